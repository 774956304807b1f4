"""Finding out what is done: from the names of chunks and parts, and for a finished single file from its manifest.

Runs on: client.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from daskinfer.checkpoint.manifest import Manifest
from daskinfer.checkpoint.opened import Opened, wipe_chunks
from daskinfer.checkpoint.published import Published
from daskinfer.errors import OutputError
from daskinfer.storage.base import FILE_ROWS, Source
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.singlefile import read_single

__all__ = ["recover"]

_ALL = FILE_ROWS << 22  # more than any id


def recover(opened: Opened, *, resume: bool, retry_failed: bool) -> None:
    """Find out which rows are done."""
    manifest, published = opened.manifest, opened.published
    has_more = _has_more(opened.source, manifest)
    if manifest.done is not None:
        _check_size(opened)
        opened.clean(chunks=True)
        if not has_more and not retry_failed:
            opened.is_settled = True
            opened.done, opened.rows_done, opened.remaining = manifest.done, manifest.done.count, 0
            return
        _take_apart(opened, manifest.done)
        published = opened.published = Published(opened.layout, opened.ops)
    published.scan()
    _finish_retries(opened)
    in_parts = opened.parts.scan(published.rows)
    failed = failed_parts = Intervals()
    if retry_failed:
        failed_published, failed_parts = published.failed(), opened.parts.errors().intersection(in_parts)
        failed = failed_published.union(failed_parts)
        opened.retrying, opened.only_failed = bool(failed_published), not resume
    there = published.rows.union(in_parts)
    opened.rows_done = there.count - failed.count
    if opened.only_failed:
        opened.done, opened.remaining = failed.complement(0, _ALL), failed.count
        return
    opened.done = there.difference(failed)
    waiting = in_parts.difference(failed_parts)
    opened.ahead = sorted([(*pair, True) for pair in published.rows] + [(*pair, False) for pair in waiting])
    gone = manifest.rows - there.count if manifest.complete else 0
    if manifest.complete and not has_more and gone <= 0:
        opened.remaining = failed.count
    elif opened.source.total is not None:
        opened.remaining = opened.source.total - opened.rows_done
    manifest.complete = manifest.complete and not has_more and gone <= 0


def _check_size(opened: Opened) -> None:
    """Refuse a finished single file that somebody cut or added to."""
    size, target = opened.manifest.bytes, opened.layout.target
    found = target.stat().st_size
    if size is not None and found != size:
        raise OutputError(
            f"{target} is not as this run left it ({size} bytes then, {found} now), so it cannot be continued; restore it, "
            "or start again with overwrite=True (--overwrite)"
        )


def _has_more(source: Source, manifest: Manifest) -> bool:
    """Tell whether the input may have rows that it had not when the output was completed."""
    if source.files:
        return len(source.files) > len(manifest.files)
    return source.total != manifest.rows


def _take_apart(opened: Opened, done: Intervals) -> None:
    """Make chunks again of a finished single file; only when that is done, they count."""
    layout, manifest = opened.layout, opened.manifest
    opened.ops.make_folder(layout.parts)
    tables = read_single(layout.kind, layout.target, opened.stored, opened.output)
    for table, rows in _portions(tables, done, opened.policy.chunk_rows):
        if table.num_rows != rows.count:
            wipe_chunks(layout, opened.ops)
            raise OutputError(
                f"{layout.target} does not hold the {done.count} rows that this run left in it, so it cannot be "
                "continued; restore it, or start again with overwrite=True (--overwrite)"
            )
        opened.published.publish(table.schema, [table], rows)
    manifest.done = None
    opened.save()


def _finish_retries(opened: Opened) -> None:
    """Put the results of an earlier retry that was cut short into their chunks."""
    rows = opened.retries.scan(Intervals())
    for file in opened.published.files:
        first, last = file.first, file.last
        if rows.overlaps(first, last + 1):
            loaded = opened.retries.load(first, last)
            opened.published.renew(file, loaded.ids, loaded.table())
            opened.retries.settle(loaded, first, last)
    opened.retries.remove_all()


def _portions(tables: Iterator[pa.Table], rows: Intervals, size: int) -> Iterator[tuple[pa.Table, Intervals]]:
    """Cut tables and the ids of their rows into chunks of a size; what is left over on one side comes last, unequal."""
    left = rows
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        while sum(part.num_rows for part in held) >= size:
            whole = pa.concat_tables(held)
            taken, left = _first(left, size)
            yield whole.slice(0, size), taken
            held = [whole.slice(size)]
    if left or sum(part.num_rows for part in held):
        yield pa.concat_tables(held) if held else pa.table({}), left


def _first(rows: Intervals, count: int) -> tuple[Intervals, Intervals]:
    """Split off the first so many ids."""
    taken = Intervals()
    for start, stop in rows:
        room = count - taken.count
        if room <= 0:
            break
        taken.add(start, min(stop, start + room))
    return taken, rows.difference(taken)

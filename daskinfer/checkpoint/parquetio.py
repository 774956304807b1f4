"""Writing and reading the Parquet files of an output.

Runs on: client.
"""

from __future__ import annotations

import binascii
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskinfer.errors import OutputError
from daskinfer.storage.encodings import encodings
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.singlefile import COMPRESSION

__all__ = [
    "FOOTER_BYTES",
    "GROUP_BYTES",
    "as_stored",
    "bytes_said",
    "ends_of",
    "footer_says",
    "ids_of",
    "is_damage",
    "is_whole",
    "latest_of",
    "merged",
    "open_table",
    "positions_of",
    "read_table",
    "row_bytes",
    "rows_of",
    "runs_of",
    "runs_said",
    "write_part",
    "write_table",
    "write_tables",
]

_ROWS_KEY = b"daskinfer.rows"
_BYTES_KEY = b"daskinfer.bytes"
_RUNS = b"daskinfer.runs="
_KINDS = {kind: np.dtype(f"<{kind.decode()}") for kind in (b"u1", b"u2", b"u4", b"u8")}
_DENSE = 8
_PART_GROUP_BYTES = 4 << 20  # of a row group in a part: what is read at least
_SPURT = 64  # files open at once; a process may have 256 on some systems
FOOTER_BYTES = 16 << 10
"""Most footers of parts are smaller."""
GROUP_BYTES = 16 << 20
"""Of a row group in a published file: what a writer or a reader holds of it."""


def as_stored(schema: pa.Schema) -> pa.Schema:
    """Return the schema as it comes back from Parquet, which has no words for a few of Arrow's types.

    Raises
    ------
    OutputError
        A column cannot be stored at all.
    """
    fields = []
    for field in schema:
        file = io.BytesIO()
        try:
            pq.write_table(pa.schema([field]).empty_table(), file)
            stored = pq.read_schema(file).field(0)
        except (pa.ArrowException, NotImplementedError) as error:
            raise OutputError(
                f"column {field.name!r} ({field.type}) cannot be written ({error}); convert it, or leave it out with keep="
            ) from None
        fields.append(pa.field(field.name, stored.type, metadata=field.metadata))
    return pa.schema(fields)


def write_table(target: Path, temporary: Path, table: pa.Table, ops: FileOps, rows: Intervals | None = None) -> None:
    """Write a table as a Parquet file; see :func:`write_tables`."""
    write_tables(target, temporary, table.schema, [table], ops, rows)


def write_tables(
    target: Path,
    temporary: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    ops: FileOps,
    rows: Intervals | None = None,
) -> None:
    """Write tables as one Parquet file, atomically; ``rows`` are its ids, kept in the file of a published chunk."""
    if rows is not None:
        text = json.dumps([list(pair) for pair in rows])
        schema = schema.with_metadata({**(schema.metadata or {}), _ROWS_KEY: text.encode()})
    with (
        ops.writing(target, temporary) as file,
        pq.ParquetWriter(
            file, schema, compression=COMPRESSION, write_page_checksum=True, **encodings(schema)
        ) as writer,
    ):
        for table in tables:
            writer.write_table(table.replace_schema_metadata(schema.metadata), _group_rows(table, GROUP_BYTES))


def _group_rows(table: pa.Table, size: int) -> int:
    """Return how many rows of a table have about so many bytes."""
    rows: int = table.num_rows * size // max(row_bytes(table), 1)
    return min(max(rows, 1), 1 << 20)


def row_bytes(table: pa.Table) -> int:
    """Return the bytes of a table's rows, without those of dictionaries, of which each row group has a whole one."""
    return sum(_row_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _row_bytes(chunk: pa.Array) -> int:
    found: int = chunk.indices.nbytes if pa.types.is_dictionary(chunk.type) else chunk.nbytes
    return found


def write_part(target: Path, temporary: Path, table: pa.Table, ops: FileOps, ids: Any) -> None:
    """Write a table as the Parquet file of a part, atomically, with the runs of its sorted ids in its footer."""
    bounds = runs_of(ids).ravel()
    lengths = np.diff(bounds)  # of runs and of gaps, by turns
    kind = np.min_scalar_type(lengths.max()).str[1:]
    data = lengths.astype(f"<{kind}").tobytes()
    with (
        ops.writing(target, temporary) as file,
        # a part is read once, soon: quick to write rather than small
        pq.ParquetWriter(
            file, table.schema, compression="snappy", write_page_checksum=True, **encodings(table.schema)
        ) as writer,
    ):
        writer.write_table(table, _group_rows(table, _PART_GROUP_BYTES))
        said = b"%s%d,%s,%d,%s;" % (
            _RUNS,
            bounds[0],
            kind.encode(),
            zlib.crc32(data),
            binascii.b2a_base64(data, newline=False),
        )
        writer.add_key_value_metadata({"daskinfer": said, _BYTES_KEY: str(row_bytes(table))})


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file, checking its sums.

    Raises
    ------
    OSError, ValueError, pyarrow.ArrowException
        It is damaged, see :func:`is_damage`, or the system cannot read it.
    """
    with open_table(path) as file:
        return file.read(columns)


def open_table(path: Path) -> pq.ParquetFile:
    """Open a Parquet file whose sums are checked as it is read."""
    return pq.ParquetFile(path, page_checksum_verification=True)


def bytes_said(about: Any) -> int:
    """Return the bytes of a part's rows, from the metadata of its file; of earlier versions' as they are encoded."""
    said = (about.metadata or {}).get(_BYTES_KEY)
    encoded: int = sum(about.row_group(at).total_byte_size for at in range(about.num_row_groups))
    return encoded if said is None else int(said)


def is_damage(error: BaseException) -> bool:
    """Tell whether an error in reading is the file's: those of the system, which have a number, say nothing of it."""
    if isinstance(error, MemoryError | pa.ArrowCancelled):
        return False
    return isinstance(error, pa.ArrowException | ValueError) or (isinstance(error, OSError) and error.errno is None)


def rows_of(path: Path) -> Intervals:
    """Return the ids that :func:`write_table` kept in a file."""
    with pq.ParquetFile(path) as file:
        text = file.schema_arrow.metadata[_ROWS_KEY]
    return Intervals(map(tuple, json.loads(text)))


def ends_of(paths: Iterable[str], count: int) -> Iterator[tuple[str, bytes, int]]:
    """Yield each path with the last ``count`` bytes of its file and the file's size, in order.

    The system is told of some dozens of files before the first of them is read. Where they come from a disk, and not from
    the system's cache, that takes a fifth of the time; threads that read side by side wait for Python's lock most of the
    time.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    left = iter(paths)
    while spurt := list(islice(left, _SPURT)):
        handles: list[int] = []
        try:
            for path in spurt:
                handles.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - all are closed if one fails
            sizes = [_announced(handle, count) for handle in handles]
            ends = [os.pread(handle, count, max(0, size - count)) for handle, size in zip(handles, sizes, strict=True)]
        finally:
            for handle in handles:
                os.close(handle)
        yield from zip(spurt, ends, sizes, strict=True)


def _announced(handle: int, count: int) -> int:
    """Tell the system that the last bytes of a file will be read; return its size."""
    size = os.fstat(handle).st_size
    if hasattr(os, "posix_fadvise"):  # not on a Mac
        with suppress(OSError):  # it is but a hint
            os.posix_fadvise(handle, max(0, size - count), count, os.POSIX_FADV_WILLNEED)
    return size


def is_whole(end: bytes, size: int) -> bool:
    """Tell whether a Parquet file has its end; a file that was being written in a crash has not."""
    return _footer_size(end, size) is not None


def footer_says(path: str, end: bytes, size: int) -> tuple[int, Any] | None:
    """Return what :func:`write_part` wrote about a part's ids: the first, and the lengths of runs and gaps, by turns.

    None if it is not there. The footer is searched as bytes, which takes a tenth of the time that Parquet needs to parse it.
    """
    footer = _footer_size(end, size)
    if footer is None:
        return None
    if footer + 8 > len(end):
        end, _ = _end(path, footer + 8)
    at = end.find(_RUNS, max(0, len(end) - 8 - footer))
    if at < 0:
        return None
    try:
        first, kind, check, text = end[at + len(_RUNS) : end.index(b";", at)].split(b",")
        data = binascii.a2b_base64(text)
        lengths = np.frombuffer(data, _KINDS[kind])
        return (int(first), lengths) if zlib.crc32(data) == int(check) and len(lengths) % 2 else None
    except (ValueError, KeyError):
        return None


def runs_said(said: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
    """Return the runs of ids of many parts, from what :func:`footer_says` of each.

    Returns
    -------
    runs : numpy array
        Rows ``(start, stop)``, one part's after the other's.
    bounds : numpy array
        Where each part's rows begin; after them where the last one's end.
    """
    sizes = np.array([len(lengths) + 1 for _, lengths in said])
    starts = np.cumsum(sizes) - sizes
    steps = np.empty(int(sizes.sum()), np.int64)
    for at, (first, lengths) in zip(starts.tolist(), said, strict=True):
        steps[at] = first
        steps[at + 1 : at + 1 + len(lengths)] = lengths
    ends = np.cumsum(steps)  # over all parts: each then loses what those before it added
    ends -= np.repeat(ends[starts] - steps[starts], sizes)
    return ends.reshape(-1, 2), np.append(starts, len(ends)) // 2


def _end(path: str, count: int) -> tuple[bytes, int]:
    """Return the last bytes of a file, and its size."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        return os.pread(handle, count, max(0, size - count)), size
    finally:
        os.close(handle)


def _footer_size(end: bytes, size: int) -> int | None:
    """Return the size of a Parquet file's footer, or None for a file without an end."""
    if size < 12 or end[-4:] != b"PAR1":
        return None
    footer = int.from_bytes(end[-8:-4], "little")
    return footer if footer <= size - 12 else None


def runs_of(ids: Any) -> Any:
    """Return the runs of adjacent numbers in a sorted array, as an array of ``(start, stop)`` rows."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(ids)]))
    return np.stack((ids[starts], ids[stops - 1] + 1), axis=1)


def merged(runs: Sequence[Any]) -> Any:
    """Return arrays of runs, which may touch and overlap, as one with disjoint runs in order."""
    every = np.concatenate([np.empty((0, 2), np.int64), *runs])
    if not len(every):
        return every
    low, high = int(every[:, 0].min()), int(every[:, 1].max())
    if high - low <= _DENSE * len(every):  # so dense that counting is quicker than sorting
        size = high - low + 1
        change = np.bincount(every[:, 0] - low, minlength=size) - np.bincount(every[:, 1] - low, minlength=size)
        covered = np.cumsum(change, out=change) > 0
        return low + np.flatnonzero(np.diff(covered, prepend=False)).reshape(-1, 2)
    every = every[np.argsort(every[:, 0], kind="stable")]
    stops = np.maximum.accumulate(every[:, 1])
    begins = np.append(True, every[1:, 0] > stops[:-1])
    ends = np.append(begins[1:], True)
    return np.stack((every[begins, 0], stops[ends]), axis=1)


def latest_of(ids: Any) -> Any:
    """Return the positions that put ids in order, the last one of each id only."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    return order[np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]]


def ids_of(rows: Intervals, positions: Any) -> Any:
    """Return the ids at positions (both numpy arrays) of a file that holds these rows in order."""
    starts, offsets = _starts(rows)
    run = np.searchsorted(offsets, positions, side="right") - 1
    return starts[run] + positions - offsets[run]


def positions_of(rows: Intervals, ids: Any) -> Any:
    """Return the positions of ids; the inverse of :func:`ids_of`."""
    starts, offsets = _starts(rows)
    run = np.searchsorted(starts, ids, side="right") - 1
    return offsets[run] + ids - starts[run]


def _starts(rows: Intervals) -> tuple[Any, Any]:
    pairs = np.array(list(rows), dtype=np.int64).reshape(-1, 2)
    offsets = np.concatenate(([0], np.cumsum(pairs[:, 1] - pairs[:, 0])))[:-1]
    return pairs[:, 0], offsets

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
from concurrent.futures import ThreadPoolExecutor
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
    "as_stored",
    "ends_of",
    "ids_of",
    "is_whole",
    "latest_of",
    "merged",
    "positions_of",
    "read_table",
    "rows_of",
    "runs_in_footer",
    "runs_of",
    "write_part",
    "write_table",
]

_ROWS_KEY = b"daskinfer.rows"
_RUNS = b"daskinfer.runs="
_KINDS = {kind: np.dtype(f"<{kind.decode()}") for kind in (b"u1", b"u2", b"u4", b"u8")}
_DENSE = 8
_GROUP_BYTES = 32 << 20  # of a row group: what a writer or a reader holds of a file
_READERS, _PIECE, _SPURT = 8, 32, 1024
FOOTER_BYTES = 16 << 10
"""Most footers of parts are smaller."""


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
    """Write a table as a Parquet file, atomically; ``rows`` are its ids, kept in the file of a published chunk."""
    if rows is not None:
        text = json.dumps([list(pair) for pair in rows])
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _ROWS_KEY: text.encode()})
    group = max(table.num_rows * _GROUP_BYTES // max(table.nbytes, 1), 1_000)
    with ops.writing(target, temporary) as file:
        pq.write_table(
            table,
            file,
            row_group_size=min(group, 1 << 20),
            compression=COMPRESSION,
            write_page_checksum=True,
            **encodings(table.schema),
        )


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
        writer.write_table(table)
        said = b"%s%d,%s,%d,%s;" % (
            _RUNS,
            bounds[0],
            kind.encode(),
            zlib.crc32(data),
            binascii.b2a_base64(data, newline=False),
        )
        writer.add_key_value_metadata({"daskinfer": said})


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file, checking its sums.

    Raises
    ------
    OSError, pyarrow.ArrowException
        It is damaged.
    """
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read(columns)


def rows_of(path: Path) -> Intervals:
    """Return the ids that :func:`write_table` kept in a file."""
    with pq.ParquetFile(path) as file:
        text = file.schema_arrow.metadata[_ROWS_KEY]
    return Intervals(map(tuple, json.loads(text)))


def ends_of(paths: Iterable[str], count: int) -> Iterator[tuple[str, bytes, int]]:
    """Yield each path with the last ``count`` bytes of its file and the file's size, in order.

    Several files are read at a time: where they come from a disk, and not from the system's cache, that takes a tenth of the
    time. They are read in spurts, a thousand at a time, since threads that read would wait for the one that computes.

    Raises
    ------
    OSError
        A file cannot be read.
    """

    def read(piece: Sequence[str]) -> list[tuple[str, bytes, int]]:
        return [(path, *_end(path, count)) for path in piece]

    left = iter(paths)
    with ThreadPoolExecutor(_READERS, "daskinfer-ends") as pool:
        while spurt := list(islice(left, _SPURT)):
            pieces = [spurt[at : at + _PIECE] for at in range(0, len(spurt), _PIECE)]
            for piece in list(pool.map(read, pieces)):
                yield from piece


def is_whole(end: bytes, size: int) -> bool:
    """Tell whether a Parquet file has its end; a file that was being written in a crash has not."""
    return _footer_size(end, size) is not None


def runs_in_footer(path: str, end: bytes, size: int) -> Any | None:
    """Return the runs of ids that :func:`write_part` kept in a part, as :func:`runs_of` does; None if they are not there.

    The footer is searched as bytes, which takes a tenth of the time that Parquet needs to parse it.
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
        if zlib.crc32(data) != int(check):
            return None
        lengths = np.frombuffer(data, _KINDS[kind])
        begin = int(first)
    except (ValueError, KeyError):
        return None
    bounds = np.empty(len(lengths) + 1, np.int64)
    bounds[0], bounds[1:] = begin, lengths
    return np.cumsum(bounds, out=bounds).reshape(-1, 2)


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

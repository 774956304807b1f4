"""Writing and reading the Parquet files of an output.

Runs on: client.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskinfer.errors import OutputError
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.singlefile import COMPRESSION

__all__ = [
    "as_stored",
    "ids_of",
    "is_whole",
    "latest_of",
    "positions_of",
    "read_table",
    "rows_of",
    "runs_of",
    "write_table",
]

_ROWS_KEY = b"daskinfer.rows"


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
    with ops.writing(target, temporary) as file:
        # a part is read once, soon: quick to write rather than small
        pq.write_table(table, file, compression=COMPRESSION if rows is not None else "snappy", write_page_checksum=True)


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


def is_whole(path: Path) -> bool:
    """Tell whether a Parquet file has its end; a file that was being written in a crash has not."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        if size < 12:
            return False
        file.seek(-8, io.SEEK_END)
        end = file.read(8)
    return end[4:] == b"PAR1" and int.from_bytes(end[:4], "little") <= size - 12


def runs_of(ids: Any) -> Any:
    """Return the runs of adjacent numbers in a sorted array, as an array of ``(start, stop)`` rows."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(ids)]))
    return np.stack((ids[starts], ids[stops - 1] + 1), axis=1)


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

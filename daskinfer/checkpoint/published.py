"""The published chunks of an output: complete, in input order, visible to any reader of the folder.

Runs on: client.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from daskinfer.checkpoint.layout import EMPTY_DATA, Layout, data_name, data_span
from daskinfer.checkpoint.parquetio import (
    ends_of,
    ids_of,
    is_whole,
    positions_of,
    read_table,
    rows_of,
    write_table,
    write_tables,
)
from daskinfer.errors import OutputError
from daskinfer.storage.base import FILE_ROWS
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals

__all__ = ["Counts", "DataFile", "Published"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counts:
    """What an output holds: rows, and how many of them are failed ones."""

    rows: int
    failed: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """A published chunk.

    Attributes
    ----------
    folder : Path
    first, last : int
        Its first and last id.
    runs : Intervals or None
        The ids of its rows, where they are not all from the first to the last.
    """

    folder: Path
    first: int
    last: int
    runs: Intervals | None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / data_name(self.first, self.last)

    @property
    def rows(self) -> Intervals:
        """The ids of its rows, in order."""
        return Intervals([(self.first, self.last + 1)]) if self.runs is None else self.runs


class Published:
    """The published chunks, by their first id.

    Attributes
    ----------
    files : list of DataFile
    rows : Intervals
        The ids of all their rows.
    """

    def __init__(self, layout: Layout, ops: FileOps) -> None:
        self._layout, self._ops = layout, ops
        self.files: list[DataFile] = []
        self.rows = Intervals()

    def scan(self) -> None:
        """Find what is there. Only chunks over several files are opened; a torn one is set aside, to be redone.

        Raises
        ------
        OutputError
            Two chunks hold the same rows.
        """
        folder = self._layout.folder
        spans = sorted(span for name in os.listdir(folder) if (span := data_span(name)))  # noqa: PTH208 - maybe very many
        ends = ends_of((f"{folder}/{data_name(*span)}" for span in spans), 8)
        for (first, last), (place, end, size) in zip(spans, ends, strict=True):
            path = Path(place)
            if not is_whole(end, size):
                logger.warning("%s is torn; it is set aside and its rows will be redone", path)
                self._ops.replace(path, path.with_name(f"_damaged-{path.name}"))
                continue
            one_file = first // FILE_ROWS == last // FILE_ROWS
            if self.rows.overlaps(first, last + 1):
                raise OutputError(f"{path} holds rows that another file in its folder holds too; remove one of the two")
            self._insert(first, last, None if one_file else rows_of(path))

    def publish(self, schema: pa.Schema, tables: Iterable[pa.Table], rows: Intervals) -> None:
        """Write the rows of a chunk, in order, under its final name."""
        path = self._layout.data(rows.first, rows.last)
        write_tables(path, self._layout.temporary(path.name), schema, tables, self._ops, rows)
        self._insert(rows.first, rows.last, None if len(rows) == 1 else rows)

    def publish_nothing(self, schema: pa.Schema) -> None:
        """Write a file without rows, so that an empty output has its columns."""
        path = self._layout.folder / EMPTY_DATA
        write_table(path, self._layout.temporary(path.name), schema.empty_table(), self._ops)

    def remove_nothing(self) -> None:
        """Remove that file again, once there are rows."""
        self._ops.remove(self._layout.folder / EMPTY_DATA)

    def renew(self, file: DataFile, ids: Any, outputs: pa.Table) -> None:
        """Put new values of the added columns into some rows of a chunk; all else stays as it is.

        Parameters
        ----------
        file : DataFile
        ids : numpy array of int
            Rows of the chunk, each once.
        outputs : pyarrow.Table
            The added columns, one row per id.
        """
        old = read_table(file.path)
        chosen = np.arange(old.num_rows)
        chosen[positions_of(file.rows, ids)] = old.num_rows + np.arange(len(ids))
        kept = old.num_columns - outputs.num_columns
        columns = [old.column(at) for at in range(kept)]
        for at in range(outputs.num_columns):
            new = outputs.column(at).cast(old.column(kept + at).type)
            columns.append(pa.chunked_array(old.column(kept + at).chunks + new.chunks).take(pa.array(chosen)))
        table = pa.Table.from_arrays(columns, schema=old.schema)
        write_table(file.path, self._layout.temporary(file.path.name), table, self._ops, file.rows)

    def file_of(self, row: int) -> DataFile | None:
        """Return the chunk that holds a row."""
        at = bisect_right(self.files, row, key=lambda file: file.first) - 1
        return self.files[at] if at >= 0 and row <= self.files[at].last and row in self.rows else None

    def failed(self) -> Intervals:
        """Return the rows that have an error."""
        found = Intervals()
        for file in self.files:
            errors = read_table(file.path, ["error"]).column("error")
            positions = np.flatnonzero(pc.is_valid(errors).to_numpy())
            for row in ids_of(file.rows, positions).tolist():
                found.add(row, row + 1)
        return found

    def counts(self) -> Counts:
        """Count rows and failed rows, from the files' footers."""
        rows = failed = 0
        for file in self.files:
            with pq.ParquetFile(file.path) as opened:
                rows += opened.metadata.num_rows
                failed += _errors(opened)
        return Counts(rows, failed)

    def tables(self) -> Iterator[pa.Table]:
        """Yield all rows in order, some at a time."""
        for file in self.files:
            with pq.ParquetFile(file.path) as opened:
                for batch in opened.iter_batches(10_000):
                    yield pa.Table.from_batches([batch])

    def _insert(self, first: int, last: int, runs: Intervals | None) -> None:
        insort(self.files, DataFile(self._layout.folder, first, last, runs), key=lambda known: known.first)
        for start, stop in runs or ((first, last + 1),):
            self.rows.add(start, stop)


def _errors(file: Any) -> int:
    """Return how many values of the error column are not null."""
    about, name = file.metadata, "error"
    at = file.schema_arrow.get_field_index(name)
    column = next((i for i in range(about.num_columns) if about.schema.column(i).path == name), -1)
    failed = 0
    for group in range(about.num_row_groups):
        statistics = about.row_group(group).column(column).statistics if column >= 0 else None
        if statistics is not None and statistics.has_null_count:
            failed += about.row_group(group).num_rows - statistics.null_count
        else:
            errors = file.read_row_group(group, columns=[name]).column(0)
            failed += len(errors) - errors.null_count
    return failed if at >= 0 else 0

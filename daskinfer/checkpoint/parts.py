"""In-progress parts: finished rows of chunks that are not complete, safe on disk a few seconds after they came.

A part holds row ids and the output's columns. Its name says which rows it can hold, and for contiguous ones exactly which;
the footer of the others does.
A row may be in two parts, when it was tried again; the later part counts.

Runs on: client.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right, insort
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from daskinfer.checkpoint.layout import Layout, PartName
from daskinfer.checkpoint.parquetio import (
    FOOTER_BYTES,
    ends_of,
    is_whole,
    latest_of,
    merged,
    read_table,
    runs_in_footer,
    runs_of,
    write_part,
)
from daskinfer.errors import OutputError, describe
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals

__all__ = ["Loaded", "Parts"]

logger = logging.getLogger(__name__)
_ID = pa.field("daskinfer.row", pa.int64())
_MANY_RUNS = 1 << 17  # so many more are held before they are merged: 2 MB


@dataclass(eq=False, slots=True)
class _Part:
    """A part as it is remembered; there may be hundreds of thousands, so its path is made when it is needed."""

    folder: Path
    number: int
    first: int
    last: int
    count: int
    left: int  # rows that are not published yet

    @property
    def path(self) -> Path:
        return self.folder / str(PartName(self.number, self.first, self.last, self.count))


@dataclass(frozen=True)
class Loaded:
    """Rows read from parts.

    Attributes
    ----------
    ids : numpy array
        Sorted, each once.
    table : pyarrow.Table
        One row per id.
    origin : tuple
        The parts, and for every row as it was read its id and the position of its part.
    """

    ids: Any
    table: pa.Table
    origin: tuple[list[_Part], Any, Any]


class Parts:
    """The parts of one kind: of unfinished chunks, or (``retry``) new results for published rows.

    Parameters
    ----------
    layout : Layout
    ops : FileOps
    schema : pyarrow.Schema
        Of the parts, without the ids.
    retry : bool
    """

    def __init__(self, layout: Layout, ops: FileOps, schema: pa.Schema, *, retry: bool = False) -> None:
        self._layout, self._ops, self._schema = layout, ops, schema
        self._prefix = "retry-" if retry else ""
        self._parts: list[_Part] = []
        self._number = 0

    def scan(self, published: Intervals) -> Intervals:
        """Find what is there and return its rows without those that are published.

        Of a contiguous part the name is enough, of others the footer. Torn ones are deleted, to be redone; so are those with
        nothing unpublished.
        """
        self._parts, held, waiting = [], [], 0
        listed, named = tee(self._listed())
        ends = ends_of((f"{folder}/{name}" for folder, name in named), FOOTER_BYTES)
        for (folder, name), (path, end, size) in zip(listed, ends, strict=True):
            self._number = max(self._number, name.number + 1)
            runs = _runs(name, path, end, size)
            if runs is None:
                logger.warning("%s is torn; it is deleted and its rows will be redone", path)
                self._ops.remove(Path(path))
                continue
            left = name.count
            if published.overlaps(name.first, name.last + 1):
                runs = np.array(list(Intervals(runs.tolist()).difference(published)), np.int64).reshape(-1, 2)
                left = int((runs[:, 1] - runs[:, 0]).sum())
            if not left:
                self._ops.remove(Path(path))
                continue
            self._parts.append(_Part(folder, name.number, name.first, name.last, name.count, left))
            held.append(runs)
            waiting += len(runs)
            if waiting > max(_MANY_RUNS, len(held[0])):
                held, waiting = [merged(held)], 0
        self._parts.sort(key=lambda part: part.first)
        return Intervals.from_runs(*merged(held).T)

    def write(self, chunk: str, ids: Any, table: pa.Table) -> None:
        """Put finished rows, sorted by id, on disk."""
        name = PartName(self._number, int(ids[0]), int(ids[-1]), len(ids))
        folder = self._layout.parts / f"{self._prefix}{chunk}"
        self._ops.make_folder(folder)
        columns = [pa.array(ids, pa.int64()), *table.columns]
        whole = pa.Table.from_arrays(columns, schema=pa.schema([_ID, *self._schema]))
        write_part(folder / str(name), folder / f"{name}.tmp", whole, self._ops, ids)
        self._number += 1
        part = _Part(folder, name.number, name.first, name.last, name.count, name.count)
        insort(self._parts, part, key=lambda part: part.first)

    def load(self, first: int, last: int, fresh: tuple[Any, pa.Table] | None = None) -> Loaded:
        """Read the rows with ids from ``first`` to ``last``, in order.

        Parameters
        ----------
        first, last : int
        fresh : tuple of numpy array and pyarrow.Table, or None
            Further rows, later than those in parts: their ids, and the table. One copy puts all in order.

        Raises
        ------
        OutputError
            A part is damaged; it is set aside, and a resumed run redoes its rows.
        """
        wanted = [part for part in self._upto(last) if part.last >= first]
        wanted.sort(key=lambda part: part.number)
        ids, tables = [np.empty(0, np.int64)], [self._schema.empty_table()]
        for part in wanted:
            part_ids, table = self._read(part)
            low, high = np.searchsorted(part_ids, [first, last + 1])
            ids.append(part_ids[low:high])
            tables.append(table.slice(low, high - low))
        every = np.concatenate(ids)
        origin = np.repeat(np.arange(len(wanted)), [len(part_ids) for part_ids in ids[1:]])
        found = every
        if fresh is not None:
            found = np.concatenate((every, fresh[0]))
            tables.append(fresh[1])
        latest = latest_of(found)
        table = pa.concat_tables(tables)
        if not np.array_equal(latest, np.arange(len(found))):
            table = table.take(pa.array(latest))
        return Loaded(found[latest], table, (wanted, every, origin))

    def settle(self, loaded: Loaded, first: int, last: int) -> None:
        """Take note that the loaded rows with ids from ``first`` to ``last`` are published.

        Parts with nothing else are deleted.
        """
        parts, ids, origin = loaded.origin
        published = np.bincount(origin[(ids >= first) & (ids <= last)], minlength=len(parts))
        gone = set()
        for part, count in zip(parts, published.tolist(), strict=True):
            part.left -= count
            if part.left <= 0:
                gone.add(part)
        self._parts = [part for part in self._parts if part not in gone]
        self._delete(gone)

    def errors(self) -> Intervals:
        """Return the rows whose latest result is an error."""
        failed: set[int] = set()
        for part in sorted(self._parts, key=lambda part: part.number):
            ids, table = self._read(part)
            is_failed = np.asarray(table.column("error").is_valid())
            failed.difference_update(ids[~is_failed].tolist())
            failed.update(ids[is_failed].tolist())
        return Intervals.from_ids(sorted(failed))

    def remove_all(self) -> None:
        """Delete all parts."""
        self._parts, gone = [], self._parts
        self._delete(gone)

    # ---------------------------------------------------------------- how

    def _delete(self, parts: Collection[_Part]) -> None:
        try:
            for part in parts:
                self._ops.remove(part.path)
            for folder in {part.folder for part in parts}:
                self._ops.remove_folder(folder)
        except OSError as error:  # it does no harm: their rows are published, so the next run passes over them
            logger.warning("%s: parts could not be deleted (%s)", self._layout.parts, error)

    def _listed(self) -> Iterator[tuple[Path, PartName]]:
        if not self._layout.parts.is_dir():
            return
        for folder in sorted(self._layout.parts.iterdir()):
            if folder.is_dir() and folder.name.startswith("retry-") == bool(self._prefix):
                for entry in sorted(os.listdir(folder)):  # noqa: PTH208 - there may be very many, and no paths are wanted
                    name = PartName.parse(entry)
                    if name is not None:
                        yield folder, name

    def _upto(self, last: int) -> list[_Part]:
        return self._parts[: bisect_right(self._parts, last, key=lambda part: part.first)]

    def _read(self, part: _Part) -> tuple[Any, pa.Table]:
        try:
            table = read_table(part.path)
        except (OSError, pa.ArrowException) as error:
            with suppress(OSError):
                self._ops.replace(part.path, part.path.with_name(f"damaged-{part.path.name}"))
            raise OutputError(
                f"{part.path} is damaged ({describe(error)}) and was set aside; run again with resume=True (--resume): "
                f"its {part.count} rows will be redone"
            ) from error
        return table.column(0).to_numpy(), table.select(range(1, table.num_columns)).cast(self._schema)


def _runs(name: PartName, path: str, end: bytes, size: int) -> Any:
    """Return the runs of ids in a part, or None if it is torn."""
    if name.is_contiguous:
        return np.array([[name.first, name.last + 1]], np.int64) if is_whole(end, size) else None
    runs = runs_in_footer(path, end, size)
    if runs is not None and _fits(runs, name):
        return runs
    with suppress(OSError, pa.ArrowException):  # its footer does not say, as in parts of earlier versions
        return runs_of(read_table(Path(path), [_ID.name]).column(0).to_numpy())
    return None


def _fits(runs: Any, name: PartName) -> bool:
    """Tell whether runs of ids are those that a part's name promises."""
    said = (runs[0, 0], runs[-1, 1], (runs[:, 1] - runs[:, 0]).sum())
    return said == (name.first, name.last + 1, name.count)

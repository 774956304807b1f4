"""Rows out of several parts, in order, a piece of them at a time, so that publishing a chunk takes little memory.

A part's row group is read when the first of its rows is wanted, and kept for the next piece, which usually begins in it.
When what is kept grows too large, since many parts have rows everywhere in the chunk, it is let go and read again.

Runs on: client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskinfer.checkpoint.layout import PartName
from daskinfer.checkpoint.parquetio import GROUP_BYTES, bytes_said, latest_of, open_table, row_bytes

__all__ = ["Loaded", "Part", "PartFile"]

_MOST_KEPT = 4 * GROUP_BYTES


@dataclass(eq=False, slots=True)
class Part:
    """A part as it is remembered; there may be hundreds of thousands, so its path is made when it is needed."""

    folder: Path
    number: int
    first: int
    last: int
    count: int
    left: int  # rows that are not published yet

    @property
    def path(self) -> Path:
        """Of its file."""
        return self.folder / str(PartName(self.number, self.first, self.last, self.count))


class PartFile:
    """The file of a part: its ids at once, its rows when they are asked for.

    Parameters
    ----------
    part : Part
    schema : pyarrow.Schema
        Of the rows, without the ids.
    guard : callable
        Gives a context manager in which the file is read; it knows what to do about damage.

    Attributes
    ----------
    ids : numpy array
        Sorted.
    nbytes : int
        Of all its rows, roughly.
    kept_bytes : int
        Of the row group that is kept.
    """

    def __init__(self, part: Part, schema: pa.Schema, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self.part = part
        self._schema, self._guard = schema, guard
        with guard(), open_table(part.path) as file:
            about = file.metadata
            self._bounds = np.cumsum([0, *(about.row_group(at).num_rows for at in range(about.num_row_groups))])
            self.nbytes = bytes_said(about)
            self.ids = file.read([file.schema_arrow.names[0]]).column(0).to_numpy()
        self.kept_bytes = 0
        self._kept: tuple[int, pa.Table] | None = None

    def rows(self, low: int, high: int) -> pa.Table:
        """Return the rows at positions from ``low`` to before ``high``."""
        first = int(np.searchsorted(self._bounds, low, side="right")) - 1
        stop = int(np.searchsorted(self._bounds, high, side="left"))
        if self._kept is not None and (first, stop) == (self._kept[0], self._kept[0] + 1):
            tables = [self._kept[1]]
        else:
            with self._guard(), open_table(self.part.path) as file:
                tables = [self._group(file, at) for at in range(first, stop)]
        if high == self._bounds[-1]:
            self.release()
        elif tables:
            self._kept, self.kept_bytes = (stop - 1, tables[-1]), tables[-1].nbytes
        whole = pa.concat_tables([self._schema.empty_table(), *tables])
        return whole.slice(low - int(self._bounds[first]), high - low)

    def release(self) -> None:
        """Let go of the row group that is kept."""
        self._kept, self.kept_bytes = None, 0

    def _group(self, file: pq.ParquetFile, at: int) -> pa.Table:
        if self._kept is not None and self._kept[0] == at:
            return self._kept[1]
        table = file.read_row_group(at)
        return table.select(range(1, table.num_columns)).cast(self._schema)


class Loaded:
    """Rows of parts, and maybe some of memory, each id once.

    Parameters
    ----------
    files : sequence of PartFile
        In the order they were written: of two rows with an id the later one counts.
    schema : pyarrow.Schema
        Of the rows.
    first, last : int
        Ids outside are left out.
    fresh : tuple of numpy array and pyarrow.Table, or None
        Ids and rows that are later than all files.

    Attributes
    ----------
    ids : numpy array
        Sorted.
    """

    def __init__(
        self,
        files: Sequence[PartFile],
        schema: pa.Schema,
        first: int,
        last: int,
        fresh: tuple[Any, pa.Table] | None = None,
    ) -> None:
        self._files, self._schema = files, schema
        self._kept = 0  # bytes, of all files
        self._fresh = schema.empty_table() if fresh is None else fresh[1]
        ids, places = [], []
        for file in files:
            low, high = np.searchsorted(file.ids, [first, last + 1])
            ids.append(file.ids[low:high])
            places.append(np.arange(low, high))
        in_files = np.concatenate([np.empty(0, np.int64), *ids])
        self._found = in_files, np.repeat(np.arange(len(files)), [len(part) for part in ids])
        fresh_ids = np.empty(0, np.int64) if fresh is None else fresh[0]
        every = np.concatenate((in_files, fresh_ids))
        latest = latest_of(every)
        self.ids = every[latest]
        self._sources = np.concatenate((self._found[1], np.full(len(fresh_ids), len(files))))[latest]
        self._places = np.concatenate([np.empty(0, np.int64), *places, np.arange(len(fresh_ids))])[latest]
        nbytes = row_bytes(self._fresh) + sum(
            file.nbytes * len(part) // max(len(file.ids), 1) for file, part in zip(files, ids, strict=True)
        )
        self._rows = max(len(every) * GROUP_BYTES // max(nbytes, 1), 1)

    def tables(self, start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """Yield the rows of ``ids[start:stop]`` in order, as tables of about 16 MB.

        Raises
        ------
        OutputError
            A part is damaged; it is set aside, and a resumed run redoes its rows.
        """
        stop = len(self.ids) if stop is None else stop
        for low in range(start, stop, self._rows):
            yield self._piece(low, min(low + self._rows, stop))

    def table(self) -> pa.Table:
        """Return all rows."""
        return pa.concat_tables([self._schema.empty_table(), *self.tables()])

    def counts(self, first: int, last: int) -> Iterator[tuple[Part, int]]:
        """Yield each part and how many of its rows have ids from ``first`` to ``last``."""
        ids, sources = self._found
        counts = np.bincount(sources[(ids >= first) & (ids <= last)], minlength=len(self._files))
        yield from zip((file.part for file in self._files), counts.tolist(), strict=True)

    def _piece(self, low: int, high: int) -> pa.Table:
        sources, places = self._sources[low:high], self._places[low:high]
        by_source = np.argsort(sources, kind="stable")
        order, tables, before = np.empty(high - low, np.int64), [], 0
        for chosen in np.split(by_source, np.flatnonzero(np.diff(sources[by_source])) + 1):
            begin, end = int(places[chosen[0]]), int(places[chosen[-1]]) + 1
            tables.append(self._of(int(sources[chosen[0]]), begin, end))
            order[chosen] = before + places[chosen] - begin
            before += end - begin
        table = pa.concat_tables(tables)
        in_order = before == len(order) and bool((order == np.arange(before)).all())
        return (table if in_order else table.take(pa.array(order))).unify_dictionaries()

    def _of(self, source: int, begin: int, end: int) -> pa.Table:
        if source == len(self._files):
            return self._fresh.slice(begin, end - begin)
        file = self._files[source]
        self._kept -= file.kept_bytes
        rows = file.rows(begin, end)
        self._kept += file.kept_bytes
        if self._kept > _MOST_KEPT:
            for each in self._files:
                each.release()
            self._kept = 0
            # a copy: a slice would hold on to all of its row group
            rows = rows.take(pa.array(np.arange(rows.num_rows)))
        return rows

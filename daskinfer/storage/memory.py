"""Rows that are in memory, or come from an iterator: texts, conversations, or mappings of column to value.

An iterator is read once, lazily; its first rows are looked at to find the columns. Texts make a column "prompt",
conversations (lists of messages) a column "messages".

Runs on: client | worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from daskinfer.errors import SourceError
from daskinfer.storage.base import FILE_ROWS, SAMPLE_ROWS, Block, Source, shown
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.kinds import Kind, encode, field_of, infer_objects, json_text, plain
from daskinfer.storage.text import kept_table

__all__ = ["RowsSource", "rows_digest"]

_ITERATOR_ROWS = 1_000  # of an iterator, which may be slow; of a sequence, SAMPLE_ROWS
_DIGEST_ROWS = 8


class RowsSource(Source):
    """Rows of a sequence, or of an iterator that can be read once.

    Parameters
    ----------
    rows : iterable
    name : str
        What messages call it.
    """

    def __init__(self, rows: Iterable[Any], name: str) -> None:
        self.name = name
        self._sequence = rows if isinstance(rows, Sequence) else None
        self._length = len(rows) if isinstance(rows, Sized) else None
        if self._sequence is not None:
            self._head = list(self._sequence[:SAMPLE_ROWS])
            self._rest: Iterator[Any] | None = None
        else:
            self._rest = iter(rows)
            self._head = list(islice(self._rest, _ITERATOR_ROWS))
        self._column = _only_column(self._head)
        self._kinds = self._look()

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys of the first rows; "prompt" for texts, "messages" for conversations."""
        return tuple(self._kinds)

    @property
    def total(self) -> int | None:
        """The length, of what has one; None for an iterator."""
        return self._length

    @property
    def is_empty(self) -> bool:
        """Whether there was no first row."""
        return not self._head

    @property
    def digest(self) -> str:
        """A hash of the first rows."""
        return rows_digest(self._head[:_DIGEST_ROWS])

    def schema(self, keep: Sequence[str]) -> pa.Schema:
        """Return the types that the first rows showed."""
        self.require(keep, "keep")
        return pa.schema([field_of(self._kinds.get(name, Kind.STRING), name) for name in keep])

    def blocks(self, needed: Sequence[str], keep: Sequence[str], *, skip: Intervals, rows: int) -> Iterator[Block]:
        """Yield the rows; an iterator can be asked once."""
        self.require(needed, "the prompt")
        schema = self.schema(keep)
        taken: list[Any] = []
        index: list[int] = []
        for position, row in self._wanted(skip):
            index.append(position)
            taken.append(row)
            if len(index) >= rows:
                yield self._block(index, taken, needed, schema)
                index, taken = [], []
        if index:
            yield self._block(index, taken, needed, schema)

    # ---------------------------------------------------------------- how

    def _wanted(self, skip: Intervals) -> Iterator[tuple[int, Any]]:
        if self._sequence is not None:
            for low, high in skip.complement(0, len(self._sequence)):
                for position in range(low, high):
                    yield position, self._sequence[position]
            return
        if self._rest is None:
            raise SourceError(self.name, "was read before, and an iterator can be read once; make a new one, or a list")
        head, rest = self._head, self._rest
        self._rest, self._head = None, self._head[:_DIGEST_ROWS]
        start, stop = skip.first_gap(0)
        for position, row in enumerate(chain(head, rest)):
            if position == stop:
                start, stop = skip.first_gap(position)
            if start >= FILE_ROWS:
                return
            if position >= start:
                yield position, row

    def _look(self) -> dict[str, Kind | pa.DataType]:
        if self._column is not None:
            return {self._column: infer_objects(self._head)}
        mappings = [row for row in self._head if isinstance(row, Mapping)]
        names = dict.fromkeys(key for row in mappings for key in row)
        for name in names:
            if not isinstance(name, str):
                raise SourceError(self.name, f"has a column {name!r}; the names of columns must be text")
        return {name: infer_objects([row.get(name) for row in mappings]) for name in names}

    def _block(self, index: list[int], rows: list[Any], needed: Sequence[str], schema: pa.Schema) -> Block:
        bad: dict[int, str] = {}
        columns: dict[str, list[Any]] = {}
        if self._column is None:
            nothing: dict[str, Any] = {}
            for at, row in enumerate(rows):
                if not isinstance(row, Mapping):
                    bad[at] = self._at(
                        index[at], f"a {type(row).__name__} ({shown(row)}), not a mapping like the others"
                    )
                    rows[at] = nothing
            for name in dict.fromkeys((*needed, *schema.names)):
                columns[name] = [row.get(name) for row in rows]
        else:
            columns[self._column] = rows
        arrays = []
        for kept in schema:
            array, misfits = encode(self._kinds[kept.name], columns[kept.name])
            arrays.append(array)
            for at, reason in misfits.items():
                bad.setdefault(
                    at, self._at(index[at], f"column {kept.name!r} {reason}; correct it, or leave it out with keep=")
                )
        values = {name: columns[name] for name in needed}
        if bad:
            values = {name: [None if i in bad else v for i, v in enumerate(column)] for name, column in values.items()}
        ids = range(index[0], index[-1] + 1) if index[-1] - index[0] + 1 == len(index) else index
        return Block(ids, values, kept_table(arrays, schema, len(index)), bad)

    def _at(self, position: int, reason: str) -> str:
        return f"{self.name}, row {position}: {reason}"


def _only_column(head: Sequence[Any]) -> str | None:
    """Return the column that rows without keys make, or None for mappings."""
    if not head or isinstance(head[0], Mapping):
        return None
    first = head[0]
    conversation = isinstance(first, list | tuple) and bool(first) and isinstance(first[0], Mapping)
    return "messages" if conversation else "prompt"


def rows_digest(rows: Iterable[Any]) -> str:
    """Return a hash of some rows; values without a JSON form count by their type."""
    text = json.dumps([_printable(row) for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _printable(row: Any) -> str:
    try:
        return json_text(plain(row))
    except (TypeError, ValueError, RecursionError):
        if isinstance(row, Mapping):
            return str({str(key): _printable(value) for key, value in row.items()})
        return type(row).__name__

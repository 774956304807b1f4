"""Sources over text files: what JSON Lines and CSV share.

A format only cuts a stream into rows; ids, types, skipping and the messages of bad rows are made here.

Runs on: client | worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import pyarrow as pa

from daskinfer.errors import SourceError, describe
from daskinfer.storage.base import BLOCK_BYTES, FILE_ROWS, SAMPLE_ROWS, Block, FileInfo, Source
from daskinfer.storage.files import FileSet
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.kinds import Kind, encode, field_of

__all__ = ["Records", "TextReader", "TextSource", "arranged", "kept_table"]


Records: TypeAlias = Iterator[tuple[int, Any, int]]
"""The line a row starts on (from 1), the row as it was cut out, and its size in bytes."""


class TextReader(Protocol):
    """One open text file of some format."""

    names: tuple[str, ...]
    """The columns that the file states before its rows, if it does."""

    def __iter__(self) -> Records:
        """Cut out the rows one by one, without parsing more than that needs."""

    def columns(
        self, records: Sequence[Any], names: Sequence[str] | None
    ) -> tuple[dict[str, list[Any]], dict[int, str]]:
        """Parse rows into columns (None: all that they have), and say which are bad (position → why, what to do)."""

    def kind(self, values: Sequence[Any]) -> Kind:
        """Return the kind of a column with these first values."""


@dataclass(slots=True)
class _Rows:
    """Rows of one file: their numbers (from 0), the lines they start on, and the rows as cut out."""

    index: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Sample:
    kinds: dict[str, Kind]
    is_empty: bool


@dataclass(frozen=True, slots=True)
class _Open:
    path: str
    reader: TextReader
    names: tuple[str, ...]
    needed: Sequence[str]
    schema: pa.Schema


class TextSource(Source):
    """Rows of text files of one format."""

    def __init__(self, found: FileSet, reader: Callable[[BinaryIO, str], TextReader]) -> None:
        self.name = found.name
        self._found = found
        self._files = list(found.files)
        self._reader = reader
        self._sampled: _Sample | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the first readable rows."""
        return tuple(self._sample.kinds)

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """The files; ``rows`` fills in when one was read to its end."""
        return tuple(self._files)

    @property
    def total(self) -> int | None:
        """The number of rows, once every file was read."""
        rows = [file.rows for file in self._files]
        return None if None in rows else sum(n for n in rows if n is not None)

    @property
    def is_empty(self) -> bool:
        """Whether no file has a row."""
        return self._sample.is_empty

    def arrange(self, known: Sequence[FileInfo]) -> None:
        """Put the files in the order of an earlier run."""
        self._files = arranged(self._files, known)
        self._sampled = None

    def claims(self, path: Path) -> bool:
        """Tell whether the path is, or would become, one of the files."""
        return self._found.claims(path)

    def schema(self, keep: Sequence[str]) -> pa.Schema:
        """Return the types that the first rows showed."""
        self.require(keep, "keep")
        return pa.schema([field_of(self._sample.kinds.get(name, Kind.STRING), name) for name in keep])

    def blocks(self, needed: Sequence[str], keep: Sequence[str], *, skip: Intervals, rows: int) -> Iterator[Block]:
        """Yield the rows of one file after the other."""
        self.require(needed, "the prompt")
        schema = self.schema(keep)
        names = tuple(dict.fromkeys((*needed, *keep)))
        for number, file in enumerate(self._files):
            base = number * FILE_ROWS
            if skip.first_gap(base)[0] >= base + (FILE_ROWS if file.rows is None else file.rows):
                continue
            local = Intervals((a - base, b - base) for a, b in skip.clip(base, base + FILE_ROWS))
            with self._found.open(file.path) as stream, _located(file.path) as at:
                reader = self._reader(stream, file.path)
                cut = _cut(reader, local, rows, at)
                while (found := next(cut, None)) is not None:
                    if isinstance(found, int):
                        self._files[number] = replace(file, rows=found)
                    else:
                        yield self._block(base, _Open(file.path, reader, names, needed, schema), found)

    # ---------------------------------------------------------------- how

    @property
    def _sample(self) -> _Sample:
        """Look at the first rows, in the first file that has a readable one."""
        if self._sampled is None:
            self._sampled = self._look()
        return self._sampled

    def _look(self) -> _Sample:
        left, stated, trouble = SAMPLE_ROWS, tuple[str, ...](), None
        for file in self._files:
            with self._found.open(file.path) as stream, _located(file.path) as at:
                reader = self._reader(stream, file.path)
                stated = stated or reader.names
                found = next(_cut(reader, Intervals(), left, at))
                if isinstance(found, int):
                    continue
                values, bad = reader.columns(found.records, None)
            if len(bad) < len(found.records):
                return _Sample({name: reader.kind(column) for name, column in values.items()}, is_empty=False)
            trouble = trouble or SourceError(file.path, bad[0], found.lines[0])
            left -= len(found.records)
            if left <= 0:
                break
        if trouble is not None:
            raise trouble
        return _Sample(dict.fromkeys(stated, Kind.STRING), is_empty=True)

    def _block(self, base: int, file: _Open, found: _Rows) -> Block:
        count = len(found.index)
        values, troubles = file.reader.columns(found.records, file.names)
        bad = {at: str(SourceError(file.path, reason, found.lines[at])) for at, reason in troubles.items()}
        arrays = []
        for kept in file.schema:
            array, misfits = encode(self._sample.kinds.get(kept.name, Kind.STRING), values[kept.name])
            arrays.append(array)
            for at, reason in misfits.items():
                advice = f"column {kept.name!r} {reason}; correct it, or leave the column out with keep="
                bad.setdefault(at, str(SourceError(file.path, advice, found.lines[at])))
        wanted = {name: values[name] for name in file.needed}
        if bad:
            wanted = {name: [None if i in bad else v for i, v in enumerate(column)] for name, column in wanted.items()}
        return Block(_ids(base, found.index), wanted, kept_table(arrays, file.schema, count), bad)


def _cut(reader: TextReader, skip: Intervals, rows: int, at: _At) -> Iterator[_Rows | int]:
    """Yield the rows that are not skipped, then how many the file has, unless all the rest of it is skipped."""
    found, size, row = _Rows(), 0, -1
    start, stop = skip.first_gap(0)
    for line, record, length in reader:
        row += 1
        if row == stop:
            start, stop = skip.first_gap(row)
        if row < start:
            if start >= FILE_ROWS:
                break
            continue
        at.line = line
        found.index.append(row)
        found.lines.append(line)
        found.records.append(record)
        size += length
        if len(found.index) >= rows or size >= BLOCK_BYTES:
            yield found
            found, size = _Rows(), 0
    if found.index:
        yield found
    if start < FILE_ROWS:
        yield row + 1


@dataclass(slots=True)
class _At:
    """How far a file was read."""

    line: int = 0


@contextmanager
def _located(path: str) -> Iterator[_At]:
    """Turn errors of reading a file into one that names it."""
    at = _At()
    try:
        yield at
    except (OSError, EOFError, zlib.error) as error:
        reason = f"cannot be read on ({describe(error)}); it is damaged or cut short: restore it"
        raise SourceError(path, reason, at.line) from error


def _ids(base: int, index: Sequence[int]) -> Sequence[int]:
    first, last = index[0], index[-1]
    if last - first + 1 == len(index):
        return range(base + first, base + last + 1)
    return [base + row for row in index]


def arranged(files: Sequence[FileInfo], known: Sequence[FileInfo]) -> list[FileInfo]:
    """Return the files in the order of ``known``, with its row counts, and the others after them."""
    here = {file.path: file for file in files}
    first = [replace(here[k.path], rows=k.rows) for k in known if k.path in here]
    seen = {file.path for file in first}
    return first + [file for file in files if file.path not in seen]


def kept_table(arrays: Sequence[pa.Array], schema: pa.Schema, rows: int) -> pa.Table:
    """Return a table of ``rows`` rows, also where no column is kept."""
    if not arrays:
        return pa.table({"": pa.nulls(rows)}).select([])
    return pa.Table.from_arrays(arrays, schema=schema)

"""Reading Parquet: Arrow types stay exactly as they are, and row groups that are not wanted are not read.

Runs on: client | worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from daskinfer.errors import SourceError, describe
from daskinfer.storage.base import FILE_ROWS, Block, FileInfo, Source
from daskinfer.storage.files import FileSet
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.text import arranged, kept_table

__all__ = ["ParquetSource", "common_type"]


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: pa.Schema
    groups: tuple[int, ...]


class ParquetSource(Source):
    """Rows of Parquet files. Their footers are all read when the types or the number of rows are first asked for."""

    def __init__(self, found: FileSet) -> None:
        self.name = found.name
        self._found = found
        self._files = list(found.files)
        self._footers: dict[str, _Footer] = {}
        self._schemas: list[pa.Schema] = []

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the first file."""
        return tuple(self._footer(self._files[0].path).schema.names)

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """The files with their row counts."""
        return tuple(replace(file, rows=sum(self._footer(file.path).groups)) for file in self._files)

    @property
    def total(self) -> int:
        """The number of rows, from the footers."""
        return sum(sum(self._footer(file.path).groups) for file in self._files)

    @property
    def is_empty(self) -> bool:
        """False: a Parquet file has columns even when it has no rows."""
        return False

    def arrange(self, known: Sequence[FileInfo]) -> None:
        """Put the files in the order of an earlier run."""
        self._files = arranged(self._files, known)

    def claims(self, path: Path) -> bool:
        """Tell whether the path is, or would become, one of the files."""
        return self._found.claims(path)

    def schema(self, keep: Sequence[str]) -> pa.Schema:
        """Return the files' types: the one they all have, or one that holds all of them without loss."""
        self.require(keep, "keep")
        first = self._footer(self._files[0].path).schema
        fields = [first.field(name) for name in keep]
        for file in self._files[1:]:
            schema = self._footer(file.path).schema
            if schema is first:
                continue
            for at, known in enumerate(fields):
                if known.name not in schema.names:
                    raise SourceError(file.path, f"has no column {known.name!r}; leave it out with keep=, or the file")
                other = schema.field(known.name).type
                kind = common_type(known.type, other)
                if kind is None:
                    raise SourceError(
                        file.path,
                        f"column {known.name!r} is {other}, but {known.type} in {Path(self._files[0].path).name}; "
                        "give the files the same type, or leave the column out with keep=",
                    )
                fields[at] = known.with_type(kind)
        return pa.schema([_clean(kept) for kept in fields])

    def blocks(self, needed: Sequence[str], keep: Sequence[str], *, skip: Intervals, rows: int) -> Iterator[Block]:
        """Yield the rows; row groups that are skipped altogether are not read."""
        self.require(needed, "the prompt")
        schema = self.schema(keep)
        names = list(dict.fromkeys((*needed, *keep)))
        for number, file in enumerate(self._files):
            base = number * FILE_ROWS
            for start, batch in self._batches(file.path, base, names, skip, rows):
                wanted = skip.complement(start, start + batch.num_rows)
                if wanted.count < batch.num_rows:
                    batch = pa.concat_tables([batch.slice(a - start, b - a) for a, b in wanted])  # noqa: PLW2901
                ids: Sequence[int] = [i for a, b in wanted for i in range(a, b)]
                if len(wanted) == 1:
                    ids = range(wanted.first, wanted.last + 1)
                try:
                    kept = kept_table(batch.select(schema.names).cast(schema).columns, schema, batch.num_rows)
                except pa.ArrowException as error:
                    raise SourceError(file.path, f"a kept column cannot be read ({describe(error)})") from error
                yield Block(ids, {name: batch.column(name).to_pylist() for name in needed}, kept)

    # ---------------------------------------------------------------- how

    def _batches(
        self, path: str, base: int, names: list[str], skip: Intervals, rows: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (first id, table) for all batches with a wanted row."""
        spans, start = [], base
        for group, count in enumerate(self._footer(path).groups):
            spans.append((group, start, count, bool(skip.complement(start, start + count))))
            start += count
        if not any(wanted for *_, wanted in spans):
            return
        try:
            with self._open(path) as file:
                for wanted, run in groupby(spans, key=lambda span: span[3]):
                    if wanted:
                        yield from _wanted_batches(file, list(run), names, skip, rows)
        except (OSError, pa.ArrowException) as error:
            raise SourceError(path, f"cannot be read on ({describe(error)}); it is damaged: restore it") from error

    @contextmanager
    def _open(self, path: str) -> Iterator[Any]:
        """Open a file; local ones by name, which is faster."""
        with ExitStack() as stack:
            place = path if self._found.fs is None else stack.enter_context(self._found.open(path))
            try:
                file = stack.enter_context(pq.ParquetFile(place))
            except (OSError, pa.ArrowException) as error:
                reason = f"is not a readable Parquet file ({describe(error)}); it may be cut short: restore it"
                raise SourceError(path, reason) from error
            yield file

    def _footer(self, path: str) -> _Footer:
        footer = self._footers.get(path)
        if footer is None:
            with self._open(path) as file:
                schema, about = file.schema_arrow, file.metadata
                groups = tuple(about.row_group(i).num_rows for i in range(about.num_row_groups))
            doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
            if doubled:
                raise SourceError(path, f"has two columns called {doubled[0]!r}; rename one of them")
            same = next((known for known in self._schemas if known.equals(schema, check_metadata=True)), None)
            if same is None:
                self._schemas.append(schema)
            footer = self._footers[path] = _Footer(schema if same is None else same, groups)
        return footer


def _wanted_batches(
    file: Any, spans: list[tuple[int, int, int, bool]], names: list[str], skip: Intervals, rows: int
) -> Iterator[tuple[int, pa.Table]]:
    start = spans[0][1]
    columns = names or file.schema_arrow.names[:1]
    for batch in file.iter_batches(rows, row_groups=[span[0] for span in spans], columns=columns):
        if skip.complement(start, start + batch.num_rows):
            yield start, pa.Table.from_batches([batch]).select(names)
        start += batch.num_rows


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that holds the values of both without loss, or None."""
    if one.equals(other):
        return one
    for a, b in ((one, other), (other, one)):
        if pa.types.is_null(a):
            return b
        if pa.types.is_dictionary(a):
            value = b.value_type if pa.types.is_dictionary(b) else b
            return common_type(a.value_type, value)
        if pa.types.is_string(a) and pa.types.is_large_string(b):
            return b
        if pa.types.is_binary(a) and pa.types.is_large_binary(b):
            return b
    for family in (pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating):
        if family(one) and family(other):
            return one if one.bit_width >= other.bit_width else other
    return None


def _clean(kept: pa.Field) -> pa.Field:
    """Drop what is about the file the field came from; what is about the values stays."""
    metadata = {k: v for k, v in (kept.metadata or {}).items() if not k.startswith(b"PARQUET:")}
    return pa.field(kept.name, kept.type, metadata=metadata or None)

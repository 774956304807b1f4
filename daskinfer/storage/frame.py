"""Rows of a pandas DataFrame. Its index is not a column; name it and ``reset_index()`` to keep it.

Runs on: client | worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from daskinfer.errors import SourceError, describe
from daskinfer.storage.base import Block, Source
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.kinds import Kind, encode, field_of, infer, is_missing, plain
from daskinfer.storage.memory import rows_digest
from daskinfer.storage.text import kept_table

__all__ = ["FrameSource"]


class FrameSource(Source):
    """Rows of a pandas DataFrame, which must not change while it is read.

    Typed columns keep their type, through Arrow. Object columns get the type that holds all their values exactly, and
    JSON text where there is none.
    """

    def __init__(self, frame: Any, name: str) -> None:
        self.name = name
        self._frame = frame
        names = [str(column) for column in frame.columns]
        doubled = sorted({column for column in names if names.count(column) > 1})
        if doubled:
            raise SourceError(name, f"has two columns called {doubled[0]!r}; rename one of them")
        self._at = {column: position for position, column in enumerate(names)}
        self._plans: dict[str, pa.DataType | Kind] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, as text."""
        return tuple(self._at)

    @property
    def total(self) -> int:
        """The number of rows."""
        return len(self._frame)

    @property
    def is_empty(self) -> bool:
        """False: a frame has columns even when it has no rows."""
        return False

    @property
    def digest(self) -> str:
        """A hash of the first rows."""
        return rows_digest(self._frame.head(8).to_dict("records"))

    def schema(self, keep: Sequence[str]) -> pa.Schema:
        """Return the Arrow types of the columns' dtypes."""
        self.require(keep, "keep")
        return pa.schema([field_of(self._plan(name), name) for name in keep])

    def blocks(self, needed: Sequence[str], keep: Sequence[str], *, skip: Intervals, rows: int) -> Iterator[Block]:
        """Yield slices of the frame."""
        self.require(needed, "the prompt")
        schema = self.schema(keep)
        for first, stop in skip.complement(0, len(self._frame)):
            for start in range(first, stop, rows):
                part = self._frame.iloc[start : min(start + rows, stop)]
                yield self._block(start, part, needed, schema)

    # ---------------------------------------------------------------- how

    def _block(self, start: int, part: Any, needed: Sequence[str], schema: pa.Schema) -> Block:
        values = {name: part.iloc[:, self._at[name]].tolist() for name in needed}
        arrays, bad = [], dict[int, str]()
        for kept in schema:
            plan = self._plan(kept.name)
            series = part.iloc[:, self._at[kept.name]]
            if isinstance(plan, Kind):
                array, misfits = encode(plan, series.tolist())
                for at, reason in misfits.items():
                    bad.setdefault(at, f"{self.name}, row {start + at}: column {kept.name!r} {reason}; correct it")
            else:
                array = pa.array(series, plan, from_pandas=True)
            arrays.append(array)
        for at in bad:
            for column in values.values():
                column[at] = None
        return Block(range(start, start + len(part)), values, kept_table(arrays, schema, len(part)), bad)

    def _plan(self, name: str) -> pa.DataType | Kind:
        if name not in self._plans:
            series = self._frame.iloc[:, self._at[name]]
            if series.dtype == object:
                self._plans[name] = _object_plan(series.tolist())
            else:
                try:
                    self._plans[name] = pa.array(series.iloc[:1], from_pandas=True).type
                except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
                    raise SourceError(
                        self.name,
                        f"column {name!r} ({series.dtype}) has no Arrow type ({describe(error)}); "
                        "convert it, or leave it out with keep=",
                    ) from None
        return self._plans[name]


def _object_plan(values: list[Any]) -> pa.DataType | Kind:
    """Return what holds all values of an object column exactly."""
    kind = infer(values)
    if kind is not Kind.JSON:
        return kind
    present = [value for value in values if not is_missing(value)]
    if not present:
        return pa.null()
    if len({type(value) for value in present}) > 1:
        return Kind.JSON
    try:
        made = pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError):
        return Kind.JSON
    if "struct" in str(made.type) and made.to_pylist() != [None if is_missing(v) else plain(v) for v in values]:
        return Kind.JSON  # mappings with different keys would get each other's, as nulls
    return made.type

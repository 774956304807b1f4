"""Rows of a dask.dataframe, partition by partition; they come to the client as they are needed.

Runs on: client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from daskinfer.storage.base import Block
from daskinfer.storage.frame import FrameSource
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.kinds import Kind, infer

__all__ = ["PartitionsSource"]


class PartitionsSource(FrameSource):
    """Rows of a dask.dataframe, which must give the same when it is computed again.

    Typed columns keep their type. Object columns get the kind of their first partition's values, and JSON text where that is
    none of text, numbers and truth values. To resume, partitions that are done are computed again for their lengths.
    """

    def __init__(self, frame: Any, name: str) -> None:
        super().__init__(frame._meta, name)  # noqa: SLF001 - Dask's name for the frame without rows
        self._lazy = frame
        self._objects: Any = None

    @property
    def total(self) -> int | None:  # type: ignore[override]
        """None: only computing the frame would tell."""
        return None

    @property
    def digest(self) -> str:
        """The name Dask gives to what the frame is made of."""
        return str(self._lazy._name)  # noqa: SLF001

    def blocks(self, needed: Sequence[str], keep: Sequence[str], *, skip: Intervals, rows: int) -> Iterator[Block]:
        """Yield slices of the partitions, one partition computed at a time."""
        self.require(needed, "the prompt")
        schema = self.schema(keep)
        wanted = [column for column in self._lazy.columns if str(column) in {*needed, *keep}]
        lazy = self._lazy[wanted] if wanted else self._lazy
        self._at = {str(column): position for position, column in enumerate(lazy.columns)}
        begin = 0
        for number in range(lazy.npartitions):
            part = lazy.partitions[number].compute()
            for first, stop in skip.complement(begin, begin + len(part)):
                for start in range(first, stop, rows):
                    slice_ = part.iloc[start - begin : min(start + rows, stop) - begin]
                    yield self._block(start, slice_, needed, schema)
            begin += len(part)

    def _plan(self, name: str) -> pa.DataType | Kind:
        if name not in self._plans and self._frame.iloc[:, self._at[name]].dtype == object:
            if self._objects is None:
                self._objects = self._lazy.partitions[0].compute()
            self._plans[name] = infer(self._objects[name].tolist())
        return super()._plan(name)

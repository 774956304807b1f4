"""What is in memory: rows that were read and have no result yet, and results that are not on disk yet.

Kept columns are held as the blocks they came in; a block gives its memory back as its rows are written.

Runs on: client.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from daskinfer.checkpoint.published import DataFile
from daskinfer.records import Completed, Result
from daskinfer.storage.intervals import Intervals

__all__ = ["Chunk", "Fresh", "Ledger"]


@dataclass(eq=False, slots=True)
class _Held:
    """Rows of one block that belong to one chunk."""

    ids: Sequence[int]
    kept: pa.Table
    chunk: Chunk
    taken: bytearray
    left: int
    start: int  # the first id if all ids are adjacent, else -1

    def position(self, row: int) -> int:
        """Return where a row is among ids with gaps, or -1."""
        at = bisect_left(self.ids, row)
        return at if at < len(self.ids) and self.ids[at] == row else -1


@dataclass(eq=False, slots=True)
class Chunk:
    """Consecutive rows that will be published together.

    Attributes
    ----------
    name : str
        Of the folder of its parts.
    opened : float
        When its first row was read.
    target : DataFile or None
        The published chunk whose rows are tried again.
    rows : Intervals
        All its rows so far (for a ``target``: those that are tried again).
    count : int
        Their number.
    left : int
        Rows without a result.
    size : int
        Bytes, roughly.
    closed : bool
        No more rows will be added.
    pending : list
        Results that are not on disk.
    pending_size : int
    pending_since : float
        When the first of them came.
    """

    name: str
    opened: float
    target: DataFile | None = None
    rows: Intervals = field(default_factory=Intervals)
    count: int = 0
    left: int = 0
    size: int = 0
    closed: bool = False
    pending: list[tuple[_Held, int, Result]] = field(default_factory=list)
    pending_size: int = 0
    pending_since: float = 0.0

    def extend(self, start: int, stop: int) -> None:
        """Add rows at the end."""
        self.rows.add(start, stop)
        self.count += stop - start


@dataclass(frozen=True)
class Fresh:
    """Pending results of a chunk, sorted by id: ids, kept columns, results."""

    ids: Any
    kept: pa.Table | None
    results: list[Result]


class Ledger:
    """Rows in flight."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._firsts: list[int] = []
        self._last = -1

    def hold(self, ids: Sequence[int], kept: pa.Table, chunk: Chunk) -> None:
        """Register rows that were read; ids must be greater than all before."""
        if ids[0] <= self._last:
            raise ValueError(
                f"row {ids[0]} was registered before; blocks must come in the order of their ids, each once"
            )
        self._last = ids[-1]
        self._held.append(_Held(ids, kept, chunk, bytearray(len(ids)), len(ids), _start(ids)))
        self._firsts.append(ids[0])
        chunk.left += len(ids)
        chunk.size += kept.nbytes

    def resolve(self, results: Sequence[Result], now: float) -> None:
        """Take results; a further one for the same row is ignored.

        Raises
        ------
        ValueError
            A row that was never registered.
        """
        firsts, all_held = self._firsts, self._held
        for result in results:
            row = result.id
            at = bisect_right(firsts, row) - 1
            held = all_held[at] if at >= 0 else None
            if held is None:
                position = -1
            elif held.start >= 0:
                position = row - held.start if row - held.start < len(held.taken) else -1
            else:
                position = held.position(row)
            if held is None or position < 0 or held.taken[position]:
                if row > self._last:
                    raise ValueError(f"there is a result for row {row}, which was not registered")
                continue
            held.taken[position] = 1
            held.left -= 1
            chunk = held.chunk
            if not chunk.pending:
                chunk.pending_since = now
            chunk.pending.append((held, position, result))
            chunk.left -= 1
            chunk.pending_size += _size(result)

    def unresolved(self, chunk: Chunk) -> Intervals:
        """Return the rows of a chunk that have no result."""
        found = Intervals()
        for held in self._held:
            if held.chunk is chunk and held.left:
                for row, taken in zip(held.ids, held.taken, strict=True):
                    if not taken:
                        found.add(row, row + 1)
        return found

    def gather(self, chunk: Chunk) -> Fresh:
        """Return what is pending in a chunk; it stays pending until :meth:`settle`."""
        pending = chunk.pending
        if not pending:
            return Fresh(np.empty(0, np.int64), None, [])
        rows = np.array([result.id for _, _, result in pending], np.int64)
        order = np.argsort(rows, kind="stable")
        ordered = [pending[at] for at in order.tolist()]
        pieces, start = [], 0
        while start < len(ordered):
            held, stop = ordered[start][0], start + 1
            while stop < len(ordered) and ordered[stop][0] is held:
                stop += 1
            pieces.append(_taken(held, [position for _, position, _ in ordered[start:stop]]))
            start = stop
        return Fresh(rows[order], pa.concat_tables(pieces), [result for _, _, result in ordered])

    def settle(self, chunk: Chunk) -> int:
        """Forget what is pending in a chunk, since it is on disk; return how many rows that were."""
        count = len(chunk.pending)
        touched = [held for held in self._held if held.chunk is chunk]
        chunk.size += chunk.pending_size
        chunk.pending, chunk.pending_size = [], 0
        for held in touched:
            if held.left and 2 * held.left <= len(held.ids):
                _shrink(held)
        self._held = [held for held in self._held if held.left or held.chunk is not chunk]
        self._firsts = [held.ids[0] for held in self._held]
        return count

    @property
    def held_rows(self) -> int:
        """Rows whose kept columns are in memory."""
        return sum(len(held.ids) for held in self._held)


def _taken(held: _Held, positions: list[int]) -> pa.Table:
    """Return rows of a block; a run of them without a copy."""
    first, count = positions[0], len(positions)
    if positions[-1] - first + 1 == count:
        return held.kept.slice(first, count)
    if not held.kept.num_columns:
        return held.kept.slice(0, count)
    return held.kept.take(pa.array(positions))


def _shrink(held: _Held) -> None:
    """Let go of the rows that have a result."""
    positions = [at for at, taken in enumerate(held.taken) if not taken]
    held.ids = [held.ids[at] for at in positions]
    if held.kept.num_columns:
        held.kept = held.kept.take(pa.array(positions))
    else:
        held.kept = held.kept.slice(0, len(positions))
    held.taken = bytearray(len(positions))
    held.start = _start(held.ids)


def _start(ids: Sequence[int]) -> int:
    return ids[0] if ids[-1] - ids[0] + 1 == len(ids) else -1


def _size(result: Result) -> int:
    """Return the rough number of bytes of a result."""
    if isinstance(result, Completed):
        output = result.output
        return 64 + (len(output) if type(output) is str else int(getattr(output, "nbytes", 64)))
    return 64 + len(result.message)

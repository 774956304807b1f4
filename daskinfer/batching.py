"""How rows are cut into batches. Pure.

Three grains, not to be confused: a *step* is what an engine runs in one forward pass, a *batch* is the unit of transport
and placement, a *chunk* is the unit of commit. This module is about batches only.

The engine's capacity decides how many rows are in flight; time decides how they are cut. Dask spends some milliseconds on
each batch, whatever is in it, so the mean time between completions of a worker is kept above ``workers · overhead / 0.5``:
then the scheduler is busy less than half the time. Near the end batches shrink, so that the workers finish together.

Runs on: client, worker.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from daskinfer.config import BatchPolicy
from daskinfer.records import Failed, Request, Result

__all__ = ["Fleet", "Pending", "Reorder", "Speed", "batch_rows", "rows_wanted"]

BUSY_SHARE = 0.5
"""Largest share of the scheduler's time that batches may take."""

MOST_ROWS = 1 << 14
FIRST_READ = 1_024


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that are ready.

    Attributes
    ----------
    workers : int
    slots : int
        Batches they take at once, all together.
    capacity : int
        Rows their engines run at once, all together.
    """

    workers: int = 0
    slots: int = 0
    capacity: int = 0


class Speed:
    """Measures rows per second of the whole fleet from completions, forgetting old ones.

    Parameters
    ----------
    memory_s : float
        Time after which an observation has lost two thirds of its weight.
    """

    def __init__(self, memory_s: float = 5.0) -> None:
        self._memory_s = memory_s
        self._last: float | None = None
        self._rows = 0.0
        self._time = 0.0

    def add(self, rows: int, now: float) -> None:
        """Note that rows came back at this time (seconds on any monotonic clock)."""
        if self._last is not None:
            passed = max(0.0, now - self._last)
            keep = math.exp(-passed / self._memory_s)
            self._rows = self._rows * keep + rows
            self._time = self._time * keep + passed
        self._last = now

    @property
    def rows_per_s(self) -> float:
        """Rows per second; 0 until two completions were seen."""
        return self._rows / self._time if self._time > 0 else 0.0


def batch_rows(policy: BatchPolicy, fleet: Fleet, rows_per_s: float, remaining: int | None) -> int:
    """Return how many rows the next batch should have; at least 1.

    Parameters
    ----------
    policy : BatchPolicy
    fleet : Fleet
    rows_per_s : float
        Of the whole fleet; 0 while unknown.
    remaining : int or None
        Rows not yet in flight, once the source is exhausted; None before.
    """
    if policy.rows is not None:
        return policy.rows
    workers = max(1, fleet.workers)
    share = policy.oversubscribe * fleet.capacity / max(1, fleet.slots)
    by_time = rows_per_s * policy.overhead_s / BUSY_SHARE
    size = min(MOST_ROWS, max(1, math.ceil(share), math.ceil(by_time)))
    if remaining is not None:
        worth_it = math.ceil(rows_per_s / workers * policy.overhead_s)
        size = min(size, max(1, worth_it, math.ceil(remaining / (2 * workers))))
    return size


def rows_wanted(policy: BatchPolicy, fleet: Fleet, rows: int, pending: int) -> int:
    """Return how many rows should be read now, so that free slots never wait for the source.

    Parameters
    ----------
    policy, fleet
    rows : int
        Rows per batch at present.
    pending : int
        Rows read and not in flight.
    """
    if fleet.slots == 0:
        return max(0, FIRST_READ - pending)
    return max(0, max(2 * rows, rows * fleet.slots // 2) - pending)


class Pending:
    """Rows that wait for a slot: highest priority first, then in order of arrival.

    Rows that come back for another attempt keep their first arrival, so that they go before newer rows.

    Attributes
    ----------
    rows : int
        How many wait.
    by_priority : Counter of int
        How many of each priority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, deque[Request]]] = []
        self._pushed = 0
        self.rows = 0
        self.by_priority: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.rows

    def push(self, requests: Sequence[Request], *, arrival: int, priority: int = 0) -> None:
        """Add rows that arrived together; ``arrival`` counts rows, and is that of the first."""
        if requests:
            self._pushed += 1
            heapq.heappush(self._heap, (-priority, arrival, self._pushed, deque(requests)))
            self.rows += len(requests)
            self.by_priority[priority] += len(requests)

    @property
    def head(self) -> Request | None:
        """The row that goes next."""
        return self._heap[0][3][0] if self._heap else None

    def cut(self, rows: int, size: int) -> tuple[tuple[Request, ...], int, int, int]:
        """Take the next rows, all of one priority.

        Parameters
        ----------
        rows : int
            At most so many.
        size : int
            At most so many bytes; one row is always taken, however large.

        Returns
        -------
        requests : tuple of Request
        bytes, arrival, priority : int
            Their size, the arrival of the first, their priority.

        Raises
        ------
        IndexError
            Nothing is pending.
        """
        taken: list[Request] = []
        lowered, first = self._heap[0][:2]
        used, full = 0, False
        while self._heap and self._heap[0][0] == lowered and not full:
            _, arrival, pushed, block = heapq.heappop(self._heap)
            before = len(taken)
            while block and not full:
                cost = block[0].size
                full = len(taken) == rows or bool(taken and used + cost > size)
                if not full:
                    used += cost
                    taken.append(block.popleft())
            if block:
                heapq.heappush(self._heap, (lowered, arrival + len(taken) - before, pushed, block))
        self.rows -= len(taken)
        self.by_priority[-lowered] -= len(taken)
        if not self.by_priority[-lowered]:
            del self.by_priority[-lowered]
        return tuple(taken), used, first, -lowered

    def clear(self) -> list[Request]:
        """Remove and return everything."""
        left = [request for *_, block in sorted(self._heap, key=lambda e: e[:3]) for request in block]
        self._heap, self.rows = [], 0
        self.by_priority.clear()
        return left


class Reorder:
    """Gives results back in the order in which their rows were offered, in spite of completion order. Pure.

    Parameters
    ----------
    limit : int
        Bytes of results that may wait; past it :attr:`full` says so and the window is told to :class:`Hold`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order: deque[int] = deque()
        self._ready: dict[int, Result] = {}
        self.bytes = 0

    def expect(self, rows: Sequence[int]) -> None:
        """Note rows in the order in which they were offered."""
        self._order.extend(rows)

    def add(self, results: Sequence[Result]) -> list[Result]:
        """Take results in; return those whose turn it is, in order."""
        for result in results:
            self._ready[result.id] = result
            self.bytes += _weight(result)
        ready: list[Result] = []
        while self._order and self._order[0] in self._ready:
            result = self._ready.pop(self._order.popleft())
            self.bytes -= _weight(result)
            ready.append(result)
        return ready

    @property
    def full(self) -> bool:
        """Whether more than the limit waits."""
        return self.bytes > self._limit

    @property
    def head(self) -> int | None:
        """The row that all others wait for."""
        return self._order[0] if self._order else None


def _weight(result: Result) -> int:
    if isinstance(result, Failed):
        return 64 + len(result.message)
    return 64 + (len(result.output) if isinstance(result.output, str) else getattr(result.output, "nbytes", 64))

"""Sets of row ids as sorted, disjoint, half-open intervals ``[start, stop)``.

A run of a billion rows that are done is one pair of integers. Rows are mostly added in order, which costs O(1).

Runs on: anywhere.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Intervals"]


class Intervals:
    """A set of integers below 2**63 that takes memory for its runs, 16 bytes each, not for its members.

    Parameters
    ----------
    pairs : iterable of (int, int)
        ``(start, stop)`` with ``start <= stop``, in any order; they may touch and overlap.

    Examples
    --------
    >>> done = Intervals([(0, 5), (8, 9)])
    >>> done.add(5, 8)
    >>> list(done), done.count, 8 in done
    ([(0, 9)], 9, True)
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts = array("q")
        self._stops = array("q")
        for start, stop in pairs:
            self.add(start, stop)

    @classmethod
    def from_ids(cls, ids: Iterable[int]) -> Intervals:
        """Build from single integers; ascending ones are taken fastest."""
        made = cls()
        for number in ids:
            made.add(number, number + 1)
        return made

    @classmethod
    def from_runs(cls, starts: Iterable[int], stops: Iterable[int]) -> Intervals:
        """Build from runs that are in order and do not touch one another; that is not checked."""
        made = cls()
        made._starts, made._stops = array("q", starts), array("q", stops)
        return made

    def add(self, start: int, stop: int) -> None:
        """Put ``start … stop - 1`` in.

        Raises
        ------
        ValueError
            ``stop < start``.
        """
        if stop <= start:
            if stop < start:
                raise ValueError(f"an interval cannot end ({stop}) before it starts ({start})")
            return
        starts, stops = self._starts, self._stops
        if not stops or start > stops[-1]:
            starts.append(start)
            stops.append(stop)
        elif start >= starts[-1]:
            stops[-1] = max(stops[-1], stop)
        else:
            low, high = bisect_left(stops, start), bisect_right(starts, stop)
            if low < high:
                start, stop = min(start, starts[low]), max(stop, stops[high - 1])
            starts[low:high] = array("q", (start,))
            stops[low:high] = array("q", (stop,))

    # ---------------------------------------------------------------- questions

    @property
    def count(self) -> int:
        """How many integers are in the set."""
        return sum(self._stops) - sum(self._starts)

    @property
    def first(self) -> int:
        """The smallest member; the set must not be empty."""
        return self._starts[0]

    @property
    def last(self) -> int:
        """The largest member; the set must not be empty."""
        return self._stops[-1] - 1

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the ``(start, stop)`` pairs, ascending."""
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        """Return the number of intervals (see :attr:`count` for the number of members)."""
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        shown = ", ".join(f"{start}:{stop}" for start, stop in list(self)[:6])
        return f"<Intervals {shown}{', …' if len(self) > 6 else ''}>"

    def overlaps(self, start: int, stop: int) -> bool:
        """Tell whether any of ``start … stop - 1`` is in the set."""
        at = bisect_right(self._stops, start)
        return start < stop and at < len(self._starts) and self._starts[at] < stop

    def first_gap(self, at: int) -> tuple[int, int | None]:
        """Return the first run ``(start, stop)`` of absent integers with ``start >= at``; the last one has no stop."""
        here = bisect_right(self._starts, at)
        if here and at < self._stops[here - 1]:
            at = self._stops[here - 1]
        return at, self._starts[here] if here < len(self._starts) else None

    # ---------------------------------------------------------------- new sets

    def clip(self, start: int, stop: int) -> Intervals:
        """Return the members in ``[start, stop)``."""
        found = Intervals()
        at = bisect_right(self._stops, start)
        while at < len(self._starts) and self._starts[at] < stop:
            found.add(max(self._starts[at], start), min(self._stops[at], stop))
            at += 1
        return found

    def complement(self, start: int, stop: int) -> Intervals:
        """Return the integers of ``[start, stop)`` that are not members."""
        found = Intervals()
        for low, high in self.clip(start, stop):
            found.add(start, low)
            start = high
        if start < stop:
            found.add(start, stop)
        return found

    def union(self, *others: Intervals) -> Intervals:
        """Return the members of any of the sets."""
        return Intervals(heapq.merge(self, *others))

    def difference(self, other: Intervals) -> Intervals:
        """Return the members that are not in the other set."""
        found = Intervals()
        for start, stop in self:
            for low, high in other.complement(start, stop):
                found.add(low, high)
        return found

    def intersection(self, other: Intervals) -> Intervals:
        """Return the members of both sets."""
        return Intervals(pair for start, stop in self for pair in other.clip(start, stop))

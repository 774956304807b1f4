"""Where keys and values live: which slot of which pool, and how much memory that takes. Pure; no tensors.

A pool is a block of slots of one size, so that one attention call serves all its rows with little padding. Rows sit at the
front of their pool. A row that outgrows its slot moves to a pool of the next size. Sizes grow by a factor of at most 1.5, so
that at most a third of a slot is idle and a token is copied only a few times. What has to be done to the tensors is
recorded, in order, and done by :class:`~daskinfer.engines.lm.kv_cache.KVCache` before the next step.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Layout", "Move", "Operation", "Place", "Resize", "slot_sizes"]


def slot_sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes of slots: 64, 96, 128, 192, 256, … for ``smallest`` 64; the last is at least ``largest``."""
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * 3 // 2 if len(sizes) % 2 else sizes[-2] * 2)
    return sizes


@dataclass(slots=True)
class Place:
    """Slot ``index`` of the pool of slots of ``size`` tokens; ``used`` tokens of it are reserved."""

    size: int
    index: int
    used: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Give the pool of this size room for so many rows; the first ``kept`` slots keep their content."""

    size: int
    rows: int
    kept: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first ``tokens`` of a slot into another one."""

    from_size: int
    from_index: int
    to_size: int
    to_index: int
    tokens: int


Operation: TypeAlias = Resize | Move


@dataclass(slots=True)
class _Pool:
    room: int = 0
    rows: list[Hashable | None] = field(default_factory=list)  # None: a hole
    holes: int = 0


class Layout:
    """Slots and memory of all rows.

    Parameters
    ----------
    budget : int
        Tokens that fit into memory, over all pools and shared segments.
    smallest, largest : int
        Sizes of slots; ``largest`` is the longest row there can be.

    Attributes
    ----------
    shared : int
        Tokens of shared segments; kept up to date by :meth:`share`.
    operations : list of Operation
        What is still to be done to the tensors.
    """

    def __init__(self, budget: int, smallest: int = 64, largest: int = 1 << 20) -> None:
        self.budget = budget
        self.shared = 0
        self.operations: list[Operation] = []
        self.places: dict[Hashable, Place] = {}
        self._sizes = slot_sizes(smallest, largest)
        self._pools: dict[int, _Pool] = {}

    @property
    def allocated(self) -> int:
        """Tokens there is memory for, in pools and segments."""
        return self.shared + sum(size * pool.room for size, pool in self._pools.items())

    @property
    def used(self) -> int:
        """Tokens reserved by rows, and those of segments."""
        return self.shared + sum(place.used for place in self.places.values())

    def size_for(self, tokens: int) -> int:
        """Return the smallest size of slot for so many tokens."""
        return next(size for size in self._sizes if size >= tokens)

    def fits_alone(self, tokens: int) -> bool:
        """Whether a row of this length fits when it has all memory for itself."""
        return tokens <= self._sizes[-1] and self.size_for(tokens) <= self.budget

    def share(self, tokens: int) -> bool:
        """Reserve memory for a segment, or give it back (negative). Returns whether it fits."""
        if tokens > 0 and not self._free(tokens):
            return False
        self.shared += tokens
        return True

    def reserve(self, key: Hashable, tokens: int, expected: int = 0) -> bool:
        """See to it that a row has a slot for ``tokens``; a new slot is made for ``expected`` if there is memory.

        Returns False, and changes nothing, when there is no memory.
        """
        place = self.places.get(key)
        if place is not None and tokens <= place.size:
            place.used = max(place.used, tokens)
            return True
        sizes = {self.size_for(max(tokens, expected)), self.size_for(tokens)}
        for size in sorted(sizes, reverse=True):
            index = self._take(size, key)
            if index is None:
                continue
            if place is not None:
                self.operations.append(Move(place.size, place.index, size, index, place.used))
                self._leave(place)
            self.places[key] = Place(size, index, tokens)
            return True
        return False

    def release(self, key: Hashable) -> None:
        """Give a row's slot back."""
        place = self.places.pop(key, None)
        if place is not None:
            self._leave(place)

    def compact(self) -> None:
        """Close the holes: rows from the end of a pool move to its front."""
        for size, pool in self._pools.items():
            while pool.holes:
                last = pool.rows.pop()
                if last is None:
                    pool.holes -= 1
                    continue
                hole = pool.rows.index(None)
                pool.rows[hole] = last
                pool.holes -= 1
                place = self.places[last]
                self.operations.append(Move(size, place.index, size, hole, place.used))
                place.index = hole

    def clear(self) -> None:
        """Forget all slots, memory and operations."""
        self.shared = 0
        self.operations.clear()
        self.places.clear()
        self._pools.clear()

    def rows(self, size: int) -> list[Hashable | None]:
        """Return the rows of a pool by index."""
        return list(self._pools[size].rows) if size in self._pools else []

    def take_operations(self) -> list[Operation]:
        """Return what is to be done to the tensors, and forget it."""
        operations, self.operations = self.operations, []
        return operations

    # ---------------------------------------------------------------- how

    def _take(self, size: int, key: Hashable) -> int | None:
        """Return a slot of the pool of this size, which is enlarged if need be; None when there is no memory."""
        pool = self._pools.setdefault(size, _Pool())
        if pool.holes:
            index = pool.rows.index(None)
            pool.rows[index] = key
            pool.holes -= 1
            return index
        if len(pool.rows) == pool.room and not self._enlarge(size, pool):
            return None
        pool.rows.append(key)
        return len(pool.rows) - 1

    def _enlarge(self, size: int, pool: _Pool) -> bool:
        wanted = max(pool.room // 2, 4)
        free = (self.budget - self.allocated) // size
        if free < 1:
            self._free(size, spare=pool)
            free = (self.budget - self.allocated) // size
        more = min(wanted, free)
        if more < 1:
            return False
        pool.room += more
        self.operations.append(Resize(size, pool.room, len(pool.rows)))
        return True

    def _free(self, tokens: int, spare: _Pool | None = None) -> bool:
        """Make so many tokens free by taking room from pools that do not need it; return whether they are."""
        for size, pool in self._pools.items():
            if self.allocated + tokens <= self.budget:
                return True
            idle = pool.room - len(pool.rows)
            if idle and pool is not spare:
                lacking = self.allocated + tokens - self.budget
                pool.room -= min(idle, -(-lacking // size))
                self.operations.append(Resize(size, pool.room, len(pool.rows)))
        return self.allocated + tokens <= self.budget

    def _leave(self, place: Place) -> None:
        pool = self._pools[place.size]
        pool.rows[place.index] = None
        pool.holes += 1
        while pool.rows and pool.rows[-1] is None:
            pool.rows.pop()
            pool.holes -= 1

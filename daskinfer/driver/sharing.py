"""How the slots of a model are shared among the streams of one driver. Pure.

Higher priorities get what they can use; within a priority the slots are divided evenly, and what one stream cannot use
goes to the others. A stream with rows always has a slot, so that none is starved by higher priorities.

Runs on: client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["share_slots"]


def share_slots(slots: int, useful: Sequence[Mapping[int, int]]) -> list[int]:
    """Return the slots of each stream.

    Parameters
    ----------
    slots : int
        All there are.
    useful : sequence of mapping of int to int
        For each stream the slots that it can use, by priority. A stream without rows is told what it would have if it
        had some; that does not count against the others until it has.
    """
    if slots <= 0:
        return [0] * len(useful)
    active = [i for i, wants in enumerate(useful) if any(wants.values())]
    given = dict.fromkeys(active, 0)
    left = slots
    for priority in sorted({p for i in active for p in useful[i]}, reverse=True):
        granted = _evenly(left, {i: useful[i].get(priority, 0) for i in active})
        for i, n in granted.items():
            given[i] += n
        left -= sum(granted.values())
    for at, i in enumerate(active):
        given[i] = max(1, given[i] + left // len(active) + (at < left % len(active)))
    newcomer = max(1, slots // (len(active) + 1))
    return [given.get(i, slots if not active else newcomer) for i in range(len(useful))]


def _evenly(slots: int, wants: dict[int, int]) -> dict[int, int]:
    """Divide slots as evenly as the wants allow."""
    granted = dict.fromkeys(wants, 0)
    unmet = [i for i, n in wants.items() if n > 0]
    while slots > 0 and unmet:
        each = max(1, slots // len(unmet))
        for i in unmet:
            taken = min(each, wants[i] - granted[i], slots)
            granted[i] += taken
            slots -= taken
        unmet = [i for i in unmet if granted[i] < wants[i]]
    return granted

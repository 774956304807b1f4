"""Intervals against a set."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.storage.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def members(intervals: Intervals) -> set[int]:
    return {i for start, stop in intervals for i in range(start, stop)}


def as_set(pairs: list[tuple[int, int]]) -> set[int]:
    return {i for start, stop in pairs for i in range(start, stop)}


def check_shape(intervals: Intervals) -> None:
    pairs = list(intervals)
    assert all(start < stop for start, stop in pairs)
    assert all(a[1] < b[0] for a, b in pairwise(pairs)), "touching runs must be one run"
    assert len(intervals) == len(pairs)


@given(PAIRS)
def test_adding_in_any_order(pairs: list[tuple[int, int]]) -> None:
    made, expected = Intervals(pairs), as_set(pairs)
    check_shape(made)
    assert members(made) == expected
    assert made.count == len(expected)
    assert bool(made) == bool(expected)
    assert all((i in made) == (i in expected) for i in range(-1, 75))
    assert made == Intervals.from_ids(sorted(expected)) == Intervals.from_ids(expected)
    if expected:
        assert (made.first, made.last) == (min(expected), max(expected))


@given(PAIRS, PAIRS, st.integers(-2, 70), st.integers(0, 30))
def test_set_operations(one: list[tuple[int, int]], other: list[tuple[int, int]], low: int, width: int) -> None:
    a, b, x, y = Intervals(one), Intervals(other), as_set(one), as_set(other)
    window = set(range(low, low + width))
    for made, expected in (
        (a.union(b), x | y),
        (a.difference(b), x - y),
        (a.intersection(b), x & y),
        (a.clip(low, low + width), x & window),
        (a.complement(low, low + width), window - x),
    ):
        check_shape(made)
        assert members(made) == expected
    assert a.overlaps(low, low + width) == bool(x & window)


@given(PAIRS, st.integers(0, 75))
def test_first_gap(pairs: list[tuple[int, int]], at: int) -> None:
    made, expected = Intervals(pairs), as_set(pairs)
    start, stop = made.first_gap(at)
    assert start not in expected
    assert all(i in expected for i in range(at, start))
    later = [i for i in expected if i > start]
    assert stop == (min(later) if later else None)


def test_in_order_appends_cost_no_search() -> None:
    made = Intervals()
    for start in range(0, 2_000_000, 20):
        made.add(start, start + 20)
    assert list(made) == [(0, 2_000_000)]


def test_bad_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot end"):
        Intervals([(3, 1)])
    assert repr(Intervals((10 * i, 10 * i + 1) for i in range(9))).endswith("50:51, …>")
    assert Intervals() != 3

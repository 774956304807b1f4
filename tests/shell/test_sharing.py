"""How slots are shared among streams: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.driver.sharing import share_slots

WANTS = st.lists(st.dictionaries(st.integers(-2, 2), st.integers(0, 40), max_size=3), max_size=6)


@pytest.mark.parametrize(
    ("slots", "useful", "shares"),
    [
        (16, [{}], [16]),
        (16, [{0: 99}], [16]),
        (16, [{0: 99}, {0: 99}], [8, 8]),
        (16, [{0: 99}, {}], [16, 8]),  # an idle one takes nothing from the other
        (16, [{0: 99}, {0: 2}], [14, 2]),
        (16, [{0: 99}, {1: 2}], [14, 2]),
        (16, [{0: 99}, {1: 99}], [1, 16]),  # nobody is starved
        (16, [{0: 3}, {0: 3}], [8, 8]),  # what nobody needs now is spread
        (16, [{0: 99, 2: 1}, {1: 99}], [1, 15]),
        (1, [{0: 9}, {0: 9}], [1, 1]),
        (0, [{0: 9}, {}], [0, 0]),
        (7, [], []),
    ],
)
def test_shares(slots: int, useful: list[dict[int, int]], shares: list[int]) -> None:
    assert share_slots(slots, useful) == shares


@given(st.integers(1, 64), WANTS)
def test_every_slot_is_given_and_nobody_is_starved(slots: int, useful: list[dict[int, int]]) -> None:
    shares = share_slots(slots, useful)
    active = [n for n, wants in zip(shares, useful, strict=True) if any(wants.values())]
    assert all(n >= 1 for n in shares)
    if active:
        assert slots <= sum(active) <= slots + len(active)


@given(st.integers(1, 64), WANTS)
def test_streams_that_want_the_same_get_the_same(slots: int, useful: list[dict[int, int]]) -> None:
    shares = share_slots(slots, [*useful, *useful])
    assert all(abs(a - b) <= 1 for a, b in zip(shares[: len(useful)], shares[len(useful) :], strict=True))

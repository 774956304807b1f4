"""Guesses: what followed the last time, as long as guesses go well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.engines.lm.lookup import Lookup


def test_what_followed_the_last_time_is_guessed() -> None:
    lookup = Lookup(4)
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7]
    assert lookup.guess(prompt, [9, 1, 2], 4) == [], "nothing like the latest three stands there"
    assert lookup.guess(prompt, [9, 1, 2, 3], 4) == [6, 7]
    assert lookup.guess(prompt, [9, 1, 2, 3], 1) == [6]
    assert lookup.guess(prompt, [9, 1, 2, 3], 0) == []


def test_what_repeats_itself_goes_on() -> None:
    lookup = Lookup(8)
    for _ in range(3):
        lookup.learn(1, 1)
    assert lookup.guess([], [1, 2, 1, 2, 1], 8) == [2, 1, 2, 1, 2, 1, 2, 1]


def test_guesses_are_as_long_as_they_were_right() -> None:
    lookup = Lookup(7)
    text = [5] * 20
    assert len(lookup.guess(text, [], 9)) == 2
    lookup.learn(2, 2)
    assert len(lookup.guess(text, [], 9)) == 4
    lookup.learn(4, 4)
    assert len(lookup.guess(text, [], 9)) == 7
    lookup.learn(7, 3)
    assert len(lookup.guess(text, [], 9)) == 3
    lookup.learn(3, 0)
    assert [len(lookup.guess(text, [], 9)) for _ in range(9)] == [0] * 8 + [1]


def test_only_the_end_of_a_long_prompt_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.engines.lm.lookup._READ", 6)
    prompt = [1, 2, 3, 4, *range(10, 20), 7, 8, 9, 5, 1, 6]
    assert Lookup(2).guess(prompt, [1, 2, 3], 2) == []
    assert Lookup(2).guess(prompt, [7, 8, 9], 2) == [5, 1]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40), st.integers(1, 9), st.integers(0, 9))
def test_a_guess_is_the_same_however_the_text_came(text: list[int], cut: int, most: int, room: int) -> None:
    at_once, bit_by_bit = Lookup(most), Lookup(most)
    prompt, answer = text[:cut], text[cut:]
    for end in range(len(answer)):
        bit_by_bit.guess(prompt, answer[:end], room)
    guess = at_once.guess(prompt, answer, room)
    assert bit_by_bit.guess(prompt, answer, room) == guess
    assert len(guess) <= min(most, room, 2)
    if guess:
        before = [at for at in range(3, len(text)) if text[at - 3 : at] == text[-3:]]
        assert guess[0] == text[before[-1]]

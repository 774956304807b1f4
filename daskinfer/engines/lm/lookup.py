"""Guessing how an answer goes on, from what stands in prompt and answer already: prompt lookup decoding.

When few rows run, a step costs hardly more for a few tokens per row than for one, since the weights have to be read once
either way. So the tokens that followed the last time the row's latest three stood there are computed along with its next
one. The model's own scores decide how many of them were right; the answer is the same but for float rounding. The method is
that of A. Saxena (2023, "prompt lookup decoding"); transformers has it as ``prompt_lookup_num_tokens``.

Pure; no tensors.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Lookup"]

_LATEST = 3  # tokens that must have stood there before
_REST = 8  # steps without a guess after one that was all wrong
_READ = 1 << 14  # tokens of a prompt, its last ones, that are looked through: some 150 bytes each


class Lookup:
    """The guesses for one row.

    Parameters
    ----------
    most : int
        Longest guess.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(2, most)  # of the next guess: as long as the last one went well
        self._rest = 0
        self._seen = 0  # tokens of prompt and answer
        self._tokens: list[int] = []  # those of them that are looked through
        self._after: dict[
            tuple[int, ...], int
        ] = {}  # tokens in a row, and where what followed them the last time stands

    def guess(self, prompt: Sequence[int], answer: Sequence[int], room: int) -> list[int]:
        """Return at most ``room`` tokens that may follow the answer; often none."""
        most = min(room, self._length)
        if self._rest:
            self._rest -= 1
            return []
        if most < 1:
            return []
        self._read(prompt, answer)
        at = self._after.get(tuple(self._tokens[-_LATEST:]))
        if at is None:
            return []
        found = self._tokens[at : at + most]
        while len(found) < most:  # it reaches the end: what repeats itself goes on repeating
            found.append(found[len(found) - (len(self._tokens) - at)])
        return found

    def learn(self, guessed: int, right: int) -> None:
        """Take note how many tokens of the last guess were right."""
        if right == guessed:
            self._length = min(2 * self._length, self._most)
        elif right:
            self._length = right
        else:
            self._length, self._rest = 1, _REST

    def _read(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Note where the tokens that are new since the last time stand."""
        begin = len(self._tokens)
        if not self._seen:
            self._tokens, self._seen = list(prompt[-_READ:]), len(prompt)
        self._tokens += answer[self._seen - len(prompt) :]
        self._seen = len(prompt) + len(answer)
        for end in range(max(begin, _LATEST), len(self._tokens)):
            self._after[tuple(self._tokens[end - _LATEST : end])] = end

"""What the scheduler moves around: rows, and prefixes that rows share.

Both are sequences of tokens whose keys and values are computed piece by piece. A row's tokens grow while it is answered.
A segment is a piece of prompt that several rows have in common; segments form a tree, and a row hangs on the path from the
root to one of them (its chain), behind which its own tokens begin.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from daskinfer.engines.lm.lookup import Lookup

__all__ = ["Chunk", "Row", "Segment", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens to be computed.

    Attributes
    ----------
    tokens : list of int
        Own tokens; those of the chain come before them.
    computed : int
        How many of the own tokens have been computed, or are being computed in the step that was scheduled last.
    chain : tuple of Segment
        The shared prefix, outermost first.
    """

    tokens: list[int]
    computed: int = 0
    chain: tuple[Segment, ...] = ()

    @property
    def offset(self) -> int:
        """Position of the first own token."""
        return sum(len(segment.tokens) for segment in self.chain)

    @property
    def pending(self) -> int:
        """Own tokens not computed yet."""
        return len(self.tokens) - self.computed


@dataclass(slots=True, eq=False)
class Segment(Sequence):
    """A shared piece of prompt; ``users`` counts the rows and the segments that hang on it."""

    users: int = 0
    used_at: int = 0

    @property
    def complete(self) -> bool:
        """Whether all of it is computed, or will be by the step that was scheduled last."""
        return self.computed == len(self.tokens)


@dataclass(slots=True, eq=False)
class Row(Sequence):
    """One row.

    Attributes
    ----------
    id : int
    prompt : list of int
        All of the prompt, that of the chain included.
    answer : list of int
        Tokens written so far.
    max_new_tokens : int
    arrival : int
        Place in the order of arrival.
    sharing : bool
        Whether it may hang on shared prefixes.
    lookup : Lookup or None
        Guesses how the answer goes on, for a row that may be guessed.
    guess : list of int
        Tokens that are computed along in the step that was scheduled last; they stand at the end of ``tokens``.
    """

    id: int = 0
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    max_new_tokens: int = 1
    arrival: int = 0
    sharing: bool = True
    lookup: Lookup | None = None
    guess: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, row: int, prompt: list[int], max_new_tokens: int, lookup: Lookup | None = None) -> Row:
        """Return a row that has not begun."""
        return cls(list(prompt), id=row, prompt=prompt, max_new_tokens=max_new_tokens, lookup=lookup)

    @property
    def expected(self) -> int:
        """Most tokens it may still write."""
        return self.max_new_tokens - len(self.answer)

    def push(self, token: int) -> None:
        """Add a token to the answer; it is computed in a later step."""
        self.answer.append(token)
        self.tokens.append(token)

    def suppose(self, guess: list[int]) -> None:
        """Have tokens computed along with the next one, as if they were part of the answer."""
        self.guess = guess
        self.tokens += guess
        self.computed += len(guess)

    def verified(self, found: Listing[int]) -> Listing[int]:
        """Return those of the tokens found, behind the last known one and behind each guessed one, that are the answer's.

        The first always is; each further one follows from a guess that was right. Keys and values of wrong guesses count as
        not computed.
        """
        guess, self.guess = self.guess, []
        if not guess:
            return found
        right = next((at for at, token in enumerate(guess) if found[at] != token), len(guess))
        del self.tokens[len(self.tokens) - len(guess) :]
        self.computed -= len(guess) - right
        if self.lookup is not None:
            self.lookup.learn(len(guess), right)
        return found[: right + 1]

    def restart(self, chain: tuple[Segment, ...] = ()) -> None:
        """Forget what is computed, and begin behind a chain."""
        self.chain = chain
        self.computed = 0
        self.guess = []
        self.tokens = (self.prompt + self.answer)[self.offset :]


@dataclass(slots=True)
class Chunk:
    """Own tokens ``start`` to ``stop`` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the next token of a row follows from it."""
        return isinstance(self.sequence, Row) and self.stop == len(self.sequence.tokens)

"""What runs in the next step: pure decisions about tokens and memory.

Every row that is being answered runs in every step, with one token. What is left of the token budget reads prompts, in
pieces if need be, those of shared segments first. A slot that falls free is filled in the next step. If the step is small
all the same, guessed tokens are computed along, and those that were right count. When memory runs out, idle segments go
first; then the row admitted last goes back to waiting, to be computed again later.

Runs on: worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from daskinfer.engines.lm.layout import Layout
from daskinfer.engines.lm.prefixes import Prefixes
from daskinfer.engines.lm.sequences import Chunk, Row, Segment, Sequence

__all__ = ["Scheduler"]

_SMALL_STEP = 16  # tokens that take hardly longer than one, where weights are what a step waits for
_AGING = 8  # every eighth row admitted is the one that has waited longest


class Scheduler:
    """Rows waiting and running.

    Parameters
    ----------
    layout : Layout
    slots : int
        Most rows at once.
    budget : int
        Tokens of a step; prompts get at least a quarter of it, however many rows are being answered.
    longest_first : bool
        Of the waiting rows admit the one that may write most, so that few long ones are left at the end; every eighth
        time the one that has waited longest. Otherwise in order of arrival.
    prefixes : Prefixes or None
        None: rows share nothing.
    """

    def __init__(
        self, layout: Layout, slots: int, budget: int, *, longest_first: bool = True, prefixes: Prefixes | None = None
    ) -> None:
        self.layout, self.slots, self.budget = layout, slots, budget
        self.prefixes = prefixes
        self.running: list[Row] = []
        self.preemptions = self.recomputed = 0
        self._shared: set[Segment] = set()  # segments that have memory
        self._dropped: list[Segment] = []
        self._longest_first = longest_first
        self._waiting: dict[int, Row] = {}
        self._by_length: list[tuple[int, int, int]] = []
        self._preempted: list[Row] = []
        self._arrivals = self._admissions = 0

    @property
    def waiting(self) -> int:
        """Rows that do not run."""
        return len(self._waiting) + len(self._preempted)

    def add(self, row: Row) -> None:
        """Let a row wait."""
        row.arrival = self._arrivals
        self._arrivals += 1
        self._waiting[row.id] = row
        if self._longest_first:
            heapq.heappush(self._by_length, (-row.expected, row.arrival, row.id))
        if self.prefixes is not None:
            self.prefixes.observe(row.prompt)

    def abort(self, ids: Iterable[int]) -> list[Row]:
        """Forget rows; return those that were running."""
        forgotten = set(ids)
        gone = [self._waiting.pop(row_id, None) for row_id in forgotten]
        gone += [row for row in self._preempted if row.id in forgotten]
        for row in gone:
            if row is not None:
                self._forget(row)
        self._preempted = [row for row in self._preempted if row.id not in forgotten]
        begun = [row for row in self.running if row.id in forgotten]
        for row in begun:
            self.finish(row)
        return begun

    def finish(self, row: Row) -> None:
        """Forget a running row and give its memory back."""
        self._take_out(row)
        self._forget(row)

    def schedule(self) -> list[Chunk]:
        """Return what to compute: first the rows that go on by one token, then pieces of prompts.

        Memory for it is reserved, and it counts as computed from here on. Empty only when no row is held. Afterwards
        :meth:`take_dropped` tells whose tensors can go.
        """
        chunks = self._decode()
        going_on = len(chunks)
        left = max(self.budget - len(chunks), self.budget // 4, 1)
        for row in self.running:
            left -= self._read(row, left, chunks)
        while left > 0 and len(self.running) < self.slots:
            admitted = self._admit()
            if admitted is None:
                break
            left -= self._read(admitted, left, chunks)
        if len(chunks) == going_on:
            self._guess(chunks)
        self.layout.compact()
        return chunks

    def send_back(self, row: Row) -> None:
        """Let a running row wait again; what was computed of it is lost."""
        self._preempt(row)

    def reset(self) -> None:
        """Send all running rows back to waiting and forget what is shared: the step that was scheduled did not run."""
        for row in list(self.running):
            self._preempt(row)
        if self.prefixes is not None:
            for segment in self.prefixes.segments:
                segment.computed = 0
            while self._evict():
                pass

    def take_dropped(self) -> list[Segment]:
        """Return the segments dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # ---------------------------------------------------------------- rows that run

    def _decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for row in list(self.running):
            if row.answer and row.pending == 1 and row.computed and self._grow(row):
                chunks.append(Chunk(row, row.computed, row.computed + 1))
                row.computed += 1
        return chunks

    def _guess(self, chunks: list[Chunk]) -> None:
        """Have guessed tokens computed along, where the step is so small that they cost little."""
        share = min(_SMALL_STEP, self.budget) // max(len(chunks), 1) - 1
        for chunk in chunks if share > 0 else ():
            row = chunk.sequence
            if not isinstance(row, Row) or row.lookup is None:
                continue
            guess = row.lookup.guess(row.prompt, row.answer, min(share, row.expected - 1))
            if guess and self.layout.reserve(row, row.computed + len(guess), self._expected(row)):
                row.suppose(guess)
                chunk.stop += len(guess)

    def _grow(self, row: Row) -> bool:
        """Reserve memory for one more token, at the cost of rows admitted later; False: the row itself had to go.

        Rows are visited in the order of admission, so that those sent back have no part in the step yet.
        """
        while not self._reserve(row, row.computed + 1, self._expected(row)):
            victim = self.running[-1]
            victim.sharing = victim.sharing and len(self.running) > 1
            self._preempt(victim)
            if victim is row:
                return False
        return True

    def _take_out(self, row: Row) -> None:
        self.running.remove(row)
        self.layout.release(row)
        self._detach(row)

    def _forget(self, row: Row) -> None:
        if self.prefixes is not None:
            self.prefixes.forget(row.prompt)

    def _preempt(self, row: Row) -> None:
        self.preemptions += 1
        self.recomputed += row.computed
        self._take_out(row)
        row.restart()
        self._preempted.append(row)

    def _read(self, row: Row, left: int, chunks: list[Chunk]) -> int:
        """Add pieces of a row's prompt, its chain's first, of at most ``left`` tokens; return how many there are."""
        taken = 0
        sequence: Sequence
        for sequence in (*row.chain, row):
            piece = min(sequence.pending, left - taken)
            if piece > 0:
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + piece))
                sequence.computed += piece
                taken += piece
            if sequence.pending:
                break
        return taken

    # ---------------------------------------------------------------- rows that wait

    def _next(self) -> Row | None:
        if self._preempted:
            return min(self._preempted, key=lambda row: row.arrival)
        if not self._waiting:
            return None
        if not self._longest_first or self._admissions % _AGING == _AGING - 1:
            return next(iter(self._waiting.values()))
        while True:
            _, arrival, row_id = self._by_length[0]
            row = self._waiting.get(row_id)
            if row is not None and row.arrival == arrival:
                return row
            heapq.heappop(self._by_length)

    def _admit(self) -> Row | None:
        """Let the next waiting row in and return it; None when there is none, or no memory for it yet."""
        row = self._next()
        if row is None:
            return None
        if not self._enter(row):
            if self.running:
                return None
            row.sharing = False  # alone and without a chain it fits: that was checked before it was added
            if not self._enter(row):
                raise AssertionError(f"row {row.id} does not fit alone")
        if self._waiting.pop(row.id, None) is None:
            self._preempted.remove(row)
        if self.prefixes is not None:
            self.prefixes.served(row.chain)
        self._admissions += 1
        self.running.append(row)
        return row

    def _enter(self, row: Row) -> bool:
        """Hang a row on its chain and reserve a slot for it; undone when there is no memory."""
        chain = self.prefixes.chain(row) if self.prefixes is not None and row.sharing else ()
        row.restart(chain)
        if self.prefixes is not None:
            self.prefixes.attach(chain)
        fits = all(segment in self._shared or self._share(segment) for segment in chain)
        fits = fits and self._reserve(row, len(row.tokens), self._expected(row))
        if not fits:
            self._detach(row)
            row.restart()
        return fits

    # ---------------------------------------------------------------- memory

    def _expected(self, row: Row) -> int:
        """Return the length to make a new slot for, so that the row need not move soon; 0 where memory is scarce."""
        if self.layout.allocated > self.layout.budget // 2:
            return 0
        length = len(row.tokens)
        return length + min(row.expected, max(64, length // 2))

    def _reserve(self, row: Row, tokens: int, expected: int) -> bool:
        while not self.layout.reserve(row, tokens, expected):
            if not self._evict():
                return False
        return True

    def _share(self, segment: Segment) -> bool:
        while not self.layout.share(len(segment.tokens)):
            if not self._evict():
                return False
        self._shared.add(segment)
        return True

    def _evict(self) -> bool:
        """Drop the shared segment that was not used for the longest time; return whether there was one."""
        segment = self.prefixes.oldest_unused() if self.prefixes is not None else None
        if segment is None or self.prefixes is None:
            return False
        self.prefixes.drop(segment)
        self._give_back(segment)
        return True

    def _detach(self, row: Row) -> None:
        if self.prefixes is not None:
            for segment in self.prefixes.detach(row.chain):
                self._give_back(segment)

    def _give_back(self, segment: Segment) -> None:
        if segment in self._shared:
            self._shared.remove(segment)
            self.layout.share(-len(segment.tokens))
            self._dropped.append(segment)

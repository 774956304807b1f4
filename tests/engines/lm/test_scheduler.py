"""The scheduler alone, with lists in place of tensors: every token is computed once, in order, within budget and memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.engines.lm.layout import Layout
from daskinfer.engines.lm.lookup import Lookup
from daskinfer.engines.lm.prefixes import Prefixes
from daskinfer.engines.lm.scheduler import Scheduler
from daskinfer.engines.lm.sequences import Chunk, Row, Segment
from tests.engines.lm.test_layout import Memory


class Machine:
    """Runs what the scheduler says; a token's key is (row's whole text so far), so that wrong memory is noticed."""

    def __init__(self, scheduler: Scheduler, lengths: dict[int, int]) -> None:
        self.scheduler, self.lengths = scheduler, lengths
        self.memory = Memory()
        self.segments: dict[Segment, list[Any]] = {}
        self.finished: dict[int, list[int]] = {}
        self.tokens_of_steps: list[int] = []
        self.guessed = self.guessed_right = 0

    def step(self) -> bool:
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        for segment in self.scheduler.take_dropped():
            self.segments.pop(segment, None)
        self.memory.apply(self.scheduler.layout.take_operations())
        assert len(self.scheduler.running) <= self.scheduler.slots
        assert self.scheduler.layout.allocated <= self.scheduler.layout.budget
        decoded = sum(1 for c in chunks if isinstance(c.sequence, Row) and c.sequence.answer and c.samples)
        self.tokens_of_steps.append(sum(c.stop - c.start for c in chunks))
        assert self.tokens_of_steps[-1] <= max(self.scheduler.budget, decoded + max(self.scheduler.budget // 4, 1))
        for chunk in chunks:
            self._compute(chunk)
        for chunk in chunks:
            if isinstance(chunk.sequence, Row) and chunk.samples:
                self._sample(chunk.sequence)
        return True

    def _text(self, sequence: Any) -> list[int]:
        return [t for s in (*sequence.chain, sequence) for t in s.tokens]

    def _kept(self, sequence: Any) -> list[Any]:
        if isinstance(sequence, Segment):
            return self.segments.setdefault(sequence, [None] * len(sequence.tokens))
        place = self.scheduler.layout.places[sequence]
        return self.memory.pools[place.size][place.index]

    def _compute(self, chunk: Chunk) -> None:
        text, offset = self._text(chunk.sequence), chunk.sequence.offset
        kept = self._kept(chunk.sequence)
        for at in range(chunk.start, chunk.stop):
            kept[at] = tuple(text[: offset + at + 1])
        for sequence, stop in (*((s, len(s.tokens)) for s in chunk.sequence.chain), (chunk.sequence, chunk.stop)):
            begin = sequence.offset
            for at, key in enumerate(self._kept(sequence)[:stop]):
                assert key == tuple(text[: begin + at + 1]), "a token looks at keys that are not its own"

    def _sample(self, row: Row) -> None:
        text, known = self._text(row), row.prompt + row.answer
        assert text == known + row.guess
        assert len(row.answer) + len(row.guess) < row.max_new_tokens
        self.guessed += len(row.guess)
        taken = row.verified([following(text[:end]) for end in range(len(known), len(text) + 1)])
        self.guessed_right += len(taken) - 1
        assert self._text(row) == known
        for token in taken:
            row.push(token)
            if len(row.answer) >= self.lengths[row.id]:
                self.finished[row.id] = row.answer
                self.scheduler.finish(row)
                break


def following(text: list[int]) -> int:
    """Return the next token: it follows from the last two, so that answers go round in circles, which can be guessed."""
    return hash(tuple(text[-2:])) % 9


def expected(prompt: list[int], n: int) -> list[int]:
    text = list(prompt)
    for _ in range(n):
        text.append(following(text))
    return text[len(prompt) :]


def scheduler(memory: int = 10_000, slots: int = 4, budget: int = 16, **options: Any) -> Scheduler:
    return Scheduler(Layout(memory, 8, 256), slots, budget, **options)


def test_rows_that_go_on_come_first_and_prompts_are_read_in_pieces() -> None:
    plan = scheduler(budget=8)
    plan.add(Row.of(0, [1, 2], 5))
    plan.add(Row.of(1, list(range(20)), 5))
    machine = Machine(plan, {0: 5, 1: 5})
    while machine.step():
        pass
    assert machine.finished == {0: expected([1, 2], 5), 1: expected(list(range(20)), 5)}
    assert max(machine.tokens_of_steps) == 8


def test_longest_first_but_nobody_starves() -> None:
    plan = scheduler(slots=1, budget=100)
    plan.add(Row.of(0, [1], 1))
    for i in range(1, 20):
        plan.add(Row.of(i, [i], 5))
    order: list[int] = []
    machine = Machine(plan, dict.fromkeys(range(20), 1))
    while machine.step():
        order += [row for row in machine.finished if row not in order]
    assert order[0] == 1
    assert order.index(0) == 7
    assert sorted(order) == list(range(20))


def test_arrival_order() -> None:
    plan = scheduler(slots=1, budget=100, longest_first=False)
    for i in range(5):
        plan.add(Row.of(i, [i], 1 + i))
    machine = Machine(plan, dict.fromkeys(range(5), 1))
    while machine.step():
        pass
    assert list(machine.finished) == list(range(5))


def test_a_free_slot_is_filled_in_the_next_step() -> None:
    plan = scheduler(slots=4, budget=64)
    for i in range(40):
        plan.add(Row.of(i, [i, i], 3))
    machine = Machine(plan, {i: 1 + i % 3 for i in range(40)})
    while True:
        waiting = plan.waiting
        if not machine.step():
            break
        ended = 4 - len(plan.running)
        if waiting > 4:
            assert len(plan.running) + ended == 4
    assert len(machine.finished) == 40


def test_out_of_memory_sends_the_row_admitted_last_back() -> None:
    plan = scheduler(memory=64, slots=4, budget=64, longest_first=False)
    for i in range(3):
        plan.add(Row.of(i, [i] * 6, 30))
    machine = Machine(plan, dict.fromkeys(range(3), 30))
    while machine.step():
        pass
    assert plan.preemptions > 0
    assert machine.finished == {i: expected([i] * 6, 30) for i in range(3)}


def test_a_shared_beginning_is_computed_once() -> None:
    common = list(range(64))
    plan = scheduler(slots=8, budget=32, prefixes=Prefixes())
    for i in range(8):
        plan.add(Row.of(i, [*common, 100 + i], 4))
    machine = Machine(plan, dict.fromkeys(range(8), 4))
    while machine.step():
        pass
    assert machine.finished == {i: expected([*common, 100 + i], 4) for i in range(8)}
    assert sum(machine.tokens_of_steps) == 64 + 8 + 8 * 3
    assert plan.prefixes is not None
    assert plan.prefixes.hits == 7


def test_abort_frees_everything() -> None:
    plan = scheduler(prefixes=Prefixes())
    for i in range(9):
        plan.add(Row.of(i, [*range(64), 100 + i], 4))
    Machine(plan, dict.fromkeys(range(9), 4)).step()
    begun = plan.abort(range(9))
    assert begun
    assert not plan.running
    assert plan.waiting == 0
    assert plan.layout.places == {}
    assert plan.layout.shared == 0
    assert plan.schedule() == []


def test_reset_starts_over() -> None:
    plan = scheduler(prefixes=Prefixes())
    for i in range(9):
        plan.add(Row.of(i, [*range(64), 100 + i], 4))
    machine = Machine(plan, dict.fromkeys(range(9), 4))
    for _ in range(6):
        machine.step()
    plan.reset()
    assert plan.layout.shared == 0
    machine.segments.clear()
    while machine.step():
        pass
    assert machine.finished == {i: expected([*range(64), 100 + i], 4) for i in range(9)}


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[int, list[int], int, int]]:
    """Rows: when they come, their prompt (many begin alike), most and true number of new tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        stem = draw(st.sampled_from([0, 0, 16, 32, 48, 70]))
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        most = draw(st.integers(1, 20))
        rows.append((draw(st.integers(0, 10)), [*range(1000, 1000 + stem), *own], most, draw(st.integers(1, most))))
    return rows


@settings(max_examples=80)
@given(
    jobs(),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from([128, 160, 250, 10_000]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 9),
    st.sets(st.integers(0, 11), max_size=3),
)
def test_every_row_gets_its_own_answer_under_every_schedule(
    rows: list[tuple[int, list[int], int, int]],
    slots: int,
    budget: int,
    memory: int,
    options: tuple[bool, bool],
    guessing: int,
    aborted: set[int],
) -> None:
    longest_first, sharing = options
    prefixes = Prefixes(min_tokens=16, min_saved=16) if sharing else None
    plan = Scheduler(Layout(memory, 8, 256), slots, budget, longest_first=longest_first, prefixes=prefixes)
    lengths = {i: true for i, (_, _, _, true) in enumerate(rows)}
    machine = Machine(plan, lengths)
    at = steps = 0
    while True:
        for i, (when, prompt, most, _) in enumerate(rows):
            if when == at:
                plan.add(Row.of(i, prompt, most, Lookup(guessing) if guessing else None))
        if at == 5:
            plan.abort(aborted)
        went = machine.step()
        at += 1
        steps += 1
        assert steps < 5_000, "no progress"
        if at > 10 and not went:
            break
    done = {i: expected(prompt, true) for i, (_, prompt, _, true) in enumerate(rows)}
    for i, answer in machine.finished.items():
        assert answer == done[i]
    assert set(done) - set(machine.finished) <= aborted
    assert plan.layout.places == {}
    assert plan.layout.used == plan.layout.shared


def test_guessed_tokens_are_computed_along_and_save_steps() -> None:
    steps = {}
    for most in (0, 7):
        plan = scheduler(slots=2, budget=64)
        for i in range(2):
            plan.add(Row.of(i, [i, 1], 60, Lookup(most) if most else None))
        machine = Machine(plan, {0: 60, 1: 47})
        while machine.step():
            pass
        assert machine.finished == {0: expected([0, 1], 60), 1: expected([1, 1], 47)}
        steps[most] = len(machine.tokens_of_steps)
    assert steps[0] == 60
    assert steps[7] < 30
    assert machine.guessed_right > 30


def test_nothing_is_guessed_while_prompts_are_read_or_many_rows_run() -> None:
    plan = scheduler(slots=20, budget=64)
    plan.add(Row.of(0, [1, 2], 60, Lookup(7)))
    machine = Machine(plan, dict.fromkeys(range(21), 40))
    for _ in range(30):
        machine.step()
    assert machine.guessed
    before = machine.guessed
    plan.add(Row.of(1, list(range(200)), 40))
    while plan.waiting or any(row.pending > 1 for row in plan.running):
        machine.step()
    assert machine.guessed == before
    for i in range(2, 20):
        plan.add(Row.of(i, [i], 40, Lookup(7)))
    machine.step()
    before = machine.guessed
    while len(plan.running) > 8:
        assert machine.guessed == before
        machine.step()


def test_a_full_house_needs_no_preemption_when_it_fits() -> None:
    plan = scheduler(slots=4, budget=64)
    for i in range(12):
        plan.add(Row.of(i, [i] * 10, 40))
    machine = Machine(plan, {i: 5 + 3 * i for i in range(12)})
    while machine.step():
        pass
    assert plan.preemptions == 0
    assert plan.recomputed == 0


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_nothing_to_do_is_an_empty_step(slots: int) -> None:
    assert scheduler(slots=slots).schedule() == []

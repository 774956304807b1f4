"""The window: conservation under random schedules, and each rule on its own."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.batching import Fleet
from daskinfer.config import BatchPolicy, RetryPolicy
from daskinfer.records import Batch, Completed, Failed, Fault, FaultKind, Report, Request, Result, SamplingParams
from daskinfer.window import (
    Action,
    Cancelled,
    Emit,
    Exhausted,
    FleetChanged,
    Hold,
    Offered,
    Release,
    Reported,
    Retrying,
    Submit,
    Tick,
    Window,
)

PARAMS = SamplingParams()


def rows(first: int, n: int) -> tuple[Request, ...]:
    return tuple(Request(i, f"row {i}", PARAMS) for i in range(first, first + n))


def window(*, batch: int | None = 4, slots: int = 4, **retry: float) -> Window:
    policy = BatchPolicy(rows=batch)
    made = Window("t", policy, RetryPolicy(**({"backoff_s": 1.0, "jitter": 0.0} | retry)))  # type: ignore[arg-type]
    made.handle(FleetChanged(Fleet(workers=1, slots=slots, capacity=8)), 0.0)
    return made


def submitted(actions: list[Action]) -> list[Batch]:
    return [a.batch for a in actions if isinstance(a, Submit)]


def emitted(actions: list[Action]) -> list[Result]:
    return [r for a in actions if isinstance(a, Emit) for r in a.results]


def done(batch: Batch) -> Reported:
    return Reported(Report(batch.key, tuple(Completed(r.id, "x") for r in batch.requests)))


def faulted(batch: Batch, kind: FaultKind, *, suspects: tuple[int, ...] | None = None, finished: int = 0) -> Reported:
    inside = tuple(r.id for r in batch.requests) if suspects is None else suspects
    results = tuple(Completed(r.id, "x") for r in batch.requests[:finished])
    return Reported(Report(batch.key, results, Fault(kind, "died", inside)))


# ---------------------------------------------------------------- conservation


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1 << 32),
    n=st.integers(0, 60),
    batch=st.none() | st.integers(1, 9),
    slots=st.integers(1, 6),
    poison=st.sets(st.integers(0, 59), max_size=3),
)
def test_every_row_is_emitted_exactly_once(seed: int, n: int, batch: int | None, slots: int, poison: set[int]) -> None:
    """Completions, row errors, partial reports, deaths, lost workers, holds, late and duplicate reports, in any order."""
    rng = random.Random(seed)
    made = Window("t", BatchPolicy(rows=batch, in_flight_bytes=rng.choice([1, 100, 1 << 20])), RetryPolicy(), seed=seed)
    seen: list[Result] = []
    flying: dict[str, Batch] = {}
    old: list[Reported] = []
    offered, now = 0, 0.0
    for _ in count():
        now += rng.random()
        choice = rng.random()
        if offered < n and choice < 0.3:
            k = min(n - offered, rng.randrange(1, 12))
            actions = made.handle(Offered(rows(offered, k), priority=rng.randrange(3)), now)
            offered += k
        elif offered == n and not made._exhausted:
            actions = made.handle(Exhausted(), now)
        elif choice < 0.4:
            actions = made.handle(FleetChanged(Fleet(1, rng.randrange(1, slots + 1), 8)), now)
        elif choice < 0.45:
            actions = made.handle(Hold(rng.choice([None, rng.randrange(60)])), now)
        elif choice < 0.5 and old:
            actions = made.handle(rng.choice(old), now)
        elif flying:
            report = _random_report(rng, flying.pop(rng.choice(list(flying))), poison)
            old.append(Reported(report))
            actions = made.handle(Reported(report), now)
        else:
            actions = made.handle(Tick(), now)
        for action in actions:
            match action:
                case Submit(b):
                    assert b.key not in flying
                    flying[b.key] = b
                case Emit(results):
                    seen += results
                case Retrying(k, _, _):
                    assert k > 0
                case Release():
                    pytest.fail("nothing was cancelled")
        assert made.rows_held + len(seen) == offered
        if made.done:
            break
        if made.due is not None and not flying:
            now = max(now, made.due)
    assert sorted(r.id for r in seen) == list(range(n))
    assert not made._histories
    bad = {r.id for r in seen if isinstance(r, Failed) and r.kind == FaultKind.ENGINE_DIED}
    assert bad == {p for p in poison if p < n and p in {r.id for r in seen if not r.ok}} & bad
    assert all(r.id in poison for r in seen if isinstance(r, Failed) and r.kind == FaultKind.ENGINE_DIED)


def _random_report(rng: random.Random, batch: Batch, poison: set[int]) -> Report:
    ids = [r.id for r in batch.requests]
    killers = [i for i in ids if i in poison]
    if killers:
        finished = ids[: rng.randrange(len(ids))] if rng.random() < 0.5 else []
        results = tuple(Completed(i, "x") for i in finished if i not in poison)
        return Report(batch.key, results, Fault(FaultKind.ENGINE_DIED, "killed", tuple(ids)))
    kind = rng.choice(
        [None, None, None, FaultKind.PREEMPTED, FaultKind.ENGINE_NOT_READY, FaultKind.ABORTED, FaultKind.ENGINE_HUNG]
    )
    results_: list[Result] = []
    for i in ids:
        draw = rng.random()
        if draw < 0.7:
            results_.append(Completed(i, "x"))
        elif draw < 0.8:
            results_.append(Failed(i, "transient", "try later"))
        elif draw < 0.9:
            results_.append(Failed(i, "error", "bad"))
    results_.append(Completed(-1, "a row that nobody asked for"))
    inside: tuple[int, ...] = ()
    return Report(batch.key, tuple(results_), None if kind is None else Fault(kind, "f", inside))


def test_cancelling_keeps_what_comes_back_and_releases_the_rest() -> None:
    made = window(slots=2)
    first, second = submitted(made.handle(Offered(rows(0, 12)), 0))
    assert made.handle(Cancelled(release=False), 0) == []
    assert not made.done
    assert made.wanted == 0
    assert [r.id for r in emitted(made.handle(done(first), 0))] == [0, 1, 2, 3]
    assert made.handle(Offered(rows(50, 2)), 0) == []
    assert made.handle(Cancelled(release=True), 0) == [Release((second.key,))]
    assert made.handle(Cancelled(release=True), 0) == []
    assert made.done
    assert made.handle(done(second), 0) == []


# ---------------------------------------------------------------- how much is in flight


def test_nothing_is_submitted_before_a_worker_is_ready() -> None:
    made = Window("t", BatchPolicy(), RetryPolicy())
    assert made.wanted > 0
    assert made.handle(Offered(rows(0, 100)), 0) == []
    sizes = [len(b.requests) for b in submitted(made.handle(FleetChanged(Fleet(1, 8, 32)), 0))]
    assert sizes == [16] * 6 + [4]
    assert made.rows_in_flight == 100
    assert made.batches_in_flight == 7


def test_rows_in_flight_are_four_times_the_capacity_in_eight_batches() -> None:
    made = Window("t", BatchPolicy(), RetryPolicy())
    made.handle(FleetChanged(Fleet(2, 16, 64)), 0)
    batches = submitted(made.handle(Offered(rows(0, 1000)), 0))
    assert len(batches) == 16
    assert sum(len(b.requests) for b in batches) == 4 * 64


def test_wanted_is_bounded_and_stops_at_the_end_and_on_hold() -> None:
    made = window(batch=4, slots=4)
    assert 0 < made.wanted <= 64
    made.handle(Offered(rows(0, 100)), 0)
    assert made.wanted == 0
    made = window()
    made.handle(Hold(0), 0)
    assert made.wanted == 0
    made.handle(Hold(None), 0)
    assert made.wanted > 0
    made.handle(Exhausted(), 0)
    assert made.wanted == 0
    assert made.done


def test_bytes_in_flight_are_bounded() -> None:
    made = Window("t", BatchPolicy(rows=1, in_flight_bytes=10), RetryPolicy())
    made.handle(FleetChanged(Fleet(1, 8, 8)), 0)
    assert len(submitted(made.handle(Offered(rows(0, 5)), 0))) == 2


def test_while_held_only_the_head_row_goes_out() -> None:
    made = window(batch=2, slots=3)
    first, second, _third = submitted(made.handle(Offered(rows(0, 20)), 0))
    made.handle(Hold(0), 0)
    assert submitted(made.handle(done(second), 0)) == []
    again = submitted(made.handle(faulted(first, FaultKind.PREEMPTED), 0))
    assert [r.id for r in again[0].requests][:2] == [0, 1]
    assert len(again) == 1
    assert len(submitted(made.handle(Hold(None), 0))) == 1


def test_higher_priority_goes_first_and_a_batch_has_one_priority() -> None:
    made = window(batch=4, slots=1)
    [running] = submitted(made.handle(Offered(rows(0, 4)), 0))
    made.handle(Offered(rows(10, 2), priority=1), 0)
    made.handle(Offered(rows(20, 2), priority=5), 0)
    [urgent] = submitted(made.handle(done(running), 0))
    assert ([r.id for r in urgent.requests], urgent.priority) == ([20, 21], 5)
    [usual] = submitted(made.handle(done(urgent), 0))
    assert ([r.id for r in usual.requests], usual.priority) == ([10, 11], 1)


# ---------------------------------------------------------------- faults


def test_useful_slots_count_what_flies_and_what_waits_by_priority() -> None:
    machine = window(slots=2)
    assert machine.useful_slots == {}
    first, second = submitted(machine.handle(Offered(rows(0, 20)), 0))
    machine.handle(Offered(rows(20, 5), priority=3), 0)
    assert machine.useful_slots == {0: 2 + 3, 3: 2}
    assert submitted(machine.handle(done(first), 0))[0].priority == 3
    assert machine.useful_slots == {0: 1 + 3, 3: 2}
    machine.handle(faulted(second, FaultKind.ENGINE_DIED), 0)
    assert sum(machine.useful_slots.values()) == 3 + 2 + 2  # two probes
    machine.handle(Cancelled(release=True), 0)
    assert machine.useful_slots == {}


def test_transient_rows_are_retried_after_a_pause_and_their_mates_are_not() -> None:
    made = window(retries=2)
    [batch] = submitted(made.handle(Offered(rows(0, 3)), 0))
    made.handle(Exhausted(), 0)
    results = (Completed(0, "x"), Failed(1, "transient", "busy"), Completed(2, "x"))
    actions = made.handle(Reported(Report(batch.key, results)), 0.0)
    assert [r.id for r in emitted(actions)] == [0, 2]
    assert [a for a in actions if isinstance(a, Retrying)] == [Retrying(1, "transient", "busy", "retry later")]
    assert made.due == 1.0
    assert submitted(made.handle(Tick(), 0.5)) == []
    [second] = submitted(made.handle(Tick(), 1.0))
    assert ([r.id for r in second.requests], second.attempt) == ([1], 1)
    made.handle(Reported(Report(second.key, (Failed(1, "transient", "busy"),))), 1.0)
    assert made.due == 3.0
    [third] = submitted(made.handle(Tick(), 3.0))
    [failed] = emitted(made.handle(Reported(Report(third.key, (Failed(1, "transient", "busy"),))), 3.0))
    assert failed == Failed(1, "transient", "busy (tried 3 times)")
    assert made.done


def test_deterministic_errors_are_not_retried() -> None:
    made = window()
    [batch] = submitted(made.handle(Offered(rows(0, 1)), 0))
    [failed] = emitted(made.handle(Reported(Report(batch.key, (Failed(0, "error", "ValueError: no"),))), 0))
    assert failed == Failed(0, "error", "ValueError: no")


def test_a_row_the_engine_forgot_fails_instead_of_vanishing() -> None:
    made = window()
    [batch] = submitted(made.handle(Offered(rows(0, 2)), 0))
    results = emitted(made.handle(Reported(Report(batch.key, (Completed(1, "x"),))), 0))
    assert [(r.id, r.ok) for r in results] == [(1, True), (0, False)]


def test_rows_that_only_waited_are_not_suspected() -> None:
    made = window(batch=8, slots=1)
    [batch] = submitted(made.handle(Offered(rows(0, 4)), 0))
    [again] = submitted(made.handle(faulted(batch, FaultKind.ENGINE_DIED, suspects=()), 0))
    assert not again.probe
    assert len(again.requests) == 4


def test_c39_a_poison_row_is_found_by_halving_and_the_rest_completes() -> None:
    made = window(batch=8, slots=4)
    flying = submitted(made.handle(Offered(rows(0, 32)), 0))
    made.handle(Exhausted(), 0)
    poison, deaths, results, probes = {13}, 0, [], 0
    while flying:
        assert sum(b.probe for b in flying) <= 1
        batch = flying.pop(0)
        probes += batch.probe
        if poison & {r.id for r in batch.requests}:
            deaths += 1
            actions = made.handle(faulted(batch, FaultKind.ENGINE_DIED), 0)
        else:
            actions = made.handle(done(batch), 0)
        results += emitted(actions)
        flying += submitted(actions)
    assert sorted(r.id for r in results) == list(range(32))
    [failed] = [r for r in results if isinstance(r, Failed)]
    assert failed.id == 13
    assert failed.kind == "engine_died"
    assert "died" in failed.message
    assert deaths <= 1 + 3  # log2(8) + 1
    assert made.done


def test_finished_rows_of_a_dying_batch_are_kept() -> None:
    made = window(batch=4, slots=1)
    [batch] = submitted(made.handle(Offered(rows(0, 4)), 0))
    actions = made.handle(faulted(batch, FaultKind.ENGINE_HUNG, suspects=(2, 3), finished=2), 0)
    assert [r.id for r in emitted(actions)] == [0, 1]
    assert [[r.id for r in b.requests] for b in submitted(actions)] == [[2]]


def test_a_lost_worker_costs_a_retry_and_only_repeated_losses_make_suspects() -> None:
    made = window(batch=2, slots=1, losses=2)
    [batch] = submitted(made.handle(Offered(rows(0, 2)), 0))
    [again] = submitted(made.handle(faulted(batch, FaultKind.WORKER_LOST, suspects=()), 0))
    assert not again.probe
    [probe] = submitted(made.handle(faulted(again, FaultKind.WORKER_LOST, suspects=()), 0))
    assert probe.probe
    assert len(probe.requests) == 1
    actions = made.handle(faulted(probe, FaultKind.WORKER_LOST, suspects=()), 0)
    assert emitted(actions) == []  # a worker may be killed from outside: one strike is not enough
    other = submitted(actions)[0]
    actions = made.handle(done(other), 0)
    [last] = submitted(actions)
    [failed] = emitted(made.handle(faulted(last, FaultKind.WORKER_LOST, suspects=()), 0))
    assert not failed.ok
    assert isinstance(failed, Failed)
    assert "worker was lost" in failed.message


@pytest.mark.parametrize("kind", [FaultKind.PREEMPTED, FaultKind.ABORTED, FaultKind.ENGINE_NOT_READY])
def test_suspects_that_were_not_found_out_about_stay_suspects(kind: FaultKind) -> None:
    """A worker that is retired during a probe neither clears its rows nor blames them."""
    made = window(batch=8, slots=1)
    [batch] = submitted(made.handle(Offered(rows(0, 8)), 0))
    [probe] = submitted(made.handle(faulted(batch, FaultKind.ENGINE_DIED), 0))
    [other] = submitted(made.handle(faulted(probe, kind, suspects=()), 0))
    [again] = submitted(made.handle(done(other), 0))
    assert [r.id for r in again.requests] == [r.id for r in probe.requests]
    assert again.probe
    assert again.attempt == 1  # as before: it was no death


@settings(max_examples=200)
@given(n=st.integers(1, 200), poison=st.sets(st.integers(0, 199), min_size=1, max_size=4), batch=st.integers(1, 64))
def test_deaths_are_bounded_by_the_number_of_poison_rows(n: int, poison: set[int], batch: int) -> None:
    """All batches are inside one engine when it dies: p · (log2(n) + 1), with the logarithm rounded up."""
    made = window(batch=batch, slots=max(1, -(-n // batch)))
    engine = submitted(made.handle(Offered(rows(0, n)), 0))
    made.handle(Exhausted(), 0)
    poison = {p for p in poison if p < n}
    deaths, results, waiting = 0, [], list(engine)
    while waiting:
        probes = [b for b in waiting if b.probe]
        inside = probes[:1] or waiting  # a probe is alone, others share the engine
        waiting = [b for b in waiting if b not in inside]
        dead = any(r.id in poison for b in inside for r in b.requests)
        deaths += dead
        for each in inside:
            actions = made.handle(faulted(each, FaultKind.ENGINE_DIED) if dead else done(each), 0)
            results += emitted(actions)
            waiting += submitted(actions)
    assert {r.id for r in results if not r.ok} == poison
    assert sorted(r.id for r in results) == list(range(n))
    assert deaths <= len(poison) * (math.ceil(math.log2(max(2, n))) + 1)


def test_batches_grow_with_speed_and_shrink_at_the_end() -> None:
    made = Window("t", BatchPolicy(overhead_s=0.01), RetryPolicy())
    made.handle(FleetChanged(Fleet(2, 2, 2)), 0)
    flying = submitted(made.handle(Offered(rows(0, 6000)), 0))
    assert [len(b.requests) for b in flying] == [4, 4]
    now, biggest = 0.0, 0
    made.handle(Exhausted(), now)
    sizes = []
    while flying:
        batch = flying.pop(0)
        now += len(batch.requests) / 20_000
        new = submitted(made.handle(done(batch), now))
        sizes += [len(b.requests) for b in new]
        flying += new
    biggest = max(sizes)
    assert 200 <= biggest <= 1000  # 20,000 rows/s · 0.01 s ÷ 0.5 = 400
    assert sizes[-1] < biggest / 2
    assert made.done

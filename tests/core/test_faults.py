"""The verdicts about rows and engines: every line of the tables is reached, and chance is the only thing that varies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.config import HealthPolicy, RetryPolicy
from daskinfer.faults import (
    DEADLY,
    ENGINES,
    ROWS,
    TABLES,
    UNDONE,
    Do,
    History,
    Verdict,
    judge_engine,
    judge_row,
    judge_undone,
    pause,
)
from daskinfer.records import Failed, FailureKind, Fault, FaultKind

RETRY = RetryPolicy(retries=2, backoff_s=1, backoff_max_s=4, jitter=0.5, strikes=2, losses=2)


def undone(
    kind: FaultKind,
    history: History | None = None,
    *,
    inside: bool = True,
    alone: bool = False,
    policy: RetryPolicy = RETRY,
) -> Verdict:
    fault = Fault(kind, "it died", (7,) if inside else ())
    return judge_undone(fault, 7, history if history is not None else History(), policy, alone=alone)


# ---------------------------------------------------------------- rows that came back failed


def test_c47_transient_failures_are_tried_again_so_many_times() -> None:
    history = History()
    failed = Failed(7, FailureKind.TRANSIENT, "reset")
    verdicts = [judge_row(failed, history, RETRY, 0.0) for _ in range(3)]
    assert [(v.do, v.delay_s) for v in verdicts] == [(Do.LATER, 1), (Do.LATER, 2), (Do.FAIL, 0)]
    assert verdicts[2].message == "reset (tried 3 times)"
    never = RetryPolicy(retries=0)
    assert judge_row(failed, History(), never, 0.0) == Verdict(Do.FAIL, 0, FailureKind.TRANSIENT, "reset")


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind is not FailureKind.TRANSIENT])
def test_c47_a_deterministic_failure_is_never_tried_again(kind: FailureKind) -> None:
    assert judge_row(Failed(7, kind, "no"), History(), RETRY, 0.5) == Verdict(Do.FAIL, 0, kind, "no")


@given(st.integers(1, 2_000), st.floats(0, 1, exclude_max=True))
def test_the_pause_doubles_up_to_a_limit_and_is_shortened_by_chance(attempt: int, chance: float) -> None:
    full = min(4.0, 2.0 ** min(attempt - 1, 9))
    assert pause(RETRY, attempt, 0.0) == full
    assert full / 2 <= pause(RETRY, attempt, chance) <= full


# ---------------------------------------------------------------- rows undone


def test_nobody_is_blamed_for_what_is_not_deadly() -> None:
    for kind in FaultKind:
        if kind in DEADLY:
            continue
        history = History()
        for alone in (False, True):
            verdict = undone(kind, history, alone=alone)
            assert verdict.do is (Do.LATER if kind is FaultKind.ENGINE_NOT_READY else Do.RETRY)
        assert history == History()


@pytest.mark.parametrize("kind", [FaultKind.ENGINE_DIED, FaultKind.ENGINE_HUNG])
def test_an_engine_that_dies(kind: FaultKind) -> None:
    history = History()
    assert undone(kind, history, inside=False).do is Do.RETRY
    assert history == History()  # it only waited
    assert undone(kind, history).do is Do.SPLIT
    assert undone(kind, history, alone=True).do is Do.SPLIT
    verdict = undone(kind, history, alone=True)
    assert verdict == Verdict(
        Do.QUARANTINE, 0, str(kind), "it died, with this row alone in it (3 deaths with this row on board)"
    )
    assert (history.deaths, history.strikes) == (3, 2)


def test_a_worker_that_is_lost() -> None:
    history = History()
    assert undone(FaultKind.WORKER_LOST, history, inside=False).do is Do.RETRY
    assert undone(FaultKind.WORKER_LOST, history, inside=False).do is Do.SPLIT
    verdicts = [undone(FaultKind.WORKER_LOST, history, alone=True).do for _ in range(3)]
    assert verdicts == [Do.SPLIT, Do.SPLIT, Do.QUARANTINE]  # strikes=2, and one more
    message = undone(FaultKind.WORKER_LOST, History(losses=9, strikes=9), alone=True).message
    assert message.startswith("its worker was lost (it died), with this row alone in it")


def test_a_probe_of_one_row_is_a_suspect_at_its_first_loss() -> None:
    assert undone(FaultKind.WORKER_LOST, History(), alone=True).do is Do.SPLIT


def test_every_fault_has_a_verdict_for_every_history() -> None:
    for fault in FaultKind:
        rules = [rule for rule in UNDONE if rule.fault == fault]
        assert rules, fault
        assert rules[-1].fits(None), f"the last rule for {fault} must fit whatever the history"
    assert ROWS[-1].fits(None)
    assert {rule.fault for rule in UNDONE} == set(map(str, FaultKind))


def test_rules_say_why() -> None:
    for rules in TABLES.values():
        assert all(rule.why and rule.history for rule in rules)


# ---------------------------------------------------------------- engines


def test_c51_an_engine_that_dies_for_ever_is_given_up() -> None:
    health = HealthPolicy(engine_restarts=2)
    assert [judge_engine(n, health) for n in range(5)] == [Do.RESTART] * 3 + [Do.EVICT] * 2
    assert ENGINES[-1].fits(None)

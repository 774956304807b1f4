"""The failure detector and the judgement on a run: each line of their tables, and what they do not do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.config import HealthPolicy
from daskinfer.detection import RUNS, WORKERS, Do, FailureDetector, Roster, Sighting, check_heartbeats, judge_run
from daskinfer.errors import ConfigError

HEALTH = HealthPolicy(
    heartbeat_timeout_s=10,
    detection_interval_s=1,
    failure_threshold=3,
    step_timeout_s=60,
    load_timeout_s=600,
    start_timeout_s=120,
)
WELL = Sighting("w", silent_s=0.5)


def looks(detector: FailureDetector, *seen: Sighting, interval_s: float = 0.5) -> list[list[str]]:
    """What each of the looks found, as reasons; Dask itself would wait for a minute."""
    return [[f.reason for f in detector.look([sighting], interval_s, 60)] for sighting in seen]


# ---------------------------------------------------------------- workers


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (replace(WELL, silent_s=10.5), "silent for 10 s (it is dead, stopped or cut off)"),
        (replace(WELL, step_age_s=71), "stuck in a step for 71 s"),
        (replace(WELL, load_age_s=611), "stuck in a load for 611 s"),
        (replace(WELL, silent_s=61, held_up=True), "silent for 61 s"),
        (replace(WELL, silent_s=61, held_up=True, paused=True, stranded_s=70), "silent for 61 s"),
    ],
)
def test_a_worker_found_wanting_often_enough_is_evicted_with_the_reason(seen: Sighting, said: str) -> None:
    detector = FailureDetector(HEALTH)
    found = [detector.look([seen], 0.5, 60) for _ in range(7)]
    assert [len(each) for each in found] == [0, 0, 1, 0, 0, 1, 0]  # after an eviction the count begins again
    assert (found[2][0].worker, found[2][0].do) == ("w", Do.EVICT)
    assert found[2][0].reason.startswith(said)


def test_a_paused_worker_gives_back_batches_and_is_never_evicted_as_stuck() -> None:
    detector = FailureDetector(HEALTH)
    stuck = replace(WELL, paused=True, held_up=True, step_age_s=9_999, load_age_s=9_999)
    assert [detector.look([stuck], 0.5, 60) for _ in range(9)] == [[]] * 9
    stranded = replace(stuck, stranded_s=11)
    found = [detector.look([stranded], 0.5, 60) for _ in range(3)]
    assert [(f.do, f.reason[:15]) for f in found[2]] == [(Do.RELEASE, "paused for 11 s")]


def test_the_limits_of_a_worker_count_where_they_are_longer_than_those_of_the_driver_that_looks() -> None:
    """Of two drivers of one model the first one's policy is in the workers."""
    theirs = replace(WELL, step_limit_s=90, load_limit_s=900)
    detector = FailureDetector(replace(HEALTH, failure_threshold=1))
    assert looks(detector, replace(theirs, step_age_s=100), replace(theirs, load_age_s=910)) == [[], []]
    found = looks(detector, replace(theirs, step_age_s=101), replace(theirs, load_age_s=911))
    assert [len(each) for each in found] == [1, 1]
    assert len(looks(detector, replace(WELL, step_limit_s=9, step_age_s=71))[0]) == 1


def test_what_holds_up_heartbeats_never_shortens_the_timeout() -> None:
    detector = FailureDetector(replace(HEALTH, failure_threshold=1))
    assert detector.look([replace(WELL, silent_s=9, held_up=True)], 0.5, 1.0) == []
    assert len(detector.look([replace(WELL, silent_s=11, held_up=True)], 0.5, 1.0)) == 1


@pytest.mark.parametrize(
    "seen",
    [
        WELL,
        replace(WELL, silent_s=10),
        replace(WELL, step_age_s=70),  # its own watchdog has heartbeat_timeout_s to act
        replace(WELL, load_age_s=610),
        replace(WELL, stranded_s=10, paused=True, held_up=True),
        replace(WELL, silent_s=60, held_up=True),
    ],
)
def test_a_worker_within_its_limits_is_left_alone(seen: Sighting) -> None:
    assert looks(FailureDetector(HEALTH), *[seen] * 9) == [[]] * 9


def test_looks_must_find_it_in_a_row() -> None:
    silent = replace(WELL, silent_s=11)
    assert looks(FailureDetector(HEALTH), silent, silent, WELL, silent, silent, WELL) == [[]] * 6


def test_workers_are_counted_one_by_one_and_forgotten_when_they_are_gone() -> None:
    detector = FailureDetector(replace(HEALTH, failure_threshold=2))
    one, two = Sighting("1", 11), Sighting("2", 11)
    assert detector.look([one], 0.5) == []
    assert detector.look([two], 0.5) == []  # the first was not among them
    assert [f.worker for f in detector.look([one, two], 0.5)] == ["2"]


def test_fewer_heartbeats_on_large_clusters_mean_a_longer_timeout() -> None:
    late = replace(WELL, silent_s=14)
    assert looks(FailureDetector(replace(HEALTH, failure_threshold=1)), late, interval_s=5) == [[]]
    assert looks(FailureDetector(replace(HEALTH, failure_threshold=1)), late, interval_s=1) != [[]]


def test_looks_are_due_at_intervals() -> None:
    detector = FailureDetector(HEALTH)
    assert [detector.due(now) for now in (100.0, 100.5, 101.0, 101.9, 102.1)] == [True, False, True, False, True]


@given(
    st.lists(
        st.builds(Sighting, st.sampled_from("abc"), st.floats(0, 30), st.floats(0, 99), st.floats(0, 999)), max_size=60
    )
)
def test_nobody_is_evicted_who_is_well(seen: list[Sighting]) -> None:
    detector = FailureDetector(HEALTH)
    for sighting in seen:
        for found in detector.look([sighting], 0.5):
            assert (sighting.worker, Do.EVICT) == (found.worker, found.do)
            assert sighting.silent_s > 10 or sighting.step_age_s > 70 or sighting.load_age_s > 610


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(1.4, 0.5), (5.9, 2)])
def test_a_timeout_below_three_heartbeats_is_refused(timeout_s: float, interval_s: float) -> None:
    health = replace(HEALTH, heartbeat_timeout_s=timeout_s)
    with pytest.raises(
        ConfigError, match=rf"heartbeat_timeout_s={timeout_s:g}: .* at least 3 of them, {3 * interval_s:g} s"
    ):
        check_heartbeats(health, interval_s)
    check_heartbeats(replace(health, heartbeat_timeout_s=3 * interval_s), interval_s)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("roster", "do", "history"),
    [
        (Roster(ready=1), Do.WAIT, "any"),
        (Roster(ready=1, failed=5, idle_s=999), Do.WAIT, "any"),
        (Roster(failed=2, idle_s=1), Do.WAIT, "any"),  # others may just be joining
        (Roster(failed=2, idle_s=4), Do.ABORT, "all failed to load"),
        (Roster(failed=2, expected=2), Do.ABORT, "all failed to load"),
        (Roster(failed=2, expected=3), Do.WAIT, "any"),
        (Roster(failed=2, others=1, idle_s=4), Do.WAIT, "any"),
        (Roster(coming=1, idle_s=9_999), Do.WAIT, "one loads or restarts"),
        (Roster(others=1, idle_s=121), Do.ABORT, "for `start_timeout_s`"),
        (Roster(idle_s=119), Do.WAIT, "any"),
        (Roster(idle_s=121), Do.ABORT, "for `start_timeout_s`"),
        (Roster(ready=1, unplaced_s=119), Do.WAIT, "any"),
        (Roster(ready=1, unplaced_s=121), Do.ABORT, RUNS[3].history),
    ],
)
def test_whether_a_run_can_go_on(roster: Roster, do: Do, history: str) -> None:
    rule = judge_run(roster, HEALTH)
    assert (rule.do, rule.history) == (do, history)


def test_there_is_a_rule_for_everything() -> None:
    for rules in (WORKERS, RUNS):
        assert rules[-1].fault == "anything else"
        assert rules[-1].fits(None)

"""Processes killed, stopped, slowed and added, links cut and slowed: no row is lost, doubled, or failed for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from tests.chaos.links import Link
from tests.chaos.story import KINDS, LINK_KINDS, Story, checked, plan

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow]

Expected = Callable[[int], pa.Table]
SMALL, LARGE = 700, 3_000


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_drawn_from_its_seed_alone(seed: int) -> None:
    faults = plan(seed, 10_000, 30, KINDS)
    random.seed(seed + 1)
    assert faults == plan(seed, 10_000, 30, KINDS)
    assert faults != plan(seed + 1, 10_000, 30, KINDS)
    instants = [fault.at for fault in faults]
    assert instants == sorted(set(instants))
    assert 0 < instants[0] <= instants[-1] < 9_000
    times = Counter(fault.kind for fault in faults)
    assert set(times) == set(KINDS)
    assert max(times.values()) - min(times.values()) <= 1


@pytest.mark.timeout(240)
def test_c35_c39_processes_killed_at_random_moments(story_folder: Path, undisturbed_output: Expected) -> None:
    kinds = ("engine killed", "worker killed", "driver killed", "worker preempted")
    story = Story(story_folder, SMALL, plan(0, SMALL, len(kinds), kinds), seed=0)
    outcome = story.run()
    assert list(checked(outcome, undisturbed_output(SMALL))) == []
    assert outcome.faults.total() == len(kinds)
    assert outcome.drivers == 2


@pytest.mark.timeout(240)
def test_links_cut_and_slowed(story_folder: Path, two_links: Sequence[Link], undisturbed_output: Expected) -> None:
    faults = plan(0, SMALL, 2, ("link cut", "link slowed"))
    outcome = Story(story_folder, SMALL, faults, links=two_links).run()
    assert list(checked(outcome, undisturbed_output(SMALL))) == []
    assert outcome.faults == {"link cut": 1, "link slowed": 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
def test_everything_that_can_be_disturbed(seed: int, story_folder: Path, undisturbed_output: Expected) -> None:
    faults = plan(seed, LARGE, len(KINDS), KINDS)
    outcome = Story(story_folder, LARGE, faults, seed=seed).run()
    assert list(checked(outcome, undisturbed_output(LARGE))) == []
    assert set(outcome.faults) == set(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_links_and_processes(story_folder: Path, two_links: Sequence[Link], undisturbed_output: Expected) -> None:
    kinds = (*LINK_KINDS, "engine killed", "driver killed", "worker killed")
    outcome = Story(story_folder, LARGE, plan(1, LARGE, 6, kinds), seed=1, links=two_links).run()
    assert list(checked(outcome, undisturbed_output(LARGE))) == []
    assert set(outcome.faults) == set(kinds)

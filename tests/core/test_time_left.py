"""The time left is honest: recorded runs with rows of uneven lengths, and simulated ones, end inside the interval shown."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from daskinfer.metrics import Metrics, Snapshot
from daskinfer.records import BatchReturned, RowsResolved, RunStarted, Timings, Usage

RECORDED = sorted(Path(__file__).with_name("recorded").glob("*.json"))
"""Real runs, see benchmarks/record_runs.py."""


def play(events: list[list[Any]], share: float) -> tuple[Snapshot, float]:
    """Return what is shown when this share of the rows is done, and the seconds that the run then took."""
    metrics = Metrics()
    _, _, total = events[0]
    metrics.apply(RunStarted(0.0, total))
    for kind, at, *rest in events:
        if kind == "returned":
            metrics.apply(BatchReturned(at, "", rest[0], "", Usage(), Timings(rest[1], rest[2])))
        elif kind == "resolved":
            metrics.apply(RowsResolved(at, rest[0], 0, Usage(rest[1], rest[2])))
            if metrics.done >= share * total:
                return metrics.snapshot(), events[-1][1] - at
    raise AssertionError("the recording ends too early")


def test_five_recorded_runs_end_inside_the_interval_shown_at_30_percent() -> None:
    assert len(RECORDED) == 5
    held = []
    for path in RECORDED:
        snapshot, left = play(json.loads(path.read_text()), 0.3)
        assert snapshot.eta_s is not None, path.stem
        low, high = snapshot.eta_s
        assert high <= 2 * low, path.stem
        held.append(low <= left <= high)
    assert sum(held) >= 4


def test_recorded_runs_mostly_end_inside_the_interval_at_any_moment() -> None:
    held = []
    for path in RECORDED:
        events = json.loads(path.read_text())
        for percent in range(20, 95, 5):
            snapshot, left = play(events, percent / 100)
            if snapshot.eta_s is not None:
                held.append(snapshot.eta_s[0] <= left <= snapshot.eta_s[1])
    assert len(held) >= 70
    assert sum(held) >= 0.8 * len(held)


def simulated(rng: random.Random, rows: int, places: int) -> list[list[Any]]:
    """A run of one engine that refills its places at once; a row takes what a heavy-tailed distribution gives."""
    events: list[list[Any]] = [["started", 0.0, rows]]
    ends: list[float] = [0.0] * places
    for _ in range(rows):
        place = min(range(places), key=ends.__getitem__)
        took = 0.1 * rng.lognormvariate(1.0, 0.8)
        ends[place] += took
        events.append(["resolved", ends[place], 1, 5, round(took * 50)])
        events.append(["returned", ends[place], 1, 0.0, took])
    events[1:] = sorted(events[1:], key=lambda event: float(event[1]))
    return [*events, ["ended", max(ends), "done"]]


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_simulated_runs_mostly_end_inside_the_interval(share: float) -> None:
    held = known = 0
    for seed in range(60):
        snapshot, left = play(simulated(random.Random(seed), 600, 8), share)
        if snapshot.eta_s is not None:
            known += 1
            held += snapshot.eta_s[0] <= left <= snapshot.eta_s[1]
    assert known == 60
    assert held >= 45

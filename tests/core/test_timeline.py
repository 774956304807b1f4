"""What the report shows of a run over time, and what it advises."""

import pickle
from typing import Any

import pytest

from daskinfer.records import (
    Noted,
    RowsRead,
    RowsResolved,
    RunEnded,
    RunStarted,
    Usage,
    WorkersSeen,
    WorkerView,
)
from daskinfer.snapshot import Snapshot, Work
from daskinfer.timeline import SAMPLES, SPANS, Recorder, Span, Timeline, advice


def view(address: str, state: str = "ready", **figures: Any) -> WorkerView:
    return WorkerView(address, state, 4, 8, "", figures)


def recorded(*events: Any) -> Timeline:
    recorder = Recorder()
    for event in events:
        recorder(event)
    return recorder.timeline


def test_nothing_is_recorded_before_the_start_or_after_the_end() -> None:
    made = recorded(Noted(0, "early"), RunStarted(5, 10), RunEnded(6, "done"), RowsResolved(7, 3, 0, Usage()))
    assert made.columns["t"] == (0, 1)
    assert made.columns["done"] == (0, 0)
    assert (made.workers, made.starved) == ({}, None)


def test_rates_are_those_since_the_sample_before() -> None:
    made = recorded(
        RunStarted(100, 50),
        WorkersSeen(100.5, (view("a", running=2, waiting=1, ram_bytes=7), view("b", "loading"))),
        RowsResolved(101, 8, 2, Usage(20, 40)),
        RowsResolved(101.5, 5, 0, Usage(5, 5)),
        RunEnded(103, "done"),
    )
    assert made.columns["t"] == (0, 1, 3)
    assert made.columns["done"] == (0, 10, 15)
    assert made.columns["rows"] == (0, 10, 2.5)
    assert made.columns["tokens_out"] == (0, 40, 2.5)
    assert made.columns["occupancy"] == (0, 0.5, 0.5)
    assert (made.columns["waiting"][-1], made.columns["ready"][-1], made.columns["ram_bytes"][-1]) == (1, 1, 7)


def test_the_last_sample_is_not_over_a_moment() -> None:
    made = recorded(
        RunStarted(0, 9), RowsResolved(1, 4, 0, Usage()), RowsResolved(2, 5, 0, Usage()), RunEnded(2.01, "done")
    )
    assert made.columns["t"] == (0, 1, 2.01)
    assert made.columns["rows"] == (0, 4, 4.9505)


def test_workers_have_spans_also_those_that_join_and_those_that_are_lost() -> None:
    made = recorded(
        RunStarted(0, 50),
        WorkersSeen(1, (view("a", "loading"),)),
        WorkersSeen(2, (view("a"), view("b", "loading"))),
        WorkersSeen(3, (view("a"), view("b"))),
        WorkersSeen(4, (view("b"), view("a", "lost"))),
        WorkersSeen(6, (view("b"),)),
        WorkersSeen(8, ()),
        WorkersSeen(9, ()),
    )
    assert made.workers == {
        "a": (Span("loading", 1, 1), Span("ready", 1, 3), Span("lost", 3, 4)),
        "b": (Span("loading", 2, 2), Span("ready", 2, 6), Span("lost", 6, 8)),
    }


def test_an_engine_with_free_places_and_no_row_waiting_is_starved_while_the_source_has_rows() -> None:
    looks = (view("a", running=1), view("b", running=4), view("c", running=1, waiting=3), view("d", "loading"))
    made = recorded(RunStarted(0, 9), WorkersSeen(1, looks), RowsRead(2, 0, exhausted=True), WorkersSeen(3, looks))
    assert made.starved == 1 / 3


def test_memory_does_not_grow_with_the_run() -> None:
    recorder = Recorder()
    recorder(RunStarted(0, None))
    sizes = []
    for n in range(1, 14_001):
        state = "ready" if n % 2 else "restarting"
        recorder(WorkersSeen(n, tuple(view(f"w-{n % 400}-{i}", state) for i in range(2))))
        recorder(RowsResolved(n, 3, 0, Usage(1, 1)))
        if n in (11_000, 14_000):
            sizes.append(len(pickle.dumps(recorder)))
    made = recorder.timeline
    assert sizes[1] < 1.5 * sizes[0]
    assert SAMPLES / 3 < len(made.columns["t"]) < SAMPLES
    assert len(made.workers) == Recorder.MAX_WORKERS
    assert max(map(len, made.workers.values())) <= SPANS
    assert sum(
        rate * (t - before)
        for rate, t, before in zip(made.columns["rows"], made.columns["t"], (0, *made.columns["t"]), strict=False)
    ) == pytest.approx(made.columns["done"][-1], rel=1e-3)


def test_advice_is_given_where_something_stands_out() -> None:
    assert advice(Snapshot()) == ()
    assert advice(Snapshot(work=Work(full_row_steps=8, full_places=10), elapsed_s=100, startup_s=1), 0.1) == ()
    work = Work(
        full_row_steps=3, full_places=10, prompt_tokens=1, padded_tokens=1, preemptions=2, out_of_memory=1, restarts=4
    )
    found = advice(Snapshot(work=work, elapsed_s=100, startup_s=40), 0.5)
    assert len(found) == 6
    expected = ("30 % full", "50 % of the computed", "50 % of the looks", "40 %", "2 times", "4 times")
    for line, says in zip(found, expected, strict=True):
        assert says in line

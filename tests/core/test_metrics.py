import itertools
import json
import math
import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.errors import ConfigError, TooManyFailuresError
from daskinfer.metrics import MAX_KINDS, FailureCount, Metrics, Snapshot, StopRule, to_json
from daskinfer.rates import Durations, Speed
from daskinfer.records import (
    BatchReturned,
    BatchSubmitted,
    Event,
    Failed,
    Noted,
    RowsCommitted,
    RowsRead,
    RowsResolved,
    RowsRetried,
    RunEnded,
    RunStarted,
    Timings,
    Usage,
    WorkersSeen,
    WorkerView,
)
from daskinfer.snapshot import Engines, SlowRow, Work


def folded(*events: Event) -> Snapshot:
    metrics = Metrics()
    for event in events:
        metrics.apply(event)
    return metrics.snapshot()


def resolved(at: float, completed: int, failed: int = 0, tokens: int = 0, kind: str = "error") -> RowsResolved:
    failures = tuple(Failed(i, kind, f"bad {i}") for i in range(failed))
    return RowsResolved(at, completed, failed, Usage(2 * tokens, tokens), failures)


def steady(seconds: int, rows: int, total: int, start: float = 0.0) -> list[Event]:
    return [RunStarted(start, total), *(resolved(start + s, rows, tokens=rows) for s in range(seconds + 1))]


# ---------------------------------------------------------------- counts


def test_before_anything_happens() -> None:
    snapshot = Metrics().snapshot()
    assert snapshot == Snapshot()
    assert (snapshot.state, snapshot.done, snapshot.remaining, snapshot.worker_states) == ("waiting", 0, None, {})


def test_a_run_from_start_to_end() -> None:
    events: list[Event] = [
        RunStarted(100.0, 50, done=10),
        RowsRead(100.5, 40, exhausted=True),
        WorkersSeen(101.0, (WorkerView("a", "ready", 8, 8), WorkerView("b", "loading"))),
        BatchSubmitted(102.0, "k-1", 20, 0),
        BatchSubmitted(102.0, "k-2", 20, 0),
        BatchReturned(104.0, "k-1", 20, "a", Usage(5, 5), Timings(0.1, 1.9)),
        RowsRetried(104.0, 3, "transient", "reset"),
        resolved(104.0, 15, failed=2, tokens=10),
        RowsCommitted(104.5, 17),
        Noted(105.0, "look"),
    ]
    running = folded(*events)
    assert running.state == "running"
    assert (running.elapsed_s, running.startup_s) == (5.0, 2.0)
    assert (running.total, running.skipped, running.read) == (50, 10, 40)
    assert running.tokens_left == round(23 * 10 / 15)
    assert (running.completed, running.failed, running.done, running.remaining) == (15, 2, 17, 23)
    assert (running.retried, running.committed) == (3, 17)
    assert running.usage == Usage(20, 10)
    assert (running.batches_in_flight, running.rows_in_flight) == (1, 20)
    assert running.failures == (FailureCount("error", 2, 0, "bad 0"),)
    assert running.worker_states == {"ready": 1, "loading": 1}
    assert running.batch_s == pytest.approx((1.9, 1.9), rel=0.1)
    assert running.notes == ("look",)

    ended = folded(*events, RunEnded(110.0, "interrupted"), resolved(120.0, 5), Noted(121.0, "late"))
    assert (ended.state, ended.elapsed_s, ended.done, ended.notes) == ("interrupted", 10.0, 17, ("look",))
    assert ended.batches_in_flight == 0


def test_the_total_is_known_when_the_source_ends() -> None:
    assert folded(RunStarted(0, None, done=5), RowsRead(1, 10)).total is None
    assert folded(RunStarted(0, None, done=5), RowsRead(1, 10), RowsRead(2, 2, exhausted=True)).total == 17
    assert folded(RunStarted(0, 30, done=5), RowsRead(2, 2, exhausted=True)).total == 30


def test_a_batch_before_the_start_has_no_startup_time() -> None:
    snapshot = folded(BatchSubmitted(1, "k", 1, 0), BatchReturned(2, "gone", 1, "a", Usage(), Timings()))
    assert (snapshot.startup_s, snapshot.batches_in_flight) == (None, 1)


def test_kinds_of_failure_are_bounded_and_add_up() -> None:
    many = tuple(Failed(i, f"kind-{i}", "m" * 10_000) for i in range(3 * MAX_KINDS))
    snapshot = folded(RunStarted(0, None), RowsResolved(1, 0, len(many) + 7, Usage(), many))
    assert len(snapshot.failures) == MAX_KINDS + 1
    assert sum(f.rows for f in snapshot.failures) == snapshot.failed == len(many) + 7
    assert (snapshot.failures[0].kind, snapshot.failures[0].rows) == ("other", 2 * MAX_KINDS + 7)
    assert max(len(f.message) for f in snapshot.failures) == 500


def test_failures_keep_their_first_example() -> None:
    snapshot = folded(
        RowsResolved(1, 0, 1, Usage(), (Failed(3, "a", "first"),)),
        RowsResolved(2, 0, 3, Usage(), (Failed(4, "a", "second"), Failed(5, "b", "x"), Failed(6, "b", "y"))),
        RowsResolved(3, 0, 1, Usage(), (Failed(7, "b", "z"), Failed(8, "b", "more examples than failures"))),
    )
    assert snapshot.failures == (FailureCount("b", 3, 5, "x"), FailureCount("a", 2, 3, "first"))


events = st.one_of(
    st.builds(RowsRead, st.just(0.0), st.integers(0, 50)),
    st.builds(BatchSubmitted, st.just(0.0), st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 3)),
    st.builds(
        BatchReturned,
        st.just(0.0),
        st.sampled_from("abc"),
        st.integers(0, 50),
        st.just("w"),
        st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
        st.builds(Timings, st.floats(0, 100), st.floats(0, 100)),
    ),
    st.builds(RowsRetried, st.just(0.0), st.integers(0, 50), st.just("transient"), st.just("")),
    st.builds(
        RowsResolved,
        st.just(0.0),
        st.integers(0, 50),
        st.integers(0, 50),
        st.builds(Usage, st.integers(0, 1000), st.integers(0, 1000)),
        st.lists(st.builds(Failed, st.integers(0), st.text(max_size=2), st.text()), max_size=60).map(tuple),
    ),
    st.builds(RowsCommitted, st.just(0.0), st.integers(0, 50)),
    st.builds(Noted, st.just(0.0), st.text()),
)


@given(st.lists(st.tuples(st.floats(0, 3600), events), max_size=60), st.integers(0, 20))
def test_counts_are_conserved(timed: list[tuple[float, Any]], skipped: int) -> None:
    metrics = Metrics()
    metrics.apply(RunStarted(0.0, 10_000, skipped))
    now = 0.0
    stream = []
    for gap, event in timed:
        now += gap
        stream.append(type(event)(now, *(getattr(event, name) for name in event.__slots__[1:])))
    for event in stream:
        metrics.apply(event)
    snapshot = metrics.snapshot()
    assert (metrics.done, metrics.failed, metrics.failures) == (snapshot.done, snapshot.failed, snapshot.failures)
    done = [event for event in stream if isinstance(event, RowsResolved)]
    assert snapshot.completed == sum(event.completed for event in done)
    assert snapshot.failed == sum(event.failed for event in done) == sum(f.rows for f in snapshot.failures)
    assert snapshot.usage == sum((event.usage for event in done), Usage())
    assert snapshot.remaining is not None
    assert snapshot.done + snapshot.skipped + snapshot.remaining == 10_000
    assert snapshot.read == sum(event.rows for event in stream if isinstance(event, RowsRead))
    assert snapshot.elapsed_s == pytest.approx(now)
    assert snapshot.rows_in_flight >= 0
    for rates in (snapshot.recent, snapshot.average):
        assert rates is None or min(rates.rows_per_s, rates.prompt_tokens_per_s, rates.completion_tokens_per_s) >= 0
    if snapshot.eta_s is not None:
        low, high = snapshot.eta_s
        assert 0 <= low <= high < math.inf
    json.dumps(snapshot.to_dict(), allow_nan=False)


def test_memory_does_not_grow_with_the_run() -> None:
    metrics = Metrics()
    metrics.apply(RunStarted(0.0, None))
    sizes = []
    for n in range(4_000):
        at = n * 0.7
        metrics.apply(BatchSubmitted(at, f"k-{n}", 8, 0))
        metrics.apply(BatchReturned(at, f"k-{n}", 8, "w", Usage(), Timings(0.0, 0.3 + n % 5)))
        metrics.apply(resolved(at, 7, 1, kind=f"kind-{n}"))
        metrics.apply(Noted(at, "note"))
        metrics.apply(WorkersSeen(at, (WorkerView(f"tcp://w-{n}", "ready", 8, 8, "", {"full_steps": n}),)))
        if n in (1_000, 3_999):
            sizes.append(len(pickle.dumps(metrics)))
    assert sizes[1] < 1.1 * sizes[0]


# ---------------------------------------------------------------- rates


def test_rates_do_not_count_what_came_before_the_first_answer() -> None:
    snapshot = folded(*steady(20, rows=8, total=1_000, start=50.0))
    assert snapshot.average is not None
    assert snapshot.average.rows_per_s == pytest.approx(8)
    assert snapshot.average.completion_tokens_per_s == pytest.approx(8)
    assert snapshot.average.prompt_tokens_per_s == pytest.approx(16)
    assert snapshot.recent is not None
    assert snapshot.recent.rows_per_s == pytest.approx(8, rel=0.15)


def test_rates_need_a_second() -> None:
    assert folded(*steady(0, 5, 10)).average is None
    assert folded(RunStarted(0, 5), resolved(1, 0, failed=3), resolved(1.5, 1), resolved(1.9, 1)).recent is None


def test_rows_refused_before_the_first_answer_do_not_start_the_clock() -> None:
    snapshot = folded(RunStarted(0, 100), resolved(1, 0, failed=50), resolved(100, 2), resolved(102, 4))
    assert snapshot.average is not None
    assert snapshot.average.rows_per_s == pytest.approx(2)


def test_the_recent_rate_forgets() -> None:
    events = [*steady(30, rows=8, total=1_000), WorkersSeen(45.0, ())]
    snapshot = folded(*events)
    assert snapshot.recent is not None
    assert snapshot.recent.rows_per_s == 0
    assert snapshot.average is not None
    assert snapshot.average.rows_per_s == pytest.approx(30 * 8 / 45)


# ---------------------------------------------------------------- time left


def test_a_steady_run_knows_how_long_it_takes() -> None:
    snapshot = folded(*steady(60, rows=10, total=1_610))
    assert snapshot.eta_s == pytest.approx((100, 100), rel=1e-6)


def test_time_left_is_unknown_before_four_samples_or_without_a_total() -> None:
    assert folded(*steady(4, 10, 1_000)).eta_s is None
    assert folded(*steady(5, 10, 1_000)).eta_s is not None
    assert folded(RunStarted(0, None), *steady(60, 10, 0)[1:]).eta_s is None


def test_nothing_left_takes_no_time() -> None:
    assert folded(RunStarted(0, 0)).eta_s == (0, 0)


def test_uneven_rates_make_a_wide_interval_that_mostly_holds_the_truth() -> None:
    held, known = 0, 0
    for seed in range(100):
        rng = random.Random(seed)
        times = list(itertools.accumulate(rng.expovariate(1.0) for _ in range(400)))
        seen = [resolved(at, 8) for at in times[:100]]
        eta = folded(RunStarted(0.0, 8 * 400), *seen).eta_s
        if eta is not None:
            known += 1
            assert eta[1] > 1.1 * eta[0]
            held += eta[0] <= times[-1] - times[99] <= eta[1]
    assert known == 100
    assert held >= 80


def test_a_change_of_speed_widens_the_interval() -> None:
    events: list[Event] = [RunStarted(0.0, 10_000), *(resolved(float(s), 10 if s < 45 else 30) for s in range(61))]
    eta = folded(*events).eta_s
    assert eta is not None
    left = 10_000 - sum(event.completed for event in events if isinstance(event, RowsResolved))
    assert eta[0] <= left / 30 * 1.05
    assert eta[1] >= left / 15


def test_a_standstill_or_chaos_gives_no_time_left() -> None:
    assert folded(*steady(60, 10, 2_000), WorkersSeen(200.0, ())).eta_s is None
    once: list[Event] = [RunStarted(0.0, 2_000), resolved(0.0, 1), resolved(1.5, 500), WorkersSeen(5.0, ())]
    assert folded(*once).eta_s is None


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=200))
def test_samples_stay_few_and_lose_no_rows(gaps: list[float]) -> None:
    speed = Speed()
    now = 0.0
    speed.add(now, 1, 0, Usage())
    for gap in gaps:
        now += gap
        speed.add(now, 2, 1, Usage())
    assert len(speed._samples) < 32
    assert sum(speed._samples) + speed._open_rows == 3 * len(gaps)


def test_percentiles_are_within_ten_percent() -> None:
    durations = Durations()
    assert durations.percentiles(0.5) is None
    for n in range(1, 1001):
        durations.add(n / 100)
    assert durations.percentiles(0.5, 0.95, 1.0) == pytest.approx((5.0, 9.5, 10.0), rel=0.1)
    durations.add(0.0)
    assert durations.percentiles(0.0) == pytest.approx((0.001,))


# ---------------------------------------------------------------- engines


def view(address: str, capacity: int = 4, **figures: Any) -> WorkerView:
    return WorkerView(address, "ready", capacity, 8, "", figures)


def test_use_counts_the_growth_within_the_run() -> None:
    before = view("a", full_steps=1_000, full_row_steps=1_000, prompt_tokens=9_000, padded_tokens=9_000)
    after = view("a", full_steps=1_010, full_row_steps=1_030, prompt_tokens=9_060, padded_tokens=9_040)
    assert folded(WorkersSeen(0, (before,))).occupancy is None
    assert folded(WorkersSeen(0, (before,))).padding is None
    snapshot = folded(WorkersSeen(0, (before,)), WorkersSeen(1, (after,)))
    assert snapshot.occupancy == 30 / 40
    assert snapshot.padding == 0.4


def test_use_survives_restarts_and_strange_figures() -> None:
    snapshot = folded(
        WorkersSeen(0, (view("a", full_steps=100, full_row_steps=400), view("b", full_steps=None))),
        WorkersSeen(1, (view("a", full_steps=10, full_row_steps=20), view("b", full_steps=math.nan))),
        WorkersSeen(2, (view("c", full_steps=5, full_row_steps=5),)),
    )
    assert snapshot.occupancy == 20 / 40


def test_use_adds_up_what_only_some_engines_count() -> None:
    figures = {"engine.prefill_tokens": 30, "engine.decode_tokens": 70, "engine.prefix_hits": 2, "restarts": 1}
    memory = {"engine.kv_tokens": 100, "engine.kv_used_tokens": 25, "ram_bytes": 7, "running": 3, "waiting": 1}
    snapshot = folded(
        WorkersSeen(0, (view("a"), view("b", restarts=5))),
        WorkersSeen(1, (view("a", **figures, **memory), view("b", restarts=6, ram_bytes=1))),
    )
    assert (snapshot.work.prefill, snapshot.work.prefix_hits, snapshot.work.restarts) == (0.3, 2, 2)
    assert snapshot.engines == Engines(8, 3, 1, kv_tokens=100, kv_used_tokens=25, ram_bytes=8)
    assert snapshot.engines.kv_use == 0.25
    assert (Work().prefill, Work().occupancy, Work().padding, Engines().kv_use) == (None, None, None, None)


def test_steps_are_added_up_over_workers_and_restarts() -> None:
    snapshot = folded(
        WorkersSeen(0, (view("a", step_bins=[0, 5]), view("b", step_bins="odd"))),
        WorkersSeen(1, (view("a", step_bins=[0, 6, 10, 2]), view("b", step_bins=[10, 1]))),
        WorkersSeen(2, (view("a", step_bins=[0, 1]), view("b", step_bins=[10, 1]))),
    )
    assert [count for _, count in snapshot.steps_s] == [2, 3]
    assert snapshot.step_s == pytest.approx((0.001 * 1.2**10, 0.001 * 1.2**10))


@given(st.lists(st.floats(0, 1e4)), st.lists(st.floats(0, 1e4)))
def test_histograms_add_up(first: list[float], second: list[float]) -> None:
    one, other, both = Durations(), Durations(), Durations()
    for seconds in first:
        one.add(seconds)
        both.add(seconds)
    for seconds in second:
        other.add(seconds)
        both.add(seconds)
    one.merge(other.flat())
    assert one.counts() == both.counts()
    assert one.percentiles(0.5, 0.95) == both.percentiles(0.5, 0.95)
    assert sum(count for _, count in both.counts()) == len(first) + len(second)
    one.merge(both.flat(), -1)
    assert (one.counts(), one.percentiles(0.5)) == ((), None)


# ---------------------------------------------------------------- batches


def test_rows_sent_are_work_and_count_again_when_they_are_repeated() -> None:
    snapshot = folded(
        RunStarted(0, 10),
        BatchSubmitted(1, "k-1", 10, 0),
        BatchReturned(2, "k-1", 10, "a", Usage(), Timings(0.5, 1.0, last=7), "worker_lost", "", answered=6),
        RowsRetried(2, 4, "worker_lost", ""),
        BatchSubmitted(2, "k-2", 4, 1),
        BatchReturned(3, "k-2", 4, "b", Usage(), Timings(0.5, 2.0, last=9), answered=4),
        resolved(3, 10),
    )
    assert (snapshot.sent, snapshot.answered, snapshot.done, snapshot.retried) == (14, 10, 10, 4)
    assert snapshot.sent == snapshot.done + snapshot.retried
    assert snapshot.queue_s == pytest.approx((0.5, 0.5), rel=0.1)
    assert snapshot.slowest == (SlowRow(9, 2.0, "b"), SlowRow(7, 1.0, "a"))


def test_the_slowest_rows_are_kept() -> None:
    returned = [BatchReturned(n, f"k-{n}", 1, "a", Usage(), Timings(0, n % 50, last=n)) for n in range(100)]
    assert [slow.seconds for slow in folded(*returned).slowest] == [49, 49, 48, 48, 47, 47, 46, 46, 45, 45]


def test_rows_that_kill_are_quarantined_and_the_last_failures_are_kept() -> None:
    deadly = Failed(3, "engine_died", "it died", worker="a")
    snapshot = folded(RowsResolved(1, 0, 2, Usage(), (deadly, Failed(4, "too_long", ""))), *[resolved(2, 0, 1)] * 30)
    assert (snapshot.quarantined, snapshot.failed) == (1, 32)
    assert len(snapshot.errors) == 20
    assert folded(RowsResolved(1, 0, 1, Usage(), (deadly,))).errors[0].worker == "a"


# ---------------------------------------------------------------- JSON


def test_snapshots_are_json() -> None:
    snapshot = folded(
        *steady(60, 10, 2_000), WorkersSeen(61, (view("a", nan=math.nan, odd={1, 2}, deep=[{"x": 1.5}]),))
    )
    read = json.loads(json.dumps(snapshot.to_dict(), allow_nan=False))
    assert read["done"] == 610
    assert read["remaining"] == 1_390
    assert read["usage"]["prompt_tokens"] == 1_220
    assert read["workers"][0]["metrics"] == {"nan": None, "odd": "{1, 2}", "deep": [{"x": 1.5}]}
    assert to_json((True, None, -math.inf)) == [True, None, None]
    assert "workers" not in snapshot.to_dict(workers=False)
    assert snapshot.to_dict(workers=False)["worker_states"] == {"ready": 1}


# ---------------------------------------------------------------- when to stop


def failures(*counts: int) -> tuple[FailureCount, ...]:
    return tuple(FailureCount(f"kind-{i}", n, 0, "why") for i, n in enumerate(counts))


@pytest.mark.parametrize(
    ("rule", "failed", "done", "ended", "stops"),
    [
        (0, 0, 500, True, False),
        (0, 1, 1, False, True),
        (10, 10, 10, True, False),
        ("10", 11, 500, False, True),
        ("1_000", 1_000, 1_000, True, False),
        ("5%", 99, 99, False, False),
        ("5%", 5, 100, False, False),
        ("5%", 6, 100, False, True),
        ("29%", 29, 100, False, False),
        (" 0.5 % ", 6, 1_000, False, True),
        ("5%", 1, 10, False, False),
        ("5%", 1, 10, True, True),
        ("0%", 0, 10, True, False),
        ("100%", 500, 500, True, False),
    ],
)
def test_max_failures(rule: int | str, failed: int, done: int, ended: bool, stops: bool) -> None:
    error = StopRule(rule).check(failed, done, failures(failed) if failed else (), ended=ended)
    assert isinstance(error, TooManyFailuresError) == stops
    if error is not None:
        assert (error.failed, error.seen) == (failed, done)
        assert "max_failures=" in str(error)
        assert "kind-0: why" in str(error)


def test_c34_by_default_a_job_stops_when_the_first_hundred_rows_fail_alike() -> None:
    rule = StopRule()
    assert rule.check(99, 99, failures(99)) is None
    assert rule.check(100, 101, failures(100)) is None
    assert rule.check(100, 100, failures(60, 40)) is None
    assert rule.check(99, 99, failures(99), ended=True) is None
    error = rule.check(128, 128, failures(128))
    assert error is not None
    assert "128 of the first 128 rows failed" in str(error)
    assert "max_failures" in str(error)


def test_a_stop_without_a_known_reason_says_so() -> None:
    error = StopRule(0).check(1, 1, ())
    assert error is not None
    assert "no reason was told" in str(error)


@pytest.mark.parametrize(
    "value",
    [-1, True, 0.05, "", "%", "-1", "-5%", "five", "101%", "100.5%", "1/2%", "5%%", "1.5", "1e2", "nan%", "٣", b"5"],
)
def test_nonsense_limits_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_failures=.*'5%'"):
        StopRule(value)

"""Jobs and single tasks on one driver: from several threads, with priorities, fair, bounded."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from daskinfer import Driver, Job
from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.driver import tasks
from daskinfer.errors import (
    ConfigError,
    JobCancelledError,
    ModelLoadError,
    NotRunningError,
    RowError,
    RowFailedError,
    UnknownOptionError,
    UnknownTaskError,
)
from daskinfer.testing import call_counts, conservation, echo_spec, read_log, wait_until

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5)


@pytest.fixture
def start(cluster: LocalCluster) -> Iterator[Callable[..., Driver]]:
    """Start drivers with echo engines; they are stopped after the test."""
    started: list[Driver] = []

    def make(batch: BatchPolicy | None = None, **options: Any) -> Driver:
        driver = Driver(echo_spec(**options), cluster=cluster, health=QUICK, batch=batch).start()
        started.append(driver)
        return driver

    yield make
    for driver in started:
        driver.stop()


def all_ready(driver: Driver) -> None:
    wait_until(lambda: sum(v.state == "ready" for v in driver.workers()) == 2)


# ---------------------------------------------------------------- single tasks


def test_submit_task_and_get_result(start: Callable[..., Driver]) -> None:
    driver = start()
    by_text = driver.submit_task({"prompt": "hello"})
    by_ids = driver.submit_task({"input_ids": [7, 8, 9], "max_new_tokens": 5, "priority": 3})
    nested = driver.submit_task({"input_ids": [[7, 8, 9]], "temperature": 0.0, "top_p": 1.0})
    assert len({by_text, by_ids, nested}) == 3
    result = driver.get_result(by_text, timeout=30)
    assert set(result) == {"generated_text", "input_ids", "output_ids", "worker_id"}
    assert result["generated_text"] == "<hello>"
    assert result["output_ids"] == list(b"<hello>")
    assert result["input_ids"] == list(b"hello")
    assert result["worker_id"] in {view.address for view in driver.workers()}
    assert driver.get_result(by_text) == result  # again
    assert driver.get_result(by_ids, 30)["input_ids"] == driver.get_result(nested, 30)["input_ids"] == [7, 8, 9]
    assert driver.get_result(by_ids)["generated_text"] == "<7 8 9>"


def test_get_result_of_no_such_task(start: Callable[..., Driver]) -> None:
    driver = start()
    for kind in (KeyError, ValueError, UnknownTaskError):
        with pytest.raises(kind, match="there is no task 'task-99'"):
            driver.get_result("task-99")
    with pytest.raises(UnknownTaskError):
        driver.add_done_callback("task-99", print)


def test_get_result_that_is_late_raises_timeout_error(start: Callable[..., Driver]) -> None:
    driver = start(lengths=40, step_s=0.05)
    task = driver.submit_task({"prompt": "slow"})
    with pytest.raises(TimeoutError, match=r"task-0 was not finished within timeout=0\.01 s"):
        driver.get_result(task, timeout=0.01)
    assert driver.get_result(task, timeout=30)["generated_text"] == "<slow>"


def test_the_surface_of_a_driver_that_is_not_running_raises_runtime_error(cluster: LocalCluster) -> None:
    driver = Driver(echo_spec(lengths=1_000, step_s=0.05), cluster=cluster, health=QUICK)
    actions: list[Callable[[], object]] = [
        lambda: driver.submit_task({"prompt": "x"}),
        lambda: driver.get_result("task-0"),
        lambda: driver.add_done_callback("task-0", print),
        lambda: driver.scale_workers(1),
        driver.worker_manager.get_all_workers,
    ]
    for action in actions:
        with pytest.raises(RuntimeError, match="not running"):
            action()
    driver.start()
    task = driver.submit_task({"prompt": "x", "max_new_tokens": 1_000})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.get_result, task)
        driver.stop()
        with pytest.raises(NotRunningError, match="driver was stopped"):
            waiting.result(10)
    driver.stop()
    for action in actions:
        with pytest.raises(RuntimeError, match="not running"):
            action()


@pytest.mark.parametrize(
    ("task", "kind", "said"),
    [
        ({}, ConfigError, "not none of them"),
        ({"prompt": "a", "input_ids": [1]}, ConfigError, "input_ids and prompt"),
        ({"prompt": "a", "max_tokens": 3}, UnknownOptionError, "max_tokens"),
        ({"input_ids": [[1], [2]]}, ConfigError, "holds 2 lists"),
        ({"prompt": " "}, RowError, "prompt"),
        ({"prompt": "a", "temperature": -1}, ConfigError, "temperature=-1"),
        ({"prompt": "a", "priority": "high"}, ConfigError, "priority='high'"),
        ("a", ConfigError, "not str"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_at_once(task: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        tasks.read_task(task, echo_params())


def echo_params() -> Any:
    return Driver("echo", engine="echo").params


def test_add_done_callback(start: Callable[..., Driver], caplog: pytest.LogCaptureFixture) -> None:
    driver = start(lengths=3, step_s=0.02)
    seen: list[tuple[str, str]] = []
    noted = threading.Semaphore(0)

    def note(task_id: str) -> None:
        seen.append((task_id, driver.get_result(task_id)["generated_text"]))
        noted.release()

    first = driver.submit_task({"prompt": "a"})
    driver.add_done_callback(first, lambda _: 1 / 0)
    driver.add_done_callback(first, note)
    driver.get_result(first, 30)
    driver.add_done_callback(first, note)  # of a finished one: at once, maybe before those that waited
    assert noted.acquire(timeout=10)
    assert noted.acquire(timeout=10)
    assert seen == [(first, "<a>")] * 2
    assert "a callback of task-0 raised" in caplog.text


def test_a_task_that_fails_raises_and_its_callback_is_called(start: Callable[..., Driver], fault_dir: Path) -> None:
    driver = start(faults={"bad": "value_error"}, faults_dir=fault_dir)
    called = threading.Event()
    task = driver.submit_task({"prompt": "bad"})
    driver.add_done_callback(task, lambda _: called.set())
    with pytest.raises(RowFailedError, match="ValueError"):
        driver.get_result(task, 30)
    assert called.wait(10)


def test_tasks_fail_when_no_worker_can_load(start: Callable[..., Driver]) -> None:
    driver = start(load_error="weights are torn")
    with pytest.raises(ModelLoadError, match="weights are torn"):
        driver.get_result(driver.submit_task({"prompt": "a"}), 30)


def test_a_task_never_waits_to_fill_a_batch(start: Callable[..., Driver], echo_log: Path) -> None:
    """Each is asked for before the next is submitted, with batches that could take 64 rows."""
    driver = start(BatchPolicy(rows=64), log=echo_log)
    for i in range(5):
        assert driver.get_result(driver.submit_task({"prompt": f"{i}"}), 30)["generated_text"] == f"<{i}>"
    assert [len(e.ids) for e in read_log(echo_log) if e.event == "step"] == [1] * 5


def test_a_thousand_tasks_from_four_threads_with_three_priorities(
    start: Callable[..., Driver], echo_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "RETAINED", 300)
    driver = start(BatchPolicy(rows=4), capacity=8, lengths=1, step_s=0.01, log=echo_log)
    all_ready(driver)
    priorities: dict[str, int] = {}
    results: dict[str, dict[str, Any]] = {}
    finished: list[str] = []

    def work(thread: int) -> None:
        for i in range(250):
            priority = (0, 5, 10)[i % 3]
            task = driver.submit_task({"prompt": f"{thread}/{i}", "priority": priority})
            priorities[task] = priority

            def keep(task_id: str) -> None:
                finished.append(task_id)
                results[task_id] = driver.get_result(task_id)

            driver.add_done_callback(task, keep)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    wait_until(lambda: len(results) == 1_000, 60)
    texts = {result["generated_text"] for result in results.values()}
    assert texts == {f"<{t}/{i}>" for t in range(4) for i in range(250)}
    assert set(call_counts(echo_log).values()) == {1}
    places = {task: place for place, task in enumerate(finished)}
    medians = {p: statistics.median(places[t] for t, q in priorities.items() if q == p) for p in (0, 5, 10)}
    assert medians[10] < medians[5] < medians[0]
    assert driver._board.counts == (0, 300)  # nothing is left but the results that are kept
    assert len(driver._board._known) == 300
    window = driver._board._stream._window  # type: ignore[union-attr]
    assert (window.rows_held, window._histories) == (0, {})
    assert driver._board._stream._events == []  # type: ignore[union-attr]
    with pytest.raises(UnknownTaskError, match="only the last 300 are kept"):
        driver.get_result(finished[0])
    assert driver.get_result(finished[-1]) == results[finished[-1]]


# ---------------------------------------------------------------- jobs


def test_a_job_is_iterable_and_tells_how_far_it_is(start: Callable[..., Driver]) -> None:
    driver = start(lengths=2, step_s=0.002)
    job = driver.submit([f"row {i}" for i in range(100)], max_new_tokens=4)
    assert isinstance(job, Job)
    assert [r.id for r in job] == list(range(100))
    assert [getattr(r, "output", None) for r in itertools.islice(job, 2)] == ["<row 0>", "<row 1>"]
    assert len(job.result()) == 100
    status = job.status()
    assert (status.state, status.completed, status.failed, status.total) == ("done", 100, 0, 100)
    assert job.cancel() is False
    assert "done, 100 rows" in repr(job)
    mixed = driver.submit(iter(["a", None]))
    assert [r.ok for r in mixed.result(30)] == [True, False]
    assert (mixed.status().failed, mixed.status().total) == (1, None)


def test_a_job_can_be_cancelled(start: Callable[..., Driver]) -> None:
    driver = start(lengths=50, step_s=0.01, capacity=2)
    job = driver.submit(f"row {i}" for i in range(100_000))
    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(timeout=0.05)
    first = next(iter(job))
    assert first.ok
    assert job.cancel() is True
    assert job.cancel() is False
    assert job.status().state == "cancelled"
    with pytest.raises(JobCancelledError, match="was cancelled after"):
        job.result()
    with pytest.raises(JobCancelledError):
        list(job)
    wait_until(lambda: all(v.metrics.get("batches") == 0 for v in driver.workers()), 10, "batches were not aborted")
    wait_until(lambda: not job._thread.is_alive())
    assert driver.generate(["x"])[0].ok


def test_a_job_that_cannot_go_on_raises_where_its_result_is_asked_for(start: Callable[..., Driver]) -> None:
    driver = start()

    def rows() -> Iterator[str]:
        yield "a"
        raise OSError("the disk is gone")

    job = driver.submit(rows())
    with pytest.raises(OSError, match="the disk is gone"):
        job.result(30)
    assert job.status().state == "error"
    slow = start(lengths=50, step_s=0.05)
    job = slow.submit(f"{i}" for i in range(1_000))
    slow.stop()
    with pytest.raises(NotRunningError, match=r"driver (was stopped|is not running)"):
        job.result(30)


def test_jobs_and_a_run_at_once_from_two_threads(start: Callable[..., Driver], tmp_path: Path, echo_log: Path) -> None:
    driver = start(log=echo_log, lengths=2, step_s=0.002)
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(
            driver.run, [{"text": f"run {i}"} for i in range(300)], tmp_path / "out.jsonl", columns="text"
        )
        jobs = [driver.submit([f"{n}: {i}" for i in range(200)]) for n in range(3)]
        other = pool.submit(driver.generate, [f"other {i}" for i in range(100)])
        assert run.result(60).completed == 300
        for n, job in enumerate(jobs):
            results = job.result(60)
            conservation(range(200), results)
            assert [r.output for r in results if r.ok] == [f"<{n}: {i}>" for i in range(200)]  # type: ignore[union-attr]
        assert [getattr(r, "output", None) for r in other.result(60)] == [f"<other {i}>" for i in range(100)]


def test_jobs_of_one_priority_share_evenly_and_a_higher_one_goes_first(start: Callable[..., Driver]) -> None:
    """In counted order: how many rows of the others were finished when a job was."""
    driver = start(BatchPolicy(rows=2), capacity=4, lengths=2, step_s=0.01)
    all_ready(driver)
    one = driver.submit([f"one {i}" for i in range(300)])
    two = driver.submit([f"two {i}" for i in range(300)])
    high = driver.submit([f"high {i}" for i in range(100)], priority=1)
    high.result(60)
    assert one.status().completed + two.status().completed < 200
    one.result(60)
    assert two.status().completed > 200


def test_a_task_of_high_priority_overtakes_a_job(start: Callable[..., Driver]) -> None:
    driver = start(BatchPolicy(rows=2), capacity=2, lengths=2, step_s=0.01)
    all_ready(driver)
    job = driver.submit([f"row {i}" for i in range(400)])
    next(iter(job))
    driver.get_result(driver.submit_task({"prompt": "urgent", "priority": 1}), 30)
    assert job.status().completed < 200
    assert len(job.result(60)) == 400


@pytest.mark.parametrize("ids", [[1, 1, 2], ["a", "b", "a"]])
def test_c33_jobs_at_once_never_mix_whatever_ids_the_rows_have(
    start: Callable[..., Driver], tmp_path: Path, ids: list[Any]
) -> None:
    """Rows are known by their place, not by a column of the user's."""
    driver = start(lengths=3, step_s=0.002)
    rows = [{"id": row, "text": f"{n}"} for n, row in enumerate(ids * 20)]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(driver.run, rows, tmp_path / f"{n}.jsonl", prompt=f"run {n}: {{text}}") for n in range(2)]
        assert [run.result(60).completed for run in runs] == [len(rows)] * 2
    for n in range(2):
        lines = (tmp_path / f"{n}.jsonl").read_text().splitlines()
        assert [f"<run {n}: {i}>" in line for i, line in enumerate(lines)] == [True] * len(rows)


# ---------------------------------------------------------------- parameters for each prompt


def test_c22_lists_of_parameters_have_a_value_for_each_prompt(start: Callable[..., Driver]) -> None:
    driver = start(lengths="params")
    results = driver.generate(["a", "b", "c", "d", "e"], max_new_tokens=[1, 2, 0, None, 3])
    assert [r.usage.completion_tokens for r in results if r.ok] == [1, 2, 0, 256, 3]  # type: ignore[union-attr]
    assert getattr(results[2], "output", None) == ""
    with pytest.raises(ValueError, match="max_new_tokens has 4 values for 5 prompts"):
        driver.generate(["a", "b", "c", "d", "e"], max_new_tokens=[1, 2, 0, None])
    with pytest.raises(ConfigError, match="without a length"):
        driver.generate(iter(["a"]), max_new_tokens=[1])
    with pytest.raises(ConfigError, match="max_new_tokens=-1"):
        driver.generate(["a"], max_new_tokens=[-1])
    job = driver.submit(["a", "b"], max_new_tokens=[3, 1], stop=[["x"], None])
    assert [r.usage.completion_tokens for r in job.result(30) if r.ok] == [3, 1]  # type: ignore[union-attr]
    assert len(driver.generate(["a", "b", "c"], stop=["x", "y"], stop_token_ids=[1], max_new_tokens=1)) == 3

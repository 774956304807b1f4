"""Workers that are silent, stuck, paused or gone: found, replaced, and their rows run elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster, Nanny
from distributed.worker import Worker

from daskinfer.cluster import local_cluster
from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.driver import Driver, dispatch
from daskinfer.errors import ConfigError, NoWorkersError
from daskinfer.preflight import by_value
from daskinfer.records import Event, Noted
from daskinfer.testing import conservation, echo_spec, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HEALTH = HealthPolicy(
    poll_s=0.1, heartbeat_timeout_s=4, detection_interval_s=0.2, failure_threshold=3, step_timeout_s=60
)


@pytest.fixture
def made() -> Iterator[LocalCluster]:
    with local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster


def rows(n: int) -> list[dict[str, Any]]:
    return [{"text": f"row {i}."} for i in range(n)]


def states(driver: Driver) -> list[str]:
    return sorted(view.state for view in driver.workers())


def notes(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Noted)]


@pytest.mark.slow
def test_a_stopped_worker_is_evicted_replaced_and_its_rows_run_elsewhere(made: LocalCluster, tmp_path: Path) -> None:
    events: list[Event] = []
    stopped: list[int] = []
    spec = echo_spec(lengths=2, step_s=0.005, capacity=4)
    with Driver(spec, cluster=made, health=HEALTH) as driver:
        wait_until(lambda: states(driver) == ["ready", "ready"], 30)
        before = {view.address for view in driver.workers()}

        def watch(event: Event) -> None:
            events.append(event)
            if len(events) == 200:
                stopped.append(min(driver.client.run(os.getpid).values()))
                os.kill(stopped[0], signal.SIGSTOP)

        report = driver.run(rows(1500), tmp_path / "out", columns="text", observers=[watch])
        assert (report.completed, report.failed) == (1500, 0)
        assert len(stopped) == 1
        assert any("was evicted: silent for" in note for note in notes(events))
        wait_until(lambda: states(driver) == ["ready", "ready"], 30, "the nanny did not start another process")
        assert len(before & {view.address for view in driver.workers()}) == 1
        wait_until(lambda: not alive(stopped[0]), 10, "the stopped process is still there")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def stop_watchdog(dask_worker: Worker) -> None:
    from daskinfer.worker import ModelWorker

    for plugin in dask_worker.plugins.values():
        if isinstance(plugin, ModelWorker) and plugin.host is not None:
            for task in plugin.host._tasks:
                task.cancel()


def test_a_worker_whose_own_watchdog_is_stuck_is_evicted(made: LocalCluster, tmp_path: Path, fault_dir: Path) -> None:
    events: list[Event] = []
    # rows take long enough for the driver to ask once more before the run ends
    spec = echo_spec(faults={"row 7.": ["hang", "ok"]}, faults_dir=fault_dir, capacity=4, lengths=5, step_s=0.1)
    health = HealthPolicy(
        poll_s=0.1, heartbeat_timeout_s=4, detection_interval_s=0.2, failure_threshold=3, step_timeout_s=0.5
    )
    with Driver(spec, cluster=made, health=health, batch=BatchPolicy(rows=4)) as driver:
        wait_until(lambda: states(driver) == ["ready", "ready"], 30)
        driver.client.run(by_value(stop_watchdog))  # sent by name it would import this module there
        report = driver.run(rows(60), tmp_path / "out", columns="text", observers=[events.append])
        assert (report.completed, report.failed) == (60, 0)
        assert any("was evicted: stuck in a step for" in note for note in notes(events))
        wait_until(lambda: states(driver) == ["ready", "ready"], 30)


def pause(dask_worker: Worker) -> None:
    from distributed.core import Status

    dask_worker.status = Status.paused


def test_c42_paused_workers_are_named_within_a_deadline(made: LocalCluster) -> None:
    health = HealthPolicy(poll_s=0.1, start_timeout_s=1)
    with Driver(echo_spec(prefix="paused "), cluster=made, health=health) as driver:
        wait_until(lambda: states(driver) == ["ready", "ready"], 30)
        driver.client.run(by_value(pause))
        with pytest.raises(NoWorkersError, match=r"is paused, .* is paused; a paused worker uses .* memory_limit"):
            driver.generate(["x"])


def test_batches_that_a_paused_worker_does_not_begin_run_elsewhere_and_it_is_not_evicted(made: LocalCluster) -> None:
    spec = echo_spec(lengths=20, step_s=0.02, capacity=1, prefix="stranded ")
    with Driver(spec, cluster=made, health=HEALTH, batch=BatchPolicy(rows=1)) as driver:
        wait_until(lambda: states(driver) == ["ready", "ready"], 30)
        stranded = driver.workers()[0].address
        driver.client.run(lambda dask_worker: setattr(dask_worker.state, "nthreads", 1), workers=[stranded])
        held = driver.client.scatter("of others", workers=[stranded], hash=False)
        job = driver.submit(f"row {i}" for i in range(24))
        wait_until(lambda: any(view.metrics.get("batches") for view in driver.workers()))
        driver.client.run(by_value(pause), workers=[stranded])
        results = job.result(90)
        conservation(range(24), results)
        assert all(result.ok for result in results)
        assert "paused" in driver._running._released[stranded]
        assert driver._running._evicted == {}
        assert states(driver) == ["paused", "ready"]
        assert held.result() == "of others"


def test_a_heartbeat_timeout_below_three_heartbeats_is_refused(made: LocalCluster) -> None:
    health = HealthPolicy(heartbeat_timeout_s=1)
    with pytest.raises(ConfigError, match=r"heartbeat_timeout_s=1: .* every 0\.5 s.* at least 3 of them, 1\.5 s"):
        Driver(echo_spec(prefix="hasty "), cluster=made, health=health).start()


def test_a_worker_that_is_lost_with_its_nanny_is_replaced_by_the_driver(
    made: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a nanny nobody but the cluster object can start another one."""
    monkeypatch.setattr(dispatch, "REPLACE_S", 1.0)
    with Driver(echo_spec(prefix="lost "), cluster=made, health=HEALTH) as driver:
        wait_until(lambda: states(driver) == ["ready", "ready"], 30)
        before = {view.address for view in driver.workers()}
        name = next(iter(made.workers))
        nanny = made.workers[name]
        assert isinstance(nanny, Nanny)
        pid = nanny.process.pid  # type: ignore[union-attr]
        nanny.close_gracefully()  # it will not start another process
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(driver.workers()) == 1, 30)
        wait_until(lambda: states(driver) == ["ready", "ready"], 60, "the driver did not replace it")
        assert len(before & {view.address for view in driver.workers()}) == 1
        assert all(result.ok for result in driver.generate([f"row {i}" for i in range(20)]))

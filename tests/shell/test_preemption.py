"""A worker that is asked to go gives back what it has: finished rows are kept, others run elsewhere, nobody is blamed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from daskinfer.cluster import local_cluster
from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.driver import Driver
from daskinfer.records import BatchReturned, Event, RowsResolved
from daskinfer.testing import call_counts, echo_spec, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5)
ROWS = 600


class Watch:
    """Calls something once after so many rows, and keeps what came back with a fault."""

    def __init__(self, after: int, action: Any) -> None:
        self.after, self.action = after, action
        self.done = 0
        self.faults: list[BatchReturned] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchReturned) and event.kind:
            self.faults.append(event)
        if isinstance(event, RowsResolved):
            self.done += event.completed
            if self.action is not None and self.done >= self.after:
                self.action, action = None, self.action
                action()


def run(driver: Driver, out: Path, watch: Watch) -> None:
    rows = [{"text": f"row {i}."} for i in range(ROWS)]
    wait_until(lambda: [view.state for view in driver.workers()] == ["ready", "ready"], 60)
    report = driver.run(rows, out, columns="text", observers=[watch])
    assert (report.completed, report.failed) == (ROWS, 0)
    assert watch.action is None


def options(log: Path) -> dict[str, Any]:
    return {"log": log, "log_events": ["finish"], "capacity": 4, "lengths": [1, 9], "step_s": 0.004}


def ended(pids: list[int]) -> None:
    def left() -> bool:
        return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)

    wait_until(left, 20, "processes were left behind")


def engines(driver: Driver, address: str) -> list[int]:
    return [int(view.metrics["pid"]) for view in driver.workers() if view.address == address]


def test_c39_a_worker_that_gets_a_sigterm_gives_its_rows_back(tmp_path: Path, echo_log: Path) -> None:
    """As when everything on a machine gets the signal: the worker, its engine, but not the nanny, which starts another."""
    pids: list[int] = []
    with (
        local_cluster(2, dashboard_address=":0") as made,
        Driver(echo_spec(**options(echo_log)), cluster=made, health=QUICK, batch=BatchPolicy(rows=16)) as driver,
    ):

        def preempt() -> None:
            address, worker = min(driver.client.run(os.getpid).items())
            pids.extend([worker, *engines(driver, address)])
            for pid in reversed(pids):
                os.kill(pid, signal.SIGTERM)

        watch = Watch(150, preempt)
        run(driver, tmp_path / "out", watch)
        ended(pids)
        wait_until(lambda: [view.state for view in driver.workers()] == ["ready", "ready"], 60)
    assert {fault.kind for fault in watch.faults} <= {"preempted"}
    assert sum(call_counts(echo_log).values()) - ROWS <= 8 * 16  # no more than was in flight there
    assert len(pids) == 2


@pytest.fixture
def by_command(tmp_path: Path, nanny: str) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler, and two workers started from the command line."""
    with LocalCluster(n_workers=0, dashboard_address=":0") as empty:
        command = [
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            empty.scheduler_address,
            "--nthreads",
            "1",
            nanny,
        ]
        workers = [
            subprocess.Popen(
                [*command, "--no-dashboard", "--local-directory", str(tmp_path / str(n))], stderr=subprocess.DEVNULL
            )
            for n in range(2)
        ]
        yield empty.scheduler_address, workers
        for worker in workers:
            worker.terminate()
            worker.wait(30)


@pytest.mark.parametrize("nanny", ["--nanny", "--no-nanny"])
def test_a_dask_worker_command_that_gets_a_sigterm_gives_its_rows_back(
    by_command: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path, echo_log: Path
) -> None:
    address, workers = by_command
    with (
        Client(address) as client,
        Driver(echo_spec(**options(echo_log)), cluster=client, health=QUICK, batch=BatchPolicy(rows=16)) as driver,
    ):
        family: list[int] = []

        def preempt() -> None:
            victim = psutil.Process(workers[0].pid)
            family.extend(process.pid for process in (victim, *victim.children(recursive=True)))
            workers[0].terminate()

        watch = Watch(150, preempt)
        run(driver, tmp_path / "out", watch)
        assert workers[0].wait(30) is not None
        ended(family)
    assert {fault.kind for fault in watch.faults} <= {"preempted"}
    assert sum(call_counts(echo_log).values()) - ROWS <= 8 * 16
    assert len(family) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("nanny", ["--nanny"])
def test_c57_a_killed_nanny_takes_its_worker_and_engine_along(
    by_command: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path, echo_log: Path
) -> None:
    address, workers = by_command
    family: list[int] = []
    with (
        Client(address) as client,
        Driver(echo_spec(**options(echo_log)), cluster=client, health=QUICK, batch=BatchPolicy(rows=16)) as driver,
    ):

        def kill() -> None:
            victim = psutil.Process(workers[0].pid)
            family.extend(process.pid for process in victim.children(recursive=True))
            victim.kill()

        run(driver, tmp_path / "out", Watch(150, kill))
        workers[0].wait(30)
        ended(family)
    assert len(family) >= 3  # the worker, its engine, the guard of its engine

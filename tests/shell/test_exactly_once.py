"""Full and read-only disks, jumping clocks, a second driver, broken connections: no row is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
from distributed import Client, LocalCluster
from distributed.comm.core import CommClosedError

from daskinfer import cli
from daskinfer.checkpoint import Checkpoint
from daskinfer.config import HealthPolicy, RetryPolicy
from daskinfer.driver import Driver, run, stream
from daskinfer.errors import OutputError
from daskinfer.records import BatchReturned, Event, RowsCommitted, RowsResolved
from daskinfer.storage import open_source
from daskinfer.testing import call_counts, echo_spec
from daskinfer.worker import ModelWorker
from tests.engines import tiny

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUICK = HealthPolicy(poll_s=0.1)
ROWS = 300
IN_ENGINES = 16
"""Rows in the slots of two engines, which may end after their run did."""


def driver_for(cluster: LocalCluster, **options: Any) -> Driver:
    return Driver(echo_spec(**options), cluster=cluster, health=QUICK, retry=RetryPolicy(backoff_s=0.05))


def write_rows(path: Path, rows: int = ROWS) -> Path:
    """Rows of 4 kB that no compression makes small."""
    rng = random.Random(0)
    path.write_text("".join(json.dumps({"id": i, "text": rng.randbytes(2_000).hex()}) + "\n" for i in range(rows)))
    return path


def check(out: Path, source: Path) -> None:
    """Compare an output with what the engine answers to the input, row for row."""
    given, frame = pd.read_json(source, lines=True), pd.read_parquet(out)
    assert list(frame["id"]) == list(given["id"])
    assert list(frame["output"]) == [f"<{text}>" for text in given["text"]]
    assert frame["error"].isna().all()


class Committed:
    """Counts the rows that a run has on disk, from its events; calls something when there are enough."""

    def __init__(self, enough: int, then: Any) -> None:
        self.rows, self._enough, self._then = 0, enough, then

    def __call__(self, event: Event) -> None:
        if isinstance(event, RowsCommitted):
            before, self.rows = self.rows, self.rows + event.rows
            if before < self._enough <= self.rows:
                self._then()


# ---------------------------------------------------------------- disks


@pytest.fixture
def disk(tmp_path: Path, require_root: None) -> Iterator[Path]:
    """A disk of 2 MB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"needs the right to mount: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no room at all: somebody else's file takes what there is."""
    with (disk / "theirs").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_c35_a_disk_that_is_really_full(cluster: LocalCluster, tmp_path: Path, disk: Path, echo_log: Path) -> None:
    source, out = write_rows(tmp_path / "in.jsonl"), disk / "out"
    remount(disk, "size=32m")
    watch = Committed(ROWS // 4, lambda: fill(disk))
    with driver_for(cluster, log=echo_log, capacity=8, step_s=0.03) as driver:
        with pytest.raises(OutputError, match=r"No space left.*--resume"):
            driver.run(source, out, columns="text", observers=[watch])
        assert not (out / "_lock").exists()
        assert not list(out.rglob("*.tmp"))
        remount(disk, "size=64m")
        before = call_counts(echo_log)
        report = driver.run(source, out, columns="text", resume=True)
    assert report.skipped + report.completed == ROWS
    assert report.skipped > 0
    again = (call_counts(echo_log) - before).total()
    assert again <= ROWS - report.skipped + IN_ENGINES, "rows that were on disk are not run again"
    check(out, source)


@pytest.mark.parametrize("sink", ["out", "out.jsonl"])
def test_an_output_that_becomes_read_only(
    sink: str, cluster: LocalCluster, tmp_path: Path, disk: Path, echo_log: Path
) -> None:
    source, out = write_rows(tmp_path / "in.jsonl"), disk / sink
    remount(disk, "size=64m")
    watch = Committed(ROWS // 4, lambda: remount(disk, "ro"))
    with driver_for(cluster, log=echo_log, capacity=8, step_s=0.02) as driver:
        with pytest.raises(OutputError, match=r"Read-only file system.*--resume"):
            driver.run(source, out, columns="text", observers=[watch])
        with pytest.raises(OutputError, match="Read-only file system"):
            driver.run(source, out, columns="text", resume=True)
        remount(disk, "rw")
        before = call_counts(echo_log)
        report = driver.run(source, out, columns="text", resume=True)
    assert report.skipped >= watch.rows
    assert (call_counts(echo_log) - before).total() <= ROWS - report.skipped + IN_ENGINES
    if sink == "out":
        check(out, source)
    else:
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == list(range(ROWS))


# ---------------------------------------------------------------- drivers


def test_the_second_driver_on_an_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path / "in.jsonl", 3), tmp_path / "out"
    arguments = ["run", str(source), str(out), "--model", "echo", "--engine", "echo", "--column", "text", "--resume"]
    opened = open_source(source)
    with Checkpoint.open(str(out), source=opened, fingerprint={}, now=time.time() - 7):
        monkeypatch.setattr(sys, "argv", ["daskinfer", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == cli.ERROR
    said = capsys.readouterr().err
    assert f"(process {psutil.Process().pid}, since " in said
    assert "(last sign of life 7 s ago)" in said
    assert "then resume" in said


def test_clocks_that_jump(
    cluster: LocalCluster, tmp_path: Path, echo_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days forward and back again, at every look at the clock: heartbeats, parts and chunks go on."""
    source, jumps = write_rows(tmp_path / "in.jsonl"), random.Random(0)

    def jumping() -> float:
        return time.time() + jumps.choice((-86_400, 0, 86_400))

    monkeypatch.setattr(run, "time", SimpleNamespace(time=jumping, monotonic=time.monotonic))
    with driver_for(cluster, log=echo_log, capacity=8, step_s=0.01) as driver:
        assert driver.run(source, tmp_path / "out", columns="text", limit=ROWS // 2).completed == ROWS // 2
        assert driver.run(source, tmp_path / "out", columns="text", resume=True).skipped == ROWS // 2
    check(tmp_path / "out", source)
    assert set(call_counts(echo_log).values()) == {1}


def test_a_result_that_cannot_be_fetched_is_asked_for_again(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real, broken = write_rows(tmp_path / "in.jsonl", 40), stream._fetched, list[str]()

    async def fetched(future: Any) -> Any:
        if len(broken) < 3:
            broken.append(future.key)
            raise CommClosedError("the connection broke")
        return await real(future)

    monkeypatch.setattr(stream, "_fetched", fetched)
    events: list[Event] = []
    with driver_for(cluster) as driver:
        driver.run(source, tmp_path / "out", columns="text", observers=[events.append])
    check(tmp_path / "out", source)
    faults = [event.message for event in events if isinstance(event, BatchReturned) and event.kind]
    assert len(faults) == 3
    assert all("the result could not be fetched" in fault for fault in faults)


def test_a_worker_that_is_lost_while_the_model_is_sent_stops_no_start(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = write_rows(tmp_path / "in.jsonl", 40), Client.register_plugin

    async def registered(client: Client, plugin: Any) -> Any:
        found = await real(client, plugin)
        if isinstance(plugin, ModelWorker):
            raise OSError("Timed out trying to connect to tcp://127.0.0.1:1 after 5 s")
        return found

    monkeypatch.setattr(Client, "register_plugin", registered)
    with driver_for(cluster) as driver:
        driver.run(source, tmp_path / "out", columns="text")
    check(tmp_path / "out", source)


# ---------------------------------------------------------------- sampled answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make(folder, "llama")
    return folder


@pytest.mark.slow
def test_sampled_answers_after_a_death_and_a_resume_are_those_of_an_undisturbed_run(
    cluster: LocalCluster, tmp_path: Path, model: Path
) -> None:
    prompts, params = [tiny.words(3, i) for i in range(60)], {"temperature": 1.0, "seed": 7, "max_new_tokens": 12}
    killed: list[int] = []

    def kill_one(event: Event) -> None:
        if isinstance(event, RowsResolved) and not killed:
            engines = [
                child
                for worker in psutil.Process().children(recursive=True)
                for child in worker.children()
                if any("daskinfer.host.child" in part for part in child.cmdline())
            ]
            killed.append(engines[0].pid)
            engines[0].send_signal(signal.SIGKILL)

    with Driver(model, cluster=cluster, health=QUICK, params=params, engine_options={"max_batch_rows": 4}) as driver:
        driver.run(prompts, tmp_path / "undisturbed", raw=True)
        driver.run(prompts, tmp_path / "out", raw=True, limit=30, observers=[kill_one])
        driver.run(prompts, tmp_path / "out", raw=True, resume=True)
    assert killed
    expected, found = pd.read_parquet(tmp_path / "undisturbed"), pd.read_parquet(tmp_path / "out")
    assert found.equals(expected)
    assert found["output"].nunique() > 50, "they are sampled"

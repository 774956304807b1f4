"""Engines that cannot be restarted, and clusters that change while models are deployed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from daskinfer.cluster import local_cluster
from daskinfer.config import BatchPolicy, HealthPolicy, RetryPolicy
from daskinfer.driver import Driver
from daskinfer.errors import ModelLoadError
from daskinfer.records import Failed
from daskinfer.testing import attempts, conservation, echo_spec, loads, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5)


def ready(driver: Driver, workers: int) -> bool:
    return [view.state for view in driver.workers()] == ["ready"] * workers


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_c51_an_engine_that_cannot_be_restarted_has_its_worker_begin_again(fault_dir: Path, echo_log: Path) -> None:
    """Its third load, the restart, fails; the nanny starts a fresh process, and no row is blamed."""
    spec = echo_spec(
        faults={"row 13.": ["exit", "ok"]}, faults_dir=fault_dir, log=echo_log, load_fails_on=[3], capacity=4, lengths=2
    )
    with local_cluster(2, dashboard_address=":0") as made, Driver(spec, cluster=made, health=QUICK) as driver:
        wait_until(lambda: ready(driver, 2), 60)
        before = {view.address for view in driver.workers()}
        results = driver.generate([f"row {i}." for i in range(80)])
        conservation(range(80), results)
        assert all(result.ok for result in results)
        wait_until(lambda: ready(driver, 2), 120, "the worker did not come back")
        assert len(before & {view.address for view in driver.workers()}) == 1
    assert len(loads(echo_log)) == 4


def test_slots_stay_granted_while_an_engine_restarts(fault_dir: Path) -> None:
    spec = echo_spec(faults={"bad": ["exit", "ok"]}, faults_dir=fault_dir, load_s=1.0)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as made,
        Driver(spec, cluster=made, health=QUICK) as driver,
    ):
        job = driver.submit(["bad", *[f"row {i}" for i in range(20)]])
        wait_until(lambda: any(view.state == "restarting" for view in driver.workers()), 60)
        assert [view.slots for view in driver.workers()] == [8]
        assert all(result.ok for result in job.result(60))
        assert [view.metrics["restarts"] for view in driver.workers()] == [1]


def test_c51_when_the_last_engine_is_gone_the_job_ends_with_the_cause(fault_dir: Path) -> None:
    """Without a nanny there is nobody to begin again."""
    spec = echo_spec(faults={"bad": "segv"}, faults_dir=fault_dir)
    health = HealthPolicy(poll_s=0.1, engine_restarts=0)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as made,
        Driver(spec, cluster=made, health=health) as driver,
        pytest.raises(ModelLoadError, match="died 1 times in a row without finishing a row"),
    ):
        driver.generate(["bad", "good"])


@pytest.mark.parametrize("retries", [0, 3])
def test_c47_transient_rows_are_tried_as_often_as_asked_and_bad_ones_once(retries: int, fault_dir: Path) -> None:
    faults = {"A": ["connection_error", "connection_error", "ok"], "B": "value_error", "C": "timeout"}
    spec = echo_spec(isolation="thread", faults=faults, faults_dir=fault_dir)
    retry = RetryPolicy(retries=retries, backoff_s=0.01)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as made,
        Driver(spec, cluster=made, health=QUICK, retry=retry, batch=BatchPolicy(rows=8)) as driver,
    ):
        results = driver.generate(["A", "B", "C", "fine"])
    assert [result.ok for result in results] == ([True, False, False, True] if retries else [False, False, False, True])
    assert attempts(fault_dir) == ({0: 3, 1: 1, 2: 4} if retries else {0: 1, 1: 1, 2: 1})
    assert isinstance(results[2], Failed)
    assert ("(tried 4 times)" in results[2].message) is bool(retries)


def test_c45_drivers_do_not_meet_and_workers_that_come_while_models_are_deployed_get_them() -> None:
    """Two models interleaved, one driver closed while the other runs, workers scaled from none to four."""
    specs = [echo_spec(isolation="thread", prefix=f"{name}:") for name in "ab"]
    with LocalCluster(n_workers=0, processes=False, threads_per_worker=1, dashboard_address=":0") as made:
        made.scale(1)
        one, two = (Driver(spec, cluster=made, health=QUICK).start() for spec in specs)
        with two:
            with one:
                made.scale(4)
                streams = [driver.stream(f"row {i}" for i in range(200)) for driver in (one, two)]
                for i, (first, second) in enumerate(zip(*streams, strict=True)):
                    assert [getattr(first, "output", ""), getattr(second, "output", "")] == [
                        f"a:row {i}>",
                        f"b:row {i}>",
                    ]
                wait_until(lambda: ready(one, 4) and ready(two, 4), 30, "a worker was left out")
            with Client(made) as client:
                names = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.worker_plugins))
            assert specs[0].resource not in names
            assert all(result.ok for result in two.generate([f"row {i}" for i in range(50)]))


FORKED = """
import multiprocessing, os
if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
tokenizer.pre_tokenizer = Whitespace()
tokenizer.encode_batch(["a b c"] * 500)
from daskinfer import Driver
if __name__ == "__main__":
    with Driver("echo", engine="echo", workers=2) as driver:
        print([result.output for result in driver.generate(["a", "b"])], os.environ.get("TOKENIZERS_PARALLELISM"))
"""


def test_c56_workers_and_engines_are_no_forks_of_a_process_that_used_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.strip() == "['<a>', '<b>'] None", done.stderr
    assert "fork" not in done.stderr

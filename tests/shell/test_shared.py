"""Several drivers on one cluster, and the ways to attach to it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from daskinfer import Driver, preflight
from daskinfer.config import HealthPolicy
from daskinfer.errors import VersionError
from daskinfer.testing import call_counts, echo_spec, loads, wait_until

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=2)

OTHER_DRIVER = """
import json, sys
from daskinfer import Driver, HealthPolicy
from daskinfer.testing import echo_spec, wait_until

address, shared, own = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
health = HealthPolicy(poll_s=0.1, lease_grace_s=2)
one = Driver(echo_spec(**shared), cluster=address, health=health).start()
two = Driver(echo_spec(**own), cluster=address, health=health).start()
for driver in (one, two):
    wait_until(lambda: sum(v.state == "ready" and bool(v.metrics.get("pid")) for v in driver.workers()) == 2, 60)
jobs = [driver.submit(f"other {i}" for i in range(1_000_000)) for driver in (one, two)]
for job in jobs:
    next(iter(job))
print(json.dumps([v.metrics["pid"] for v in two.workers()]), flush=True)
jobs[0].result()
"""


@pytest.fixture
def other_driver(cluster: LocalCluster, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A process with a driver of the model that the test uses, and one of another; both at work."""
    script = tmp_path / "other.py"
    script.write_text(OTHER_DRIVER)
    shared, own = tmp_path / "shared.jsonl", tmp_path / "own.jsonl"
    options = [json.dumps(shared_options(shared)), json.dumps({"prefix": "own ", "lengths": 20, "log": str(own)})]
    process = subprocess.Popen(
        [sys.executable, str(script), cluster.scheduler_address, *options], stdout=subprocess.PIPE, text=True
    )
    yield process, shared, own
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def shared_options(log: Path) -> dict[str, Any]:
    return {"prefix": "shared ", "lengths": 4, "step_s": 0.01, "capacity": 4, "log": str(log)}


def plugins(client: Client) -> set[str]:
    names: set[str] = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.worker_plugins))
    return {name for name in names if name.startswith("daskinfer-")}


@pytest.mark.slow
def test_a_killed_driver_disturbs_nobody_and_its_model_is_unloaded(
    cluster: LocalCluster, other_driver: tuple[subprocess.Popen[str], Path, Path]
) -> None:
    process, shared, own = other_driver
    spec = echo_spec(**shared_options(shared))
    with Driver(spec, cluster=cluster, health=QUICK) as driver:
        stream = driver.stream(f"row {i}" for i in range(800))
        results = [next(stream)]
        assert process.stdout is not None
        engines = json.loads(process.stdout.readline())  # both of its drivers are at work now
        assert len(plugins(driver.client)) == 2
        assert all(psutil.pid_exists(pid) for pid in engines)
        process.kill()
        results += stream
        assert [r.id for r in results] == list(range(800))
        assert all(r.ok for r in results)
        wait_until(lambda: plugins(driver.client) == {spec.resource}, 30, "the killed driver's model is still there")
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in engines), 30, "its memory was not released")
        wait_until(
            lambda: all(v.metrics.get("batches") == 0 for v in driver.workers()), 10, "its batches were not aborted"
        )
        assert driver.generate(["still here"])[0].ok
    assert len(loads(shared)) == 2  # one per worker, for two drivers
    assert len(loads(own)) == 2
    assert min(call_counts(shared).values()) >= 1


def test_two_models_at_once_on_workers_with_one_thread(echo_log: Path, tmp_path: Path) -> None:
    """A worker's threads also cap how many batches it awaits; they are given back at the end."""
    logs = [echo_log, tmp_path / "second.jsonl"]
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as narrow,
        Client(narrow) as client,
    ):
        specs = [echo_spec(log=log, lengths=4, step_s=0.01, prefix=f"{n} ") for n, log in enumerate(logs)]
        with (
            Driver(specs[0], cluster=client, health=QUICK) as one,
            Driver(specs[1], cluster=client, health=QUICK) as two,
        ):
            jobs = [driver.submit([f"row {i}" for i in range(100)]) for driver in (one, two)]
            assert [len(job.result(60)) for job in jobs] == [100, 100]
            assert [v.slots for v in (*one.workers(), *two.workers())] == [8, 8]
            threads = client.run(lambda dask_worker: dask_worker.state.nthreads)
            assert min(threads.values()) >= 9
        wait_until(lambda: set(client.run(lambda dask_worker: dask_worker.state.nthreads).values()) == {1})
    assert [len(loads(log)) for log in logs] == [1, 1]


def test_attaching_by_scheduler_file_and_by_client(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    with Client(cluster) as client:
        client.write_scheduler_file(str(file))
        with Driver(echo_spec(prefix="by file "), cluster=file, health=QUICK) as driver:
            assert driver.generate(["x"])[0].ok
        with Driver(echo_spec(prefix="by client "), cluster=client, health=QUICK) as driver:
            assert driver.client is client
            assert driver.generate(["x"])[0].ok
        assert client.status == "running"  # it was not ours to close


def test_workers_without_daskinfer_are_refused_before_any_plugin_is_sent(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(dask_worker: Any) -> dict[str, Any]:
        return {"version": None}

    monkeypatch.setattr(preflight, "_describe", lacking)
    with Client(cluster) as client:
        before = plugins(client)
        with pytest.raises(VersionError, match=r"not installed.*pip install 'daskinfer=="):
            Driver(echo_spec(prefix="lacking "), cluster=client).start()
        assert plugins(client) == before


# ---------------------------------------------------------------- where the caller runs


def test_c59_the_plain_api_works_inside_a_running_event_loop(cluster: LocalCluster) -> None:
    """As in a notebook's cell."""

    async def cell() -> list[Any]:
        with Driver(echo_spec(prefix="cell "), cluster=cluster, health=QUICK) as driver:
            first = driver.generate(["a"])
            job = driver.submit(["b"])
            task = driver.submit_task({"prompt": "c"})
            outputs = [*first, *job.result(30), *driver.stream(["d"])]
            return [*(getattr(r, "output", None) for r in outputs), driver.get_result(task, 30)["generated_text"]]

    assert asyncio.run(cell()) == ["cell a>", "cell b>", "cell d>", "cell c>"]


def test_c59_an_interrupt_in_a_stream_leaves_the_driver_usable(cluster: LocalCluster) -> None:
    spec = echo_spec(prefix="interrupted ", lengths=5, step_s=0.01)
    with Driver(spec, cluster=cluster, health=QUICK) as driver:

        def rows() -> Iterator[str]:
            yield "a"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(driver.stream(rows()))
        assert [r.ok for r in driver.generate(["b", "c"])] == [True, True]
        threads = [threading.Thread(target=driver.generate, args=([f"{n}"] * 20,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("guarded", [True, False])
def test_c55_a_script_without_a_main_guard_is_told_so_at_once(tmp_path: Path, guarded: bool) -> None:
    script = tmp_path / "script.py"
    body = [
        'with Driver("echo", engine="echo") as driver:',
        '    print([r.output for r in driver.generate(["a", "b"])])',
    ]
    lines = ['if __name__ == "__main__":', *(f"    {line}" for line in body)] if guarded else body
    script.write_text("\n".join(["from daskinfer import Driver", *lines]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    if guarded:
        assert (done.returncode, done.stdout.strip()) == (0, "['<a>', '<b>']"), done.stderr
    else:
        assert done.returncode == 1
        assert 'put what the script does under if __name__ == "__main__":' in done.stderr
        assert done.stderr.count("Error: ") == 1

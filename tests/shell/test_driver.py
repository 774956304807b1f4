"""The driver on real worker processes: rows in, rows out, and what happens to workers on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.diagnostics import nvml

from daskinfer import preflight, worker
from daskinfer.cluster import local_cluster
from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.driver import Driver
from daskinfer.engines.base import BatchEngine
from daskinfer.errors import (
    ClusterError,
    ConfigError,
    DaskinferError,
    ModelLoadError,
    NoWorkersError,
    ResourceError,
    UnknownOptionError,
    VersionError,
)
from daskinfer.records import Request
from daskinfer.testing import call_counts, conservation, echo_spec, loads, read_log, wait_until

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5)


def texts(n: int) -> Iterator[str]:
    return (f"row {i}" for i in range(n))


def plugin_names(client: Client) -> list[str]:
    names: set[str] = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.worker_plugins))
    return [name for name in names if name.startswith("daskinfer-")]


# ---------------------------------------------------------------- rows in, rows out


def test_c32_results_come_in_order_or_as_they_are_finished(cluster: LocalCluster, echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, lengths={"seed": 1, "low": 1, "high": 40}, step_s=0.001, capacity=4)
    with Driver(spec, cluster=cluster, health=QUICK, batch=BatchPolicy(rows=3)) as driver:
        ordered = list(driver.stream(texts(200)))
        assert [r.id for r in ordered] == list(range(200))
        assert [r.output for r in ordered if r.ok] == [f"<row {i}>" for i in range(200)]  # type: ignore[union-attr]
        loose = list(driver.stream(texts(200), ordered=False))
        conservation(range(200), loose)
        assert {(r.id, r.output) for r in loose if r.ok} == {(r.id, r.output) for r in ordered if r.ok}  # type: ignore[union-attr]
        assert [r.id for r in loose] != list(range(200))
    assert set(call_counts(echo_log).values()) == {2}


def test_c03_bad_prompts_fail_alone_and_stay_in_their_place(cluster: LocalCluster) -> None:
    prompts: list[Any] = ["a", None, float("nan"), 7, 3.5, b"raw", True, [], "", "  ", "b", "c"]
    with Driver(echo_spec(), cluster=cluster, health=QUICK) as driver:
        results = driver.generate(prompts)
        assert [r.id for r in results] == list(range(len(prompts)))
        assert [r.id for r in results if r.ok] == [0, 10, 11]
        assert driver.generate([None, None])[1].ok is False
        assert driver.generate([]) == []
        with pytest.raises(ConfigError, match="not one str"):
            driver.generate("one text")
        with pytest.raises(UnknownOptionError, match="max_tokens"):
            driver.generate(["a"], max_tokens=3)


def test_leaving_a_stream_early_aborts_the_rows_in_flight(cluster: LocalCluster, echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, lengths=20, step_s=0.002, capacity=4)
    with Driver(spec, cluster=cluster, health=QUICK) as driver:
        for result in driver.stream(texts(1_000_000)):
            if result.id == 5:
                break
        wait_until(lambda: all(v.metrics.get("batches") == 0 for v in driver.workers()), 10, "batches were not aborted")
        assert len(driver.generate(["x"])) == 1
        prefixes = driver.client.run_on_scheduler(
            lambda dask_scheduler: [key for key in dask_scheduler.tasks if str(key).startswith("daskinfer-")]
        )
        assert prefixes == []


def test_streams_that_are_left_do_not_disturb_others(cluster: LocalCluster) -> None:
    """Dask fetches results for all who wait at once: giving up one batch must not lose another's."""
    with Driver(echo_spec(lengths=20, step_s=0.002, capacity=4), cluster=cluster, health=QUICK) as driver:
        for _ in range(8):
            for result in driver.stream(texts(1_000_000)):
                if result.id == 5:
                    break
            assert driver.generate(["x"])[0].ok


def test_a_held_stream_restores_order_in_bounded_memory(cluster: LocalCluster) -> None:
    """Row 0 takes far longer than the others; the buffer is far smaller than the answers."""
    spec = echo_spec(lengths=[400] + [1] * 9_999, step_s=0.002, capacity=4)
    policy = BatchPolicy(rows=4, order_bytes=2_000)
    with Driver(spec, cluster=cluster, health=QUICK, batch=policy) as driver:
        results = driver.generate([f"row {i}" for i in range(500)], max_new_tokens=1_000)
        assert [r.id for r in results] == list(range(500))
        assert all(r.ok for r in results)


def test_capacity_is_known_as_soon_as_a_worker_is_ready(cluster: LocalCluster) -> None:
    """With a capacity that only the next heartbeat tells, the first batches would have one row each."""
    with Driver(echo_spec(capacity=32, load_s=0.3), cluster=cluster, health=QUICK) as driver:
        driver.wait_until_ready()
        assert {view.capacity for view in driver.workers() if view.state == "ready"} == {32}


@pytest.mark.slow
def test_occupancy_of_a_ragged_job_through_the_driver(cluster: LocalCluster, echo_log: Path) -> None:
    """At least 95 % of the slots are used while the job has rows waiting anywhere, counted from the engines' own steps."""
    spec = echo_spec(
        capacity=32, lengths={"seed": 3, "low": 4, "high": 64}, step_s=0.03, log=echo_log, log_events=["step"]
    )
    with Driver(spec, cluster=cluster, health=QUICK) as driver:
        driver.wait_until_ready()
        wait_until(lambda: sum(v.state == "ready" for v in driver.workers()) == 2)
        assert sum(1 for _ in driver.stream(texts(1_000), ordered=False)) == 1_000
    by_engine: dict[int, list[tuple[int, ...]]] = {}
    for entry in read_log(echo_log):
        if entry.event == "step":
            by_engine.setdefault(entry.pid, []).append(entry.ids)
    assert len(by_engine) == 2
    used = steps = 0
    for step_ids in by_engine.values():
        first_seen: dict[int, int] = {}
        for number, ids in enumerate(step_ids):
            for row in ids:
                first_seen.setdefault(row, number)
        busy = step_ids[: max(first_seen.values())]  # after the last row has begun none waits
        used += sum(len(ids) for ids in busy)
        steps += len(busy)
    assert used / (steps * 32) >= 0.95


def test_two_streams_of_one_driver_share_the_slots(cluster: LocalCluster) -> None:
    with Driver(echo_spec(prefix="2 "), cluster=cluster, health=QUICK) as driver:
        first, second = driver.stream(texts(300)), driver.stream(texts(300))
        pairs = list(zip(first, second, strict=True))
        assert len(pairs) == 300
        assert all(a.id == b.id and a.ok and b.ok for a, b in pairs)


def test_an_engine_class_from_a_notebook_travels_by_value(cluster: LocalCluster) -> None:
    class Shout(BatchEngine):
        def load(self) -> None:
            self.mark = "!"

        def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
            return [str(r.input).upper() + self.mark if r.input != "no" else ValueError("not that") for r in requests]

    with Driver("shout", engine=Shout, cluster=cluster, health=QUICK) as driver:
        results = driver.generate(["a", "no", "b"])
    assert [getattr(r, "output", None) for r in results] == ["A!", None, "B!"]
    assert getattr(results[1], "message", "") == "ValueError: not that"


# ---------------------------------------------------------------- life of a driver


def test_the_model_is_unloaded_with_the_last_lease(cluster: LocalCluster, echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, prefix="lease ")
    with Client(cluster) as client:
        one = Driver(spec, cluster=client, health=QUICK).start()
        two = Driver(spec, cluster=client, health=QUICK).start()
        assert one.start() is one
        assert [r.ok for r in one.generate(["x"])] == [True]
        wait_until(lambda: sum(v.state == "ready" for v in two.workers()) == 2)
        one.stop()
        one.stop()
        assert spec.resource in plugin_names(client)
        assert [r.ok for r in two.generate(["x"])] == [True]
        two.stop()
        wait_until(lambda: spec.resource not in plugin_names(client))
        with pytest.raises(DaskinferError, match="not running"):
            one._running  # noqa: B018 - the property raises
    assert len(loads(echo_log)) == 2  # one per worker, for two drivers


def test_a_driver_that_vanishes_loses_its_lease(cluster: LocalCluster) -> None:
    spec = echo_spec(prefix="vanish ")
    with Client(cluster) as client:
        driver = Driver(spec, cluster=client, health=HealthPolicy(poll_s=0.1, lease_grace_s=1)).start()
        driver.wait_until_ready()
        client.loop.add_callback(driver._running._poller.cancel)  # type: ignore[union-attr]
        wait_until(lambda: spec.resource not in plugin_names(client), 15)


def test_attaching_by_address(cluster: LocalCluster) -> None:
    address = cluster.scheduler_address
    with Driver(echo_spec(prefix="by address "), cluster=address, health=QUICK) as driver:
        assert driver.generate(["x"])[0].ok
    with pytest.raises(ConfigError, match="cannot be scaled"):
        Driver(echo_spec(), cluster=address, workers=3).start()
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(ClusterError, match="no Dask scheduler"),
    ):
        Driver(echo_spec(), cluster="tcp://127.0.0.1:1").start()
    with pytest.raises(ConfigError, match="must be None, a scheduler address"):
        Driver(echo_spec(), cluster=3).start()


def test_settings_that_cannot_work_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"there are .*echo"):
        Driver("m", engine="no-such-engine")
    with pytest.raises(UnknownOptionError, match="dtyp"):
        Driver("m", dtyp="float32")
    with pytest.raises(ConfigError, match="isolation"):
        Driver("m", isolation="container")
    with dask.config.set({"daskinfer.batch.slots": 3}):
        assert Driver("m", engine="echo").batch.slots == 3


# ---------------------------------------------------------------- preflight


def test_workers_with_another_version_are_refused(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "__version__", "99.0")
    with pytest.raises(VersionError, match=r"pip install 'daskinfer==99\.0'"):
        Driver(echo_spec(), cluster=cluster).start()


def test_c42_a_model_that_does_not_fit_the_memory_limit_is_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(300_000_000)
    with LocalCluster(n_workers=1, threads_per_worker=2, memory_limit=400_000_000, dashboard_address=":0") as small:
        with pytest.raises(ResourceError, match=r"0\.30 GB .* memory limit of 0\.40 GB .* memory_limit"):
            Driver(str(tmp_path), cluster=small, engine="echo", isolation="thread").start()
        with Driver(str(tmp_path), cluster=small, engine="echo", health=QUICK) as driver:  # its own process: fine
            assert driver.generate(["x"])[0].ok


# ---------------------------------------------------------------- workers that come, go and fail


def test_no_worker_can_load(cluster: LocalCluster) -> None:
    with Driver(echo_spec(load_error="weights are torn"), cluster=cluster, health=QUICK) as driver:
        with pytest.raises(ModelLoadError, match="weights are torn"):
            driver.generate(["x"])
        with pytest.raises(ModelLoadError, match="weights are torn"):
            driver.wait_until_ready()


def test_one_worker_that_cannot_load_is_reported_and_gets_no_rows(cluster: LocalCluster, echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, load_fails_on=1, load_s=0.2)
    with Driver(spec, cluster=cluster, health=QUICK) as driver:
        results = driver.generate(list(texts(100)))
        assert all(r.ok for r in results)
        wait_until(lambda: sorted(v.state for v in driver.workers()) == ["failed", "ready"])
        [failed] = [v for v in driver.workers() if v.state == "failed"]
        assert failed.error
        assert failed.slots == 0


@pytest.mark.parametrize("load_s", [2.0, pytest.param(30.0, marks=[pytest.mark.slow, pytest.mark.timeout(180)])])
@pytest.mark.parametrize("isolation", ["process", pytest.param("thread", marks=pytest.mark.slow)])
def test_a_late_worker_that_loads_for_long_gets_no_rows_before(load_s: float, isolation: str, echo_log: Path) -> None:
    """With a worker-ttl far shorter than the load."""
    spec = echo_spec(isolation=isolation, log=echo_log, load_s=load_s, step_s=0.02, lengths=2, capacity=2)
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "5s" if load_s > 5 else "1s"}),
        local_cluster(1, dashboard_address=":0") as made,
        Driver(spec, cluster=made, health=QUICK) as driver,
    ):
        stream = driver.stream(texts(1_000_000))
        assert next(stream).ok
        made.scale(2)
        seen: dict[str, set[str]] = {}
        for result in stream:
            assert result.ok
            for view in driver.workers():
                seen.setdefault(view.address, set()).add(view.state)
                assert view.state == "ready" or view.metrics.get("steps", 0) == 0
            if sum(v.state == "ready" and v.metrics["steps"] > 20 for v in driver.workers()) == 2:
                break
        assert {"loading", "ready"} <= set().union(*seen.values())
        assert len(seen) == 2
        stream.close()  # type: ignore[attr-defined]
        workers = made.scheduler_info["workers"]
        assert len(workers) == 2
    assert len(loads(echo_log)) == 2  # nobody was killed while loading


def test_no_workers_at_all_is_said_in_time() -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address=":0") as empty,
        Driver(echo_spec(), cluster=empty, health=HealthPolicy(poll_s=0.1, start_timeout_s=0.5)) as driver,
    ):
        with pytest.raises(NoWorkersError, match="no workers; start some"):
            driver.generate(["x"])
        with pytest.raises(NoWorkersError, match="no worker"):
            driver.wait_until_ready(0.1)


@pytest.mark.slow
@pytest.mark.keeps_children
def test_c39_killed_workers_cost_retries_only(cluster: LocalCluster) -> None:
    spec = echo_spec(lengths=4, step_s=0.005, capacity=4, prefix="killed ")
    with Driver(spec, cluster=cluster, health=QUICK) as driver:
        wait_until(lambda: sum(v.state == "ready" for v in driver.workers()) == 2 if driver.workers() else False)
        results = []
        for result in driver.stream(texts(600), ordered=False):
            results.append(result)
            if len(results) == 100:
                pids = driver.client.run(os.getpid)
                os.kill(min(pids.values()), signal.SIGKILL)
        conservation(range(600), results)
        assert all(r.ok for r in results)


def test_c39_poison_rows_are_found_and_the_others_complete(cluster: LocalCluster, fault_dir: Path) -> None:
    spec = echo_spec(
        capacity=4, lengths=2, step_s=0.002, faults={"row 13.": "sigkill", "row 31.": "exit"}, faults_dir=fault_dir
    )
    with Driver(spec, cluster=cluster, health=QUICK, batch=BatchPolicy(rows=8)) as driver:
        results = driver.generate([f"row {i}." for i in range(40)])
        failed = {r.id: r for r in results if not r.ok}
        assert set(failed) == {13, 31}
        assert "SIGKILL" in failed[13].message  # type: ignore[union-attr]
        assert "exit code" in failed[31].message  # type: ignore[union-attr]
        wait_until(lambda: all(v.state == "ready" for v in driver.workers()))
        restarts = sum(v.metrics["restarts"] for v in driver.workers())
        assert 2 <= restarts <= 2 * (5 + 1)  # p · (log2(n) + 1) for n ≤ 32 suspects


def test_what_no_worker_has_is_said_at_start(cluster: LocalCluster) -> None:
    with pytest.raises(ResourceError, match=r"requires=\{'TPU': 1\}.*--resources"):
        Driver(echo_spec(), cluster=cluster, requires={"TPU": 1}).start()
    with pytest.raises(ResourceError, match=r"device='cuda:0': no worker sees a GPU"):
        Driver("echo", engine="echo", device="cuda:0", cluster=cluster).start()


def test_only_workers_with_the_required_resource_get_the_model(echo_log: Path) -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, resources={"TPU": 1}, dashboard_address=":0") as made,
        Driver(echo_spec(log=echo_log), cluster=made, health=QUICK, requires={"TPU": 1}) as driver,
    ):
        assert driver.generate(["x"])[0].ok  # on a worker with one thread, which gets what its slots need
        made.worker_spec[1] = {**made.new_spec, "options": {**made.new_spec["options"], "resources": {}}}
        made.sync(made._correct_state)
        wait_until(lambda: sorted(v.state for v in driver.workers()) == ["excluded", "ready"])
        assert all(r.ok for r in driver.generate(list(texts(50))))
    assert len(loads(echo_log)) == 1


def test_gpu_figures_are_reported_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.gpu_figures() == {}
    monkeypatch.setattr(nvml, "device_get_count", lambda: 1)
    monkeypatch.setattr(nvml, "real_time", lambda: {"utilization": 7, "memory-used": 1 << 30})
    assert worker.gpu_figures() == {"gpu_memory_bytes": 1 << 30, "gpu_utilization": 7}
    monkeypatch.setattr(nvml, "real_time", lambda: 1 / 0)
    assert worker.gpu_figures() == {}

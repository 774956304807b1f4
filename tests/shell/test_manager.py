"""The sketch's configuration, and workers one by one."""

from __future__ import annotations

import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from daskinfer import Driver, WorkerManager
from daskinfer.cluster import local_cluster
from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.driver.sketch import KNOWN, translated
from daskinfer.errors import ClusterError, ConfigError, NoWorkersError, ResourceError, UnknownOptionError
from daskinfer.records import Batch, Request
from daskinfer.testing import conservation, echo_spec, loads, wait_until

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5)
SKETCH: dict[str, Any] = {
    "model": "echo",
    "dtype": "bfloat16",
    "initial_worker_count": 2,
    "batch_size": 4,
    "compile": True,
    "actor_gpu": 1,
    "actor_cpu": 1,
    "trust_remote_code": False,
    "heartbeat_timeout": 10,
    "detection_interval": 1,
    "failure_threshold": 3,
    "worker_monitor_interval": 0.2,
    "schedule_interval": 0.01,
}


# ---------------------------------------------------------------- the configuration


def test_every_name_of_the_sketch_means_something() -> None:
    config = {**SKETCH, "actor_gpu": 0, "dtype": "float32", "compile": False, "ray_address": "tcp://scheduler:8786"}
    driver = Driver(config, engine="echo")
    assert (driver.spec.model, driver.spec.dtype, driver.spec.device, driver.spec.threads) == (
        "echo",
        "float32",
        "cpu",
        1,
    )
    assert driver.batch.rows == 4
    health = driver.health
    assert (health.heartbeat_timeout_s, health.poll_s) == (10, 0.2)
    assert (health.detection_interval_s, health.failure_threshold) == (1, 3)
    assert (driver._workers, driver._cluster) == (2, "tcp://scheduler:8786")
    assert Driver({"model": "echo", "actor_gpu": 0.5}, engine="echo").spec.device == "cuda:0"
    assert Driver({"model": "echo", "ray_address": "auto"}, engine="echo", workers=3)._workers == 3
    assert Driver({"model": "echo", "trust_remote_code": True}, engine="echo").spec.trust_remote_code


@pytest.mark.parametrize("name", ["ray_runtime_env", "object_store_memory", "compile"])
def test_what_dask_has_another_place_for_is_one_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"no effect: {name}: .*(Dask|no engine)") as caught:
        Driver({"model": "echo", name: {"pip": ["x"]} if name == "ray_runtime_env" else True}, engine="echo")
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("config", "kind", "said"),
    [
        (
            {"modelname": "x"},
            UnknownOptionError,
            "has no option 'modelname'; it has actor_cpu, actor_gpu, batch_size",
        ),
        ({}, ConfigError, "model=None"),
        ({"model": "echo", "batch_size": 0}, ConfigError, "batch_size=0"),
        ({"model": "echo", "initial_worker_count": True}, ConfigError, "initial_worker_count=True"),
        ({"model": "echo", "actor_gpu": 2}, ConfigError, "actor_gpu=2: a worker has one GPU"),
        ({"model": "echo", "actor_cpu": -1}, ConfigError, "actor_cpu=-1"),
        ({"model": "echo", "heartbeat_timeout": 0}, ConfigError, "heartbeat_timeout=0"),
        ({"model": "echo", "schedule_interval": "1"}, ConfigError, "schedule_interval='1'"),
        ({"model": "echo", "trust_remote_code": "no"}, ConfigError, "trust_remote_code='no'"),
        ({"model": "echo", "ray_address": "ray://head:10001"}, ConfigError, "address of a Dask scheduler"),
        ({"model": "echo", "ray_address": 8786}, ConfigError, "ray_address=8786"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(config: dict[str, Any], kind: type[Exception], said: str) -> None:
    with warnings.catch_warnings(), pytest.raises(kind, match=said):
        translated(config, BatchPolicy(), HealthPolicy())


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        Driver({"model": "echo", "num_gpus": 1})
    assert all(name in str(caught.value) for name in KNOWN)


@pytest.mark.cluster
def test_the_sketch_as_printed_without_gpus_is_one_error_before_any_load(cluster: LocalCluster, echo_log: Path) -> None:
    options = {"log": str(echo_log)}
    with pytest.warns(UserWarning, match="no engine here compiles"):
        driver = Driver(SKETCH, engine="echo", engine_options=options, cluster=cluster)
    with pytest.raises(ResourceError) as caught:
        driver.start()
    for named in ('"actor_gpu": 0 (it is 1)', '"dtype": "float32" (it is \'bfloat16\')', '"compile": False'):
        assert named in str(caught.value)
    assert loads(echo_log) == []
    driver.stop()


@pytest.mark.cluster
def test_the_sketchs_example_from_two_workers_to_three(echo_log: Path) -> None:
    config = {**SKETCH, "actor_gpu": 0, "dtype": "float32", "compile": False}
    driver = Driver(config, engine="echo", engine_options={"log": str(echo_log)})
    try:
        assert driver.start() is driver
        assert driver.start() is driver
        tasks = [driver.submit_task({"input_ids": [[1, 2, 3]], "max_new_tokens": 8}) for _ in range(20)]
        assert {driver.get_result(task, 60)["generated_text"] for task in tasks} == {"<1 2 3>"}
        driver.scale_workers(3)
        wait_until(lambda: sum(v.state == "ready" for v in driver.workers()) == 3, 60)
        task = driver.submit_task({"prompt": "hello"})
        assert driver.get_result(task, 60)["output_ids"] == list(b"<hello>")
    finally:
        driver.stop()
        driver.stop()
    assert len(loads(echo_log)) == 3


# ---------------------------------------------------------------- workers one by one


@pytest.fixture(scope="module")
def own() -> Iterator[LocalCluster]:
    made = local_cluster(1, dashboard_address=":0")
    yield made
    made.close()


@pytest.mark.cluster
@pytest.mark.keeps_children
def test_add_worker_and_remove_worker(own: LocalCluster) -> None:
    with Driver(echo_spec(lengths=4, step_s=0.01, capacity=4), cluster=own, health=QUICK) as driver:
        manager = driver.worker_manager
        assert isinstance(manager, WorkerManager)
        [first] = [view.address for view in manager.get_all_workers()]
        added = manager.add_worker()
        assert {view.address for view in manager.get_all_workers()} == {first, added}
        wait_until(lambda: manager.worker_status()[added].healthy)
        job = driver.submit([f"row {i}" for i in range(300)])
        next(iter(job))
        assert manager.remove_worker(added) == added  # while it has rows: they are run on the other
        assert [view.address for view in manager.get_all_workers()] == [first]
        results = job.result(60)
        conservation(range(300), results)
        assert all(r.ok for r in results)
        assert manager.remove_worker(manager.add_worker()) != first
        with pytest.raises(NoWorkersError, match=f"no worker 'tcp://nowhere:1'; there are: {first}"):
            manager.remove_worker("tcp://nowhere:1")
        assert len(own.worker_spec) == 1


@pytest.mark.cluster
@pytest.mark.keeps_children
def test_remove_worker_takes_the_idlest_and_may_take_the_last(own: LocalCluster) -> None:
    spec = echo_spec(lengths=200, step_s=0.02, capacity=4, prefix="idlest ")
    with Driver(spec, cluster=own, health=QUICK, batch=BatchPolicy(rows=1)) as driver:
        manager = driver.worker_manager
        manager.add_worker()
        wait_until(lambda: all(s.healthy for s in manager.worker_status().values()))
        driver.submit_task({"prompt": "long", "max_new_tokens": 200})
        wait_until(lambda: sum(s.load > 0 for s in manager.worker_status().values()) == 1)
        [idle] = [name for name, s in manager.worker_status().items() if s.load == 0]
        assert manager.get_worker().address == idle
        assert manager.remove_worker() == idle
        manager.remove_worker()
        with pytest.raises(NoWorkersError, match="no healthy worker: none at all"):
            manager.get_worker()
        with pytest.raises(NoWorkersError, match="there is no worker"):
            manager.remove_worker()
        manager.add_worker()


@pytest.mark.cluster
def test_get_worker_and_worker_status_and_balance_load(cluster: LocalCluster) -> None:
    with Driver(echo_spec(capacity=4, prefix="status "), cluster=cluster, health=QUICK) as driver:
        manager = driver.worker_manager
        wait_until(lambda: all(s.healthy for s in manager.worker_status().values()))
        status = manager.worker_status()
        assert set(status) == {view.address for view in manager.get_all_workers()}
        for one in status.values():
            assert one.state == "ready"
            assert 0 <= one.last_heartbeat_s < 30
            assert one.cpu_percent is not None
            assert one.ram_bytes is not None
            assert one.ram_bytes > 1e6
            assert one.engine_ram_bytes is not None
            assert one.engine_ram_bytes > 1e6
            assert (one.gpu_memory_bytes, one.gpu_utilization) == (None, None)
            assert (one.load, one.error) == (0.0, "")
        batch = Batch("b", (Request(0, "a"), Request(1, "b")))
        assert manager.get_worker(batch).address in status
        assert manager.get_worker(8).address in status
        assert manager.balance_load() == dict.fromkeys(status, 0.0)
        assert driver.generate(["x"])[0].ok


@pytest.mark.cluster
def test_worker_status_of_one_that_could_not_load_is_unhealthy(cluster: LocalCluster) -> None:
    with Driver(echo_spec(load_error="weights are torn"), cluster=cluster, health=QUICK) as driver:
        manager = driver.worker_manager
        wait_until(lambda: {s.state for s in manager.worker_status().values()} == {"failed"})
        assert all(not s.healthy and "weights are torn" in s.error for s in manager.worker_status().values())
        with pytest.raises(NoWorkersError, match=r"no healthy worker: .* is failed"):
            manager.get_worker()


@pytest.mark.cluster
def test_a_worker_not_heard_of_is_unhealthy(cluster: LocalCluster) -> None:
    with Driver(echo_spec(prefix="silent "), cluster=cluster, health=QUICK) as driver:
        driver.wait_until_ready()
        driver._running.health = replace(QUICK, heartbeat_timeout_s=0.001)
        wait_until(lambda: any(not s.healthy for s in driver.worker_manager.worker_status().values()))


@pytest.mark.cluster
def test_a_bare_address_cannot_be_scaled(cluster: LocalCluster) -> None:
    with Driver(echo_spec(prefix="bare "), cluster=cluster.scheduler_address, health=QUICK) as driver:
        actions: list[Callable[[], object]] = [lambda: driver.scale(3), lambda: driver.scale_workers(3)]
        for action in (*actions, driver.worker_manager.add_worker):
            with pytest.raises(ConfigError, match="bare scheduler address"):
                action()
        with pytest.raises(ConfigError, match=r"scale\(-1\)"):
            driver.scale(-1)


@pytest.mark.cluster
def test_a_worker_that_does_not_come_or_go_is_said_in_time(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driver(echo_spec(prefix="slow "), cluster=cluster, health=QUICK) as driver:
        manager = driver.worker_manager
        monkeypatch.setattr(driver, "scale", lambda n: None)
        with pytest.raises(ClusterError, match=r"no worker came within timeout_s=0\.1"):
            manager.add_worker(timeout_s=0.1)
        monkeypatch.setattr(Client, "retire_workers", lambda *args, **kwargs: None)
        monkeypatch.setattr(cluster, "worker_spec", {})
        with pytest.raises(ClusterError, match=r"was not gone within timeout_s=0\.1"):
            manager.remove_worker(timeout_s=0.1)


@pytest.mark.cluster
def test_c58_a_taken_dashboard_port_is_replaced_and_the_link_has_the_true_one(cluster: LocalCluster) -> None:
    schedulers: list[Any] = [cluster.scheduler]
    taken = schedulers[0].http_server.port
    with local_cluster(1, dashboard_address=f":{taken}") as other, Driver(echo_spec(), cluster=other) as driver:
        assert driver.generate(["x"])[0].ok
        schedulers.append(other.scheduler)
        port = schedulers[1].http_server.port
        assert port != taken
        assert f":{port}/" in driver.dashboard_link
        with urllib.request.urlopen(driver.dashboard_link.replace("status", "health"), timeout=10) as answer:
            assert answer.read() == b"ok"

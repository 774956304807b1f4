"""Making a cluster: nothing is left behind when it fails, and why a worker could not start is said."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import LocalCluster
from distributed.deploy.spec import SpecCluster

import daskinfer.cluster
from daskinfer import preflight
from daskinfer.cluster import Connection, _preloads, _worker_settings, connect, local_cluster
from daskinfer.config import ModelSpec
from daskinfer.driver import Driver
from daskinfer.errors import ClusterError, VersionError
from daskinfer.preflight import check_workers


def fails(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def open_clusters() -> set[SpecCluster]:
    return {made for made in SpecCluster._instances if made.status.name not in ("closed", "closing")}


@pytest.mark.cluster
@pytest.mark.parametrize("step", ["scale", "Client"])
def test_a_cluster_that_is_interrupted_while_it_is_made_is_closed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_clusters()
    monkeypatch.setattr(daskinfer.cluster, step, fails)
    if step == "Client":
        monkeypatch.setattr(daskinfer.cluster, "scale", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        connect(None)
    assert open_clusters() == before


@pytest.mark.cluster
def test_why_a_worker_could_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_clusters()
    monkeypatch.setattr(daskinfer.cluster, "IGNORE_SIGINT", "raise ValueError('no luck today')")
    with pytest.raises(ClusterError, match=r"1 of 1 workers could not start: .*no luck today"):
        local_cluster(1, dashboard_address=":0")
    assert open_clusters() == before


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
def test_the_cluster_is_closed_though_its_client_cannot_be(fault: type[BaseException]) -> None:
    closed: list[str] = []

    def broken() -> None:
        raise fault

    cluster: Any = SimpleNamespace(close=lambda: closed.append("cluster"))
    client: Any = SimpleNamespace(close=broken)
    with pytest.raises(fault):
        Connection(client, cluster, owns_client=True, owns_cluster=True).close()
    assert closed == ["cluster"]


def test_stopping_a_driver_closes_its_connection_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    driver = Driver("echo", engine="echo")
    driver._dispatcher = SimpleNamespace(stop=None)  # type: ignore[assignment]
    driver._connection = SimpleNamespace(close=lambda: closed.append("connection"))  # type: ignore[assignment]
    monkeypatch.setattr(driver, "_sync", fails)
    with pytest.raises(KeyboardInterrupt):
        driver.stop()
    assert closed == ["connection"]
    assert driver.client is None


def test_the_environment_is_put_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def start() -> None:
        with _worker_settings():
            os.environ["OMP_NUM_THREADS"] = "1"
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the one raised above
        start()
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("preload", "argv", "found"),
    [
        ([], [], ([], [])),
        ("mine", [], (["mine"], [[]])),
        (["a", "b"], ["--x"], (["a", "b"], [["--x"], ["--x"]])),
        (["a", "b"], [["--x"], []], (["a", "b"], [["--x"], []])),
        (None, None, ([], [])),
    ],
)
def test_preloads_of_the_user_stay(preload: Any, argv: Any, found: Any) -> None:
    with dask.config.set({"distributed.worker.preload": preload, "distributed.worker.preload-argv": argv}):
        assert _preloads() == found
        with _worker_settings():
            assert dask.config.get("distributed.worker.preload")[1:] == found[0]
            assert dask.config.get("distributed.worker.preload-argv") == [[], *found[1]]


@pytest.mark.parametrize(("said", "used"), [(None, "100ms"), ("10ms", "100ms"), ("20ms", "20ms"), ("1s", "1s")])
def test_dask_looks_out_more_seldom_unless_the_user_says_how_often(said: str | None, used: str) -> None:
    name = "distributed.worker.profile.interval"
    with dask.config.set({name: said} if said else {}), _worker_settings():
        assert dask.config.get(name) == used


def _old() -> str | None:
    return "0.0.1"


@pytest.mark.cluster
def test_a_scheduler_with_another_version_is_refused(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_version", _old)
    connection = connect(cluster)
    try:
        with pytest.raises(VersionError, match=r"but scheduler: 0\.0\.1; on the scheduler") as said:
            check_workers(connection.client, ModelSpec("echo", engine="echo"))
        assert said.value.found == {"scheduler": "0.0.1"}
    finally:
        connection.close()

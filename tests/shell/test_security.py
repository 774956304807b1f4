"""Encrypted clusters; prompts and secrets are nowhere but where they belong."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import fsspec
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from distributed.security import Security
from fsspec.implementations.memory import MemoryFileSystem

from daskinfer.cluster import connect
from daskinfer.config import HealthPolicy, RetryPolicy
from daskinfer.driver import Driver
from daskinfer.errors import ClusterError, SourceError
from daskinfer.records import Batch, Completed, Event, Request
from daskinfer.storage import open_source
from daskinfer.testing import echo_spec
from tests.chaos.processes import Place, ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUICK = HealthPolicy(poll_s=0.1)
CANARY = "xyzzy-canary"
SECRET = "plugh-secret"


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def encrypted() -> Iterator[LocalCluster]:
    """A cluster whose processes speak to one another through TLS, with certificates made for it."""
    made = LocalCluster(
        n_workers=1, threads_per_worker=1, security=Security.temporary(), protocol="tls", dashboard_address=":0"
    )
    yield made
    made.close()


def test_a_run_on_a_tls_cluster(encrypted: LocalCluster, tmp_path: Path) -> None:
    rows = [f"row {i}" for i in range(100)]
    with Driver(echo_spec(), cluster=encrypted, health=QUICK) as driver:
        assert driver.run(rows, tmp_path / "out").completed == len(rows)
        assert driver.client is not None
        information = driver.client.scheduler_info()
    assert [address[:6] for address in (information["address"], *information["workers"])] == ["tls://"] * 2
    assert list(pd.read_parquet(tmp_path / "out")["output"]) == [f"<{row}>" for row in rows]


def test_a_tls_cluster_by_its_address(encrypted: LocalCluster, tmp_path: Path) -> None:
    """With certificates in Dask's configuration, as for the command line; without them it is said what is missing."""
    address = encrypted.scheduler_address
    with dask.config.set({"distributed.comm.timeouts.connect": "3s"}):
        with pytest.raises(ClusterError, match=r"no Dask scheduler answers at 'tls://.*distributed\.comm\.tls"):
            connect(address)
        with pytest.raises(ClusterError, match="no Dask scheduler answers"):
            connect(address.replace("tls://", "tcp://"))
    security: Any = encrypted.security
    files = {"ca-file": security.tls_ca_file, "key": security.tls_client_key, "cert": security.tls_client_cert}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {
        "distributed.comm.tls.ca-file": str(tmp_path / "ca-file"),
        "distributed.comm.tls.client.key": str(tmp_path / "key"),
        "distributed.comm.tls.client.cert": str(tmp_path / "cert"),
    }
    with dask.config.set(settings), Driver(echo_spec(), cluster=address, health=QUICK) as driver:
        assert [result.ok for result in driver.generate(["a", "b"])] == [True, True]


# ---------------------------------------------------------------- prompts in logs


@pytest.mark.timeout(180)
def test_prompts_are_in_no_log_of_workers_and_scheduler(tmp_path: Path, fault_dir: Path) -> None:
    """Whatever goes wrong: rows that fail, engines that die, workers that are lost, code that prints and that raises."""
    faults = {"wrong": "value_error", "again": ["connection_error", "ok"], "deadly": "segv", "leaving": "system_exit"}
    words = [*faults, *(f"row {i}" for i in range(40))]
    prompts = [f"{CANARY} {word}" for word in words]
    with ProcessCluster(tmp_path, [Place()]) as cluster:
        retry = RetryPolicy(backoff_s=0.05)
        spec = echo_spec(faults=faults, faults_dir=fault_dir, capacity=4)
        with Driver(spec, cluster=cluster.address, health=QUICK, retry=retry) as driver:
            results = dict(zip(words, driver.generate(prompts), strict=True))
        assert {word for word, result in results.items() if not result.ok} == {"wrong", "deadly", "leaving"}
        for engine, isolation in (("Telltale", "process"), ("Quoting", "thread"), ("Unpicklable", "process")):
            path = f"tests.shell.engines:{engine}Engine"
            with Driver("m", engine=path, isolation=isolation, cluster=cluster.address, health=QUICK) as driver:
                assert not driver.generate(prompts[:1])[0].ok
        with Client(cluster.address) as client:
            future = client.submit(_raises, batch_of(prompts), pure=False, retries=0)
            with pytest.raises(ZeroDivisionError):
                future.result()
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert set(logs) == {"scheduler.log", "worker0.log"}
    assert "SIGSEGV; restarting it" in logs["worker0.log"]
    assert "ZeroDivisionError" in logs["worker0.log"]
    for name, text in logs.items():
        lines = [line for line in text.splitlines() if CANARY in line]
        assert lines == [], name


def batch_of(prompts: list[str]) -> Batch:
    return Batch("a-batch", tuple(Request(i, prompt, system=prompt) for i, prompt in enumerate(prompts)))


def _raises(batch: Batch) -> None:
    raise ZeroDivisionError


# ---------------------------------------------------------------- secrets


def test_secrets_of_the_drivers_environment_stay_there(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DASK_DASKINFER_SECRET"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setitem(fsspec.config.conf, "memory", {"storage_options": {"password": SECRET}})
    events: list[Event] = []
    with Driver(echo_spec(), cluster=cluster, health=QUICK) as driver:
        report = driver.run(["a", "b"], tmp_path / "out", observers=[events.append])
        assert driver.client is not None
        plugins: dict[str, bytes] = driver.client.run_on_scheduler(_plugins)
        logged: str = driver.client.run_on_scheduler(_logged)
    assert any(name.startswith("daskinfer-") for name in plugins)
    told = [repr(events), json.dumps(report.to_dict()), str(report), logged]
    told += [path.read_text() for path in (tmp_path / "out").glob("*.json")]
    told += [repr(pickle.loads(plugin).__dict__) for plugin in plugins.values()]
    assert len(told) >= 6
    for text in told:
        assert SECRET not in text
    assert all(SECRET.encode() not in plugin for plugin in plugins.values())


def _plugins(dask_scheduler: Any) -> dict[str, bytes]:
    return dict(dask_scheduler.worker_plugins)


def _logged(dask_scheduler: Any) -> str:
    return repr({topic: dask_scheduler.get_events(topic) for topic in list(dask_scheduler._broker._topics)})


class KeptFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Files whose paths are whole URLs, as those of a web server are."""

    protocol = "kept"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        return name


def test_passwords_in_urls_are_in_no_manifest_and_no_message(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptFileSystem, "store", {})
    fsspec.register_implementation("kept", KeptFileSystem, clobber=True)
    url = f"kept://me:{SECRET}@there/in.jsonl"
    with fsspec.open(url, "w") as file:
        file.write('{"text": "a"}\n{"text": "b"}\n')
    with Driver(echo_spec(), cluster=cluster, health=QUICK) as driver:
        assert driver.run(url, tmp_path / "out", limit=1).completed == 1
        assert driver.run(url, tmp_path / "out", resume=True).completed == 1
    manifest = (tmp_path / "out/_manifest.json").read_text()
    assert "kept://there/in.jsonl" in manifest
    assert SECRET not in manifest
    for wrong in (url.replace("in.jsonl", "none.jsonl"), f"nothing://me:{SECRET}@there/in.csv"):
        with pytest.raises(SourceError) as refused:
            open_source(wrong)
        assert SECRET not in str(refused.value)


def test_the_engines_process_has_the_token_of_its_worker(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token belongs into the workers' environment; the driver's is not passed on."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with Driver("m", engine="tests.shell.engines:TokenEngine", cluster=cluster, health=QUICK) as driver:
        [before] = driver.generate(["a"])
    assert isinstance(before, Completed)
    assert before.output != SECRET
    assert os.environ["HF_TOKEN"] == SECRET

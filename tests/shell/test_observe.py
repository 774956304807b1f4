"""What the scheduler shows of jobs: the page's data, JSON, Prometheus; and numbers that agree wherever they stand."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import dask
import pandas as pd
import psutil
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

from daskinfer.cli import cli
from daskinfer.cluster import local_cluster
from daskinfer.config import HealthPolicy, RetryPolicy
from daskinfer.dashboard.page import DOCUMENTS
from daskinfer.dashboard.serving import NO_BOKEH
from daskinfer.driver import Driver
from daskinfer.records import Noted
from daskinfer.testing import call_counts, echo_spec, wait_until

pytestmark = pytest.mark.cluster
QUICK = HealthPolicy(poll_s=0.1)


def get(cluster: LocalCluster, path: str) -> str:
    with urlopen(str(cluster.dashboard_link).replace("/status", path), timeout=10) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def told(cluster: LocalCluster, driver: Driver) -> dict[str, Any]:
    models = json.loads(get(cluster, "/daskinfer.json"))["models"]
    return next(model for model in models if model["key"] == driver.spec.key)


def ended(cluster: LocalCluster, driver: Driver) -> dict[str, Any]:
    """What is shown of a driver's job once that is done."""
    found = wait_until(lambda: [job for job in told(cluster, driver)["jobs"] if job["state"] == "done"])
    return dict(found[0])


def driver_for(cluster: LocalCluster, **options: Any) -> Driver:
    return Driver(echo_spec(**options), cluster=cluster, health=QUICK, retry=RetryPolicy(backoff_s=0.05))


@pytest.fixture
def plain_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A running scheduler that knew nothing of daskinfer when it was started."""
    from distributed.dashboard.scheduler import applications

    for path in DOCUMENTS:
        monkeypatch.delitem(applications, path, raising=False)
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as made:
        yield made


# ---------------------------------------------------------------- where it is shown


def test_a_cluster_that_we_make_has_the_page_and_lists_its_parts(cluster: LocalCluster) -> None:
    with driver_for(cluster, prefix="page") as driver:
        driver.generate(["a"])
        assert 'id="daskinfer"' in get(cluster, "/daskinfer")
        assert 'href="daskinfer"' in get(cluster, "/status")
    listed = set(json.loads(get(cluster, "/individual-plots.json")).values())
    assert set(DOCUMENTS) - {"/daskinfer"} <= listed
    for path in DOCUMENTS:
        assert "bokeh" in get(cluster, path)


def test_a_scheduler_that_runs_already_gets_the_page_and_keeps_what_it_showed(plain_cluster: LocalCluster) -> None:
    with pytest.raises(OSError, match="404"):
        get(plain_cluster, "/daskinfer.json")
    with driver_for(plain_cluster, isolation="thread") as driver:
        driver.generate(["a", "b"])
    for path in DOCUMENTS:
        assert "bokeh" in get(plain_cluster, path)
    assert 'href="daskinfer"' in get(plain_cluster, "/daskinfer")
    wait_until(lambda: not told(plain_cluster, driver)["loaded"])
    model = told(plain_cluster, driver)
    (job,) = model["jobs"]
    assert (job["state"], job["snapshot"]["done"], model["model"]) == ("done", 2, "echo")
    assert [worker["state"] for worker in model["workers"]] == ["unloaded"]


def test_several_models_and_jobs_are_kept_apart(cluster: LocalCluster) -> None:
    with driver_for(cluster, prefix="one") as one, driver_for(cluster, prefix="two") as two:
        jobs = [one.submit(["a"] * 3), one.submit(["b"] * 4), two.submit(["c"] * 5)]
        for job in jobs:
            job.result(timeout=60)

        def counts(driver: Driver) -> list[tuple[str, int]]:
            return [(job["name"], job["snapshot"]["done"]) for job in told(cluster, driver)["jobs"]]

        wait_until(lambda: sorted(counts(one)) == sorted([(jobs[0].name, 3), (jobs[1].name, 4)]))
        wait_until(lambda: counts(two) == [(jobs[2].name, 5)])


def test_c58_without_bokeh_the_job_runs_and_one_line_says_so(
    plain_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.server", None)
    notes: list[str] = []
    with driver_for(plain_cluster, isolation="thread", prefix="bare") as driver:
        report = driver.run(
            pd.DataFrame({"text": ["a", "b"]}),
            tmp_path / "out",
            columns="text",
            observers=[lambda event: notes.append(event.message) if isinstance(event, Noted) else None],
        )
        assert told(plain_cluster, driver)["jobs"]
    assert report.completed == 2
    assert notes == [NO_BOKEH]


def test_a_cluster_without_a_web_page_runs_jobs(tmp_path: Path) -> None:
    with (
        LocalCluster(
            n_workers=1, processes=False, dashboard_address=":0", scheduler_kwargs={"dashboard": False}
        ) as cluster,
        driver_for(cluster, isolation="thread") as driver,
    ):
        assert [result.ok for result in driver.generate(["a"])] == [True]


# ---------------------------------------------------------------- numbers


def test_row_counters_agree_with_retries_and_failures_and_work_adds_up(
    cluster: LocalCluster, tmp_path: Path, fault_dir: Path, echo_log: Path
) -> None:
    texts = [f"{'bad' if n % 50 == 3 else 'busy' if n % 20 == 5 else 'row'} {n}" for n in range(400)]
    faults = {"bad": "value_error", "busy": ["connection_error", "ok"]}
    with driver_for(cluster, faults=faults, faults_dir=fault_dir, log=echo_log, log_events=["finish"]) as driver:
        report = driver.run(pd.DataFrame({"text": texts}), tmp_path / "out", columns="text")
        job = ended(cluster, driver)
    frame = pd.read_parquet(tmp_path / "out")
    shown = job["snapshot"]
    assert len(frame) == report.rows == shown["done"] == report.committed == shown["committed"] == 400
    assert int(frame["error"].notna().sum()) == report.failed == shown["failed"] == 8
    assert report.completed == shown["completed"] == 392
    assert report.retried == shown["retried"] == sum(text.startswith("busy") for text in texts)
    assert report.sent == report.answered == report.rows + report.retried
    assert sum(call_counts(echo_log).values()) == report.completed
    written = json.loads((tmp_path / "out" / "_report.json").read_text())
    assert {name: written[name] for name in ("rows", "completed", "failed", "retried", "sent", "answered")} == {
        name: getattr(report, name) for name in ("rows", "completed", "failed", "retried", "sent", "answered")
    }


@pytest.fixture
def own_cluster() -> Iterator[LocalCluster]:
    """One whose workers may be killed."""
    made = local_cluster(2, dashboard_address=":0")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.keeps_children
def test_row_counters_agree_when_a_worker_is_killed(own_cluster: LocalCluster, tmp_path: Path, echo_log: Path) -> None:
    spec = {"capacity": 8, "step_s": 0.02, "lengths": {"seed": 0, "low": 2, "high": 20}, "prefix": "killed"}
    frame = pd.DataFrame({"text": [f"row {n}" for n in range(500)]})
    with driver_for(own_cluster, **spec, log=echo_log, log_events=["finish"]) as driver:
        ready = driver.wait_until_ready()
        reports: list[Any] = []
        run = threading.Thread(target=lambda: reports.append(driver.run(frame, tmp_path / "out", columns="text")))
        run.start()
        wait_until(lambda: sum(call_counts(echo_log).values()) > 60, 30)
        nanny = next(w for w in own_cluster.workers.values() if w.worker_address == ready[0].address)
        psutil.Process(nanny.pid).kill()
        seen = wait_until(
            lambda: [w for w in told(own_cluster, driver)["workers"] if w["state"] in ("dead", "replaced")], 30
        )
        assert [worker["address"] for worker in seen] == [ready[0].address]
        wait_until(lambda: any(w["state"] == "replaced" for w in told(own_cluster, driver)["workers"]), 60)
        run.join(100)
        (report,) = reports
        job = ended(own_cluster, driver)
    written = pd.read_parquet(tmp_path / "out")
    assert len(written) == report.rows == report.completed == job["snapshot"]["done"] == 500
    assert report.sent == report.rows + report.retried
    computed = call_counts(echo_log)  # work: Dask itself runs a batch again whose result was lost before it was fetched
    assert set(computed) == set(range(500))
    assert report.timeline is not None
    assert "lost" in {span.state for span in report.timeline.workers[ready[0].address]}


def test_messages_are_shown_only_when_asked_for(cluster: LocalCluster, fault_dir: Path) -> None:
    def shown(prefix: str) -> dict[str, Any]:
        faults = {"secret": "value_error"}
        with driver_for(cluster, faults=faults, faults_dir=fault_dir / prefix, prefix=prefix) as driver:
            driver.generate(["my secret", "fine"])
            job = ended(cluster, driver)
            return dict(job["snapshot"]["errors"][0])

    error = shown("quiet")
    assert (error["id"], error["kind"], error["message"]) == (0, "error", "")
    assert error["worker"].startswith("tcp://")
    with dask.config.set({"daskinfer.show.messages": True}):
        assert "scripted fault" in shown("loud")["message"]


# ---------------------------------------------------------------- for other programs


def values(text: str, name: str) -> dict[str, float]:
    """The samples of one metric, by their labels."""
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{([^}}]*)}} (\S+)$", text, re.MULTILINE)}


def test_prometheus_on_scheduler_and_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with driver_for(cluster, prefix="metrics", step_s=0.01) as driver:
        driver.wait_until_ready()
        report = driver.run(pd.DataFrame({"text": ["a b", "c"] * 40}), tmp_path / "answers", columns="text")

        def completed() -> float | None:
            lines = values(get(cluster, "/metrics"), "daskinfer_rows_completed_total")
            return next((value for labels, value in lines.items() if 'run="answers"' in labels and value == 80), None)

        assert wait_until(completed) == report.completed
        with Client(cluster) as client:
            workers = client.scheduler_info(n_workers=-1)["workers"]
        read = steps = 0.0
        for worker in workers.values():
            with urlopen(f"http://{worker['host']}:{worker['services']['dashboard']}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            assert "dask_worker" in text
            read += sum(values(text, "daskinfer_prompt_tokens_total").values())
            steps += sum(values(text, "daskinfer_step_seconds_count").values())
            assert set(values(text, "daskinfer_engine_ready").values()) == {1.0}
        assert read >= report.usage.prompt_tokens
        assert steps > 0
    assert 'state="unloaded"' in get(cluster, "/metrics")


def test_the_grafana_dashboard_asks_for_what_there_is() -> None:
    from daskinfer.dashboard import prometheus

    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "daskinfer.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"daskinfer_\w+", target["expr"])
    }
    source = Path(prometheus.__file__).read_text()
    assert len(asked) >= 10
    for name in asked:
        bare = re.sub(r"_(total|bucket|count|sum)$", "", name.removeprefix("daskinfer_"))
        assert f'"{bare}"' in source or bare.endswith(("_per_second", "_ratio")), name


def test_top_shows_the_cluster_in_a_terminal(cluster: LocalCluster) -> None:
    with driver_for(cluster, prefix="top") as driver:
        driver.submit(["a"] * 5).result(timeout=60)
        wait_until(lambda: told(cluster, driver)["jobs"])
        address = str(cluster.dashboard_link)
        shown = CliRunner().invoke(cli, ["top", "--once", address], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert "echo" in shown.output
    assert "ready" in shown.output
    assert "5/5" in shown.output

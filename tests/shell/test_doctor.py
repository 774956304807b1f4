"""What the doctor says of clusters."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import LocalCluster

from daskinfer import doctor
from daskinfer.cli import cli
from daskinfer.doctor import DISTRIBUTED, examine, judge
from daskinfer.version import __version__

HEALTHY: dict[str, Any] = {
    "worker": True,
    "version": __version__,
    "distributed": DISTRIBUTED,
    "python": platform.python_version(),
    "torch": "2.13.0",
    "cuda": True,
    "cores": 4,
    "host": "a",
    "nthreads": 12,
    "gpus": 0,
    "memory_limit": 0,
    "used": 100_000_000,
    "available": 8_000_000_000,
    "daemon": False,
    "spill": 0,
    "env": {},
}
CENTRAL = {"distributed": DISTRIBUTED, "bokeh": True, "dashboard": "on port 8787"}


def test_a_healthy_cluster_has_no_findings() -> None:
    assert judge({"w": HEALTHY}, 1_000_000, CENTRAL) == []
    assert set(examine(None)) == set(HEALTHY)


@pytest.mark.parametrize(
    ("change", "what", "wrong"),
    [
        ({"version": None}, "daskinfer is not installed", True),
        ({"version": "0.0.1"}, "daskinfer is 0.0.1", True),
        ({"distributed": "2020.1"}, "distributed is 2020.1", True),
        ({"python": "3.1.9"}, "Python is 3.1.9", True),
        ({"torch": None}, "torch is not installed", True),
        ({"gpus": 2, "cuda": False}, "built without CUDA", True),
        ({"nthreads": 1}, "1 thread (nthreads), and 4 cores", True),
        ({"nthreads": 2}, "2 threads (nthreads)", True),
        ({"memory_limit": 600_000_000}, "memory_limit is 600 MB", True),
        ({"available": 1_000_000_000}, "1,000 MB are available, and the model needs 2,000 MB", True),
        ({"env": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS=1", False),
        ({"env": {"MALLOC_TRIM_THRESHOLD_": "65536"}}, "MALLOC_TRIM_THRESHOLD_=65536", False),
        ({"daemon": True}, "daemonic", False),
        ({"memory_limit": 64 << 30, "spill": 0.7}, "spills to disk at 70%", False),
    ],
)
def test_each_finding_says_what_it_costs_and_how_to_mend_it(change: dict[str, Any], what: str, wrong: bool) -> None:
    [finding] = judge({"w": {**HEALTHY, **change}}, 2_000_000_000, CENTRAL)
    assert finding.where == "w"
    assert what in finding.what
    assert finding.wrong is wrong
    assert finding.cost
    assert finding.remedy
    assert str(finding).startswith("wrong: w: " if wrong else "note: w: ")


def test_what_is_wrong_comes_first() -> None:
    findings = judge({"w": {**HEALTHY, "daemon": True, "version": None}}, 0, {**CENTRAL, "bokeh": False})
    assert [finding.wrong for finding in findings] == [True, False, False]
    assert judge({}, 0, CENTRAL)[0].what == "it has no workers"
    assert "2020.1" in judge({"w": HEALTHY}, 0, {**CENTRAL, "distributed": "2020.1"})[0].what


@pytest.mark.cluster
def test_a_cluster_with_one_thread_little_memory_and_another_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "__version__", "99.0")
    with LocalCluster(n_workers=1, threads_per_worker=1, memory_limit=600_000_000, dashboard_address=":0") as broken:
        done = CliRunner().invoke(cli, ["doctor", "--scheduler", broken.scheduler_address])
    assert done.exit_code == 1
    for named in ("1 thread (nthreads)", "memory_limit is 600 MB", "here it is 99.0", "pip install 'daskinfer==99.0'"):
        assert named in done.output
    assert "3 wrong" in done.output


@pytest.mark.cluster
def test_a_cluster_as_the_driver_makes_it_is_in_order(cluster: LocalCluster) -> None:
    done = CliRunner().invoke(cli, ["doctor", "--scheduler", cluster.scheduler_address])
    assert done.exit_code == 0, done.output
    assert "0 wrong" in done.output


def test_this_machine_is_in_order() -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0, done.output
    assert f"daskinfer {__version__}" in done.output

"""Rows that kill, hang or leave their engine: each fails alone and says why, and the others do not notice."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from distributed import LocalCluster

from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.driver import Driver
from daskinfer.records import Event, Failed, RowsRetried
from daskinfer.testing import conservation, echo_spec, loads, read_log, wait_until

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5, step_timeout_s=1)
CAUSES = {
    "segv": "SIGSEGV",
    "exit": "exit code 1",
    "sigkill": "SIGKILL (the kernel does that when memory runs out)",
    "hang": "no step ended within step_timeout_s=1 s",
    "system_exit": "SystemExit",
    "raise:builtins.KeyboardInterrupt": "KeyboardInterrupt",
    "raise:builtins.BaseException": "BaseException",
}


@pytest.mark.slow
def test_c39_poison_of_every_kind_several_in_one_batch(cluster: LocalCluster, fault_dir: Path, echo_log: Path) -> None:
    places = dict(zip([3, 5, 6, 40, 90, 91, 119], CAUSES, strict=True))  # three of them in the first batch
    texts = [f"row {i} {f'<{places[i]}>' if i in places else ''}" for i in range(120)]
    spec = echo_spec(
        capacity=8,
        faults={f"<{kind}>": kind for kind in CAUSES},
        faults_dir=fault_dir,
        log=echo_log,
        log_events=["load"],
    )
    with Driver(spec, cluster=cluster, health=QUICK, batch=BatchPolicy(rows=8, slots=2)) as driver:
        results = driver.generate(texts)
    conservation(range(120), results)
    failed = {r.id: r for r in results if isinstance(r, Failed)}
    assert set(failed) == set(places)
    for row, kind in places.items():
        assert CAUSES[kind] in failed[row].message
        assert failed[row].kind == ("engine_hung" if kind == "hang" else "engine_died")
    restarts = len(loads(echo_log)) - 2
    assert len(places) <= restarts <= len(places) * (math.log2(2 * 8) + 1)


def test_a_probe_is_alone_on_one_worker_and_the_other_goes_on(
    cluster: LocalCluster, fault_dir: Path, echo_log: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    spec = echo_spec(
        capacity=8, step_s=0.01, faults={"row 20.": "exit"}, faults_dir=fault_dir, log=echo_log, log_events=["step"]
    )
    rows = [{"text": f"row {i}."} for i in range(800)]
    with Driver(spec, cluster=cluster, health=QUICK, batch=BatchPolicy(rows=8)) as driver:
        wait_until(lambda: [v.state for v in driver.workers()] == ["ready", "ready"], 60)
        report = driver.run(rows, tmp_path / "out", columns="text", observers=[events.append])
    assert (report.completed, report.failed) == (799, 1)
    steps = [entry for entry in read_log(echo_log) if entry.event == "step"]
    deadly = [at for at, entry in enumerate(steps) if 20 in entry.ids]
    sizes = [len(steps[at].ids) for at in deadly]
    assert sizes[-1] == 1
    assert all(later <= -(-earlier // 2) for earlier, later in pairwise(sizes[1:]))
    dying = {steps[at].pid for at in deadly}
    between = [entry for entry in steps[deadly[0] : deadly[-1]] if entry.pid not in dying]
    assert between, "the other worker stood still"
    split = [e for e in events if isinstance(e, RowsRetried) and e.verdict == "split"]
    assert split
    assert all("exit code 1" in event.message for event in split)


def test_a_row_alone_in_its_engine_has_one_more_try(cluster: LocalCluster, fault_dir: Path, echo_log: Path) -> None:
    """Its engine may have been killed from outside."""
    faults = {"bad": "segv", "unlucky": ["sigkill", "ok"]}
    spec = echo_spec(faults=faults, faults_dir=fault_dir, log=echo_log, log_events=["load"])
    with Driver(spec, cluster=cluster, health=QUICK) as driver:
        wait_until(lambda: [v.state for v in driver.workers()] == ["ready", "ready"], 60)
        [failed] = driver.generate(["a bad row"])
        [fine] = driver.generate(["an unlucky row"])
    assert isinstance(failed, Failed)
    assert "(2 deaths with this row on board)" in failed.message
    assert fine.ok
    assert len(loads(echo_log)) <= 2 + 2 + 1

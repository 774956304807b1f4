"""Looks a cluster over: what is wrong, what it costs, how to mend it.

Facts are gathered on every worker by a function that is sent by value, so it runs where daskinfer is missing, too. What
they mean is decided by :func:`judge`, which is pure.

Runs on: client.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Client

from daskinfer.cluster import connect
from daskinfer.config import ModelSpec
from daskinfer.preflight import PAUSE_SHARE, by_value, model_bytes
from daskinfer.version import __version__

__all__ = ["Finding", "diagnose", "examine", "judge"]

ROOM = 500_000_000
"""Bytes a worker needs besides a model in its own process: batches, results, Python itself."""

DASK = "dask and distributed"
DISTRIBUTED = importlib.metadata.version("distributed")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth knowing.

    Attributes
    ----------
    where : str
        A worker's address, "scheduler", "cluster" or "this machine".
    what, cost, remedy : str
    wrong : bool
        False for what is as usual, and only matters in some cases.
    """

    where: str
    what: str
    cost: str
    remedy: str
    wrong: bool = True

    def __str__(self) -> str:
        mark = "wrong" if self.wrong else "note"
        return f"{mark}: {self.where}: {self.what}\n  it costs: {self.cost}\n  mend it:  {self.remedy}"


def diagnose(scheduler: str | None = None, model: str | None = None) -> tuple[list[str], list[Finding]]:
    """Look a cluster over, or this machine when no scheduler is given.

    Parameters
    ----------
    scheduler : str or None
        A scheduler's address, or a scheduler file.
    model : str or None
        A local model, to compare its size with the memory there is.

    Returns
    -------
    lines : list of str
        What was found, a line per worker.
    findings : list of Finding

    Raises
    ------
    ClusterError
        The scheduler does not answer.
    """
    needed = model_bytes(ModelSpec(model)) if model else 0
    if scheduler is None:
        facts = examine(None)
        return [_line("this machine", facts)], judge({"this machine": facts}, needed)
    connection = connect(scheduler)
    try:
        workers = _gather(connection.client)
        central: dict[str, Any] = connection.client.run_on_scheduler(by_value(_examine_scheduler))
    finally:
        connection.close()
    lines = [_line(address, facts) for address, facts in workers.items()]
    return [f"scheduler: dashboard {central['dashboard'] or 'off'}", *lines], judge(workers, needed, central)


def _gather(client: Client) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = client.run(by_value(examine), on_error="ignore")
    return found


def _line(where: str, facts: Mapping[str, Any]) -> str:
    gib = 1 << 30
    limit = f"{facts['memory_limit'] / gib:.1f} GiB limit" if facts["memory_limit"] else "no limit"
    return (
        f"{where}: daskinfer {facts['version'] or 'not installed'}, distributed {facts['distributed']}, Python "
        f"{facts['python']}, torch {facts['torch'] or 'not installed'}; {facts['nthreads']} threads of {facts['cores']} "
        f"cores, {facts['gpus']} GPUs, {facts['available'] / gib:.1f} GiB available, {limit}"
    )


# ---------------------------------------------------------------- what the facts mean


def judge(
    workers: Mapping[str, Mapping[str, Any]], needed: int = 0, scheduler: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Return what is worth knowing about workers with these facts.

    Parameters
    ----------
    workers : mapping of str to mapping
        Address to what :func:`examine` gave there.
    needed : int
        Bytes of the model's weights; 0 when unknown.
    scheduler : mapping or None
        ``distributed, dashboard, bokeh`` of the scheduler.
    """
    findings = list(_of_scheduler(scheduler)) if scheduler is not None else []
    if not workers:
        cost = "nothing can run"
        findings.append(Finding("cluster", "it has no workers", cost, "start some: dask worker SCHEDULER, or scale it"))
    mates = Counter(facts["host"] for facts in workers.values())
    for where, facts in workers.items():
        cores = max(1, facts["cores"] // mates[facts["host"]])
        findings += [*_of_versions(where, facts), *_of_threads(where, facts, cores)]
        findings += [*_of_memory(where, facts, needed), *_of_devices(where, facts)]
    return sorted(findings, key=lambda finding: not finding.wrong)


def _of_scheduler(facts: Mapping[str, Any]) -> Iterator[Finding]:
    here = DISTRIBUTED
    if facts["distributed"] != here:
        what = f"distributed {facts['distributed']}, here it is {here}"
        yield Finding("scheduler", what, "messages may not be understood", f"the same {DASK} everywhere")
    if not facts["bokeh"]:
        cost = "there is no dashboard; jobs run all the same"
        yield Finding("scheduler", "bokeh is not installed", cost, "pip install bokeh", wrong=False)


def _of_versions(where: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["version"] != __version__:
        what = f"daskinfer is {facts['version'] or 'not installed'}, here it is {__version__}"
        cost = "a driver refuses to start on this cluster"
        yield Finding(where, what, cost, f"there: pip install 'daskinfer=={__version__}'")
    if facts["distributed"] != DISTRIBUTED:
        what = f"distributed is {facts['distributed']}, here it is {DISTRIBUTED}"
        yield Finding(where, what, "messages may not be understood", f"the same {DASK} everywhere")
    minor = platform.python_version().rpartition(".")[0]
    if facts["python"].rpartition(".")[0] != minor:
        cost = "engine classes from a notebook, which travel as bytecode, cannot be loaded"
        yield Finding(where, f"Python is {facts['python']}, here it is {minor}", cost, "the same Python minor version")
    if facts["torch"] is None and facts["version"] is not None:
        yield Finding(
            where, "torch is not installed", "only engines without torch can load", "there: pip install torch"
        )


def _of_threads(where: str, facts: Mapping[str, Any], cores: int) -> Iterator[Finding]:
    threads = facts["nthreads"]
    if facts["worker"] and not facts["gpus"] and threads < cores:
        what = f"{facts['nthreads']} thread{'s' * (facts['nthreads'] > 1)} (nthreads), and {cores} cores for it"
        cost = f"an engine computes with {threads} of the cores (threads to await batches are added by themselves)"
        yield Finding(where, what, cost, f"dask worker --nthreads {cores}, or Driver(threads={cores})")
    if facts["env"].get("OMP_NUM_THREADS") == "1":
        cost = "numeric code in the worker itself uses one core; engines in their own process set their own number"
        yield Finding(where, "OMP_NUM_THREADS=1, as Dask's nanny sets it", cost, "isolation='process'", wrong=False)
    if facts["daemon"]:
        cost = "an engine with isolation='thread' cannot start processes with multiprocessing"
        remedy = "isolation='process', or distributed.worker.daemon: False"
        yield Finding(where, "the worker's process is daemonic, as Dask's nanny makes it", cost, remedy, wrong=False)


def _of_memory(where: str, facts: Mapping[str, Any], needed: int) -> Iterator[Finding]:
    limit, used = facts["memory_limit"], facts["used"]
    room = PAUSE_SHARE * limit - used
    if limit and room < max(needed, ROOM):
        model = f"; the model needs {needed / 1e6:,.0f} MB" if needed else ""
        what = f"memory_limit is {limit / 1e6:,.0f} MB, of which {used / 1e6:,.0f} MB are used{model}"
        cost = (
            f"Dask pauses the worker at {PAUSE_SHARE:.0%} of it and ends it at 95 %; a model with isolation='thread' counts "
            "in full, one in its own process does not, but batches and results do"
        )
        yield Finding(where, what, cost, "dask worker --memory-limit with at least 2 GB, or 0 for none")
    if needed > facts["available"]:
        what = f"{facts['available'] / 1e6:,.0f} MB are available, and the model needs {needed / 1e6:,.0f} MB"
        cost = "the load is refused, or the system ends a process"
        yield Finding(where, what, cost, "fewer workers per machine, a smaller model or a smaller dtype")
    trim = facts["env"].get("MALLOC_TRIM_THRESHOLD_")
    if trim is not None and int(trim) < 1 << 24:
        cost = "torch in the worker itself runs a third slower; engines in their own process are not affected"
        remedy = "isolation='process', or distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_: 1073741824"
        yield Finding(where, f"MALLOC_TRIM_THRESHOLD_={trim}, as Dask's nanny sets it", cost, remedy, wrong=False)
    if limit and facts["spill"]:
        cost = "with isolation='thread' Dask writes results to disk because of the model's size, which frees nothing"
        remedy = "isolation='process', or distributed.worker.memory.spill: False and target: False"
        yield Finding(where, f"spills to disk at {facts['spill']:.0%} of its memory limit", cost, remedy, wrong=False)


def _of_devices(where: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["gpus"] and facts["torch"] is not None and not facts["cuda"]:
        what = f"there are {facts['gpus']} GPUs, and torch {facts['torch']} is built without CUDA"
        yield Finding(
            where, what, "models run on the CPU", "install torch's CUDA build: https://pytorch.org/get-started"
        )


# ---------------------------------------------------------------- the facts; these two are sent by value


def examine(dask_worker: Any) -> dict[str, Any]:
    """Return the facts of a worker, or with None of this process."""
    import importlib.metadata
    import multiprocessing
    import os
    import platform

    import dask
    import psutil
    from distributed.diagnostics import nvml

    found: dict[str, str | None] = {}
    for name in ("daskinfer", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    try:
        gpus = nvml.device_get_count()
    except Exception:  # noqa: BLE001 - drivers fail in many ways
        gpus = 0
    limit = getattr(dask_worker.memory_manager, "memory_limit", 0) if dask_worker is not None else 0
    torch_version = found["torch"]
    return {
        "worker": dask_worker is not None,
        "version": found["daskinfer"],
        "distributed": importlib.metadata.version("distributed"),
        "python": platform.python_version(),
        "torch": torch_version,
        "cuda": torch_version is not None and "+cpu" not in torch_version,
        "cores": psutil.cpu_count() or 1,
        "host": platform.node(),
        "nthreads": dask_worker.state.nthreads if dask_worker is not None else psutil.cpu_count() or 1,
        "gpus": gpus,
        "memory_limit": int(limit or 0),
        "used": psutil.Process().memory_info().rss,
        "available": psutil.virtual_memory().available,
        "daemon": multiprocessing.current_process().daemon,
        "spill": dask.config.get("distributed.worker.memory.spill", default=None) or 0,
        "env": {k: v for k, v in os.environ.items() if k in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")},
    }


def _examine_scheduler(dask_scheduler: Any) -> dict[str, Any]:
    import importlib.metadata
    import importlib.util

    server = getattr(dask_scheduler, "http_server", None)
    port = getattr(server, "port", None)
    bokeh = importlib.util.find_spec("bokeh") is not None
    return {
        "distributed": importlib.metadata.version("distributed"),
        "bokeh": bokeh,
        "dashboard": f"on port {port}" if port and bokeh else "",
    }

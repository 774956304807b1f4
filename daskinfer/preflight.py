"""What is asked of a cluster's workers before a model goes there.

Runs on: client.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client

from daskinfer.config import ModelSpec
from daskinfer.errors import ClusterError, ResourceError, VersionError, describe
from daskinfer.version import __version__

__all__ = ["PAUSE_SHARE", "by_value", "check_workers", "lost_is_said", "model_bytes"]

GGUF_GROWTH = 6.4
"""float32 weights by the bytes of a GGUF file with 5 bits per weight, which is usual."""

PAUSE_SHARE = 0.8
"""Share of its memory limit above which Dask pauses a worker."""


@contextmanager
def lost_is_said(doing: str) -> Iterator[None]:
    """Turn comm errors, which are OSErrors as a full disk is, into ClusterError.

    Raises
    ------
    ClusterError
        A worker or the scheduler was lost in here.
    """
    try:
        yield
    except OSError as error:
        raise ClusterError(f"{doing}: the scheduler or a worker was lost ({describe(error)}); start again") from error


def check_workers(
    client: Client, spec: ModelSpec, requires: Mapping[str, float] | None = None
) -> dict[str, dict[str, Any]]:
    """Ask every worker what it is, and refuse a cluster that cannot do the job.

    Returns
    -------
    dict of str to dict
        Worker address to ``version, python, host, nthreads, resources, gpus, memory_limit, used, available, daemon``.

    Raises
    ------
    VersionError
        Workers or the scheduler lack daskinfer or have another version of it.
    ResourceError
        The model does not fit the workers' memory, or no worker has the device or the resources that it needs; with the
        figures and the setting to change.
    ClusterError
        The scheduler or a worker was lost meanwhile.
    """
    with lost_is_said("looking at the workers"):
        central: str | None = client.run_on_scheduler(by_value(_version))
        found: dict[str, dict[str, Any]] = client.run(by_value(_describe), on_error="ignore")
    everywhere = {"scheduler": central, **{address: facts["version"] for address, facts in found.items()}}
    versions = {where: version for where, version in everywhere.items() if version != __version__}
    if versions:
        raise VersionError(__version__, versions)
    needed = model_bytes(spec)
    for address, facts in found.items():
        _check_memory(address, facts, spec, needed)
    if found:
        _check_devices(found, spec, requires or {})
    return found


def _check_devices(found: Mapping[str, Mapping[str, Any]], spec: ModelSpec, requires: Mapping[str, float]) -> None:
    offered = [facts["resources"] for facts in found.values()]
    if not any(all(has.get(name, 0) >= amount for name, amount in requires.items()) for has in offered):
        raise ResourceError(
            f"requires={dict(requires)}: no worker offers that (they offer {offered[0] or 'no resources'}); start "
            "workers with --resources, or leave requires out"
        )
    if spec.device.startswith("cuda") and not any(facts["gpus"] for facts in found.values()):
        raise ResourceError(
            f"device={spec.device!r}: no worker sees a GPU; use device='cpu' or 'auto', or workers on machines with GPUs"
        )


def _check_memory(address: str, facts: Mapping[str, Any], spec: ModelSpec, needed: int) -> None:
    limit, used = facts["memory_limit"], facts["used"]
    if spec.isolation == "thread" and limit and used + needed > PAUSE_SHARE * limit:
        raise ResourceError(
            f"{address}: {spec.model} needs about {needed / 1e9:.2f} GB in the worker's own process, which uses "
            f"{used / 1e9:.2f} GB of a memory limit of {limit / 1e9:.2f} GB and is paused at {PAUSE_SHARE:.0%} of it; raise "
            "the workers' memory_limit, or use isolation='process', where weights do not count"
        )
    if needed > facts["available"]:
        raise ResourceError(
            f"{address}: {spec.model} needs about {needed / 1e9:.2f} GB, but its machine has "
            f"{facts['available'] / 1e9:.2f} GB available; use fewer workers per machine, a smaller model or a smaller dtype"
        )


def model_bytes(spec: ModelSpec) -> int:
    """Return about how much memory the model's weights take; 0 where that cannot be told from here.

    Parameters
    ----------
    spec : ModelSpec
        A local folder or file; a hub name says nothing.
    """
    path = Path(spec.model)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) if path.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    return round(size * GGUF_GROWTH) if path.suffix == ".gguf" else size


def _version() -> str | None:  # pragma: no cover - runs on the scheduler
    try:
        from daskinfer.version import __version__ as found
    except ImportError:
        return None
    return found


def _describe(dask_worker: Any) -> dict[str, Any]:  # pragma: no cover - runs on the workers
    import multiprocessing
    import platform

    import psutil
    from distributed.diagnostics import nvml

    try:
        from daskinfer.version import __version__ as found

        version: str | None = found
    except ImportError:
        version = None
    manager = dask_worker.memory_manager
    return {
        "version": version,
        "python": platform.python_version(),
        "host": platform.node(),
        "nthreads": dask_worker.state.nthreads,
        "resources": dict(dask_worker.state.total_resources),
        "gpus": nvml.device_get_count(),
        "memory_limit": int(manager.memory_limit or 0),
        "used": psutil.Process().memory_info().rss,
        "available": psutil.virtual_memory().available,
        "daemon": multiprocessing.current_process().daemon,
    }


def by_value(function: Any) -> types.FunctionType:
    """Return a copy of a function that is pickled by value, so that it runs where daskinfer is not installed."""
    copy = types.FunctionType(function.__code__, {"__builtins__": __builtins__}, function.__name__)
    copy.__module__ = "__main__"
    return copy

"""Make a cluster or attach to one, and check beforehand that it can do the job.

The cluster made by default is one worker per GPU, or one worker with all cores on a machine without: one copy of the
weights, and two single-thread processes are no faster. Its workers ignore SIGINT, since a Ctrl-C reaches the whole process
group and would kill them before a drain.

Runs on: client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import dask
import psutil
from distributed import Client, LocalCluster
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster

from daskinfer.errors import ClusterError, ConfigError, describe
from daskinfer.mainguard import check_main_guard

__all__ = [
    "Connection",
    "connect",
    "local_cluster",
    "scale",
]

logger = logging.getLogger("daskinfer.cluster")

_SELDOM = {
    "distributed.worker.profile.interval": ("10ms", "100ms"),
    "distributed.admin.tick.interval": ("20ms", "100ms"),
}
"""Dask's own look-outs in each process, by default and as here: they took half of the time that idle processes need."""
IGNORE_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
CLOSE_S = 20.0
NANNY_S = 120
STARTING = (Status.init, Status.starting)
FAILED = (Status.failed, Status.closed, Status.closing)


@dataclass
class Connection:
    """A client, and what must be closed with it.

    Attributes
    ----------
    client : Client
    cluster : Cluster or None
        The cluster object, where there is one.
    owns_client, owns_cluster : bool
        Whether closing them is our business.
    expected : int
        Workers the cluster was made with; 0 when it is not ours.
    """

    client: Client
    cluster: Cluster | None
    owns_client: bool
    owns_cluster: bool
    expected: int = 0

    async def replace(self, names: Sequence[str]) -> list[str]:
        """Have the cluster start workers in place of lost ones; return those that it did so for.

        Only a cluster object that lists its workers needs that: others see to it themselves, and a scheduler's address
        cannot.

        Parameters
        ----------
        names : sequence of str
            Names of workers that were lost and did not come back. Those that the cluster is not to have any more are left.
        """
        cluster = self.cluster
        if not isinstance(cluster, SpecCluster) or cluster.status is not Status.running:
            return []
        loop = cast("asyncio.AbstractEventLoop", cast("Any", cluster.loop).asyncio_loop)
        # Broken off in the middle it would leave a process that nobody knows of.
        if loop is asyncio.get_running_loop():
            return await asyncio.shield(_replaced(cluster, names))
        made = asyncio.run_coroutine_threadsafe(_replaced(cluster, names), loop)
        return await asyncio.shield(asyncio.wrap_future(made))

    def close(self) -> None:
        """Close what is ours."""
        try:
            if self.owns_client:
                self.client.close()
        finally:
            if self.owns_cluster and self.cluster is not None:
                self.cluster.close()


def connect(cluster: Any = None, *, workers: int | None = None) -> Connection:
    """Attach to a cluster, or make the default one.

    Parameters
    ----------
    cluster : None, str, Client, or a Dask cluster object
        None makes a LocalCluster; a str is a scheduler's address or the path of a scheduler file.
    workers : int or None
        Workers of the cluster to be made; with a cluster object: scale it to so many.

    Raises
    ------
    ClusterError
        The scheduler does not answer.
    ConfigError
        ``workers`` with something that cannot be scaled, or a cluster of an unknown kind.
    """
    if cluster is None:
        made = local_cluster(workers)
        with _closed_unless_done(made):
            return Connection(Client(made), made, owns_client=True, owns_cluster=True, expected=len(made.worker_spec))
    scalable: Any = cluster.cluster if isinstance(cluster, Client) else cluster
    if workers is not None and not isinstance(scalable, Cluster):
        raise ConfigError(
            f"workers={workers}: a bare scheduler address cannot be scaled; pass the cluster object, or start the workers "
            "yourself and leave workers out"
        )
    if isinstance(cluster, Client):
        if cluster.asynchronous:
            raise ConfigError(
                "the Client is asynchronous, and this is not its event loop: await the driver's methods there"
            )
        connection = Connection(cluster, cluster.cluster, owns_client=False, owns_cluster=False)
    elif isinstance(cluster, str | os.PathLike):
        connection = Connection(_client(os.fspath(cluster)), None, owns_client=True, owns_cluster=False)
    elif isinstance(cluster, Cluster):
        connection = Connection(Client(cluster), cluster, owns_client=True, owns_cluster=False)
    else:
        kinds = "None, a scheduler address, a scheduler file, a dask.distributed Client or a Dask cluster object"
        raise ConfigError(f"cluster={cluster!r}: must be {kinds}")
    if workers is not None:
        with _closed_unless_done(connection):
            scale(scalable, workers)
        connection.expected = workers
    return connection


@contextmanager
def _closed_unless_done(made: Any) -> Iterator[None]:
    """Close what was just made when the next step fails or is interrupted: nobody else knows of it yet."""
    try:
        yield
    except BaseException:
        made.close()
        raise


def _client(where: str) -> Client:
    before = set(Client._instances)  # noqa: SLF001 - a Client that could not connect is reachable in no other way
    try:
        if Path(where).is_file():
            return Client(scheduler_file=where)
        return Client(where)
    except (OSError, TimeoutError, TypeError, ValueError) as error:  # TypeError: a TLS address, and no certificates
        for client in set(Client._instances) - before:  # noqa: SLF001
            client.close(timeout=0)  # else it goes on trying
        hint = "; pass Client(address, security=…), or set distributed.comm.tls in Dask's configuration"
        raise ClusterError(
            f"no Dask scheduler answers at {where!r}: {error}{hint if where.startswith('tls://') else ''}"
        ) from error


class _Local(LocalCluster):
    """A LocalCluster whose n-th worker gets the n-th GPU, and that can be closed while a worker is being replaced."""

    gpus: tuple[str, ...] = ()

    def _update_worker_status(self, op: Any, msg: Any) -> None:
        """Give a nanny time to start another process: Dask closes it after 15 seconds, which is too short for some."""
        with dask.config.set({"distributed.deploy.lost-worker-timeout": f"{NANNY_S} s"}):
            super()._update_worker_status(op, msg)  # type: ignore[no-untyped-call]

    async def _close(self) -> None:
        """Let nannies finish what they are starting: closed before, they would leave a process behind."""
        deadline = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline and any(map(_starting, self.workers.values())):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.05)
        await super()._close()  # type: ignore[no-untyped-call]

    def new_worker_spec(self) -> dict[Any, Any]:
        spec: dict[Any, Any] = super().new_worker_spec()  # type: ignore[no-untyped-call]
        for name, worker in spec.items():
            if self.gpus:
                env = {"CUDA_VISIBLE_DEVICES": self.gpus[int(name) % len(self.gpus)]}
                worker["options"] = {**worker["options"], "env": {**worker["options"].get("env", {}), **env}}
        return spec


def local_cluster(workers: int | None = None, *, dashboard_address: str = ":8787") -> LocalCluster:
    """Start the default cluster on this machine: its workers have its cores, shared evenly, as threads.

    Parameters
    ----------
    workers : int or None
        None: one per GPU, or one on a machine without.
    dashboard_address : str
        Where the dashboard listens; another port is taken when it is occupied.
    """
    if dask.config.get("distributed.worker.multiprocessing-method") != "fork":
        check_main_guard()
    gpus = visible_gpus()
    count = workers if workers is not None else max(1, len(gpus))
    if count < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    cores = max(1, (psutil.cpu_count() or 1) // count)
    import_module("daskinfer.dashboard.preload")  # adds the pages, which has to come before the scheduler
    with _worker_settings(), warnings.catch_warnings():
        # Between the look for a free port and its use another process may take it; Dask takes another one then, and warns.
        warnings.filterwarnings("ignore", message="Port", category=UserWarning)
        made = _Local(  # type: ignore[no-untyped-call]
            n_workers=0, threads_per_worker=cores, dashboard_address=_free(dashboard_address)
        )
    with _closed_unless_done(made):
        made.gpus = gpus
        scale(made, count)
    return made


def _free(address: str) -> str:
    """Return the address, or that of any free port when it is taken; Dask would warn, and leave a socket open."""
    host, _, port = address.rpartition(":")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError:
        return f"{host}:0"
    return address


def scale(cluster: Cluster | None, n: int) -> None:
    """Change the number of workers of a cluster.

    Raises
    ------
    ConfigError
        There is no cluster object, only a scheduler's address; or a number that cannot be.
    ClusterError
        A worker of the default cluster could not start.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ConfigError(f"scale({n!r}): must be a number of workers ≥ 0")
    if cluster is None:
        raise ConfigError(
            f"scale({n}): a bare scheduler address cannot be scaled; give the driver the cluster object, or start and stop "
            "the workers yourself"
        )
    if not isinstance(cluster, _Local):
        cluster.scale(n)
        return
    with _worker_settings():
        # Its own scale() would start the workers after this block, without its settings, and swallow why one could not.
        cluster.sync(_scaled, cluster, n)  # type: ignore[no-untyped-call]


async def _scaled(cluster: _Local, n: int) -> None:
    spec: dict[Any, Any] = cluster.worker_spec
    while len(spec) > n:
        spec.popitem()
    while len(spec) < n:
        spec.update(cluster.new_worker_spec())
    try:
        await cluster._correct_state()  # type: ignore[no-untyped-call] # noqa: SLF001
    except Exception as error:
        failed = [name for name, worker in cluster.workers.items() if worker.status in FAILED]
        for name in failed:  # so that scaling again tries again
            spec.pop(name, None)
            del cluster.workers[name]
        raise ClusterError(f"{len(failed)} of {n} workers could not start: {_first_cause(error)}") from error


def _starting(worker: Any) -> bool:
    """Whether a worker of a cluster, or the process of a nanny, is on its way."""
    process = getattr(worker, "process", None)
    return any(getattr(one, "status", None) in STARTING for one in (worker, process))


async def _replaced(cluster: SpecCluster, names: Sequence[str]) -> list[str]:
    spec: dict[Any, Any] = cluster.worker_spec
    named = [name for name, one in spec.items() if str(name) in names and not one.get("group")]
    lost = [name for name in named if not _starting(cluster.workers.get(name))]
    for name in lost:
        remains = cluster.workers.pop(name, None)
        if remains is not None:  # a nanny that no longer answers, perhaps
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(remains.close(), CLOSE_S)
    if lost:
        with _worker_settings() if isinstance(cluster, _Local) else contextlib.nullcontext():
            await cluster._correct_state()  # noqa: SLF001
    return [str(name) for name in lost]


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return describe(error)


@contextmanager
def _worker_settings() -> Iterator[None]:
    """Start the workers of a cluster of ours in here."""
    preload, argv = _preloads()
    settings = {
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "distributed.worker.preload": [IGNORE_SIGINT, *preload],
        "distributed.worker.preload-argv": [[], *argv],
        "distributed.scheduler.allowed-failures": 0,
        **{name: seldom for name, (often, seldom) in _SELDOM.items() if dask.config.get(name, often) == often},
    }
    before = os.environ.copy()
    try:
        with dask.config.set(settings):
            yield
    finally:
        _restore(before)


def _preloads() -> tuple[list[str], list[list[str]]]:
    """Return the preloads that the user configured and the arguments of each, in any of the forms Dask takes."""
    preload: str | list[str] = dask.config.get("distributed.worker.preload", None) or []
    argv: list[Any] = dask.config.get("distributed.worker.preload-argv", None) or []
    preload = [preload] if isinstance(preload, str) else list(preload)
    if not argv or isinstance(argv[0], str):
        argv = [list(argv)] * len(preload)
    return preload, argv


def _restore(before: Mapping[str, str]) -> None:
    """Undo what the nanny does to this process's environment: one thread for every numeric library."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


def visible_gpus() -> tuple[str, ...]:
    """Return this process's GPUs as ``CUDA_VISIBLE_DEVICES`` entries, without touching CUDA."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(entry.strip() for entry in listed.split(",") if entry.strip() not in ("", "-1"))
    nodes = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return tuple(str(i) for i in range(len(nodes)))

"""Workers one by one: add, remove, choose, and how each is.

Everything here goes through the cluster object and the scheduler, so what is done here, by ``scale`` and by Dask itself
agrees. A worker's id is its address.

Runs on: client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed.deploy.spec import SpecCluster

from daskinfer.driver.aio import awaitable
from daskinfer.errors import ClusterError, ConfigError, NoWorkersError
from daskinfer.records import Batch, WorkerView

if TYPE_CHECKING:
    from daskinfer.driver.service import Service

__all__ = ["WorkerManager", "WorkerStatus"]

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """How a worker is.

    Attributes
    ----------
    healthy : bool
        It can run the model, and was heard of within ``HealthPolicy.heartbeat_timeout_s``.
    state : str
        "ready", "loading", "restarting", "failed", "paused", … as :class:`~daskinfer.records.WorkerView` has it.
    last_heartbeat_s : float
        Seconds since the scheduler heard of it.
    cpu_percent : float or None
        Of the worker's process.
    ram_bytes, engine_ram_bytes : int or None
        Memory of the worker's process, and of the engine's.
    gpu_memory_bytes, gpu_utilization : int or None
        Of the worker's GPU (percent); None where there is none.
    load : float
        Rows that it holds, by rows its engine runs at once.
    error : str
        Why it failed, or "".
    """

    healthy: bool
    state: str
    last_heartbeat_s: float
    cpu_percent: float | None
    ram_bytes: int | None
    engine_ram_bytes: int | None
    gpu_memory_bytes: int | None
    gpu_utilization: int | None
    load: float
    error: str


class WorkerManager:
    """The workers of a running driver; got from :attr:`Driver.worker_manager`.

    Parameters
    ----------
    driver : Driver
    """

    def __init__(self, driver: Service) -> None:
        self._driver = driver

    @property
    def asynchronous(self) -> bool:
        """Whether methods are to be awaited."""
        return self._driver.asynchronous

    # ---------------------------------------------------------------- more, fewer

    @awaitable
    def add_worker(self, timeout_s: float = 60.0) -> str:
        """Start a worker and return its id once it is known to the scheduler; it loads the model meanwhile.

        Raises
        ------
        ConfigError
            The driver knows only the scheduler's address, and cannot start workers through it.
        ClusterError
            No worker came in time.
        """
        before = {view.address for view in self._refreshed()}
        cluster = self._cluster("add_worker")
        self._driver.scale(len(cluster.worker_spec) + 1 if isinstance(cluster, SpecCluster) else len(before) + 1)

        def came() -> str | None:
            return next((v.address for v in self._refreshed() if v.address not in before), None)

        return str(self._wait(came, timeout_s, "no worker came"))

    @awaitable
    def remove_worker(self, worker_id: str | None = None, timeout_s: float = 60.0) -> str:
        """Retire a worker and return its id once it is gone; batches it had are run elsewhere.

        Parameters
        ----------
        worker_id : str or None
            None: the idlest.
        timeout_s : float

        Raises
        ------
        NoWorkersError
            There is no worker, or none with this id.
        ClusterError
            It was not gone in time.
        """
        view = self._view(worker_id) if worker_id is not None else min(self._some(self._refreshed()), key=_load)
        connection = self._driver._connection  # noqa: SLF001 - one object in two files
        assert connection is not None
        cluster: Any = connection.cluster
        name = view.metrics.get("name")
        spec = cluster.worker_spec if isinstance(cluster, SpecCluster) else {}
        known: list[Any] = [key for key in spec if str(key) == name]
        if known:
            cluster.sync(cluster.scale_down, known)
        else:
            connection.client.retire_workers([view.address], close_workers=True)

        def gone() -> bool:
            return all(v.address != view.address for v in self._refreshed())

        self._wait(gone, timeout_s, f"{view.address} was not gone")
        return view.address

    # ---------------------------------------------------------------- which

    @awaitable
    def get_worker(self, batch: int | Batch = 1) -> WorkerView:
        """Return the healthy worker that a batch would be best placed on: the least loaded once it has it.

        Parameters
        ----------
        batch : int or Batch
            The batch, or its number of rows.

        Raises
        ------
        NoWorkersError
            None is healthy.
        """
        rows = batch if isinstance(batch, int) else len(batch.requests)
        healthy = [v for v in self._refreshed() if self._healthy(v)]
        best: WorkerView = min(self._some(healthy, "healthy "), key=lambda v: _load(v) + rows / max(1, v.capacity))
        return best

    @awaitable
    def get_all_workers(self) -> tuple[WorkerView, ...]:
        """Return what is known of each worker, healthy or not."""
        return self._refreshed()

    @awaitable
    def balance_load(self) -> dict[str, float]:
        """Let idle workers take over batches that others have not begun; return each worker's load (rows by capacity).

        Dask does this by itself at intervals; here it is done now.
        """
        dispatcher = self._driver._running  # noqa: SLF001
        scheduler: Any = dispatcher.client.scheduler

        async def balanced() -> None:
            await scheduler.daskinfer_balance(key=dispatcher.spec.key)

        self._driver._sync(balanced)  # noqa: SLF001
        return {view.address: _load(view) for view in self._refreshed()}

    # ---------------------------------------------------------------- how they are

    @awaitable
    def worker_status(self) -> dict[str, WorkerStatus]:
        """Return how each worker is, by id."""
        return {view.address: self._status(view) for view in self._refreshed()}

    def _status(self, view: WorkerView) -> WorkerStatus:
        figures = view.metrics
        return WorkerStatus(
            self._healthy(view),
            view.state,
            figures.get("silent_s", 0.0),
            figures.get("worker_cpu_percent"),
            figures.get("worker_ram_bytes"),
            figures.get("ram_bytes"),
            figures.get("gpu_memory_bytes"),
            figures.get("gpu_utilization"),
            _load(view),
            view.error,
        )

    def _healthy(self, view: WorkerView) -> bool:
        limit = self._driver._running.health.heartbeat_timeout_s  # noqa: SLF001
        return view.state == "ready" and bool(view.metrics.get("silent_s", 0.0) <= limit)

    # ---------------------------------------------------------------- how

    def _refreshed(self) -> tuple[WorkerView, ...]:
        dispatcher = self._driver._running  # noqa: SLF001
        self._driver._sync(dispatcher.refresh)  # noqa: SLF001
        return dispatcher.views

    def _view(self, worker_id: str) -> WorkerView:
        found = [v for v in self._refreshed() if worker_id in (v.address, v.metrics.get("name"))]
        if not found:
            there = ", ".join(v.address for v in self._driver._running.views) or "none"  # noqa: SLF001
            raise NoWorkersError(f"there is no worker {worker_id!r}; there are: {there}")
        return found[0]

    def _some(self, views: Any, which: str = "") -> Any:
        if not views:
            states = ", ".join(f"{v.address} is {v.state}" for v in self._driver._running.views) or "none at all"  # noqa: SLF001
            raise NoWorkersError(f"there is no {which}worker: {states}")
        return views

    def _cluster(self, verb: str) -> Any:
        connection = self._driver._connection  # noqa: SLF001
        if connection is None or connection.cluster is None:
            raise ConfigError(
                f"{verb}: a bare scheduler address cannot start workers; give the driver the cluster object, or start them "
                "yourself"
            )
        return connection.cluster

    def _wait(self, found: Callable[[], Any], timeout_s: float, what: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            if time.monotonic() > deadline:
                raise ClusterError(f"{what} within timeout_s={timeout_s:g}")
            time.sleep(POLL_S)
        return value


def _load(view: WorkerView) -> float:
    held = view.metrics.get("running", 0) + view.metrics.get("waiting", 0)
    return held / max(1, view.capacity) if view.state == "ready" else 0.0

"""Where a partition finds its engine: on a Dask worker, beside it; anywhere else, in this process.

On a worker on which a Driver has put the same model, that one is used. Otherwise the model is loaded on first use, once for
all partitions of the worker (or of this process), and closed when nobody has used it for ``daskinfer.dataframe.idle-s``
seconds, when the worker closes, or at exit.

Runs on: worker, client.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import psutil
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from daskinfer.config import HealthPolicy, ModelSpec
from daskinfer.dataframe.engines import Engines
from daskinfer.dataframe.rows import PartitionRows
from daskinfer.errors import JobCancelledError, ModelLoadError
from daskinfer.host import Host
from daskinfer.records import Result
from daskinfer.worker import ModelWorker, threads_of

__all__ = ["NAME", "FrameWorker", "Home", "here", "local_home", "released"]

logger = logging.getLogger("daskinfer.dataframe")

NAME = "daskinfer-frames"
"""Name of the worker plugin, and of its entry in a worker's metrics."""

POLL_S = 0.05
T = TypeVar("T")


class Home(Protocol):
    """A place with an event loop and engines on it."""

    def run(self, rows: PartitionRows, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> list[Result]:
        """Run a partition's rows and wait for them; called from any thread but the loop's own."""


def here() -> Home:
    """Return the home of the partition that is being computed in this thread."""
    try:
        from distributed import get_worker

        worker = get_worker()
    except ValueError:
        return local_home()
    plugin = worker.plugins.get(NAME)
    if not isinstance(plugin, FrameWorker):
        plugin = asyncio.run_coroutine_threadsafe(_installed(worker), _loop_of(worker)).result()
    return _OnWorker(worker, plugin)


class _Lodging:
    """Engines, the partitions that use them, and what progress is told."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.partitions: dict[PartitionRows, ModelSpec] = {}

    @asynccontextmanager
    async def lent(self, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> AsyncIterator[Host]:
        host = await self.engines.acquire(spec, health, idle_s)
        try:
            yield host
        finally:
            self.engines.release(spec, host, idle_s)

    async def run(self, rows: PartitionRows, source: Any, spec: ModelSpec) -> list[Result]:
        self.partitions[rows] = spec
        try:
            return await rows.run(source)
        finally:
            del self.partitions[rows]

    def figures(self) -> list[dict[str, Any]]:
        """Return what is known of the partitions being inferred, in plain values."""
        now = time.monotonic()
        return [
            {
                "partition": rows.name,
                "model": spec.model,
                "rows": rows.rows,
                "done": rows.done,
                "failed": rows.failed,
                "seconds": round(now - rows.began, 1),
            }
            for rows, spec in list(self.partitions.items())
        ]


class _Source:
    """An engine of ours."""

    def __init__(self, lodging: _Lodging, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> None:
        self._lodging, self._arguments = lodging, (spec, health, idle_s)

    def engine(self) -> Any:
        return self._lodging.lent(*self._arguments)


# ---------------------------------------------------------------- on a worker


class FrameWorker(WorkerPlugin):
    """Keeps the engines of a worker's partitions, tells in the worker's metrics how far they are, ends cancelled ones.

    The first partition on a worker installs it; a driver's models are not its business.
    """

    name = NAME

    def __init__(self) -> None:
        self.lodging: _Lodging | None = None
        self._running: dict[str, Future[list[Result]]] = {}

    def setup(self, worker: Worker) -> None:
        """Begin; nothing is loaded yet."""
        self.lodging = _Lodging(Engines(worker.address, threads_of(worker)))
        worker.metrics = {**worker.metrics, NAME: lambda _: self.figures()}

    async def teardown(self, worker: Worker) -> None:
        """Close the engines."""
        worker.metrics = {name: metric for name, metric in worker.metrics.items() if name != NAME}
        for future in self._running.values():
            future.cancel()
        if self.lodging is not None:
            await self.lodging.engines.close()

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Abort the rows of a partition that nobody wants any more; Dask itself cannot stop a thread."""
        if start == "executing" and finish in ("cancelled", "released", "forgotten"):
            future = self._running.get(str(key))
            if future is not None:
                future.cancel()

    def figures(self) -> list[dict[str, Any]]:
        """Return what the heartbeat says of the partitions."""
        return self.lodging.figures() if self.lodging is not None else []

    def wait(self, key: str, future: Future[list[Result]]) -> list[Result]:
        """Wait for a partition's rows, which :meth:`transition` may give up."""
        self._running[key] = future
        try:
            return _result(future)
        finally:
            self._running.pop(key, None)


class _OnWorker:
    """The home of a worker's partitions."""

    def __init__(self, worker: Worker, plugin: FrameWorker) -> None:
        self._worker, self._plugin = worker, plugin

    def run(self, rows: PartitionRows, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> list[Result]:
        lodging = self._plugin.lodging
        assert lodging is not None
        source = _WorkersSource(self._worker, lodging, spec, health, idle_s)
        coroutine = lodging.run(rows, source, spec)
        future = asyncio.run_coroutine_threadsafe(coroutine, _loop_of(self._worker))
        return self._plugin.wait(str(self._worker.get_current_task()), future)


class _WorkersSource(_Source):
    """A driver's engine for the same specification, where there is one on the worker, else one of ours."""

    def __init__(self, worker: Worker, lodging: _Lodging, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> None:
        super().__init__(lodging, spec, health, idle_s)
        self._worker, self._spec = worker, spec

    def engine(self) -> Any:
        model = self._worker.plugins.get(self._spec.resource)
        if isinstance(model, ModelWorker) and model.host is not None and model.host.state != "closed":
            return _ready(model.host)
        return super().engine()


@asynccontextmanager
async def _ready(host: Host) -> AsyncIterator[Host]:
    """Wait until a driver's engine has loaded; ``PartitionRows`` sees when it is closed again."""
    while host.state in ("new", "loading"):  # noqa: ASYNC110 - a host has no event for it
        await asyncio.sleep(POLL_S)
    if host.state == "failed":
        raise ModelLoadError(host.spec.model, {host.settings.worker: str(host.error)})
    yield host


async def _installed(worker: Worker) -> FrameWorker:
    """Return the worker's plugin, adding it once; runs on the worker's loop, so two partitions do not add two."""
    found = worker.plugins.get(NAME)
    if not isinstance(found, FrameWorker):
        found = FrameWorker()
        await worker.plugin_add(plugin=found, name=NAME)
    return found


async def released(dask_worker: Worker) -> None:
    """Close a worker's engines that no partition uses."""
    plugin = dask_worker.plugins.get(NAME)
    if isinstance(plugin, FrameWorker) and plugin.lodging is not None:
        await plugin.lodging.engines.close(idle_only=True)


def _loop_of(worker: Worker) -> asyncio.AbstractEventLoop:
    return worker.loop.asyncio_loop  # type: ignore[attr-defined,no-any-return]


# ---------------------------------------------------------------- anywhere else


class _Local:
    """A thread with an event loop, for processes that are no Dask worker."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self.lodging = _Lodging(Engines(f"process {self.pid}", psutil.cpu_count() or 1))
        self._thread = threading.Thread(target=self._loop.run_forever, name="daskinfer-frames", daemon=True)
        self._thread.start()

    def run(self, rows: PartitionRows, spec: ModelSpec, health: HealthPolicy, idle_s: float) -> list[Result]:
        return _result(self._submit(self.lodging.run(rows, _Source(self.lodging, spec, health, idle_s), spec)))

    def release(self) -> None:
        """Close the engines that nobody uses at the moment."""
        self._submit(self.lodging.engines.close(idle_only=True)).result()

    def stop(self) -> None:
        """Close all engines and end the thread."""
        if self.pid == os.getpid() and self._thread.is_alive():
            self._submit(self.lodging.engines.close()).result(timeout=10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


_lock = threading.Lock()
_local: _Local | None = None


def local_home() -> _Local:
    """Return the home of this process; a forked process gets one of its own."""
    global _local  # noqa: PLW0603 - one per process is what it is about
    with _lock:
        if _local is None or _local.pid != os.getpid():
            _local = _Local()
            atexit.register(_local.stop)
        return _local


def _result(future: Future[list[Result]]) -> list[Result]:
    try:
        return future.result()
    except CancelledError:
        raise JobCancelledError("the partition was cancelled") from None
    except BaseException:
        future.cancel()  # Ctrl-C in the thread that waits: the rows are aborted in the engine
        raise

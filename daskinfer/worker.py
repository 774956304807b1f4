"""The worker's side: a plugin that carries a ``ModelSpec`` to every worker, and the task that runs a batch there.

``setup`` returns at once: a load that blocked it would stop the heartbeats, and its failure would be swallowed on a worker
that joins late. The load runs beside the worker's event loop; on success the worker is granted its slot resource and
the scheduler is asked to look again at tasks that could not run. Until then no batch can be placed on it.

Runs on: worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from typing import Any

import psutil
from distributed import Worker, get_worker
from distributed.core import Status
from distributed.diagnostics import nvml
from distributed.diagnostics.plugin import WorkerPlugin

from daskinfer.config import HealthPolicy, ModelSpec
from daskinfer.dashboard.prometheus import expose, of_worker, withdraw
from daskinfer.errors import RemoteError
from daskinfer.host import Host, HostSettings
from daskinfer.records import Batch, Fault, FaultKind, Report

__all__ = ["ModelWorker", "run_batch"]

logger = logging.getLogger("daskinfer.worker")

METRIC = "daskinfer"
NOT_READY_PAUSE_S = 1.0
FETCH_S = 2.0
FETCH_POLL_S = 0.02


async def run_batch(batch: Batch, plugin: str) -> Report:
    """Run a batch on the worker that this task was placed on.

    Never raises for anything the engine does, and never retries: retries belong to the window.

    Parameters
    ----------
    batch : Batch
    plugin : str
        Name of the :class:`ModelWorker` plugin.
    """
    worker = get_worker()
    model = worker.plugins.get(plugin)
    if not isinstance(model, ModelWorker) or model.host is None:
        fault = Fault(FaultKind.ENGINE_NOT_READY, f"{worker.address} does not have this model")
        report = Report(batch.key, (), fault, worker=worker.address)
    else:
        try:
            report = await model.host.run(batch)
        except asyncio.CancelledError:
            if worker.status is not Status.closing:
                raise
            # The worker is asked to go: what is finished is given back, and the rest runs elsewhere.
            return model.host.give_back(batch.key)
    if report.fault is not None and report.fault.kind is FaultKind.ENGINE_NOT_READY:
        # An instant answer would draw every batch of the job to the one worker that cannot run it.
        await asyncio.sleep(NOT_READY_PAUSE_S)
    return report


class ModelWorker(WorkerPlugin):
    """Loads a model on each worker and keeps its engine running.

    Parameters
    ----------
    spec : ModelSpec
    health : HealthPolicy
    slots : int
        Batches the worker takes at once.
    requires : dict of str to float
        Dask resources a worker must have for the model to be loaded there; others are left alone.
    """

    idempotent = True

    def __init__(
        self,
        spec: ModelSpec,
        health: HealthPolicy | None = None,
        slots: int = 8,
        requires: dict[str, float] | None = None,
    ) -> None:
        self.spec = spec
        self.health = health or HealthPolicy()
        self.slots = slots
        self.requires = requires or {}
        self.name = spec.resource
        self.host: Host | None = None
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._process: psutil.Process | None = None  # the engine's; to look it up costs more than to ask it
        self._leaving = False

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "health": self.health, "slots": self.slots, "requires": self.requires}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # ---------------------------------------------------------------- what Dask calls

    def setup(self, worker: Worker) -> None:
        """Begin to load; returns at once and never raises for a load error."""
        self._worker = worker
        _leave_in_order(worker)
        worker.metrics = {**worker.metrics, METRIC: heartbeat_figures}
        offered = worker.state.total_resources
        if any(offered.get(name, 0) < amount for name, amount in self.requires.items()):
            return
        threads = self.spec.threads or threads_of(worker)
        settings = HostSettings(self.health, threads, {}, worker.address)
        self.host = Host(self.spec, settings, self._state_changed)
        expose(f"{worker.address} {self.name}", of_worker(worker.address, self.spec, self.figures))
        self._task = asyncio.create_task(self._load(worker, self.host))

    async def teardown(self, worker: Worker) -> None:
        """Free the model; batches still here go back to be run elsewhere."""
        withdraw(f"{worker.address} {self.name}")
        if self._task is not None:
            self._task.cancel()
        if self.host is not None:
            await self.host.close()
        if worker.status is Status.closing and self._granted:
            await self._fetched(worker)
            with contextlib.suppress(OSError, TimeoutError):  # a scheduler that is gone has no use for it
                await asyncio.wait_for(self._withdraw(worker, leaving=True), FETCH_S)
        if worker.state.total_resources.get(self.name) and worker.status.name == "running":
            worker.state.nthreads -= self.slots
            await worker.set_resources(**{self.name: 0})

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Abort a batch that the driver has let go of; Dask itself does not cancel a running coroutine."""
        if start == "executing" and finish in ("cancelled", "released", "forgotten") and self.host is not None:
            self.host.abort(str(key))

    # ---------------------------------------------------------------- how

    async def _load(self, worker: Worker, host: Host) -> None:
        try:
            await host.start()
        except RemoteError as error:
            logger.warning("%s cannot serve %s: %s", worker.address, self.spec.model, error)
            return
        worker.state.nthreads += self.slots  # it also caps how many coroutines run at once
        await worker.set_resources(**{self.name: self.slots})
        capacity = host.stats.capacity
        await worker.scheduler.daskinfer_ready(worker=worker.address, key=self.spec.key, capacity=capacity)

    def _state_changed(self, state: str) -> None:
        worker = self._worker
        if state != "failed" or not self._granted or worker is None:
            return
        if worker.nanny is not None:
            # An engine that cannot be restarted may have spoilt its process: begin again with a fresh one.
            self._leaving = True
            worker.loop.call_later(0.5, worker.close, nanny=False, reason="daskinfer-engine-failed")
        else:
            self._task = asyncio.create_task(self._withdraw(worker))

    async def _fetched(self, worker: Worker) -> None:
        """Wait until the driver has fetched the last reports of a worker that goes: they go with it."""
        deadline = time.monotonic() + FETCH_S
        while any(map(_is_report, worker.data)) and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(FETCH_POLL_S)

    async def _withdraw(self, worker: Worker, *, leaving: bool = False) -> None:
        await worker.scheduler.daskinfer_withdraw(worker=worker.address, key=self.spec.key, leaving=leaving)

    @property
    def _granted(self) -> bool:
        return self._worker is not None and self.name in self._worker.state.total_resources

    def figures(self) -> dict[str, Any]:
        """Return what the heartbeat says of this model on this worker."""
        if self.host is None:
            return {"state": "excluded", "error": f"lacks {self.requires}"}
        figures = {**self.host.figures(), "slots": self.slots}
        if figures["state"] == "ready" and not self._granted:
            figures["state"] = "loading"  # loaded, but not yet known to the scheduler
        if self._leaving:
            figures |= {"state": "restarting", "error": ""}
        figures["ram_bytes"] = self._ram_bytes(figures["pid"] or os.getpid())
        return {**figures, **gpu_figures()}

    def _ram_bytes(self, pid: int) -> int:
        try:
            if self._process is None or self._process.pid != pid:
                self._process = psutil.Process(pid)
            return int(self._process.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0


def _leave_in_order(worker: Worker) -> None:
    """Have a SIGTERM close the worker, which gives its rows back, where it would end the process on the spot.

    That is so under a nanny, when a machine is taken away and everything on it gets the signal. A worker without one has a
    handler of its own.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        loop = asyncio.get_running_loop()
        closing: set[asyncio.Task[Any]] = set()

        def leave() -> None:
            closing.add(asyncio.create_task(worker.close(nanny=False, reason="daskinfer-sigterm")))

        loop.add_signal_handler(signal.SIGTERM, leave)


def _is_report(key: Any) -> bool:
    """Whether a key is one of a batch, see :class:`~daskinfer.driver.stream.Stream`."""
    return isinstance(key, str) and key.startswith(f"{METRIC}-")


def heartbeat_figures(worker: Worker) -> dict[str, dict[str, Any]]:
    """Return the figures of every model on this worker, by the key of its specification."""
    return {p.spec.key: p.figures() for p in worker.plugins.values() if isinstance(p, ModelWorker)}


def threads_of(worker: Worker) -> int:
    """Return the threads a worker was given, without those that models added to await their batches."""
    models = (p for p in worker.plugins.values() if isinstance(p, ModelWorker))
    added = sum(p.slots for p in models if worker.state.total_resources.get(p.name))
    return max(1, worker.state.nthreads - added)


def gpu_figures() -> dict[str, Any]:
    """Return memory and utilisation of the worker's GPU, through NVML; nothing where there is none."""
    try:
        if nvml.device_get_count() < 1:
            return {}
        now = nvml.real_time()
    except Exception:  # noqa: BLE001 - drivers fail in many ways, and a heartbeat must not
        return {}
    return {"gpu_memory_bytes": now["memory-used"], "gpu_utilization": now["utilization"]}

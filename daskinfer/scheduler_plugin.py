"""The scheduler's side: which workers are ready and well, and which drivers still want which model.

A driver's poll renews its lease. A model is unloaded when its last lease is released, or when its driver has not been
heard of for a grace period. While a model is leased its workers are looked after: :mod:`daskinfer.health`.

Runs on: scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from daskinfer.config import HealthPolicy
from daskinfer.dashboard import Board
from daskinfer.dashboard.prometheus import expose, of_board, withdraw
from daskinfer.dashboard.serving import serve, show
from daskinfer.health import Watch, name_of

__all__ = ["DaskinferScheduler", "Leases", "keep_few_messages"]

logger = logging.getLogger("daskinfer.scheduler")

METRIC = "daskinfer"
NAME = "daskinfer"
REDEPLOY_S = 15.0
LOOK_S = 0.25
"""Longest time between two looks whether something is due."""
MESSAGES_KEPT = 8


def keep_few_messages(comm: Any) -> None:
    """Shorten the log of sent messages of one of Dask's batched comms.

    Dask keeps the last 1,000 messages of every comm for its developers (``distributed.admin.low-level-log-length``), and
    with them the rows of every batch: 250 MB of a long run, in the driver and again in the scheduler. The setting is read
    when a comm is made, which is too late for a cluster that runs.

    Parameters
    ----------
    comm : distributed.batched.BatchedSend or None
        Anything without such a log is left alone.
    """
    log = getattr(comm, "recent_message_log", None)
    if isinstance(log, deque) and log.maxlen != MESSAGES_KEPT:
        comm.recent_message_log = deque(log, maxlen=MESSAGES_KEPT)


class Leases:
    """Who wants which model until when. Pure; time (seconds) is an argument."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}

    def renew(self, key: str, lease: str, until: float) -> None:
        """Extend or create a lease."""
        self._until.setdefault(key, {})[lease] = until

    def release(self, key: str, lease: str) -> bool:
        """Drop a lease; return whether it was the model's last."""
        held = self._until.get(key, {})
        held.pop(lease, None)
        if not held:
            self._until.pop(key, None)
        return not held

    def expire(self, now: float) -> list[str]:
        """Drop the leases that ran out; return the models that nobody wants any more."""
        unwanted: list[str] = []
        for key, held in list(self._until.items()):
            expired = [lease for lease, until in held.items() if until <= now]
            unwanted.extend(key for lease in expired if self.release(key, lease))
        return unwanted

    def holders(self, key: str) -> tuple[str, ...]:
        """Return the leases on a model."""
        return tuple(self._until.get(key, ()))


class DaskinferScheduler(SchedulerPlugin):
    """Answers workers and drivers; registered once per cluster."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.leases = Leases()
        self.board = Board()
        self._page = ""
        self.watch = Watch()
        self._scheduler: Scheduler | None = None
        self._first_seen: dict[str, float] = {}
        # by model: workers that have loaded it, and their engines' capacity
        self._ready: dict[str, dict[str, int]] = {}
        self._leased_since: dict[str, float] = {}
        self._redeploying: dict[str, asyncio.Task[Any]] = {}
        self._expiry: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._names: dict[str, str] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Add the RPC handlers."""
        self._scheduler = scheduler
        scheduler.handlers["daskinfer_ready"] = self.ready
        scheduler.handlers["daskinfer_status"] = self.status
        scheduler.handlers["daskinfer_release"] = self.release
        scheduler.handlers["daskinfer_balance"] = self.balance
        scheduler.handlers["daskinfer_withdraw"] = self.withdraw
        for address in scheduler.workers:
            self.add_worker(scheduler, address)
        self._expiry = asyncio.create_task(self._expire())
        self._looking = asyncio.create_task(self._look())
        self._page = serve(scheduler)
        expose(scheduler.address, of_board(self.board))

    async def before_close(self) -> None:
        """Stop watching leases and workers."""
        withdraw(self._scheduler.address if self._scheduler is not None else "")
        self.watch.close()
        for task in (self._expiry, self._looking, *self._redeploying.values()):
            if task is not None:
                task.cancel()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note when a worker came."""
        self._first_seen[worker] = monotonic()
        self._names[worker] = name_of(scheduler.workers[worker])
        self.watch.came(self._names[worker])
        keep_few_messages(scheduler.stream_comms.get(worker))

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str = "", **kwargs: Any) -> None:
        """Forget a worker."""
        self._first_seen.pop(worker, None)
        self.watch.went(worker, self._names.pop(worker, worker), stimulus_id, monotonic())
        for ready in self._ready.values():
            ready.pop(worker, None)

    # ---------------------------------------------------------------- RPC

    async def ready(self, worker: str, key: str, capacity: int) -> None:
        """Note that a worker has loaded a model, and place the tasks that waited for it.

        ``capacity`` is that of its engine; the heartbeat tells it too, but later, and it decides how large batches are.
        Granting a resource does not by itself wake tasks in ``no-worker`` (dask/distributed#6677).
        """
        scheduler = self._scheduler
        assert scheduler is not None
        state = scheduler.workers.get(worker)
        if state is None:  # lost between grant and call
            return
        self._ready.setdefault(key, {})[worker] = capacity
        self.watch.ready(key, state)
        recommended = scheduler.bulk_schedule_unrunnable_after_adding_worker(state)
        scheduler.transitions(recommended, stimulus_id=f"daskinfer-ready-{monotonic()}")

    async def withdraw(self, worker: str, key: str, *, leaving: bool = False) -> None:
        """Place no more tasks for a model on a worker.

        Those already there stay, unless it is leaving: then they go elsewhere, and the worker's end is no loss to them.
        Only the scheduler's books change: lowering the resource on the worker itself would strand its tasks.
        """
        scheduler = self._scheduler
        assert scheduler is not None
        state = scheduler.workers.get(worker)
        if state is None:
            return
        name = f"{NAME}-{key}"
        if name in state.resources:
            state.resources[name] = scheduler.resources[name][worker] = 0
        self._ready.get(key, {}).pop(worker, None)
        if leaving:
            tasks: Any = {t.key: "released" for t in state.processing if name in (t.resource_restrictions or ())}
            scheduler.transitions(tasks, stimulus_id=f"daskinfer-leave-{monotonic()}")

    async def status(
        self, key: str, lease: str, grace_s: float, health: dict[str, Any], told: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Renew a driver's lease and return what is known.

        Parameters
        ----------
        key, lease : str
        grace_s : float
            Seconds until the lease runs out.
        health : dict
            The driver's :class:`~daskinfer.config.HealthPolicy`, by which the workers are looked after.
        told : dict or None
            Of the driver's jobs, for the page: see :class:`~daskinfer.driver.telling.Telling`.

        Returns
        -------
        deployed : bool
            Whether workers that join get the model; False after the last lease ran out.
        workers : list of dict
            ``address, state, slots, capacity, error, status, metrics``; state is one of ``starting, loading,
            ready, restarting, failed, excluded``.
        evicted, released, lost, unplaced_s, heartbeat_s
            See :meth:`Watch.told`.
        page : str
            What a person should know of the page on the dashboard, or "".
        """
        scheduler = self._scheduler
        assert scheduler is not None
        now = monotonic()
        self.leases.renew(key, lease, now + grace_s)
        self._leased_since.setdefault(key, now)
        self.watch.want(key, lease, HealthPolicy(**health))
        self._deploy_missing(key, now)
        workers = [self._view(key, worker) for worker in scheduler.workers.values()]
        deployed = f"{NAME}-{key}" in scheduler.worker_plugins
        show(self.board, key, told, workers, scheduler)
        return {"deployed": deployed, "workers": workers, "page": self._page, **self.watch.told(key, scheduler, now)}

    async def release(self, key: str, lease: str, told: dict[str, Any] | None = None) -> bool:
        """Give a lease back; return whether the model was unloaded."""
        show(self.board, key, told)
        last = self.leases.release(key, lease)
        self.watch.forget(key, self.leases.holders(key))
        if last:
            await self._unload(key)
        return last

    async def balance(self, key: str) -> None:
        """Place tasks that wait for this model, and let idle workers take over batches that others have not begun."""
        scheduler = self._scheduler
        assert scheduler is not None
        for worker in self._ready.get(key, {}).keys() & set(scheduler.workers):
            recommended = scheduler.bulk_schedule_unrunnable_after_adding_worker(scheduler.workers[worker])
            scheduler.transitions(recommended, stimulus_id=f"daskinfer-balance-{monotonic()}")
        stealing = scheduler.extensions.get("stealing")
        if stealing is not None:
            stealing.balance()

    # ---------------------------------------------------------------- how

    def _view(self, key: str, worker: WorkerState) -> dict[str, Any]:
        figures = dict(worker.metrics.get(METRIC, {}).get(key, {}))
        state = figures.get("state", "starting")
        capacity = int(figures.get("capacity", 0))
        ready = self._ready.get(key, {}).get(worker.address)
        if state in ("loading", "new") and ready is not None and not figures.get("error"):
            state, capacity = "ready", ready  # the heartbeat is older than the ready call
            figures |= {"state": state, "capacity": capacity}
        given_up = self.watch.given_up.get((key, worker.address), "")
        if given_up:
            state = "failed"
        return {
            "address": worker.address,
            "state": state,
            "slots": int(worker.resources.get(f"{NAME}-{key}", 0)),
            "capacity": capacity,
            "error": given_up or figures.get("error", ""),
            "status": worker.status.name,
            "metrics": {
                **figures,
                "name": str(worker.name),
                "silent_s": round(max(0.0, _time() - worker.last_seen), 3),
                "worker_cpu_percent": worker.metrics.get("cpu"),
                "worker_ram_bytes": worker.metrics.get("memory"),
            },
        }

    def _deploy_missing(self, key: str, now: float) -> None:
        """Deploy again to workers that a registration race left out (dask/distributed#7035)."""
        scheduler = self._scheduler
        assert scheduler is not None
        name = f"{NAME}-{key}"
        plugin = scheduler.worker_plugins.get(name)
        running = self._redeploying.get(key)
        if plugin is None or (running is not None and not running.done()):
            return
        since = self._leased_since[key]
        missing = [
            worker.address
            for worker in self._missing(scheduler, key)
            if now - max(since, self._first_seen.get(worker.address, now)) > REDEPLOY_S
        ]
        if missing:
            logger.info("deploying %s again to %s", name, missing)
            self._first_seen.update(dict.fromkeys(missing, now))
            message = {"op": "plugin-add", "plugin": plugin, "name": name}
            sent = scheduler.broadcast(msg=message, workers=missing, on_error="ignore")
            self._redeploying[key] = asyncio.create_task(sent)

    def _missing(self, scheduler: Scheduler, key: str) -> Iterator[WorkerState]:
        for worker in scheduler.workers.values():
            if worker.status.name == "running" and key not in worker.metrics.get(METRIC, {}):
                yield worker

    async def _look(self) -> None:
        assert self._scheduler is not None
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.watch.look(self._scheduler, self._ready, monotonic())
            except Exception:  # nobody else would take care of the workers
                logger.exception("the workers could not be looked at")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            unwanted = self.leases.expire(monotonic())
            for key in self.watch.keys:
                self.watch.forget(key, self.leases.holders(key))
            for key in unwanted:
                logger.info("no driver wants model %s any more: unloading it", key)
                try:
                    await self._unload(key)
                except Exception:  # one model's trouble must not keep the others' leases alive for ever
                    logger.exception("model %s could not be unloaded everywhere", key)

    async def _unload(self, key: str) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        self._ready.pop(key, None)
        self._leased_since.pop(key, None)
        self.board.unloaded(key)
        name = f"{NAME}-{key}"
        if scheduler.worker_plugins.pop(name, None) is not None:
            await scheduler.broadcast(msg={"op": "plugin-remove", "name": name}, on_error="ignore")


def _time() -> float:
    from distributed.metrics import time

    return float(time())

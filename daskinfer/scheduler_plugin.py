"""The scheduler's side: which workers are ready, and which drivers still want which model.

A driver's poll renews its lease. A model is unloaded when its last lease is released, or when its driver has not been
heard of for a grace period.

Runs on: scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from time import monotonic
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

__all__ = ["DaskinferScheduler", "Leases"]

logger = logging.getLogger("daskinfer.scheduler")

METRIC = "daskinfer"
NAME = "daskinfer"
REDEPLOY_S = 15.0


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
        self._scheduler: Scheduler | None = None
        self._first_seen: dict[str, float] = {}
        self._ready: dict[str, set[str]] = {}
        self._expiry: asyncio.Task[None] | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Add the RPC handlers."""
        self._scheduler = scheduler
        scheduler.handlers["daskinfer_ready"] = self.ready
        scheduler.handlers["daskinfer_status"] = self.status
        scheduler.handlers["daskinfer_release"] = self.release
        scheduler.handlers["daskinfer_balance"] = self.balance
        for address in scheduler.workers:
            self.add_worker(scheduler, address)
        self._expiry = asyncio.create_task(self._expire())

    async def before_close(self) -> None:
        """Stop watching leases."""
        if self._expiry is not None:
            self._expiry.cancel()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note when a worker came."""
        self._first_seen[worker] = monotonic()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker."""
        self._first_seen.pop(worker, None)
        for ready in self._ready.values():
            ready.discard(worker)

    # ---------------------------------------------------------------- RPC

    async def ready(self, worker: str, key: str) -> None:
        """Note that a worker has loaded a model, and place the tasks that waited for it.

        Granting a resource does not by itself wake tasks in ``no-worker`` (dask/distributed#6677).
        """
        scheduler = self._scheduler
        assert scheduler is not None
        state = scheduler.workers.get(worker)
        if state is None:  # lost between grant and call
            return
        self._ready.setdefault(key, set()).add(worker)
        recommended = scheduler.bulk_schedule_unrunnable_after_adding_worker(state)
        scheduler.transitions(recommended, stimulus_id=f"daskinfer-ready-{monotonic()}")

    async def status(self, key: str, lease: str, grace_s: float) -> list[dict[str, Any]]:
        """Renew a driver's lease and return what is known of each worker.

        Returns
        -------
        list of dict
            ``address, state, slots, capacity, error, status, metrics``; state is one of ``starting, loading,
            ready, restarting, failed, excluded``.
        """
        scheduler = self._scheduler
        assert scheduler is not None
        self.leases.renew(key, lease, monotonic() + grace_s)
        await self._deploy_missing(key)
        return [self._view(key, worker) for worker in scheduler.workers.values()]

    async def release(self, key: str, lease: str) -> bool:
        """Give a lease back; return whether the model was unloaded."""
        if self.leases.release(key, lease):
            await self._unload(key)
            return True
        return False

    async def balance(self, key: str) -> None:
        """Place tasks that wait for this model, and let idle workers take over batches that others have not begun."""
        scheduler = self._scheduler
        assert scheduler is not None
        for worker in self._ready.get(key, set()) & set(scheduler.workers):
            recommended = scheduler.bulk_schedule_unrunnable_after_adding_worker(scheduler.workers[worker])
            scheduler.transitions(recommended, stimulus_id=f"daskinfer-balance-{monotonic()}")
        stealing = scheduler.extensions.get("stealing")
        if stealing is not None:
            stealing.balance()

    # ---------------------------------------------------------------- how

    def _view(self, key: str, worker: WorkerState) -> dict[str, Any]:
        figures = dict(worker.metrics.get(METRIC, {}).get(key, {}))
        state = figures.get("state", "starting")
        ready = worker.address in self._ready.get(key, ())
        if state in ("loading", "new") and ready and not figures.get("error"):
            state = "ready"  # the heartbeat is older than the ready call
        return {
            "address": worker.address,
            "state": state,
            "slots": int(worker.resources.get(f"{NAME}-{key}", 0)),
            "capacity": int(figures.get("capacity", 0)),
            "error": figures.get("error", ""),
            "status": worker.status.name,
            "metrics": {
                **figures,
                "name": str(worker.name),
                "silent_s": round(max(0.0, _time() - worker.last_seen), 3),
                "worker_cpu_percent": worker.metrics.get("cpu"),
                "worker_ram_bytes": worker.metrics.get("memory"),
            },
        }

    async def _deploy_missing(self, key: str) -> None:
        """Deploy again to workers that a registration race left out (dask/distributed#7035)."""
        scheduler = self._scheduler
        assert scheduler is not None
        name = f"{NAME}-{key}"
        plugin = scheduler.worker_plugins.get(name)
        now = monotonic()
        missing = [
            worker.address
            for worker in self._missing(scheduler, key)
            if now - self._first_seen.get(worker.address, now) > REDEPLOY_S
        ]
        if plugin is not None and missing:
            logger.info("deploying %s again to %s", name, missing)
            self._first_seen.update(dict.fromkeys(missing, now))
            await scheduler.broadcast(msg={"op": "plugin-add", "plugin": plugin, "name": name}, workers=missing)

    def _missing(self, scheduler: Scheduler, key: str) -> Iterator[WorkerState]:
        for worker in scheduler.workers.values():
            if worker.status.name == "running" and key not in worker.metrics.get(METRIC, {}):
                yield worker

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for key in self.leases.expire(monotonic()):
                logger.info("no driver wants model %s any more: unloading it", key)
                await self._unload(key)

    async def _unload(self, key: str) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        self._ready.pop(key, None)
        if f"{NAME}-{key}" in scheduler.worker_plugins:
            await scheduler.unregister_worker_plugin(None, name=f"{NAME}-{key}")


def _time() -> float:
    from distributed.metrics import time

    return float(time())

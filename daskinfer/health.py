"""The scheduler looks after the workers: finds those that are silent or stuck, and batches that are placed nowhere.

What is seen is judged by :class:`~daskinfer.detection.FailureDetector`, one for each driver's lease with that driver's
policy. Ages are taken from the monotonic clock at which a heartbeat was first seen here, so a clock that jumps evicts
nobody.

Runs on: scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from distributed import Scheduler
from distributed.core import rpc
from distributed.scheduler import WorkerState, heartbeat_interval

from daskinfer.config import HealthPolicy
from daskinfer.detection import Eviction, FailureDetector, Sighting

__all__ = ["Watch", "heartbeat_s"]

logger = logging.getLogger("daskinfer.health")

METRIC = "daskinfer"
EVICTED = "daskinfer-evicted"
LOST = ("handle-worker-cleanup", "nanny-close", "check-worker-ttl", EVICTED)
"""How the reason of a removal begins when the worker was lost, rather than retired or scaled away."""

KEPT = 50
KILL_S = 30.0
STOP_S = 2.0


class Watch:
    """What is known of the health of all workers.

    Attributes
    ----------
    evicted : dict of str to str
        The last workers that were evicted, by address, and why.
    """

    def __init__(self) -> None:
        self.evicted: dict[str, str] = {}
        self._detectors: dict[str, tuple[str, FailureDetector]] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        self._stranded: dict[tuple[str, str], float] = {}
        self._unplaced: dict[str, float] = {}
        self._lost: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------- what the plugin tells

    @property
    def keys(self) -> set[str]:
        """Models that are looked after."""
        return {key for key, _ in self._detectors.values()}

    def want(self, key: str, lease: str, health: HealthPolicy) -> None:
        """Look after a model's workers by a driver's policy."""
        known = self._detectors.get(lease)
        if known is None or known[1].health != health:
            self._detectors[lease] = key, FailureDetector(health)

    def forget(self, key: str, leases: tuple[str, ...]) -> None:
        """Keep only these of the leases on a model."""
        for lease, (of, _) in list(self._detectors.items()):
            if of == key and lease not in leases:
                del self._detectors[lease]

    def came(self, name: str) -> None:
        """Note that a worker of this name is there."""
        self._lost.pop(name, None)

    def went(self, worker: str, name: str, reason: str, now: float) -> None:
        """Note that a worker is gone, and whether it was lost."""
        self._beats.pop(worker, None)
        if reason.startswith(LOST):
            self._lost[name] = now
            _keep_last(self._lost)

    def close(self) -> None:
        """Stop what is under way."""
        for task in self._tasks:
            task.cancel()

    # ---------------------------------------------------------------- what drivers ask

    def told(self, key: str, scheduler: Scheduler, now: float) -> dict[str, Any]:
        """Return what a driver hears with each poll: evictions, lost workers by name, unplaced batches, heartbeats."""
        since = self._unplaced.get(key)
        return {
            "evicted": dict(self.evicted),
            "lost": {name: round(now - at, 3) for name, at in self._lost.items()},
            "unplaced_s": 0.0 if since is None else round(now - since, 3),
            "heartbeat_s": heartbeat_s(scheduler),
        }

    # ---------------------------------------------------------------- looking

    def look(self, scheduler: Scheduler, ready: dict[str, set[str]], now: float) -> None:
        """Take a look at every leased model for which one is due; evict, and place again, what needs it.

        Parameters
        ----------
        scheduler : Scheduler
        ready : dict of str to set of str
            Addresses of the workers that have loaded each model.
        now : float
            Seconds on the monotonic clock.
        """
        for worker in scheduler.workers.values():
            if self._beats.get(worker.address, (None,))[0] != worker.last_seen:
                self._beats[worker.address] = worker.last_seen, now
        evictions: dict[str, Eviction] = {}
        for key, detector in list(self._detectors.values()):
            if not detector.due(now):
                continue
            self._place(scheduler, key, ready.get(key, set()), now)
            seen = list(self._sightings(scheduler, key, now))
            evictions |= {e.worker: e for e in detector.look(seen, heartbeat_s(scheduler))}
        for eviction in evictions.values():
            task = asyncio.create_task(self._evict(scheduler, eviction))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _sightings(self, scheduler: Scheduler, key: str, now: float) -> Iterator[Sighting]:
        for worker in scheduler.workers.values():
            figures = worker.metrics.get(METRIC, {}).get(key)
            if figures is None or figures.get("state") in ("excluded", "failed"):
                continue
            yield Sighting(
                worker.address,
                now - self._beats[worker.address][1],
                float(figures.get("step_age_s", 0.0)),
                float(figures.get("load_age_s", 0.0)),
                self._stranded_s(worker, key, int(figures.get("batches", 0)), now),
            )

    def _stranded_s(self, worker: WorkerState, key: str, begun: int, now: float) -> float:
        """Return for how long a worker has been paused with batches that it does not begin."""
        at = worker.address, key
        paused = worker.status.name == "paused"
        if paused and sum(_is_for(key, task) for task in worker.processing) > begun:
            return now - self._stranded.setdefault(at, now)
        self._stranded.pop(at, None)
        return 0.0

    def _place(self, scheduler: Scheduler, key: str, ready: set[str], now: float) -> None:
        """Offer batches that are placed nowhere to the workers again, and note since when that has not helped."""
        able = [w for address in ready if (w := scheduler.workers.get(address)) and w.status.name == "running"]
        if able and self._nowhere(scheduler, key):
            for worker in able:
                recommended = scheduler.bulk_schedule_unrunnable_after_adding_worker(worker)
                scheduler.transitions(recommended, stimulus_id=f"daskinfer-place-{now}")
        if able and self._nowhere(scheduler, key):
            self._unplaced.setdefault(key, now)
        else:
            self._unplaced.pop(key, None)

    def _nowhere(self, scheduler: Scheduler, key: str) -> bool:
        return any(_is_for(key, task) for task in scheduler.unrunnable)

    # ---------------------------------------------------------------- acting

    async def _evict(self, scheduler: Scheduler, eviction: Eviction) -> None:
        """Remove a worker, and have its nanny start a fresh process in its place.

        The nanny is told first: a worker that hears from the scheduler that it was removed takes its nanny along.
        """
        worker = scheduler.workers.get(eviction.worker)
        if worker is None:
            return
        logger.warning("evicting %s: %s", eviction.worker, eviction.reason)
        scheduler.log_event(METRIC, {"action": "evict", "worker": eviction.worker, "reason": eviction.reason})
        self.evicted[eviction.worker] = eviction.reason
        _keep_last(self.evicted)
        killed = asyncio.create_task(_kill(scheduler, worker.nanny)) if worker.nanny else None
        if killed is not None:
            await asyncio.wait([killed], timeout=STOP_S / 4)
        stimulus = f"{EVICTED}: {eviction.reason}"
        await scheduler.remove_worker(eviction.worker, stimulus_id=stimulus, close=killed is None)
        if killed is not None:
            await killed


async def _kill(scheduler: Scheduler, nanny: str) -> None:
    try:
        async with rpc(nanny, connection_args=scheduler.connection_args) as remote:
            await asyncio.wait_for(remote.kill(reason=EVICTED, timeout=STOP_S), KILL_S)
    except (OSError, TimeoutError) as error:
        logger.warning("the nanny %s does not answer either: %s", nanny, error)


def _keep_last(noted: dict[str, Any]) -> None:
    for name in list(noted)[:-KEPT]:
        del noted[name]


def _is_for(key: str, task: Any) -> bool:
    """Whether a task is a batch of this model."""
    return f"{METRIC}-{key}" in (task.resource_restrictions or ())


def heartbeat_s(scheduler: Scheduler) -> float:
    """Return the seconds between two heartbeats of a worker; more on large clusters."""
    return float(heartbeat_interval(len(scheduler.workers)))

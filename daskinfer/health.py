"""The scheduler looks after the workers: finds those that are silent or stuck, and batches that are placed nowhere.

What is seen is judged by :class:`~daskinfer.detection.FailureDetector`, one for each driver's lease with that driver's
policy. Ages are taken from the monotonic clock at which a heartbeat was first seen here, so a clock that jumps evicts
nobody.

Runs on: scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from distributed import Scheduler
from distributed.core import rpc
from distributed.scheduler import WorkerState, heartbeat_interval

from daskinfer.config import HealthPolicy
from daskinfer.detection import TTL_S, Do, FailureDetector, Finding, Sighting

__all__ = ["Watch", "heartbeat_s", "name_of"]

logger = logging.getLogger("daskinfer.health")

METRIC = "daskinfer"
EVICTED = "daskinfer-evicted"
LOST = ("handle-worker-cleanup", "nanny-close", "check-worker-ttl", EVICTED)
"""How the reason of a removal begins when the worker was lost, rather than retired or scaled away."""

COMING = ("new", "loading", "restarting")
"""States in which a model's weights are read, which may hold up a worker's heartbeats."""

MOST_EVICTIONS = 3
"""How often a worker is evicted without having become ready in between; then it is left, and its model has failed there."""

KEPT = 50
COUNTED = 5_000
KILL_S = 30.0
STOP_S = 2.0


class Watch:
    """What is known of the health of all workers.

    Attributes
    ----------
    evicted : dict of str to str
        The last workers that were evicted, by address, and why.
    released : dict of (str, str) to str
        The last paused workers that gave back batches, by model and address, and why.
    given_up : dict of (str, str) to str
        Workers that are not evicted any more, by model and address, and why.
    """

    def __init__(self) -> None:
        self.evicted: dict[str, str] = {}
        self.released: dict[tuple[str, str], str] = {}
        self.given_up: dict[tuple[str, str], str] = {}
        self._evicting: set[str] = set()
        self._evictions: dict[tuple[str, str], int] = {}
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
        self.given_up = {at: why for at, why in self.given_up.items() if at[1] != worker}
        self._stranded = {at: since for at, since in self._stranded.items() if at[0] != worker}
        if reason.startswith(LOST):
            self._lost[name] = now
            _keep_last(self._lost)

    def ready(self, key: str, worker: WorkerState) -> None:
        """Note that a worker has loaded a model."""
        self._evictions.pop((key, name_of(worker)), None)
        self.given_up.pop((key, worker.address), None)

    def close(self) -> None:
        """Stop what is under way."""
        for task in self._tasks:
            task.cancel()

    # ---------------------------------------------------------------- what drivers ask

    def told(self, key: str, scheduler: Scheduler, now: float) -> dict[str, Any]:
        """Return what a driver hears with each poll: evictions, releases, lost workers, unplaced batches, heartbeats."""
        since = self._unplaced.get(key)
        return {
            "evicted": dict(self.evicted),
            "released": {worker: reason for (of, worker), reason in self.released.items() if of == key},
            "lost": {name: round(now - at, 3) for name, at in self._lost.items()},
            "unplaced_s": 0.0 if since is None else round(now - since, 3),
            "heartbeat_s": heartbeat_s(scheduler),
        }

    # ---------------------------------------------------------------- looking

    def look(self, scheduler: Scheduler, ready: Mapping[str, Collection[str]], now: float) -> None:
        """Take a look at every leased model for which one is due; evict, and place again, what needs it.

        Parameters
        ----------
        scheduler : Scheduler
        ready : mapping of str to collection of str
            Addresses of the workers that have loaded each model.
        now : float
            Seconds on the monotonic clock.
        """
        for worker in scheduler.workers.values():
            if self._beats.get(worker.address, (None,))[0] != worker.last_seen:
                self._beats[worker.address] = worker.last_seen, now
        wanting: dict[tuple[str, str], Finding] = {}
        for key, detector in list(self._detectors.values()):
            if not detector.due(now):
                continue
            self._place(scheduler, key, ready.get(key, ()), now)
            seen = list(self._sightings(scheduler, key, now))
            for found in detector.look(seen, heartbeat_s(scheduler), _ttl_s(scheduler)):
                if found.do is Do.RELEASE:
                    self._release(scheduler, key, found, now)
                elif found.worker not in self._evicting:
                    wanting[key, found.worker] = found
        due = {found.worker: found for (key, _), found in wanting.items() if not self._gives_up(scheduler, key, found)}
        for found in due.values():
            self._evicting.add(found.worker)
            task = asyncio.create_task(self._evict(scheduler, found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _sightings(self, scheduler: Scheduler, key: str, now: float) -> Iterator[Sighting]:
        for worker in scheduler.workers.values():
            models = worker.metrics.get(METRIC, {})
            figures = models.get(key)
            if figures is None or figures.get("state") in ("excluded", "failed"):
                continue
            paused = worker.status.name == "paused"
            yield Sighting(
                worker.address,
                now - self._beats[worker.address][1],
                float(figures.get("step_age_s", 0.0)),
                float(figures.get("load_age_s", 0.0)),
                self._stranded_s(worker, key, now),
                paused,
                paused or any(map(_holds_up, models.values())),
                float(figures.get("step_timeout_s", 0.0)),
                float(figures.get("load_timeout_s", 0.0)),
            )

    def _stranded_s(self, worker: WorkerState, key: str, now: float) -> float:
        """Return for how long a worker has been paused with batches that it does not begin."""
        at = worker.address, key
        if worker.status.name == "paused" and _not_begun(key, worker):
            return now - self._stranded.setdefault(at, now)
        self._stranded.pop(at, None)
        return 0.0

    def _place(self, scheduler: Scheduler, key: str, ready: Collection[str], now: float) -> None:
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

    def _release(self, scheduler: Scheduler, key: str, found: Finding, now: float) -> None:
        """Have the batches that a paused worker has not begun run elsewhere; for them it is no loss of a worker."""
        tasks: Any = dict.fromkeys(_not_begun(key, scheduler.workers[found.worker]), "released")
        self._stranded.pop((found.worker, key), None)
        self.released[key, found.worker] = found.reason
        _keep_last(self.released)
        logger.warning("%s gives back %d batches: %s", found.worker, len(tasks), found.reason)
        scheduler.log_event(METRIC, {"action": "release", "worker": found.worker, "reason": found.reason})
        scheduler.transitions(tasks, stimulus_id=f"daskinfer-release-{now}")

    def _gives_up(self, scheduler: Scheduler, key: str, found: Finding) -> bool:
        """Count an eviction, and return whether there were too many of this worker."""
        at = key, name_of(scheduler.workers[found.worker])
        count = self._evictions[at] = self._evictions.pop(at, 0) + 1
        _keep_last(self._evictions, COUNTED)
        if count <= MOST_EVICTIONS:
            return False
        if (key, found.worker) not in self.given_up:
            logger.warning("%s is not evicted any more: %s", found.worker, found.reason)
        told = f"{found.reason}; it was evicted {MOST_EVICTIONS} times before and was not ready in between"
        self.given_up[key, found.worker] = told
        return True

    async def _evict(self, scheduler: Scheduler, eviction: Finding) -> None:
        """Remove a worker, and have its nanny start a fresh process in its place.

        The nanny is told first: a worker that hears from the scheduler that it was removed takes its nanny along.
        """
        try:
            await self._remove(scheduler, eviction)
        finally:
            self._evicting.discard(eviction.worker)

    async def _remove(self, scheduler: Scheduler, eviction: Finding) -> None:
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


def _keep_last(noted: dict[Any, Any], most: int = KEPT) -> None:
    for name in list(noted)[:-most]:
        del noted[name]


def name_of(worker: WorkerState) -> str:
    """Return what a worker is called when it comes back as a fresh process.

    A worker without a name is called by its address, which changes: it is known by that of its nanny.
    """
    return worker.nanny if worker.nanny and worker.name == worker.address else str(worker.name)


def _holds_up(figures: dict[str, Any]) -> bool:
    """Whether a model may hold up its worker's heartbeats: weights are read, or its engine has the same interpreter."""
    return figures.get("state") in COMING or figures.get("isolation") == "thread"


def _not_begun(key: str, worker: WorkerState) -> list[Any]:
    """Return the keys of the batches of a model that a worker had not begun at its last heartbeat."""
    return [task.key for task in worker.processing if _is_for(key, task) and task not in worker.executing]


def _is_for(key: str, task: Any) -> bool:
    """Whether a task is a batch of this model."""
    return f"{METRIC}-{key}" in (task.resource_restrictions or ())


def heartbeat_s(scheduler: Scheduler) -> float:
    """Return the seconds between two heartbeats of a worker; more on large clusters."""
    return float(heartbeat_interval(len(scheduler.workers)))


def _ttl_s(scheduler: Scheduler) -> float:
    """Return the seconds after which Dask itself gives up a worker without heartbeats."""
    return max(float(scheduler.worker_ttl or TTL_S), 10 * heartbeat_s(scheduler))

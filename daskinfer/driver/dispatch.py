"""One model on one cluster: deploys it, watches its workers, and shares their slots among streams of rows.

Everything here runs on the Dask client's event loop; nothing blocks it.

Runs on: client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from distributed import Client

from daskinfer.batching import Fleet
from daskinfer.config import BatchPolicy, HealthPolicy, ModelSpec, RetryPolicy
from daskinfer.detection import Do, Roster, check_heartbeats, judge_run
from daskinfer.driver.sharing import share_slots
from daskinfer.driver.stream import Stream
from daskinfer.driver.telling import Telling
from daskinfer.errors import (
    ClusterError,
    DaskinferError,
    ModelLoadError,
    NotRunningError,
    NoWorkersError,
    describe,
)
from daskinfer.records import Event, Noted, WorkersSeen, WorkerView
from daskinfer.scheduler_plugin import DaskinferScheduler, keep_few_messages
from daskinfer.worker import ModelWorker

__all__ = ["Dispatcher"]

logger = logging.getLogger("daskinfer.driver")

S = TypeVar("S", bound=Stream)

LOSS_S = 5.0
"""How long to ask why a worker was lost."""

REPLACE_S = 30.0
"""How long a lost worker's nanny has to start another process before the cluster is asked to."""

Replace = Callable[[Sequence[str]], Awaitable[Sequence[str]]]
"""Has the cluster start workers in place of lost ones, by name; returns those that it did so for."""


class Dispatcher:
    """Deploys a model and keeps streams supplied with slots.

    Parameters
    ----------
    client : Client
    spec : ModelSpec
    batch, retry, health
        Policies.
    requires : dict of str to float
        Resources of the workers to deploy to.
    expected : int
        Workers that are known to be coming; 0 when unknown.
    replace : callable or None
        Has the cluster start others in place of lost workers; None where nobody can.
    """

    def __init__(  # noqa: PLR0913 - all that a driver was given
        self,
        client: Client,
        spec: ModelSpec,
        batch: BatchPolicy,
        retry: RetryPolicy,
        health: HealthPolicy,
        requires: dict[str, float],
        *,
        expected: int = 0,
        replace: Replace | None = None,
    ) -> None:
        self.client = client
        self.spec = spec
        self.batch = batch
        self.retry = retry
        self.health = health
        self.expected = expected
        self.views: tuple[WorkerView, ...] = ()
        self.telling = Telling(spec)
        self._requires = requires
        self._lease = uuid.uuid4().hex
        self._streams: list[Stream] = []
        self._sharing = False
        self._fleet = Fleet()
        self._error: DaskinferError | None = None
        self._began = self._heard = self._served = time.monotonic()
        self._poller: asyncio.Task[None] | None = None
        self._deployed = False
        self._noted: set[str] = set()
        self._replace = replace
        self._replacing: asyncio.Task[None] | None = None
        self._replaced_at: dict[str, float] = {}
        self._replace_from = 0.0
        self._evicted: dict[str, str] = {}
        self._released: dict[str, str] = {}
        self._unplaced_s = 0.0

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Register the plugins; returns before the model is loaded."""
        await self.client.register_plugin(DaskinferScheduler())
        check_heartbeats(self.health, await self._poll())  # the lease must be there before the model
        await self._deploy()
        self._served = time.monotonic()
        self._poller = asyncio.create_task(self._poll_for_ever())

    async def stop(self) -> None:
        """Give the lease back; the last one unloads the model."""
        for stream in list(self._streams):
            stream.fail(NotRunningError("the driver was stopped"))  # a stream must not look as if it had ended
            stream.close()
        if self._poller is not None:
            self._poller.cancel()
        if self._replacing is not None:
            await asyncio.wait([self._replacing], timeout=REPLACE_S)
        if self.client.status == "running":
            try:
                await asyncio.wait_for(self._release(), 10)
            except (OSError, TimeoutError) as error:
                logger.warning("could not give the lease back: %s", error)

    async def _deploy(self) -> None:
        plugin = ModelWorker(self.spec, self.health, self.batch.slots, self._requires)
        try:
            await self.client.register_plugin(plugin)
        except OSError as error:
            # A worker is just going. The scheduler has the plugin, the others got it, and those left out get it again.
            logger.warning("%s could not be sent to a worker: %s", self.spec.model, describe(error))
        self._deployed = True

    async def _release(self) -> None:
        scheduler: Any = self.client.scheduler
        await scheduler.daskinfer_release(key=self.spec.key, lease=self._lease, told=self.telling.pending())

    async def ready(self, timeout_s: float | None) -> tuple[WorkerView, ...]:
        """Wait until a worker is ready and return the views; raises what a stream would raise."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._fleet.workers:
            if self._error is not None:
                raise self._error
            if deadline is not None and time.monotonic() > deadline:
                raise NoWorkersError(f"no worker was ready within {timeout_s:g} s: {self._states()}")
            await asyncio.sleep(0.05)
        return self.views

    # ---------------------------------------------------------------- streams

    def open(self, *, ordered: bool, seed: int) -> Stream:
        """Begin a stream of rows."""
        return self.adopt(Stream(self, ordered=ordered, seed=seed))

    def adopt(self, stream: S) -> S:
        """Give a stream its share of the slots from now on.

        Raises
        ------
        DaskinferError
            The scheduler was lost: nobody watches the workers any more.
        """
        if self._poller is None or self._poller.done():
            raise self._error or NotRunningError("the driver was stopped")
        self._streams.append(stream)
        self._share()
        return stream

    def forget(self, stream: Stream) -> None:
        """Take a stream off the list; its slots go to the others."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._share()

    def fail(self, error: DaskinferError) -> None:
        """End every stream with an error."""
        self._error = error
        for stream in list(self._streams):
            stream.fail(error)

    def demand_changed(self) -> None:
        """Share the slots again, since a stream can use more or fewer."""
        if len(self._streams) > 1 and not self._sharing:
            self._share()

    def _share(self) -> None:
        """Divide the slots among the streams, see :func:`share_slots`."""
        fleet, streams = self._fleet, list(self._streams)
        self._sharing = True  # streams that get slots use them, which changes what they can use
        try:
            for stream, slots in zip(streams, share_slots(fleet.slots, [s.useful_slots for s in streams]), strict=True):
                capacity = max(1, fleet.capacity * slots // max(1, fleet.slots))
                stream.fleet_changed(Fleet(fleet.workers, slots, capacity) if slots else Fleet())
        finally:
            self._sharing = False

    def _publish(self, event: Event) -> None:
        for stream in self._streams:
            stream.publish(event)

    # ---------------------------------------------------------------- the workers

    async def refresh(self) -> None:
        """Ask the scheduler for the workers now."""
        await self._poll()

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.health.poll_s)
            limit = self.health.heartbeat_timeout_s
            try:
                await asyncio.wait_for(self._poll(), max(limit, 5.0))
            except Exception as error:  # noqa: BLE001 - comms raise many kinds; what matters is for how long
                closed = self.client.status in ("closing", "closed")  # a dropped connection is made again by Dask
                if closed or time.monotonic() - self._heard > limit:
                    where = getattr(self.client.scheduler, "address", "")
                    told = f"the Dask scheduler {where} was lost ({describe(error)}); what a run has written is safe"
                    self.fail(ClusterError(f"{told}: start the cluster again, and run with resume=True (--resume)"))
                    return
            verdict = self._verdict(time.monotonic())
            if verdict is not None:
                self.fail(verdict)

    async def _poll(self) -> float:
        """Renew the lease and take in how the workers are; return the seconds between their heartbeats."""
        scheduler: Any = self.client.scheduler
        told = self.telling.pending()
        status: dict[str, Any] = await scheduler.daskinfer_status(
            key=self.spec.key,
            lease=self._lease,
            grace_s=self.health.lease_grace_s,
            health=asdict(self.health),
            told=told,
        )
        self.telling.sent(told)
        if status["page"] and status["page"] not in self._noted and self._streams:
            self._noted.add(status["page"])
            self._publish(Noted(time.monotonic(), status["page"]))
        rows: Sequence[dict[str, Any]] = status["workers"]
        if self._deployed and not status["deployed"]:
            logger.warning("the lease on %s had run out: deploying it again", self.spec.model)
            await self._deploy()
        now = self._heard = time.monotonic()
        keep_few_messages(self.client.scheduler_comm)  # a new one after every reconnect
        gone = {v.address for v in self.views} - {row["address"] for row in rows}
        lost = [WorkerView(address, "lost") for address in sorted(gone)]
        self.views = tuple(_view(row) for row in rows)
        for view in self.views:
            if view.state == "failed" and view.address not in self._noted:
                self._noted.add(view.address)
                self._publish(Noted(now, f"{view.address} could not load the model: {view.error.splitlines()[0]}"))
        self._publish(WorkersSeen(now, (*self.views, *lost)))
        ready = [v for v in self.views if v.state == "ready" and v.slots > 0]
        fleet = Fleet(len(ready), sum(v.slots for v in ready), sum(v.capacity for v in ready))
        if ready:
            self._served = now
        if fleet != self._fleet:
            self._fleet = fleet
            self._share()
        self._unplaced_s = status["unplaced_s"]
        self._tell(status["evicted"], status["released"], now)
        self._mend(status["lost"], now)
        return float(status["heartbeat_s"])

    def _tell(self, evicted: dict[str, str], released: dict[str, str], now: float) -> None:
        """Tell of workers that the scheduler has evicted, or relieved of batches."""
        for address, reason in evicted.items():
            if address not in self._evicted:
                self._publish(Noted(now, f"{address} was evicted: {reason}; its rows run elsewhere"))
        for address, reason in released.items():
            if self._released.get(address) != reason:
                self._publish(Noted(now, f"{address} gave back batches: {reason}; they run elsewhere"))
        self._evicted, self._released = evicted, released

    def _mend(self, lost: dict[str, float], now: float) -> None:
        """See that lost workers are replaced."""
        limit = self.health.heartbeat_timeout_s + REPLACE_S
        # A new one may wait for a machine, and is not replaced again unless it, too, was there and is lost.
        names = [n for n, age_s in lost.items() if age_s > limit and now - age_s > self._replaced_at.get(n, -math.inf)]
        if self._replace is None:
            names = [name for name in names if now - lost[name] > self._began]  # others were lost to others
            self._replaced_at |= dict.fromkeys(names, now)
            if names:
                self._say(f"{_gone(names)}; start another: a driver that has only a scheduler's address cannot")
        elif names and now >= self._replace_from and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replaced(self._replace, names))

    async def _replaced(self, replace: Replace, names: Sequence[str]) -> None:
        started: Sequence[str] = ()
        try:
            started = await replace(names)
        except Exception as error:  # noqa: BLE001 - of a cluster class that we may not know; the run goes on without
            logger.warning("the cluster could not replace %s: %s", ", ".join(names), describe(error))
        now = time.monotonic()
        self._replace_from = now + REPLACE_S  # those that it did not start are not asked for with every poll
        self._replaced_at |= dict.fromkeys(started, now)
        if started:
            self._say(f"{_gone(started)}; the cluster starts another")

    def _say(self, message: str) -> None:
        logger.warning(message)
        self._publish(Noted(time.monotonic(), message))

    async def loss(self, worker: str) -> str:
        """Return how a worker was lost, in words, as far as the scheduler knows."""
        if worker not in self._evicted:
            with contextlib.suppress(Exception):  # whatever it is: the rows must be told of, or their run never ends
                await asyncio.wait_for(self._poll(), LOSS_S)
        reason = self._evicted.get(worker)
        return f"{worker} was evicted: {reason}" if reason else f"{worker} ended unexpectedly"

    def _verdict(self, now: float) -> DaskinferError | None:
        """Return why no worker will ever be ready, or None while one is or may be."""
        states = Counter(v.state for v in self.views)
        coming = states["loading"] + states["restarting"]
        others = states.total() - coming - states["failed"] - states["excluded"]
        roster = Roster(
            self._fleet.workers, states["failed"], coming, others, self.expected, now - self._served, self._unplaced_s
        )
        rule = judge_run(roster, self.health)
        if rule.do is not Do.ABORT:
            return None
        failed = {v.address: v.error for v in self.views if v.state == "failed"}
        if rule.history == "all failed to load":
            return ModelLoadError(self.spec.model, failed)
        seconds, what = roster.idle_s, f"no worker has been able to run {self.spec.model}"
        if roster.ready:
            seconds, what = roster.unplaced_s, "the scheduler has placed batches on no worker though some are ready"
        limit = self.health.start_timeout_s
        return NoWorkersError(f"{what} for {seconds:.0f} s (start_timeout_s={limit:g}): {self._states()}")

    def _states(self) -> str:
        if not self.views:
            return "the cluster has no workers; start some, or scale it"
        told = ", ".join(f"{v.address} is {v.state}" for v in self.views[:5])
        if any(v.state == "paused" for v in self.views):
            told += "; a paused worker uses more of its memory_limit than Dask allows: raise it, or set it to 0"
        return told


def _gone(names: Sequence[str]) -> str:
    who = f"worker {names[0]} was" if len(names) == 1 else f"workers {', '.join(names)} were"
    return f"{who} lost and did not come back"


def _view(row: dict[str, Any]) -> WorkerView:
    state = row["state"]
    if state == "ready" and row["status"] != "running":
        state = row["status"]  # paused or closing: Dask places nothing there
    return WorkerView(row["address"], state, row["capacity"], row["slots"], row["error"], row["metrics"])

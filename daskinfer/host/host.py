"""Keeps one engine running and turns batches into reports.

::

    loading ──loaded──▶ ready ──died, hung──▶ restarting ──loaded──▶ ready
       │                                          │ too often, or the load fails
       └──────────────── failed ◀─────────────────┘

A batch that was inside the engine when it died comes back at once: its finished rows, and a fault that names the
unfinished ones. A batch that only waited stays here and goes to the next engine.

Runs on: worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from daskinfer.config import HealthPolicy, ModelSpec
from daskinfer.errors import RemoteError
from daskinfer.faults import Do, judge_engine
from daskinfer.host.channels import Channel, ProcessChannel, ThreadChannel
from daskinfer.records import Batch, EngineStats, Fault, FaultKind, Report, Result, Timings, Usage, unpack_results

__all__ = ["Host", "HostSettings"]

logger = logging.getLogger("daskinfer.host")

LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True)
class HostSettings:
    """How an engine is run.

    Attributes
    ----------
    health : HealthPolicy
        ``step_timeout_s``, ``load_timeout_s`` and ``engine_restarts`` count here.
    threads : int
        Compute threads.
    env : mapping
        Environment variables for the engine's process.
    worker : str
        The worker's address, for reports.
    """

    health: HealthPolicy = field(default_factory=HealthPolicy)
    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    worker: str = ""


@dataclass(slots=True)
class _Held:
    batch: Batch
    future: asyncio.Future[Report]
    received: float
    began: float | None = None
    results: list[Result] = field(default_factory=list)


class Host:
    """One engine and the batches it was given.

    Parameters
    ----------
    spec : ModelSpec
    settings : HostSettings
    on_state : callable
        Called with the new state's name whenever it changes.
    """

    def __init__(self, spec: ModelSpec, settings: HostSettings, on_state: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self.settings = settings
        self.state = "new"
        self.error: RemoteError | None = None
        self.stats = EngineStats()
        self.restarts = 0
        self.loads = 0
        self._on_state = on_state or (lambda _: None)
        self._channel: Channel | None = None
        self._held: dict[str, _Held] = {}
        self._heard = self._changed = time.monotonic()
        self._loaded: asyncio.Future[None] | None = None
        self._steps: list[int] = []
        self._fruitless = 0
        self._death: tuple[FaultKind, str] | None = None
        self._last_words = ""
        self._tasks: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------- what the worker calls

    async def start(self) -> EngineStats:
        """Load the engine.

        Raises
        ------
        RemoteError
            The load failed, with the reason as the engine gave it.
        """
        self._become("loading")
        try:
            await self._load()
        except RemoteError as error:
            await self._fail(error)
            raise
        self._become("ready")
        self._spawn(self._watch())
        return self.stats

    async def run(self, batch: Batch) -> Report:
        """Run a batch to its end and report; never raises for anything the engine does."""
        if self.state in ("new", "failed", "closed"):
            reason = f"{self.state}: {self.error}" if self.error else self.state
            return Report(batch.key, (), Fault(FaultKind.ENGINE_NOT_READY, reason), worker=self.settings.worker)
        held = self._held.get(batch.key)
        if held is None:
            future = asyncio.get_running_loop().create_future()
            held = self._held[batch.key] = _Held(batch, future, time.monotonic())
            if self.state == "ready":
                self._send(("batch", batch))
        return await asyncio.shield(held.future)

    def abort(self, key: str) -> None:
        """Forget a batch: nobody waits for it any more."""
        held = self._held.get(key)
        if held is not None:
            self._send(("abort", key))
            self._answer(held, Fault(FaultKind.ABORTED, "released by the driver"))

    def give_back(self, key: str) -> Report:
        """Return a batch's report as it is now, and forget it: its other rows run elsewhere."""
        fault = Fault(FaultKind.PREEMPTED, "the worker is closing")
        held = self._held.get(key)
        if held is None:
            return Report(key, (), fault, worker=self.settings.worker)
        self._answer(held, fault)
        return held.future.result()

    async def close(self) -> None:
        """End the engine; batches still here come back as preempted."""
        if self.state == "closed":
            return
        self._become("closed")
        for task in self._tasks:
            task.cancel()
        self._answer_all(Fault(FaultKind.PREEMPTED, "the worker is closing"))
        if self._channel is not None:
            await self._channel.kill()
            self._channel = None

    def figures(self) -> dict[str, Any]:
        """Return what a heartbeat carries: plain numbers and words."""
        stats = self.stats
        return {
            "state": self.state,
            "error": str(self.error)[:2_000] if self.error else "",
            "pid": self._channel.pid if self._channel else None,
            "batches": len(self._held),
            "step_age_s": round(self._step_age(), 3),
            "load_age_s": round(self._load_age(), 3),
            "step_timeout_s": self.settings.health.step_timeout_s,
            "load_timeout_s": self.settings.health.load_timeout_s,
            "isolation": "thread" if self.spec.isolation == "thread" else "process",
            "restarts": self.restarts,
            "loads": self.loads,
            "capacity": stats.capacity,
            "running": stats.running,
            "waiting": stats.waiting,
            "steps": stats.steps,
            "row_steps": stats.row_steps,
            "full_steps": stats.full_steps,
            "full_row_steps": stats.full_row_steps,
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.completion_tokens,
            "padded_tokens": stats.padded_tokens,
            "step_bins": self._steps,
            **{f"engine.{name}": value for name, value in stats.extra.items()},
        }

    # ---------------------------------------------------------------- the engine's life

    def _become(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._changed = time.monotonic()
            self._on_state(state)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        threaded = self.spec.isolation == "thread"
        channel: Channel = (
            ThreadChannel(replace(self.spec, threads=self.settings.threads))
            if threaded
            else ProcessChannel(self.spec, self.settings.threads, self.settings.env)
        )
        self._channel = channel
        self._loaded = asyncio.get_running_loop().create_future()
        self.loads += 1
        limit = self.settings.health.load_timeout_s
        try:
            await channel.open(partial(self._deliver, channel), partial(self._ended, channel))
            await asyncio.wait_for(self._loaded, limit)
        except TimeoutError:
            await channel.kill()
            raise RemoteError("TimeoutError", f"not loaded after load_timeout_s={limit:g} s") from None
        except OSError as error:
            raise RemoteError.from_exception(error) from None

    async def _restart(self) -> None:
        health = self.settings.health
        self._become("restarting")
        if self._channel is not None:
            await self._channel.kill()
        if judge_engine(self._fruitless, health) is Do.EVICT:
            message = f"died {self._fruitless} times in a row without finishing a row (engine_restarts)"
            await self._fail(RemoteError("EngineDiedError", message))
            return
        await asyncio.sleep(min(LONGEST_PAUSE_S, 0.1 * 2**self._fruitless) if self._fruitless > 1 else 0)
        self.restarts += 1
        self.stats = EngineStats(capacity=self.stats.capacity)
        self._steps = []
        try:
            await self._load()
        except RemoteError as error:
            await self._fail(error)
            return
        self._become("ready")
        for held in self._held.values():
            self._send(("batch", held.batch))

    async def _fail(self, error: RemoteError) -> None:
        self.error = error
        logger.warning("engine for %s failed: %s", self.spec.model, error)
        self._become("failed")
        self._answer_all(Fault(FaultKind.ENGINE_NOT_READY, f"the engine failed: {error}"))
        if self._channel is not None:
            await self._channel.kill()

    async def _watch(self) -> None:
        """Kill an engine whose step takes too long."""
        limit = self.settings.health.step_timeout_s
        pause = min(1.0, limit / 4)
        while True:
            slept = time.monotonic()
            await asyncio.sleep(pause)
            # While this process was suspended, or got no processor, it could not hear the engine either.
            self._heard += max(0.0, time.monotonic() - slept - 2 * pause)
            if self.state == "ready" and self._step_age() > limit:
                message = f"the engine hung: no step ended within step_timeout_s={limit:g} s"
                logger.warning("%s; restarting it", message)
                self._death = (FaultKind.ENGINE_HUNG, message)
                channel = self._channel
                assert channel is not None
                await channel.kill()
                if isinstance(channel, ThreadChannel):  # it goes on hanging: this process is spoilt
                    if self._death is not None:
                        self._blame()
                    await self._fail(RemoteError("EngineDiedError", message))

    def _step_age(self) -> float:
        working = any(held.began is not None for held in self._held.values())
        return time.monotonic() - self._heard if working else 0.0

    def _load_age(self) -> float:
        return time.monotonic() - self._changed if self.state in ("loading", "restarting") else 0.0

    # ---------------------------------------------------------------- messages

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _deliver(self, channel: Channel, message: tuple[Any, ...]) -> None:
        if channel is not self._channel:
            return
        now = time.monotonic()
        self._heard = now
        match message:
            case ("loaded", stats):
                self.stats = stats
                self._settle(None)
            case ("failed", name, text, details):
                self._settle(RemoteError(name, text, details))
            case ("began", keys):
                for held in self._known(keys):
                    held.began = now
            case ("results", packed, ended, stats):
                self.stats = stats
                self._fruitless = 0
                self._collect(packed, ended)
            case ("died", name, text):
                self._last_words = f"the engine raised {name}: {text}" if text else f"the engine raised {name}"
            case ("tick", stats):
                self.stats = stats
            case ("steps", bins):
                self._steps = bins

    def _collect(self, packed: list[tuple[str, Any]], ended: list[str]) -> None:
        for key, rows in packed:
            for held in self._known([key]):
                held.results += unpack_results(rows)
        for held in self._known(ended):
            self._answer(held, None)

    def _known(self, keys: Iterable[str]) -> list[_Held]:
        """Return the batches that are still wanted; a message about an aborted one may be late."""
        return [self._held[key] for key in keys if key in self._held]

    def _settle(self, error: RemoteError | None) -> None:
        if self._loaded is not None and not self._loaded.done():
            if error is None:
                self._loaded.set_result(None)
            else:
                self._loaded.set_exception(error)

    def _ended(self, channel: Channel, reason: str) -> None:
        if channel is not self._channel or self.state == "closed":
            return
        reason, self._last_words = self._last_words or reason, ""
        self._settle(RemoteError("EngineDiedError", f"{reason} while loading"))
        if self.state == "ready":
            if not any(held.batch.probe and held.began is not None for held in self._held.values()):
                self._fruitless += 1  # a probe's death says something of its rows, not of the engine
            self._death = self._death or (FaultKind.ENGINE_DIED, reason)
            # what an exception says may quote a row, which the report may do and a log must not
            logger.warning("%s; restarting it", self._death[1].partition(":")[0])
            self._blame()
            self._spawn(self._restart())

    # ---------------------------------------------------------------- answers

    def _blame(self) -> None:
        """Answer the batches that were inside the engine when it died; the others wait for the next one."""
        assert self._death is not None
        kind, reason = self._death
        self._death = None
        for held in [held for held in self._held.values() if held.began is not None]:
            finished = {result.id for result in held.results}
            suspects = tuple(r.id for r in held.batch.requests if r.id not in finished)
            self._answer(held, Fault(kind, reason, suspects))

    def _answer_all(self, fault: Fault) -> None:
        for held in list(self._held.values()):
            self._answer(held, fault)

    def _answer(self, held: _Held, fault: Fault | None) -> None:
        self._held.pop(held.batch.key, None)
        now = time.monotonic()
        began = held.began if held.began is not None else now
        usage = sum((r.usage for r in held.results if r.ok), Usage())  # type: ignore[union-attr]
        report = Report(
            held.batch.key,
            tuple(held.results),
            fault,
            usage,
            Timings(began - held.received, now - began, held.results[-1].id if held.results else None),
            self.settings.worker,
        )
        if not held.future.done():
            held.future.set_result(report)

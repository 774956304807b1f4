"""The rows of one partition through an engine: the same window as in a run, over one host instead of a cluster.

Runs on: worker, client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from daskinfer import window as w
from daskinfer.batching import Fleet
from daskinfer.config import BatchPolicy, RetryPolicy
from daskinfer.errors import ModelLoadError
from daskinfer.host import Host
from daskinfer.records import Failed, Report, Request, Result

__all__ = ["PartitionRows", "Source"]

POLL_S = 0.05


class Source(Protocol):
    """Where the engine comes from."""

    def engine(self) -> AbstractAsyncContextManager[Host]:
        """Return a running engine for as long as it is needed; may raise ModelLoadError."""


class PartitionRows:
    """Runs rows to their final results.

    Parameters
    ----------
    name : str
        What progress calls the partition.
    requests : sequence of Request
    batch : BatchPolicy
    retry : RetryPolicy

    Attributes
    ----------
    done, failed : int
        Rows with a final result so far, and those of them that failed.
    """

    def __init__(self, name: str, requests: Sequence[Request], batch: BatchPolicy, retry: RetryPolicy) -> None:
        self.name = name
        self.rows = len(requests)
        self.done = self.failed = 0
        self.began = time.monotonic()
        self._requests = tuple(requests)
        self._batch = batch
        self._window = w.Window(f"daskinfer-part-{uuid.uuid4().hex[:12]}", batch, retry)
        self._results: list[Result] = []
        self._flying: dict[asyncio.Task[Report], str] = {}
        self._host: Host | None = None

    async def run(self, source: Source) -> list[Result]:
        """Return the final result of every row, in the order in which they were finished.

        An engine that is taken away (its driver was stopped) is replaced by another one. When this is cancelled, the rows
        are aborted in the engine.

        Raises
        ------
        ModelLoadError
            There is no engine, or it has become unusable.
        """
        self._handle(w.Offered(self._requests))
        self._handle(w.Exhausted())
        while not self._window.done:
            async with source.engine() as host:
                await self._through(host)
                if host.state == "failed" and not self._window.done:
                    raise ModelLoadError(host.spec.model, {host.settings.worker: str(host.error)})
        return self._results

    async def _through(self, host: Host) -> None:
        """Work until all is done, or the host is of no use any more."""
        self._host = host
        self._handle(w.FleetChanged(Fleet(1, self._batch.slots, max(1, host.stats.capacity))))
        try:
            while not self._window.done and (self._flying or host.state not in ("failed", "closed")):
                await self._turn()
        finally:
            for task, key in self._flying.items():
                task.cancel()
                host.abort(key)
            self._flying.clear()
            self._host = None
        self._handle(w.FleetChanged(Fleet()))

    async def _turn(self) -> None:
        due = self._window.due
        pause = None if due is None else max(0.0, due - time.monotonic())
        if not self._flying:
            await asyncio.sleep(POLL_S if pause is None else min(pause, POLL_S))
            self._handle(w.Tick())
            return
        finished, _ = await asyncio.wait(self._flying, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            del self._flying[task]
        for task in finished:
            self._handle(w.Reported(task.result()))
        if not finished:
            self._handle(w.Tick())

    def _handle(self, event: w.Event) -> None:
        for action in self._window.handle(event, time.monotonic()):
            if isinstance(action, w.Submit):
                assert self._host is not None
                self._flying[asyncio.create_task(self._host.run(action.batch))] = action.batch.key
            elif isinstance(action, w.Emit):
                self._results += action.results
                self.done += len(action.results)
                self.failed += sum(isinstance(result, Failed) for result in action.results)

"""One stream of rows through a deployed model: a window, and the futures that carry its batches.

The user's thread (or coroutine) drives it in turns: it offers rows and gets results, events, and how many rows are wanted
next. So an iterator of rows is only ever advanced where its owner called us from, and a slow consumer is not flooded.

Runs on: client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Future
from distributed.client import FutureCancelledError
from distributed.scheduler import KilledWorker

from daskinfer import window as w
from daskinfer.batching import Fleet, Reorder
from daskinfer.errors import ClusterError, DaskinferError, RemoteError, describe
from daskinfer.records import (
    Batch,
    BatchReturned,
    BatchSubmitted,
    Event,
    Fault,
    FaultKind,
    Report,
    Request,
    Result,
    RowsRetried,
    WorkersSeen,
)
from daskinfer.worker import run_batch

if TYPE_CHECKING:
    from daskinfer.driver.dispatch import Dispatcher

__all__ = ["Stream", "Turn"]

TURN_S = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn brought.

    Attributes
    ----------
    results : list of Result
        Final results, each row once; in order when the stream is ordered.
    events : list of Event
        What happened since the last turn.
    wanted : int
        Rows to offer next.
    done : bool
        Nothing more will come.
    """

    results: list[Result]
    events: list[Event]
    wanted: int
    done: bool


class Stream:
    """Rows in, results out; lives on the client's event loop.

    Parameters
    ----------
    dispatcher : Dispatcher
    ordered : bool
        Give results in the order of the rows, buffering at most ``BatchPolicy.order_bytes``.
    seed : int
        For the jitter of back-off.
    """

    def __init__(self, dispatcher: Dispatcher, *, ordered: bool, seed: int) -> None:
        self._dispatcher = dispatcher
        self._window = w.Window(f"daskinfer-{uuid.uuid4().hex[:12]}", dispatcher.batch, dispatcher.retry, seed=seed)
        self._reorder = Reorder(dispatcher.batch.order_bytes) if ordered else None
        self._held: int | None = None
        self._results: list[Result] = []
        self._events: list[Event] = []
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._error: DaskinferError | None = None
        self._closed = False
        self.useful_slots: dict[int, int] = {}

    # ---------------------------------------------------------------- turns

    async def turn(
        self, offer: Sequence[Request] = (), *, priority: int = 0, exhausted: bool = False, wait_s: float = TURN_S
    ) -> Turn:
        """Offer rows and take what is there; waits up to ``wait_s`` when there is nothing to take or to give.

        Raises
        ------
        DaskinferError
            The stream cannot go on; rows without a result stay without one.
        """
        if offer:
            if self._reorder is not None:
                self._reorder.expect([request.id for request in offer])
            self._handle(w.Offered(tuple(offer), priority))
        if exhausted:
            self._handle(w.Exhausted())
        if not (self._results or self._window.wanted or self._window.done or self._error):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        if self._error is not None and not self._results:
            self.close()
            raise self._error
        results, self._results = self._results, []
        events, self._events = self._events, []
        done = self._window.done
        if done:
            self.close()
        return Turn(results, events, self._window.wanted, done)

    def cancel(self, *, release: bool) -> None:
        """Submit nothing more; with ``release`` also let go of what is in flight."""
        self._handle(w.Cancelled(release))

    def close(self) -> None:
        """Let go of everything; does nothing when it has been done."""
        if self._closed:
            return
        self._closed = True
        self.cancel(release=True)
        if self._timer is not None:
            self._timer.cancel()
        self._dispatcher.forget(self)

    # ---------------------------------------------------------------- what the dispatcher says

    def fleet_changed(self, fleet: Fleet) -> None:
        """Use these workers, or this share of them, from now on."""
        self._handle(w.FleetChanged(fleet))

    def fail(self, error: DaskinferError) -> None:
        """End the stream with an error once its results were taken."""
        self._error = self._error or error
        self._changed.set()

    def publish(self, event: Event) -> None:
        """Note an event for the observers; of several views of the workers only the last is kept."""
        if isinstance(event, WorkersSeen) and self._events and isinstance(self._events[-1], WorkersSeen):
            self._events.pop()
        self._events.append(event)

    # ---------------------------------------------------------------- enacting the window's actions

    def _handle(self, event: w.Event) -> None:
        now = time.monotonic()
        for action in self._window.handle(event, now):
            match action:
                case w.Submit(batch):
                    self._submit(batch, now)
                case w.Emit(results):
                    self._emit(results)
                case w.Retrying(rows, kind, message, verdict):
                    self._note(RowsRetried(now, rows, kind, message, verdict))
                case w.Release(keys):
                    for key in keys:
                        watcher = self._watchers.pop(key, None)
                        if watcher is not None:
                            watcher.cancel()
        self._changed.set()
        self._arm(now)
        useful = self._window.useful_slots
        if useful != self.useful_slots:
            self.useful_slots = useful
            self._dispatcher.demand_changed()

    def _note(self, event: Event) -> None:
        self._events.append(event)

    def _submit(self, batch: Batch, now: float) -> None:
        dispatcher = self._dispatcher
        future = dispatcher.client.submit(
            run_batch,
            batch,
            dispatcher.spec.resource,
            key=batch.key,
            pure=False,
            retries=0,
            priority=batch.priority,
            resources={dispatcher.spec.resource: 1},
        )
        self._watchers[batch.key] = asyncio.create_task(self._watch(batch, future))
        self._note(BatchSubmitted(now, batch.key, len(batch.requests), batch.attempt))

    async def _watch(self, batch: Batch, future: Future[Any]) -> None:
        """Wait for a batch's future, and tell the window; letting go of the future lets go of the batch."""
        try:
            report: Report = await _result(future)
        except FutureCancelledError as error:
            report = _lost(batch, FaultKind.PREEMPTED, f"Dask cancelled the batch: {error}")
        except KilledWorker as error:
            lost = getattr(error.last_worker, "address", "")
            report = _lost(batch, FaultKind.WORKER_LOST, await self._dispatcher.loss(lost), worker=lost)
        except Exception as error:  # noqa: BLE001 - anything else is a bug or a broken installation
            if future.status == "error" or not isinstance(error, OSError):
                remote = RemoteError.from_exception(error, with_traceback=False)
                self.fail(ClusterError(f"a batch could not be run on a worker: {remote}"))
                return
            # The connection broke while its result was fetched. Whether the scheduler is gone, the dispatcher finds out.
            report = _lost(batch, FaultKind.PREEMPTED, f"the result could not be fetched: {describe(error)}")
        self._watchers.pop(batch.key, None)
        fault = report.fault
        self._note(
            BatchReturned(
                time.monotonic(),
                batch.key,
                len(batch.requests),
                report.worker,
                report.usage,
                report.timings,
                str(fault.kind) if fault else "",
                fault.message if fault else "",
                len(report.results),
            )
        )
        self._reported(report)

    def _reported(self, report: Report) -> None:
        self._handle(w.Reported(report))

    def _emit(self, results: Sequence[Result]) -> None:
        if self._reorder is None:
            self._results.extend(results)
            return
        self._results.extend(self._reorder.add(results))
        head = self._reorder.head if self._reorder.full else None
        if head != self._held:
            self._held = head
            self._handle(w.Hold(head))

    def _arm(self, now: float) -> None:
        """Wake the window when its next delayed row is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._window.due
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - now), self._handle, w.Tick())


async def _result(future: Future[Any]) -> Any:
    """Wait for a future's result, in a way that may be cancelled at any moment.

    Dask fetches the results of all who wait in one go: cancelling one of them in there would cancel, or lose, the others'.
    So only the wait for the batch's end is given up, and a fetch that has begun comes to its end.
    """
    assert future._state is not None  # noqa: SLF001
    await future._state.wait()  # noqa: SLF001 - the public ways to wait also fetch, or take the process's default client
    fetch = asyncio.ensure_future(_fetched(future))
    fetch.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(fetch)


async def _fetched(future: Future[Any]) -> Any:
    return await future


def _lost(batch: Batch, kind: FaultKind, message: str, worker: str = "") -> Report:
    return Report(batch.key, (), Fault(kind, message, tuple(r.id for r in batch.requests)), worker=worker)

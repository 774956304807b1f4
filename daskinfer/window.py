"""The in-flight window: events in, actions out. No Dask, no clock, no I/O; time and chance are arguments.

::

    Offered ─▶ pending ──Submit──▶ in flight ──Reported──▶ Emit
                  ▲                    │
                  ├── retry at once ◀──┤
                  ├── delayed ◀────────┤  transient, back-off
                  └── probes ◀─────────┘  suspects of a death, halved until the one at fault is alone

Invariant: every row offered is pending, delayed, among the probes, in flight, or emitted exactly once. ``handle`` is the
only way to change anything, and a report for an unknown key changes nothing, so a duplicate execution is harmless.

Runs on: client, worker.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias, assert_never

from daskinfer.batching import Fleet, Pending, Speed, batch_rows, rows_wanted
from daskinfer.config import BatchPolicy, RetryPolicy
from daskinfer.faults import ENGINE_DEATHS, Do, History, Verdict, judge_row, judge_undone
from daskinfer.records import Batch, Completed, Failed, FailureKind, Fault, Report, Request, Result

__all__ = [
    "Action",
    "Cancelled",
    "Emit",
    "Event",
    "Exhausted",
    "FleetChanged",
    "Hold",
    "Offered",
    "Release",
    "Reported",
    "Retrying",
    "Submit",
    "Tick",
    "Window",
]


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Offered:
    """The source gave rows."""

    requests: tuple[Request, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The source has no more rows."""


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """The set of ready workers, or this window's share of it, is another one now."""

    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Reported:
    """A batch came back; the shell makes a report with a fault for a future that was lost."""

    report: Report


@dataclass(frozen=True, slots=True)
class Hold:
    """Submit nothing but the batch with this row, which others wait for; None ends it."""

    row: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the rest: stop submitting; with ``release`` also give up what is in flight."""

    release: bool


Event: TypeAlias = Offered | Exhausted | FleetChanged | Reported | Hold | Tick | Cancelled


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Submit:
    """Give the batch to Dask."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Emit:
    """These rows have their final result."""

    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Retrying:
    """Rows will be tried again, in which way (a :class:`~daskinfer.faults.Do`), and why (for observers)."""

    rows: int
    kind: str
    message: str
    verdict: str = "retry"


@dataclass(frozen=True, slots=True)
class Release:
    """Drop these futures; their rows are not wanted any more."""

    keys: tuple[str, ...]


Action: TypeAlias = Submit | Emit | Retrying | Release


@dataclass(frozen=True, slots=True)
class _Flight:
    batch: Batch
    bytes: int
    arrival: int


def _alone(batch: Batch, fault: Fault | None) -> bool:
    """Whether a row was by itself, as a probe, in the engine that died or on the worker that was lost."""
    of_engine = fault is not None and fault.kind in ENGINE_DEATHS
    return batch.probe and len(fault.suspects if of_engine and fault else batch.requests) == 1


class Window:
    """Decides what is in flight.

    Parameters
    ----------
    name : str
        Prefix of the batches' keys; unique on the cluster.
    batch : BatchPolicy
    retry : RetryPolicy
    seed : int
        For the jitter of back-off.
    """

    def __init__(self, name: str, batch: BatchPolicy, retry: RetryPolicy, *, seed: int = 0) -> None:
        self._name = name
        self._policy = batch
        self._retry = retry
        self._rng = random.Random(seed)  # noqa: S311 - jitter is no secret
        self._fleet = Fleet()
        self._speed = Speed()
        self._pending = Pending()
        self._delayed: list[tuple[float, int, int, int, tuple[Request, ...]]] = []
        self._probes: deque[tuple[tuple[Request, ...], int, int]] = deque()
        self._flying: dict[str, _Flight] = {}
        self._flying_bytes = 0
        self._histories: dict[int, History] = {}
        self._head: int | None = None
        self._exhausted = False
        self._cancelled = False
        self._arrived = 0
        self._numbers = count()
        self._keys = count()

    # ---------------------------------------------------------------- what the shell asks

    @property
    def done(self) -> bool:
        """Whether every row was emitted, or nothing more will be since the job was cancelled."""
        if self._cancelled:
            return not self._flying
        return self._exhausted and not self.rows_held

    @property
    def rows_held(self) -> int:
        """Rows offered and not emitted."""
        delayed = sum(len(rows) for *_, rows in self._delayed) + sum(len(rows) for rows, *_ in self._probes)
        return len(self._pending) + delayed + self.rows_in_flight

    @property
    def rows_in_flight(self) -> int:
        """Rows in submitted batches."""
        return sum(len(flight.batch.requests) for flight in self._flying.values())

    @property
    def batches_in_flight(self) -> int:
        """Submitted batches."""
        return len(self._flying)

    @property
    def useful_slots(self) -> dict[int, int]:
        """Batches there would be in flight if it had all the slots it can use, by priority."""
        useful: dict[int, int] = {}
        for flight in self._flying.values():
            useful[flight.batch.priority] = useful.get(flight.batch.priority, 0) + 1
        for _, _, priority in self._probes:
            useful[priority] = useful.get(priority, 0) + 1
        rows = self._rows_per_batch()
        for priority, waiting in self._pending.by_priority.items():
            useful[priority] = useful.get(priority, 0) + -(-waiting // rows)
        return useful

    @property
    def wanted(self) -> int:
        """Rows the source should give now; 0 when enough wait."""
        if self._exhausted or self._cancelled or self._head is not None:
            return 0
        return rows_wanted(self._policy, self._fleet, self._rows_per_batch(), len(self._pending))

    @property
    def due(self) -> float | None:
        """When the next delayed row is due: the shell sends a ``Tick`` then."""
        return self._delayed[0][0] if self._delayed else None

    # ---------------------------------------------------------------- the one way in

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event in; return what the shell must do, in order.

        Parameters
        ----------
        event : Event
        now : float
            Seconds on any monotonic clock.
        """
        actions: list[Action] = []
        match event:
            case Offered(requests, priority):
                if not self._cancelled:
                    self._pending.push(requests, arrival=self._arrived, priority=priority)
                    self._arrived += len(requests)
            case Exhausted():
                self._exhausted = True
            case FleetChanged(fleet):
                self._fleet = fleet
            case Reported(report):
                actions += self._returned(report, now)
            case Hold(row):
                self._head = row
            case Tick():
                pass
            case Cancelled(release):
                return self._cancel(release=release)
            case _:
                assert_never(event)
        self._wake(now)
        return actions + self._fill()

    # ---------------------------------------------------------------- batches that come back

    def _returned(self, report: Report, now: float) -> list[Action]:
        flight = self._flying.pop(report.key, None)
        if flight is None:
            return []
        self._flying_bytes -= flight.bytes
        left = {request.id: request for request in flight.batch.requests}
        final: list[Result] = []
        actions: list[Action] = []
        again: dict[Verdict, list[Request]] = {}
        for result in report.results:
            request = left.pop(result.id, None)
            if request is None:
                continue
            verdict = self._judged(result)
            if verdict is None or verdict.do is Do.FAIL:
                self._histories.pop(result.id, None)
                final.append(Failed(result.id, verdict.kind, verdict.message) if verdict else result)
            else:
                again.setdefault(verdict, []).append(request)
        if left:
            final += self._undone(report.fault, list(left.values()), again, alone=_alone(flight.batch, report.fault))
        for verdict, rows in again.items():
            if verdict.do is Do.SPLIT:
                self._suspect(rows, flight, parts=2)
            elif flight.batch.probe and report.fault is not None and verdict.kind == report.fault.kind:
                self._suspect(rows, flight, parts=1)  # they were not found out about
            else:
                self._later(tuple(rows), flight, now + verdict.delay_s if verdict.delay_s > 0 else None)
            actions.append(Retrying(len(rows), verdict.kind, verdict.message, verdict.do.value))
        if final:
            self._speed.add(len(final), now)
            actions.insert(0, Emit(tuple(r.at(report.worker) if isinstance(r, Failed) else r for r in final)))
        return actions

    def _judged(self, result: Result) -> Verdict | None:
        """Return what to do about a row that came back, or None when it is fine."""
        if isinstance(result, Completed):
            return None
        history = self._histories.setdefault(result.id, History())
        return judge_row(result, history, self._retry, self._rng.random())

    def _undone(
        self, fault: Fault | None, rows: list[Request], again: dict[Verdict, list[Request]], *, alone: bool
    ) -> list[Result]:
        """Judge rows without a result: those to be tried again go to ``again``; returns the failed ones."""
        if fault is None:
            message = "the engine returned no result for this row"
            for request in rows:
                self._histories.pop(request.id, None)
            return [Failed(request.id, FailureKind.ERROR, message) for request in rows]
        failed: list[Result] = []
        chance = self._rng.random()  # one for all: rows that wait for the same reason come back together
        for request in rows:
            history = self._histories.setdefault(request.id, History())
            verdict = judge_undone(fault, request.id, history, self._retry, alone=alone, chance=chance)
            if verdict.do is Do.QUARANTINE:
                self._histories.pop(request.id)
                failed.append(Failed(request.id, verdict.kind, verdict.message))
            else:
                again.setdefault(verdict, []).append(request)
        return failed

    def _suspect(self, rows: list[Request], flight: _Flight, parts: int) -> None:
        size = -(-len(rows) // parts)
        for at in range(0, len(rows), size):
            self._probes.append((tuple(rows[at : at + size]), flight.arrival, flight.batch.priority))

    def _later(self, rows: tuple[Request, ...], flight: _Flight, due: float | None) -> None:
        if due is None:
            self._pending.push(rows, arrival=flight.arrival, priority=flight.batch.priority)
        else:
            item = (due, next(self._numbers), flight.arrival, flight.batch.priority, rows)
            heapq.heappush(self._delayed, item)

    def _wake(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            *_, arrival, priority, rows = heapq.heappop(self._delayed)
            self._pending.push(rows, arrival=arrival, priority=priority)

    # ---------------------------------------------------------------- batches that go out

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        probing = any(flight.batch.probe for flight in self._flying.values())
        while not self._cancelled and len(self._flying) < self._fleet.slots:
            if self._probes and not probing:
                rows, arrival, priority = self._probes.popleft()
                probing = True
                actions.append(self._submit(rows, sum(r.size for r in rows), arrival, priority, probe=True))
            elif self._pending and self._may_cut():
                rows, size, arrival, priority = self._pending.cut(self._rows_per_batch(), self._policy.batch_bytes)
                actions.append(self._submit(rows, size, arrival, priority))
            else:
                break
        return actions

    def _may_cut(self) -> bool:
        if not self._flying:
            return True
        if self._head is not None and (self._pending.head is None or self._pending.head.id != self._head):
            return False
        return self._flying_bytes < self._policy.in_flight_bytes

    def _rows_per_batch(self) -> int:
        remaining = len(self._pending) if self._exhausted else None
        return batch_rows(self._policy, self._fleet, self._speed.rows_per_s, remaining)

    def _submit(
        self, rows: tuple[Request, ...], size: int, arrival: int, priority: int, *, probe: bool = False
    ) -> Submit:
        attempt = max((h.attempts + h.deaths for r in rows if (h := self._histories.get(r.id))), default=0)
        batch = Batch(f"{self._name}-{next(self._keys)}", rows, attempt, priority, probe)
        self._flying[batch.key] = _Flight(batch, size, arrival)
        self._flying_bytes += size
        return Submit(batch)

    def _cancel(self, *, release: bool) -> list[Action]:
        self._cancelled = True
        self._pending.clear()
        self._delayed.clear()
        self._probes.clear()
        if not release:
            return []
        keys = tuple(self._flying)
        self._flying.clear()
        self._flying_bytes = 0
        return [Release(keys)] if keys else []

"""What a run's events add up to: counts, rates, time left, failures; and the rule that stops a hopeless run.

:class:`Metrics` takes the events of one run and gives an immutable :class:`Snapshot` whenever asked. It reads no clock:
time is what the events say. Its memory does not grow with the number of rows.

Each row is counted once, in ``completed`` or ``failed``, by the ``RowsResolved`` event that carries its final result;
``retried`` counts further attempts and is no part of the sum.

Runs on: anywhere.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import assert_never

from daskinfer.counters import EngineUse, engines_now
from daskinfer.errors import ConfigError, TooManyFailuresError
from daskinfer.rates import Durations, Rates, Speed
from daskinfer.records import (
    BatchReturned,
    BatchSubmitted,
    Event,
    Failed,
    FailureKind,
    Noted,
    RowsCommitted,
    RowsRead,
    RowsResolved,
    RowsRetried,
    RunEnded,
    RunStarted,
    Usage,
    WorkersSeen,
    WorkerView,
)
from daskinfer.snapshot import FailureCount, SlowRow, Snapshot, to_json

__all__ = ["FailureCount", "Metrics", "Rates", "Snapshot", "StopRule", "to_json"]

MAX_KINDS = 20
OTHER = "other"
_MAX_NOTES = 20
_MAX_ERRORS = 20
_MAX_EXAMPLE = 500
_SAMPLE_ROWS = 100
_SLOWEST = 10
_DEADLY = (FailureKind.ENGINE_DIED, FailureKind.ENGINE_HUNG, FailureKind.WORKER_LOST)


class Metrics:
    """Folds the events of one run; not thread-safe."""

    def __init__(self) -> None:
        self._state = "waiting"
        self._started: float | None = None
        self._now = -math.inf
        self._startup: float | None = None
        self._total: int | None = None
        self._rows: Counter[str] = Counter()
        self._usage = Usage()
        self._flying: dict[str, int] = {}
        self._failures: dict[str, FailureCount] = {}
        self._workers: tuple[WorkerView, ...] = ()
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._errors: deque[Failed] = deque(maxlen=_MAX_ERRORS)
        self._speed = Speed()
        self._ran = Durations()
        self._waited = Durations()
        self._slowest: list[tuple[float, int, str]] = []
        self._use = EngineUse()

    def apply(self, event: Event) -> None:
        """Take one event. Events after the end of the run change nothing."""
        if self._state not in ("waiting", "running"):
            return
        self._now = max(self._now, event.at)
        match event:
            case RowsResolved() | RowsRead() | RowsRetried() | RowsCommitted():
                self._apply_rows(event)
            case BatchSubmitted():
                if self._startup is None and self._started is not None:
                    self._startup = event.at - self._started
                self._flying[event.key] = event.rows
                self._rows["sent"] += event.rows
            case BatchReturned():
                self._returned(event)
            case WorkersSeen():
                self._workers = event.workers
                self._use.see(event.workers)
            case Noted():
                self._notes.append(event.message)
            case RunStarted():
                self._state, self._started, self._now = "running", event.at, event.at
                self._total, self._rows["skipped"] = event.total, event.done
            case RunEnded():
                self._state = event.state
                self._flying.clear()
            case _:
                assert_never(event)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, by the latest event."""
        return 0.0 if self._started is None else self._now - self._started

    @property
    def failed(self) -> int:
        """Rows of this run that finally failed."""
        return self._rows["failed"]

    @property
    def done(self) -> int:
        """Rows of this run that have their final result."""
        return self._rows["completed"] + self._rows["failed"]

    @property
    def failures(self) -> tuple[FailureCount, ...]:
        """How rows failed, most frequent first."""
        return tuple(sorted(self._failures.values(), key=lambda f: -f.rows))

    def _returned(self, event: BatchReturned) -> None:
        self._flying.pop(event.key, None)
        self._rows["answered"] += event.answered
        self._ran.add(event.timings.ran_s)
        self._waited.add(event.timings.waited_s)
        if event.timings.last is not None:
            slow = (event.timings.ran_s, event.timings.last, event.worker)
            (heapq.heappush if len(self._slowest) < _SLOWEST else heapq.heappushpop)(self._slowest, slow)

    def _apply_rows(self, event: RowsResolved | RowsRead | RowsRetried | RowsCommitted) -> None:
        match event:
            case RowsResolved():
                self._rows["completed"] += event.completed
                self._rows["failed"] += event.failed
                self._usage += event.usage
                self._count_failures(event.failed, event.failures)
                self._speed.add(self._now, event.completed, event.failed, event.usage)
            case RowsRead():
                self._rows["read"] += event.rows
                if event.exhausted and self._total is None:
                    self._total = self._rows["skipped"] + self._rows["read"]
            case RowsRetried():
                self._rows["retried"] += event.rows
            case RowsCommitted():
                self._rows["committed"] += event.rows
            case _:
                assert_never(event)

    def _count_failures(self, failed: int, examples: Sequence[Failed]) -> None:
        for example in examples[:failed]:
            self._rows["quarantined"] += example.kind in _DEADLY
            self._errors.append(replace(example, message=example.message[:_MAX_EXAMPLE]))
            kind = example.kind if example.kind in self._failures or len(self._failures) < MAX_KINDS else OTHER
            self._count_failure(FailureCount(kind, 1, example.id, example.message[:_MAX_EXAMPLE]))
        if failed > len(examples):
            self._count_failure(FailureCount(OTHER, failed - len(examples)))

    def _count_failure(self, more: FailureCount) -> None:
        first = self._failures.get(more.kind, FailureCount(more.kind, 0, more.row, more.message))
        self._failures[more.kind] = FailureCount(first.kind, first.rows + more.rows, first.row, first.message)

    def snapshot(self) -> Snapshot:
        """Return the run as of the latest event."""
        snapshot = Snapshot(
            state=self._state,
            elapsed_s=self.elapsed_s,
            startup_s=self._startup,
            total=self._total,
            skipped=self._rows["skipped"],
            read=self._rows["read"],
            completed=self._rows["completed"],
            failed=self._rows["failed"],
            retried=self._rows["retried"],
            committed=self._rows["committed"],
            quarantined=self._rows["quarantined"],
            sent=self._rows["sent"],
            answered=self._rows["answered"],
            usage=self._usage,
            batches_in_flight=len(self._flying),
            rows_in_flight=sum(self._flying.values()),
            recent=self._speed.recent(self._now),
            average=self._speed.average(self._now),
            queue_s=self._waited.percentiles(0.5, 0.95),
            batch_s=self._ran.percentiles(0.5, 0.95),
            step_s=self._use.steps.percentiles(0.5, 0.95),
            steps_s=self._use.steps.counts(),
            failures=self.failures,
            errors=tuple(self._errors),
            slowest=tuple(SlowRow(row, seconds, worker) for seconds, row, worker in sorted(self._slowest)[::-1]),
            workers=self._workers,
            work=self._use.work,
            engines=engines_now(self._workers),
            notes=tuple(self._notes),
        )
        if snapshot.remaining is None:
            return snapshot
        tail_s = snapshot.batch_s[-1] if snapshot.batch_s else 0.0
        return replace(snapshot, eta_s=self._speed.time_left(snapshot.remaining, self._now, tail_s))


# ---------------------------------------------------------------- when to stop


@dataclass(frozen=True, slots=True)
class StopRule:
    """How many failed rows a job allows before it is stopped.

    Parameters
    ----------
    max_failures : int, str or None
        A number of rows: the job is stopped when more have failed. A percentage such as "5%": when a greater share of the
        rows resolved so far has failed, judged from 100 rows on, and at the end of the job whatever their number. None:
        only when the first 100 rows that were resolved (or more, if more came at once) all failed with the same kind.

    Raises
    ------
    ConfigError
        Neither a whole number ≥ 0, nor a percentage from 0% to 100%.
    """

    max_failures: int | str | None = None

    def __post_init__(self) -> None:
        self._limits()

    def _limits(self) -> tuple[int | None, Fraction | None]:
        """Return the number of rows, and the share of rows; at most one of them is not None."""
        value = self.max_failures
        if value is None:
            return None, None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value, None
        if isinstance(value, str):
            text = value.replace("_", "").strip()
            if text.isascii() and text.isdecimal():
                return int(text), None
            number = text.removesuffix("%").rstrip()
            if text.endswith("%") and number.isascii() and number.replace(".", "", 1).isdecimal():
                share = Fraction(number) / 100
                if share <= 1:
                    return None, share
        raise ConfigError(
            f"max_failures={value!r}: must be a number of rows such as 100, or a percentage such as '5%' (0% to 100%)"
        )

    def check(
        self, failed: int, done: int, failures: Sequence[FailureCount], *, ended: bool = False
    ) -> TooManyFailuresError | None:
        """Return the error to stop the job with, or None when it may go on.

        Parameters
        ----------
        failed, done : int
            Rows of this run that failed, and that were resolved at all.
        failures : sequence of FailureCount
            Most frequent first, as in a :class:`Snapshot`.
        ended : bool
            No further row will come.
        """
        rows, share = self._limits()
        if rows is not None:
            broken, limit = failed > rows, f"max_failures={rows}"
        elif share is not None:
            enough = ended or done >= _SAMPLE_ROWS
            broken, limit = enough and failed > share * done, f"max_failures={self.max_failures}"
        else:
            broken = done >= _SAMPLE_ROWS and len(failures) == 1 and failures[0].rows == done
            limit = "all with the same kind; to go on nevertheless give max_failures (--max-failures)"
        if not broken:
            return None
        example = f"{failures[0].kind}: {failures[0].message}" if failures else "no reason was told"
        return TooManyFailuresError(failed, done, limit, example)

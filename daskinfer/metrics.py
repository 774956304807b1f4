"""What a run's events add up to: counts, rates, time left, failures; and the rule that stops a hopeless run.

:class:`Metrics` takes the events of one run and gives an immutable :class:`Snapshot` whenever asked. It reads no clock:
time is what the events say. Its memory does not grow with the number of rows.

Each row is counted once, in ``completed`` or ``failed``, by the ``RowsResolved`` event that carries its final result;
``retried`` counts further attempts and is no part of the sum.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, assert_never

from daskinfer.errors import ConfigError, TooManyFailuresError
from daskinfer.rates import Durations, EngineUse, Rates, Speed
from daskinfer.records import (
    BatchReturned,
    BatchSubmitted,
    Event,
    Failed,
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

__all__ = ["FailureCount", "Metrics", "Rates", "Snapshot", "StopRule", "to_json"]

MAX_KINDS = 20
OTHER = "other"
_MAX_NOTES = 20
_MAX_EXAMPLE = 500
_SAMPLE_ROWS = 100


@dataclass(frozen=True, slots=True)
class FailureCount:
    """How many rows failed in one way.

    Attributes
    ----------
    kind : str
        "other" gathers what is over the number of kinds kept apart, and rows of which no reason was told.
    rows : int
    row : int or None
        Id of the first such row.
    message : str
        What was said of it, at most 500 characters.
    """

    kind: str
    rows: int
    row: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    Attributes
    ----------
    state : str
        "waiting" before the run began, "running", then how it ended: "done", "interrupted" or "error".
    elapsed_s : float
        Since the run began, until its end.
    startup_s : float or None
        From the beginning to the first batch.
    total : int or None
        Rows of the job, those of earlier runs included, where it is known.
    skipped : int
        Rows done in earlier runs.
    read, completed, failed, retried, committed : int
        Rows of this run: taken from the source; finally answered; finally failed; tried again; safe on disk.
    usage : Usage
        Tokens of the resolved rows.
    batches_in_flight, rows_in_flight : int
    recent, average : Rates or None
        Over the last 10 seconds, and since the first row was answered. None until a second has passed since then.
    eta_s : (float, float) or None
        Least and most seconds that are left, by the spread of the rates measured so far; None while those say too little.
    batch_s : tuple of float or None
        Median and 95th percentile of the seconds a batch ran on its worker, within 10 %.
    failures : tuple of FailureCount
        Most frequent first; the rows add up to ``failed``.
    workers : tuple of WorkerView
    occupancy : float or None
        Share of the engines' capacity in use in the run's steps during which rows were waiting.
    padding : float or None
        Share of the tokens computed in the run that were only padding.
    notes : tuple of str
        The last 20 things that a person should read.
    """

    state: str = "waiting"
    elapsed_s: float = 0.0
    startup_s: float | None = None
    total: int | None = None
    skipped: int = 0
    read: int = 0
    completed: int = 0
    failed: int = 0
    retried: int = 0
    committed: int = 0
    usage: Usage = field(default_factory=Usage)
    batches_in_flight: int = 0
    rows_in_flight: int = 0
    recent: Rates | None = None
    average: Rates | None = None
    eta_s: tuple[float, float] | None = None
    batch_s: tuple[float, ...] | None = None
    failures: tuple[FailureCount, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    occupancy: float | None = None
    padding: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """Rows of this run that have their final result."""
        return self.completed + self.failed

    @property
    def remaining(self) -> int | None:
        """Rows still without a result, where the total is known."""
        return None if self.total is None else max(0, self.total - self.skipped - self.done)

    @property
    def worker_states(self) -> dict[str, int]:
        """Number of workers in each state."""
        return dict(Counter(worker.state for worker in self.workers))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        derived = {"done": self.done, "remaining": self.remaining, "worker_states": self.worker_states}
        return {**to_json(self), **derived}


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
        self._speed = Speed()
        self._durations = Durations()
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
            case BatchReturned():
                self._flying.pop(event.key, None)
                self._durations.add(event.timings.ran_s)
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
            usage=self._usage,
            batches_in_flight=len(self._flying),
            rows_in_flight=sum(self._flying.values()),
            recent=self._speed.recent(self._now),
            average=self._speed.average(self._now),
            batch_s=self._durations.percentiles(0.5, 0.95),
            failures=tuple(sorted(self._failures.values(), key=lambda f: -f.rows)),
            workers=self._workers,
            occupancy=self._use.occupancy,
            padding=self._use.padding,
            notes=tuple(self._notes),
        )
        if snapshot.remaining is None:
            return snapshot
        return replace(snapshot, eta_s=self._speed.time_left(snapshot.remaining, self._now))


def to_json(value: Any) -> Any:
    """Return records, mappings and sequences as plain JSON types; a number that is not finite becomes None."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


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

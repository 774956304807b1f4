"""A run at one moment, as plain figures.

Two kinds of counters are kept apart. *Row* counters (``completed, failed, …``) are kept by the driver when a row has its
final result: each row counts once. *Work* counters (:class:`Work`) are the engines': a row that was run twice, because its
worker was lost or it was tried again, counts twice.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from daskinfer.rates import Rates
from daskinfer.records import Failed, Usage, WorkerView

__all__ = ["Engines", "FailureCount", "SlowRow", "Snapshot", "Work", "to_json"]


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
class SlowRow:
    """A row that took long: the last one of its batch.

    Attributes
    ----------
    row : int
    seconds : float
        From its batch's first step to its end, its wait inside the engine included.
    worker : str
    """

    row: int
    seconds: float
    worker: str


@dataclass(frozen=True, slots=True)
class Work:
    """What the engines did in a run, repeats included; from heartbeats, so the last half second may be missing.

    Attributes
    ----------
    steps, row_steps : int
        Forward passes, and the rows in them.
    full_steps, full_row_steps, full_places : int
        Those during which rows were waiting, the rows in them, and the rows they had place for.
    prompt_tokens, completion_tokens, padded_tokens : int
        Tokens read, written, and computed for padding alone.
    prefill_tokens, decode_tokens : int
        Tokens computed of prompts and of answers, where the engine tells them apart; without what shared beginnings saved.
    prefix_hits, prefix_tokens : int
        Rows that found the beginning of their prompt computed already, and its tokens.
    preemptions, out_of_memory : int
        Rows sent back for lack of memory, and steps that did not fit.
    restarts : int
        Engines that were started again.
    """

    steps: int = 0
    row_steps: int = 0
    full_steps: int = 0
    full_row_steps: int = 0
    full_places: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    padded_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    restarts: int = 0

    @property
    def occupancy(self) -> float | None:
        """Share of the capacity used in steps during which rows were waiting, None before the first."""
        return self.full_row_steps / self.full_places if self.full_places else None

    @property
    def padding(self) -> float | None:
        """Share of the computed tokens that were only padding, None before the first."""
        computed = self.prompt_tokens + self.completion_tokens + self.padded_tokens
        return self.padded_tokens / computed if computed else None

    @property
    def prefill(self) -> float | None:
        """Share of the computed tokens that were prompts', None where engines do not tell."""
        computed = self.prefill_tokens + self.decode_tokens
        return self.prefill_tokens / computed if computed else None


@dataclass(frozen=True, slots=True)
class Engines:
    """What the engines hold now, summed over the workers.

    Attributes
    ----------
    capacity, running, waiting : int
        Rows that run at once at most; that run; that wait in the engines.
    kv_tokens, kv_used_tokens : int
        Size and use of the key-value caches, in tokens; 0 with engines that have none.
    ram_bytes : int
        Memory of the engines' processes.
    gpu_memory_bytes : int
        Of the workers' GPUs.
    """

    capacity: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_used_tokens: int = 0
    ram_bytes: int = 0
    gpu_memory_bytes: int = 0

    @property
    def kv_use(self) -> float | None:
        """Share of the key-value caches in use, None without any."""
        return self.kv_used_tokens / self.kv_tokens if self.kv_tokens else None


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
    quarantined : int
        Those of the failed rows that killed or hung their engine, or lost their worker.
    sent, answered : int
        Work, repeats included: rows given to workers, and results that came back, of which some were tried again.
    usage : Usage
        Tokens of the resolved rows.
    batches_in_flight, rows_in_flight : int
    recent, average : Rates or None
        Over the last 10 seconds, and since the first row was answered. None until a second has passed since then.
    eta_s : (float, float) or None
        Least and most seconds that are left, by the spread of the rates measured so far; None while those say too little.
    queue_s, batch_s, step_s : tuple of float or None
        Median and 95th percentile, within 10 %, of the seconds that a batch waited on its worker, that it ran there, and of
        an engine's step.
    steps_s : tuple of (float, int)
        The steps by duration: seconds (middle of a bin) and number, repeats included.
    failures : tuple of FailureCount
        Most frequent first; the rows add up to ``failed``.
    errors : tuple of Failed
        The last 20 rows that failed.
    slowest : tuple of SlowRow
        Slowest first, at most 10; of each batch only its last row is known.
    workers : tuple of WorkerView
    work : Work
    engines : Engines
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
    quarantined: int = 0
    sent: int = 0
    answered: int = 0
    usage: Usage = field(default_factory=Usage)
    batches_in_flight: int = 0
    rows_in_flight: int = 0
    recent: Rates | None = None
    average: Rates | None = None
    eta_s: tuple[float, float] | None = None
    queue_s: tuple[float, ...] | None = None
    batch_s: tuple[float, ...] | None = None
    step_s: tuple[float, ...] | None = None
    steps_s: tuple[tuple[float, int], ...] = ()
    failures: tuple[FailureCount, ...] = ()
    errors: tuple[Failed, ...] = ()
    slowest: tuple[SlowRow, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    work: Work = field(default_factory=Work)
    engines: Engines = field(default_factory=Engines)
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
    def tokens_left(self) -> int | None:
        """Tokens that the remaining rows will write if they are like those before, None where nothing is known."""
        if self.remaining is None or not self.completed:
            return None
        return round(self.remaining * self.usage.completion_tokens / self.completed)

    @property
    def occupancy(self) -> float | None:
        """Share of the engines' capacity in use in the run's steps during which rows were waiting."""
        return self.work.occupancy

    @property
    def padding(self) -> float | None:
        """Share of the tokens computed in the run that were only padding."""
        return self.work.padding

    @property
    def worker_states(self) -> dict[str, int]:
        """Number of workers in each state."""
        return dict(Counter(worker.state for worker in self.workers))

    def to_dict(self, *, workers: bool = True) -> dict[str, Any]:
        """Return everything as plain JSON types.

        Parameters
        ----------
        workers : bool
            Also the workers' views, which are most of it on a large cluster.
        """
        shown = {f.name: to_json(getattr(self, f.name)) for f in fields(self) if workers or f.name != "workers"}
        return {
            **shown,
            "done": self.done,
            "remaining": self.remaining,
            "tokens_left": self.tokens_left,
            "worker_states": self.worker_states,
            "occupancy": self.work.occupancy,
            "padding": self.work.padding,
            "prefill": self.work.prefill,
            "kv_use": self.engines.kv_use,
        }


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

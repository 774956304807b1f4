"""How a run went over time, and what would make it faster: an observer that keeps what the report shows.

Memory does not grow with the run: samples are at most 240 and their distance doubles, and of each worker the last changes of
state are kept.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daskinfer.counters import figure
from daskinfer.records import Event, RowsRead, RowsResolved, RunEnded, RunStarted, Usage, WorkersSeen, WorkerView
from daskinfer.snapshot import Snapshot

__all__ = ["Recorder", "Span", "Timeline", "advice"]

SAMPLES = 240
SPANS = 50
LOW_OCCUPANCY = 0.7
HIGH_PADDING = 0.3
HIGH_STARVED = 0.3
LONG_STARTUP = 0.3


@dataclass(frozen=True, slots=True)
class Span:
    """A worker was in one state from a second of the run to another."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run over time.

    Attributes
    ----------
    columns : dict of str to tuple of float
        ``t`` (seconds since the start) and, since the sample before: ``rows, tokens_in, tokens_out`` per second; and at
        that moment: ``done`` (rows), ``occupancy`` (share of the places of ready workers), ``waiting`` (rows in engines),
        ``ready`` (workers), ``ram_bytes, gpu_bytes``.
    workers : dict of str to tuple of Span
        By address, for at most 200 workers; a worker that joined has its first span then.
    starved : float or None
        How often, of all looks at ready workers while the source had rows, an engine had free places and no row waited.
    """

    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    workers: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    starved: float | None = None


class Recorder:
    """Keeps the timeline of one run; call it with each event."""

    NAMES = ("t", "done", "rows", "tokens_in", "tokens_out", "occupancy", "waiting", "ready", "ram_bytes", "gpu_bytes")
    MAX_WORKERS = 200

    def __init__(self) -> None:
        self._start: float | None = None
        self._now = 0.0
        self._done = 0
        self._usage = Usage()
        self._exhausted = False
        self._looks = self._starved = 0
        self._samples: list[dict[str, float]] = []
        self._every = 1.0
        self._spans: dict[str, deque[Span]] = {}
        self._views: Sequence[WorkerView] = ()
        self._ended = False

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if self._ended:
            return
        if isinstance(event, RunStarted):
            self._start = event.at
        if self._start is None:
            return
        self._now = max(self._now, event.at - self._start)
        if isinstance(event, RowsResolved):
            self._done += event.completed + event.failed
            self._usage += event.usage
        elif isinstance(event, RowsRead):
            self._exhausted = self._exhausted or event.exhausted
        elif isinstance(event, WorkersSeen):
            self._see(event.workers)
        self._ended = isinstance(event, RunEnded)
        since = self._now - self._samples[-1]["t"] if self._samples else math.inf
        if self._ended and len(self._samples) > 1 and since < self._every / 2:
            self._samples.pop()  # a rate over a moment says nothing
        if self._ended or since >= self._every:
            self._sample()

    def _see(self, workers: Sequence[WorkerView]) -> None:
        self._views = workers
        there = {worker.address for worker in workers}
        for address, known in self._spans.items():
            if address not in there and known[-1].state != "lost":
                known.append(Span("lost", known[-1].end, self._now))
        for worker in workers:
            spans = self._spans.get(worker.address)
            if spans is None:
                if len(self._spans) >= self.MAX_WORKERS:
                    continue
                spans = self._spans[worker.address] = deque(maxlen=SPANS)
            if spans and spans[-1].state == worker.state:
                spans[-1] = Span(worker.state, spans[-1].begin, self._now)
            else:
                begin = spans[-1].end if spans else self._now
                spans.append(Span(worker.state, begin, self._now))
            if worker.state == "ready" and not self._exhausted:
                free = worker.capacity - figure(worker.metrics, "running")
                self._looks += 1
                self._starved += free > 0 and not figure(worker.metrics, "waiting")

    def _sample(self) -> None:
        ready = [worker for worker in self._views if worker.state == "ready"]
        capacity = sum(worker.capacity for worker in ready)
        figures = [worker.metrics for worker in self._views]
        self._samples.append(
            {
                "t": self._now,
                "done": self._done,
                "tokens_in": self._usage.prompt_tokens,
                "tokens_out": self._usage.completion_tokens,
                "occupancy": sum(figure(w.metrics, "running") for w in ready) / capacity if capacity else 0.0,
                "waiting": sum(figure(each, "waiting") for each in figures),
                "ready": len(ready),
                "ram_bytes": sum(figure(each, "ram_bytes") for each in figures),
                "gpu_bytes": sum(figure(each, "gpu_memory_bytes") for each in figures),
            }
        )
        if len(self._samples) >= SAMPLES:
            self._samples = [self._samples[0], *self._samples[1::2]]
            self._every *= 2

    @property
    def timeline(self) -> Timeline:
        """What was kept so far."""
        rows: list[dict[str, float]] = []
        before: Mapping[str, float] = dict.fromkeys(self.NAMES, 0.0)
        for sample in self._samples:
            seconds = max(1e-9, sample["t"] - before["t"])
            grown = {name: (sample[name] - before[name]) / seconds for name in ("tokens_in", "tokens_out")}
            rows.append({**sample, **grown, "rows": (sample["done"] - before["done"]) / seconds})
            before = sample
        columns = {name: tuple(round(row[name], 4) for row in rows) for name in self.NAMES}
        return Timeline(
            columns,
            {address: tuple(spans) for address, spans in self._spans.items()},
            self._starved / self._looks if self._looks else None,
        )


def advice(snapshot: Snapshot, starved: float | None = None) -> tuple[str, ...]:
    """Return what would make such a run faster, one sentence each; nothing when nothing stands out.

    Parameters
    ----------
    snapshot : Snapshot
        As of the run's end.
    starved : float or None
        See :class:`Timeline`.
    """
    found: list[str] = []
    occupancy, padding = snapshot.occupancy, snapshot.padding
    if occupancy is not None and occupancy < LOW_OCCUPANCY:
        found.append(
            f"Engines were {_percent(occupancy)} full while rows waited: an engine that refills its places (lm), or rows of "
            "like length together, would fill them."
        )
    if padding is not None and padding > HIGH_PADDING:
        found.append(
            f"{_percent(padding)} of the computed tokens were padding: an engine that does not pad (lm, encoder), or more "
            "rows to choose from (batch.oversubscribe), would save them."
        )
    if starved is not None and starved > HIGH_STARVED:
        found.append(
            f"In {_percent(starved)} of the looks an engine had free places and no row waited: the driver could not supply "
            "it; make batches larger (batch.rows, batch.oversubscribe), keep fewer columns, or lighten preprocess."
        )
    startup = snapshot.startup_s or 0.0
    if snapshot.elapsed_s > 10 and startup > LONG_STARTUP * snapshot.elapsed_s:
        found.append(
            f"{_percent(startup / snapshot.elapsed_s)} of the time went by before the first batch: run more rows at once, "
            "or keep the driver open between runs."
        )
    work = snapshot.work
    if work.preemptions or work.out_of_memory:
        found.append(
            f"Rows were sent back {work.preemptions:,} times for lack of memory, and {work.out_of_memory:,} steps did not "
            "fit: fewer rows at once, or more memory for the cache."
        )
    if work.restarts:
        found.append(f"Engines were started again {work.restarts:,} times: the failed rows say why.")
    return tuple(found)


def _percent(share: float) -> str:
    return f"{math.floor(100 * share + 0.5)} %"

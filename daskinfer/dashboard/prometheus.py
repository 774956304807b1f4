"""Figures for Prometheus, beside Dask's own on the ``/metrics`` of the scheduler and of each worker.

The names of what an engine does are those that inference servers use, with ``daskinfer_`` in front. Prometheus' registry is
one per process, and so is the collector here: a scheduler and several workers in one process share it, each as a source.
Without ``prometheus_client`` nothing is exposed, as with Dask.

A model may be loaded twice, with other options: every series has its name, its task and the key of its specification.

Runs on: scheduler, worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.counters import STEPS, figure
from daskinfer.dashboard.board import Board, Model
from daskinfer.rates import Durations

__all__ = ["expose", "of_board", "of_worker", "withdraw"]

PREFIX = "daskinfer"
Sample = tuple[str, str, str, dict[str, str], Any]
"""Name, kind ("gauge", "counter" or "histogram"), help, labels, value; of a histogram the flat bins of ``Durations``."""
Source = Callable[[], Iterable[Sample]]

_ENGINE = (
    ("num_requests_running", "gauge", "Rows in the engine's step", "running"),
    ("num_requests_waiting", "gauge", "Rows that wait in the engine", "waiting"),
    ("num_requests_capacity", "gauge", "Rows that the engine runs at once", "capacity"),
    ("prompt_tokens", "counter", "Tokens read, repeats included", "prompt_tokens"),
    ("generation_tokens", "counter", "Tokens written, repeats included", "completion_tokens"),
    ("padded_tokens", "counter", "Tokens computed only for padding", "padded_tokens"),
    ("engine_steps", "counter", "Forward passes", "steps"),
    ("engine_step_rows", "counter", "Rows in forward passes, summed", "row_steps"),
    ("engine_restarts", "counter", "Engines started again", "restarts"),
    ("num_preemptions", "counter", "Rows sent back for lack of memory", "engine.preemptions"),
    ("prefix_cache_hits", "counter", "Rows whose beginning was computed already", "engine.prefix_hits"),
    ("prefix_cache_hit_tokens", "counter", "Tokens of those beginnings", "engine.prefix_tokens"),
    ("engine_memory_bytes", "gauge", "Memory of the engine's process", "ram_bytes"),
    ("gpu_memory_bytes", "gauge", "Memory in use of the worker's GPU", "gpu_memory_bytes"),
)
_JOB = (
    ("rows_completed", "counter", "Rows answered, each once", "completed"),
    ("rows_failed", "counter", "Rows finally failed, each once", "failed"),
    ("rows_retried", "counter", "Further attempts", "retried"),
    ("rows_quarantined", "counter", "Failed rows that killed their engine or worker", "quarantined"),
    ("rows_sent", "counter", "Rows given to workers, repeats included", "sent"),
    ("rows_committed", "counter", "Rows safe on disk", "committed"),
    ("rows_in_flight", "gauge", "Rows on workers", "rows_in_flight"),
    ("rows_remaining", "gauge", "Rows without a result", "remaining"),
)
_RATES = (
    ("rows_per_s", "rows"),
    ("prompt_tokens_per_s", "prompt_tokens"),
    ("completion_tokens_per_s", "generation_tokens"),
)


def of_worker(address: str, spec: ModelSpec, figures: Callable[[], Mapping[str, Any]]) -> Source:
    """Return the samples of one model on one worker, from the figures of its heartbeat."""

    def samples() -> Iterator[Sample]:
        labels = {"model": spec.model, "task": spec.task, "key": spec.key, "worker": address}
        now = figures()
        for name, kind, text, key in _ENGINE:
            if key in now:
                yield name, kind, text, labels, figure(now, key)
        yield "engine_ready", "gauge", "Whether the engine takes rows", labels, int(now.get("state") == "ready")
        total = figure(now, "engine.kv_tokens")
        if total:
            used = figure(now, "engine.kv_used_tokens") / total
            yield "kv_cache_usage_ratio", "gauge", "Share of the key-value cache in use", labels, used
        yield "step_seconds", "histogram", "Duration of a forward pass", labels, now.get(STEPS) or []

    return samples


def of_board(board: Board) -> Source:
    """Return the samples of all jobs and models on a scheduler's board."""

    def samples() -> Iterator[Sample]:
        now = time.time()
        for model in board.models.values():
            named = _named(model)
            states: dict[str, int] = {}
            for worker in model.workers.values():
                states[worker.state] = states.get(worker.state, 0) + 1
            for state, count in states.items():
                yield "workers", "gauge", "Workers by state", {**named, "state": state}, count
            for job in model.jobs.values():
                labels = {**named, "run": job.name, "id": job.id}
                yield "run_active", "gauge", "Whether it runs", labels, int(job.state(now) == "running")
                yield from _of_job(labels, job.snapshot)

    return samples


def _named(model: Model) -> dict[str, str]:
    return {"model": model.about.get("model", model.key), "task": model.about.get("task", ""), "key": model.key}


def _of_job(labels: dict[str, str], snapshot: Mapping[str, Any]) -> Iterator[Sample]:
    for name, kind, text, key in _JOB:
        if snapshot.get(key) is not None:
            yield name, kind, text, labels, snapshot[key]
    if snapshot.get("total") is not None:
        yield "rows", "gauge", "Rows of the job, those of earlier runs included", labels, snapshot["total"]
    rates = snapshot.get("recent") or {}
    for key, name in _RATES:
        yield (
            f"{name}_per_second",
            "gauge",
            "Over the last 10 seconds, of rows with a result",
            labels,
            rates.get(key, 0.0),
        )
    for bound, seconds in zip(("least", "most"), snapshot.get("eta_s") or (), strict=False):
        yield "seconds_left", "gauge", "Time left", {**labels, "bound": bound}, seconds
    for key in ("occupancy", "padding"):
        if snapshot.get(key) is not None:
            yield f"{key}_ratio", "gauge", "Of the run so far", labels, snapshot[key]


# ---------------------------------------------------------------- the registry of this process


class _Collector:
    """What ``prometheus_client`` calls: all sources, one family per name."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def describe(self) -> list[Any]:
        """Return nothing: names come with the samples."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        families: dict[str, Any] = {}
        for source in list(self.sources.values()):
            for name, kind, text, labels, value in source():
                family = families.get(name)
                if family is None:
                    family = families[name] = kinds[kind](f"{PREFIX}_{name}", text, labels=list(labels))
                if kind == "histogram":
                    buckets, total = _buckets(value)
                    family.add_metric(list(labels.values()), buckets, sum_value=total)
                else:
                    family.add_metric(list(labels.values()), value)
        yield from families.values()


_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _buckets(flat: Sequence[int]) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets and the sum of seconds, of the bins of ``Durations``."""
    steps = Durations()
    steps.merge(flat)
    counts = steps.counts()
    buckets = [(str(edge), float(sum(n for middle, n in counts if middle <= edge * 1.0001))) for edge in _EDGES]
    return [*buckets, ("+Inf", float(sum(n for _, n in counts)))], sum(middle * n for middle, n in counts)


_COLLECTOR = _Collector()


def expose(name: str, source: Source) -> bool:
    """Add a source; return False where ``prometheus_client`` is not installed."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    if not _COLLECTOR.sources:
        REGISTRY.register(_COLLECTOR)
    _COLLECTOR.sources[name] = source
    return True


def withdraw(name: str) -> None:
    """Take a source away; does nothing when it is not there."""
    if _COLLECTOR.sources.pop(name, None) is not None and not _COLLECTOR.sources:
        from prometheus_client import REGISTRY

        REGISTRY.unregister(_COLLECTOR)

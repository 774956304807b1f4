"""What the counters in the workers' heartbeats add up to over a run.

The counters live as long as an engine, which may serve other runs before; only their growth from view to view counts. An
engine that was started again begins at zero, and so does a worker that comes later.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from daskinfer.rates import Durations
from daskinfer.records import WorkerView
from daskinfer.snapshot import Engines, Work

__all__ = ["EngineUse", "engines_now", "figure"]

_OF_ENGINES = ("prefill_tokens", "decode_tokens", "prefix_hits", "prefix_tokens", "preemptions", "out_of_memory")
"""Counters that only some engines have; in a heartbeat their names begin with "engine."."""
_DERIVED = ("full_places", "restarts")
_COUNTED = tuple(field.name for field in fields(Work) if field.name not in _DERIVED)
_NAMES = {name: f"engine.{name}" if name in _OF_ENGINES else name for name in _COUNTED}
STEPS = "step_bins"
"""Name of the heartbeat's figure with the histogram of steps, see :class:`~daskinfer.rates.Durations`."""


class EngineUse:
    """The growth of all workers' counters since the first view."""

    def __init__(self) -> None:
        self._seen: dict[str, Mapping[str, Any]] = {}
        self._grown: Counter[str] = Counter()
        self.steps = Durations()

    def see(self, workers: Sequence[WorkerView]) -> None:
        """Take the latest view of all workers; one that is not among them any more is forgotten."""
        for worker in workers:
            now = worker.metrics
            self._grow(worker.capacity, now, self._seen.get(worker.address, now))
        self._seen = {worker.address: worker.metrics for worker in workers}

    def _grow(self, capacity: int, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        again = any(figure(now, name) < figure(before, name) for name in _NAMES.values())
        for counter, name in _NAMES.items():
            grown = figure(now, name) - (0 if again else figure(before, name))
            self._grown[counter] += grown
            if counter == "full_steps":
                self._grown["full_places"] += grown * capacity
        self._grown["restarts"] += max(0, figure(now, "restarts") - figure(before, "restarts"))
        old, new = _bins(before), _bins(now)
        self.steps.merge(new)
        if sum(new[1::2]) >= sum(old[1::2]):
            self.steps.merge(old, -1)

    @property
    def work(self) -> Work:
        """What was done so far."""
        return Work(**{field.name: self._grown[field.name] for field in fields(Work)})


def engines_now(workers: Sequence[WorkerView]) -> Engines:
    """Return what the engines of these workers hold, summed."""

    def total(name: str) -> int:
        return sum(figure(worker.metrics, name) for worker in workers)

    return Engines(
        capacity=sum(worker.capacity for worker in workers),
        running=total("running"),
        waiting=total("waiting"),
        kv_tokens=total("engine.kv_tokens"),
        kv_used_tokens=total("engine.kv_used_tokens"),
        ram_bytes=total("ram_bytes"),
        gpu_memory_bytes=total("gpu_memory_bytes"),
    )


def figure(metrics: Mapping[str, Any], name: str) -> int:
    """Return a whole number of a heartbeat; 0 where it is missing or is none."""
    value = metrics.get(name)
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _bins(metrics: Mapping[str, Any]) -> list[int]:
    value = metrics.get(STEPS)
    return list(value) if isinstance(value, list | tuple) and len(value) % 2 == 0 else []

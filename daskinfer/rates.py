"""Measured speed: recent and average rates, how long the rest will take, durations, how well the engines are used.

Nothing here reads a clock, and memory is constant: seconds are kept for the last ten only, and the whole run is kept as at
most 32 samples, whose length doubles whenever there would be more.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

from daskinfer.records import Usage, WorkerView

__all__ = ["Durations", "EngineUse", "Rates", "Speed"]

WINDOW_S = 10
_SAMPLES = 32
_ENOUGH = 4
_VAGUE = 5.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Resolved rows, and tokens of resolved rows, per second."""

    rows_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float


@dataclass(slots=True)
class _Sums:
    second: int
    rows: int = 0
    prompt: int = 0
    completion: int = 0

    def add(self, rows: int, usage: Usage) -> None:
        self.rows += rows
        self.prompt += usage.prompt_tokens
        self.completion += usage.completion_tokens


class Speed:
    """Rates since the first rows were answered; those rows themselves took an unknown time and do not count."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._all = _Sums(0)
        self._last: deque[_Sums] = deque()
        self._samples: list[int] = []
        self._sample_s = 1.0
        self._open_rows = 0

    def add(self, at: float, completed: int, failed: int, usage: Usage) -> None:
        """Count rows that were resolved at this time; times do not decrease."""
        if self._first is None:
            if completed:
                self._first = at
            return
        self._advance(at)
        second = int(at - self._first)
        if not self._last or self._last[-1].second != second:
            self._last.append(_Sums(second))
            while self._last[0].second <= second - WINDOW_S:
                self._last.popleft()
        self._last[-1].add(completed + failed, usage)
        self._all.add(completed + failed, usage)
        self._open_rows += completed + failed

    def recent(self, now: float) -> Rates | None:
        """Return the rates over the last 10 seconds (or the time since the first answer), None before 1 second."""
        if self._first is None or now - self._first < 1:
            return None
        start = max(0, int(now - self._first) - WINDOW_S + 1)
        sums = _Sums(0)
        for part in self._last:
            if part.second >= start:
                sums.add(part.rows, Usage(part.prompt, part.completion))
        return _rates(sums, now - self._first - start)

    def average(self, now: float) -> Rates | None:
        """Return the rates since the first answer, None before 1 second."""
        if self._first is None or now - self._first < 1:
            return None
        return _rates(self._all, now - self._first)

    def time_left(self, rows: int, now: float) -> tuple[float, float] | None:
        """Return the least and most seconds that this many rows will take.

        A prediction interval (two standard errors) from the samples' rates: once over the whole run and once over its last
        quarter, and the wider of the two ends, so that a change of speed shows as a wide interval. None while there are
        fewer than four samples, after a standstill, or when the ends are more than 5 times apart from the middle.
        """
        if rows == 0:
            return 0.0, 0.0
        self._advance(now)
        rates = [sample / self._sample_s for sample in self._samples]
        if len(rates) < _ENOUGH:
            return None
        low, high = math.inf, 0.0
        for part in (rates, rates[-max(_ENOUGH, len(rates) // 4) :]):
            mean = fmean(part)
            if mean == 0:
                return None
            middle = rows / mean
            error = stdev(part) / mean * math.sqrt(1 / len(part) + 1 / max(1.0, middle / self._sample_s))
            factor = math.exp(2 * error)
            if factor > _VAGUE:
                return None
            low, high = min(low, middle / factor), max(high, middle * factor)
        return low, high

    def _advance(self, now: float) -> None:
        """Close the samples that have ended; rows resolved at the very end of one belong to it."""
        if self._first is None:
            return
        while now - self._first > (len(self._samples) + 1) * self._sample_s:
            self._samples.append(self._open_rows)
            self._open_rows = 0
            if len(self._samples) == _SAMPLES:
                self._samples = [a + b for a, b in zip(self._samples[::2], self._samples[1::2], strict=True)]
                self._sample_s *= 2


class Durations:
    """Percentiles of durations, within 10 %, from a histogram whose bins grow by a fifth."""

    _LEAST = 1e-3
    _GROWTH = math.log(1.2)

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one duration; less than a millisecond counts as one."""
        self._bins[round(math.log(max(seconds, self._LEAST) / self._LEAST) / self._GROWTH)] += 1

    def percentiles(self, *shares: float) -> tuple[float, ...] | None:
        """Return the durations below which these shares (0 to 1) lie, None without any."""
        total = self._bins.total()
        return tuple(self._percentile(share * total) for share in shares) if total else None

    def _percentile(self, rank: float) -> float:
        bins = sorted(self._bins)
        seen = accumulate(self._bins[index] for index in bins)
        index = next(index for index, count in zip(bins, seen, strict=True) if count >= rank)
        return self._LEAST * math.exp(index * self._GROWTH)


class EngineUse:
    """How well the engines are used in a run, from the counters in the workers' heartbeats.

    The counters live as long as an engine, which may serve other runs before; only their growth from view to view counts.
    """

    _NAMES = ("full_steps", "full_row_steps", "prompt_tokens", "completion_tokens", "padded_tokens")

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}
        self._grown: defaultdict[str, float] = defaultdict(float)

    def see(self, workers: Sequence[WorkerView]) -> None:
        """Take the latest view of all workers; one that is not among them any more is forgotten."""
        seen = {worker.address: {name: _figure(worker, name) for name in self._NAMES} for worker in workers}
        for worker in workers:
            now = seen[worker.address]
            before = self._seen.get(worker.address, now)
            restarted = any(now[name] < before[name] for name in self._NAMES)
            grown = {name: now[name] - (0 if restarted else before[name]) for name in self._NAMES}
            grown["places"] = grown["full_steps"] * worker.capacity
            for name, amount in grown.items():
                self._grown[name] += amount
        self._seen = seen

    @property
    def occupancy(self) -> float | None:
        """Share of the capacity used in steps during which rows were waiting, None before the first."""
        return self._grown["full_row_steps"] / self._grown["places"] if self._grown["places"] else None

    @property
    def padding(self) -> float | None:
        """Share of the computed tokens that were only padding, None before the first."""
        computed = sum(self._grown[name] for name in ("prompt_tokens", "completion_tokens", "padded_tokens"))
        return self._grown["padded_tokens"] / computed if computed else None


def _figure(worker: WorkerView, name: str) -> float:
    value = worker.metrics.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


def _rates(sums: _Sums, seconds: float) -> Rates:
    return Rates(sums.rows / seconds, sums.prompt / seconds, sums.completion / seconds)

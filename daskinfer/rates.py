"""Measured speed: recent and average rates, how long the rest will take, and durations.

Nothing here reads a clock, and memory is constant: seconds are kept for the last ten only, and the whole run is kept as at
most 32 samples, whose length doubles whenever there would be more.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

from daskinfer.records import Usage

__all__ = ["Durations", "Rates", "Speed"]

WINDOW_S = 10
_SAMPLES = 32
_ENOUGH = 4
_LATEST = 8
_ERRORS = 1.4
"""Standard errors to each side: the end lies inside in about four of five cases; with more the interval says little."""
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

    def time_left(self, rows: int, now: float, tail_s: float = 0.0) -> tuple[float, float] | None:
        """Return the least and most seconds that this many rows will take.

        A prediction interval from the rates of the samples: once over the whole run and once over its last quarter, and the
        wider of the two ends, so that a change of speed shows as a wide interval. It holds for rows to come that are like
        those before; where the long ones come last, it says too little.

        Parameters
        ----------
        rows : int
            Rows without a result.
        now : float
        tail_s : float
            How long the last rows may run on while engines fall idle; half of it is added to the most.

        Returns
        -------
        (float, float) or None
            None while there are fewer than four samples, after a standstill, or when an end is more than 5 times the
            middle away from it.
        """
        if rows == 0:
            return 0.0, 0.0
        self._advance(now)
        rates = [sample / self._sample_s for sample in self._samples]
        if len(rates) < _ENOUGH:
            return None
        low, high = math.inf, 0.0
        for part in (rates, rates[-max(_LATEST, len(rates) // 4) :]):
            mean = fmean(part)
            if mean == 0:
                return None
            middle = rows / mean
            error = stdev(part) / mean * math.sqrt(1 / len(part) + 1 / max(1.0, middle / self._sample_s))
            factor = math.exp(_ERRORS * error)
            if factor > _VAGUE:
                return None
            low, high = min(low, middle / factor), max(high, middle * factor)
        return low, high + tail_s / 2

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
    """A histogram of durations, whose bins grow by a fifth: percentiles within 10 %, and histograms can be added.

    Also what an engine's process says of its steps: as a flat list of bin, count, bin, count, …
    """

    LEAST_S = 1e-3
    _GROWTH = math.log(1.2)

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one duration; less than a millisecond counts as one."""
        self._bins[round(math.log(max(seconds, self.LEAST_S) / self.LEAST_S) / self._GROWTH)] += 1

    def merge(self, flat: Sequence[int], sign: int = 1) -> None:
        """Add what :meth:`flat` gave elsewhere, or with ``sign=-1`` take it away."""
        for index, count in zip(flat[::2], flat[1::2], strict=True):
            self._bins[index] += sign * count

    def flat(self) -> list[int]:
        """Return bins and counts, for :meth:`merge`."""
        return [number for item in sorted(self._bins.items()) for number in item]

    def counts(self) -> tuple[tuple[float, int], ...]:
        """Return the middle (seconds) and the count of each bin that is not empty, the shortest first."""
        return tuple((self._seconds(index), count) for index, count in sorted(self._bins.items()) if count > 0)

    def percentiles(self, *shares: float) -> tuple[float, ...] | None:
        """Return the durations below which these shares (0 to 1) lie, None without any."""
        total = self._bins.total()
        return tuple(self._percentile(share * total) for share in shares) if total > 0 else None

    def _percentile(self, rank: float) -> float:
        bins = sorted(self._bins)
        seen = accumulate(self._bins[index] for index in bins)
        return self._seconds(next(index for index, count in zip(bins, seen, strict=True) if count >= rank))

    def _seconds(self, index: int) -> float:
        return self.LEAST_S * math.exp(index * self._GROWTH)


def _rates(sums: _Sums, seconds: float) -> Rates:
    return Rates(sums.rows / seconds, sums.prompt / seconds, sums.completion / seconds)

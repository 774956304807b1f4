"""Workers that are silent or stuck, and runs that cannot go on: what is seen in, what to do out. Pure; time is passed in.

:class:`FailureDetector` takes a look at all workers every ``detection_interval_s``: the age of their last heartbeat, and of
what their engines are doing. One that is found wanting ``failure_threshold`` times in a row is evicted: the scheduler
removes it, its rows run elsewhere, and its nanny or the driver starts another one in its place. One that Dask has paused
keeps what others have on it, and gives back what it has not begun.

Runs on: client, scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from daskinfer.config import HealthPolicy
from daskinfer.errors import ConfigError

__all__ = [
    "RUNS",
    "WORKERS",
    "Do",
    "FailureDetector",
    "Finding",
    "Roster",
    "Rule",
    "Sighting",
    "always",
    "check_heartbeats",
    "first",
    "judge_run",
]

HEARTBEATS = 3
"""Fewest heartbeats that fit into the time after which a worker is called silent."""

TTL_S = 300.0
"""Dask's default of ``distributed.scheduler.worker-ttl``, for clusters on which it is switched off."""

FAILED_GRACE_S = 3.0
"""How long all known workers may have failed before the job does: others may just be joining."""


class Do(Enum):
    """What happens next."""

    RETRY = "retry"
    LATER = "retry later"
    SPLIT = "split"
    FAIL = "fail"
    QUARANTINE = "quarantine"
    RESTART = "restart engine"
    RELEASE = "release batches"
    EVICT = "evict worker"
    WAIT = "wait"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a table: a fault, a history, what is done then, and why."""

    fault: str
    history: str
    do: Do
    why: str
    fits: Callable[[Any], bool]


def always(_: object) -> bool:
    """Fit whatever the history."""
    return True


def first(rules: Iterable[Rule], case: object, fault: str | None = None) -> Rule:
    """Return the first rule for this fault, or for any, whose history fits the case."""
    return next(r for r in rules if fault in (None, r.fault) and r.fits(case))


# ---------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True)
class Sighting:
    """What the scheduler knows of a worker's health.

    Attributes
    ----------
    worker : str
        Its address.
    silent_s : float
        Age of its last heartbeat.
    step_age_s, load_age_s : float
        How long the engine's present step, or its load, had lasted at that heartbeat; 0 when there is none.
    stranded_s : float
        How long it has been paused with batches that it does not begin; 0 when it has none.
    paused : bool
        Dask has paused it, since its memory is full.
    held_up : bool
        Its heartbeats may be late though it is well: it is paused, a model loads, or an engine shares its interpreter.
    step_limit_s, load_limit_s : float
        After how long its own watchdog ends a step or a load; another driver may have set them.
    """

    worker: str
    silent_s: float
    step_age_s: float = 0.0
    load_age_s: float = 0.0
    stranded_s: float = 0.0
    paused: bool = False
    held_up: bool = False
    step_limit_s: float = 0.0
    load_limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker's case."""

    seen: Sighting
    health: HealthPolicy
    timeout_s: float
    ttl_s: float

    @property
    def stuck_in_step(self) -> bool:
        return self.seen.step_age_s > max(self.health.step_timeout_s, self.seen.step_limit_s) + self.timeout_s

    @property
    def stuck_in_load(self) -> bool:
        return self.seen.load_age_s > max(self.health.load_timeout_s, self.seen.load_limit_s) + self.timeout_s


WORKERS: tuple[Rule, ...] = (
    Rule(
        "silent",
        "no heartbeat for `heartbeat_timeout_s`",
        Do.EVICT,
        "it is dead, stopped or cut off",
        lambda c: not c.seen.held_up and c.seen.silent_s > c.timeout_s,
    ),
    Rule(
        "silent",
        "no heartbeat for Dask's `worker-ttl`, if longer, while it loads, runs an engine as a thread, or is paused",
        Do.EVICT,
        "it is dead, stopped or cut off",
        lambda c: c.seen.silent_s > max(c.timeout_s, c.ttl_s),
    ),
    Rule(
        "paused",
        "for `heartbeat_timeout_s`, with batches that it does not begin",
        Do.RELEASE,
        "Dask leaves them there for ever; the worker itself is well",
        lambda c: c.seen.stranded_s > c.timeout_s,
    ),
    Rule("paused", "otherwise", Do.WAIT, "others may need what is in its memory", lambda c: c.seen.paused),
    Rule(
        "stuck in a step",
        "`step_timeout_s` and `heartbeat_timeout_s` over",
        Do.EVICT,
        "its own watchdog should have ended that step",
        lambda c: c.stuck_in_step,
    ),
    Rule(
        "stuck in a load",
        "`load_timeout_s` and `heartbeat_timeout_s` over",
        Do.EVICT,
        "its own watchdog should have ended that load",
        lambda c: c.stuck_in_load,
    ),
    Rule("anything else", "any", Do.WAIT, "it is well, or may yet be", always),
)
"""A worker, looked at every ``detection_interval_s``; a rule must fit ``failure_threshold`` times in a row."""


def check_heartbeats(health: HealthPolicy, interval_s: float) -> None:
    """Refuse a heartbeat timeout that a healthy worker would exceed by chance.

    Parameters
    ----------
    health : HealthPolicy
    interval_s : float
        Seconds between two heartbeats of a worker of this cluster.

    Raises
    ------
    ConfigError
        It is shorter than three heartbeats.
    """
    least = HEARTBEATS * interval_s
    if health.heartbeat_timeout_s < least:
        raise ConfigError(
            f"heartbeat_timeout_s={health.heartbeat_timeout_s:g}: workers of this cluster send a heartbeat every "
            f"{interval_s:g} s, and one may be late; must be at least {HEARTBEATS} of them, {least:g} s"
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be done about a worker, and why in words."""

    worker: str
    do: Do
    reason: str


class FailureDetector:
    """Finds workers that are silent or stuck.

    Parameters
    ----------
    health : HealthPolicy
        ``heartbeat_timeout_s, detection_interval_s, failure_threshold, step_timeout_s, load_timeout_s`` count here.
    """

    def __init__(self, health: HealthPolicy) -> None:
        self.health = health
        self._misses: dict[str, int] = {}
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Return whether it is time for another look (seconds on any monotonic clock), and note that it is taken."""
        if now < self._due:
            return False
        self._due = now + self.health.detection_interval_s
        return True

    def look(self, sightings: Iterable[Sighting], interval_s: float, ttl_s: float = TTL_S) -> list[Finding]:
        """Take a look at all workers; return those that were found wanting ``failure_threshold`` times in a row.

        Parameters
        ----------
        sightings : iterable of Sighting
            A worker that is not among them is forgotten.
        interval_s : float
            Seconds between two heartbeats at present: they are sent less often on large clusters.
        ttl_s : float
            Dask's own time for a worker without heartbeats.
        """
        timeout_s = max(self.health.heartbeat_timeout_s, HEARTBEATS * interval_s)
        misses: dict[str, int] = {}
        found = []
        for seen in sightings:
            rule = first(WORKERS, _Worker(seen, self.health, timeout_s, ttl_s))
            if rule.do is Do.WAIT:
                continue
            misses[seen.worker] = self._misses.get(seen.worker, 0) + 1
            if misses[seen.worker] >= self.health.failure_threshold:
                del misses[seen.worker]
                found.append(Finding(seen.worker, rule.do, _said(rule, seen)))
        self._misses = misses
        return found


def _said(rule: Rule, seen: Sighting) -> str:
    ages = {
        "silent": seen.silent_s,
        "stuck in a step": seen.step_age_s,
        "stuck in a load": seen.load_age_s,
        "paused": seen.stranded_s,
    }
    return f"{rule.fault} for {ages[rule.fault]:.0f} s ({rule.why})"


# ---------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class Roster:
    """What a driver knows of its workers when it looks whether the run can go on.

    Attributes
    ----------
    ready, failed, coming, others : int
        Workers that are ready; that could not load; that load or restart; that are in another state but not excluded.
    expected : int
        Workers that are known to be coming; 0 when unknown.
    idle_s : float
        How long no worker has been ready.
    unplaced_s : float
        How long the scheduler has held batches that it places nowhere.
    """

    ready: int = 0
    failed: int = 0
    coming: int = 0
    others: int = 0
    expected: int = 0
    idle_s: float = 0.0
    unplaced_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    """A run's case."""

    roster: Roster
    health: HealthPolicy


def _none_can_load(case: _Run) -> bool:
    roster = case.roster
    if roster.ready or not roster.failed or roster.coming or roster.others:
        return False
    return roster.idle_s > FAILED_GRACE_S or 0 < roster.expected <= roster.failed


RUNS: tuple[Rule, ...] = (
    Rule("no worker is ready", "all failed to load", Do.ABORT, "nobody is coming", _none_can_load),
    Rule(
        "no worker is ready",
        "one loads or restarts",
        Do.WAIT,
        "a load has a time limit of its own",
        lambda c: not c.roster.ready and c.roster.coming > 0,
    ),
    Rule(
        "no worker is ready",
        "for `start_timeout_s`",
        Do.ABORT,
        "nobody is coming",
        lambda c: not c.roster.ready and c.roster.idle_s > c.health.start_timeout_s,
    ),
    Rule(
        "batches are placed nowhere",
        "for `start_timeout_s`, though workers are ready and they were offered again",
        Do.ABORT,
        "the scheduler does not find the workers",
        lambda c: c.roster.ready > 0 and c.roster.unplaced_s > c.health.start_timeout_s,
    ),
    Rule("anything else", "any", Do.WAIT, "all is well, or may yet be", always),
)
"""A run, looked at by its driver with each poll."""


def judge_run(roster: Roster, health: HealthPolicy) -> Rule:
    """Decide whether a run can go on."""
    return first(RUNS, _Run(roster, health))

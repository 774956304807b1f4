"""What to do about a fault: fault and history in, verdict out. Pure; time and chance are passed in.

The tables below decide: of several rules for a fault the first one whose history fits. They are drawn in ``docs/faults.md``.
The one owner of retries is the window, which asks here about rows; an engine's host asks about its engine, the scheduler's
side about workers, and the driver about the whole run.

Suspects run again as *probes*, alone in their engine: a group is halved until the row that kills is alone; that row is
failed with its evidence, all others complete. For p such rows among n suspects that costs at most ``p · (log2(n) + 1)``
restarts, the logarithm rounded up; a row that was alone from the beginning is tried once more, too.

Runs on: client, scheduler, worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from daskinfer.config import HealthPolicy, RetryPolicy
from daskinfer.detection import RUNS, WORKERS, Do, Rule, always, first
from daskinfer.records import Failed, FailureKind, Fault, FaultKind

__all__ = [
    "DEADLY",
    "ENGINE_DEATHS",
    "TABLES",
    "Do",
    "History",
    "Verdict",
    "judge_engine",
    "judge_row",
    "judge_undone",
]

ENGINE_DEATHS = frozenset({FaultKind.ENGINE_DIED, FaultKind.ENGINE_HUNG})
DEADLY = ENGINE_DEATHS | {FaultKind.WORKER_LOST}
"""Faults that a row may have caused."""


@dataclass(slots=True)
class History:
    """What one row has been through; kept only for rows in trouble.

    Attributes
    ----------
    attempts : int
        Transient failures.
    losses : int
        Workers lost with the row on board.
    deaths : int
        Engines or workers that died with the row on board, as a suspect.
    strikes : int
        Those in which it was alone.
    """

    attempts: int = 0
    losses: int = 0
    deaths: int = 0
    strikes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, after how many seconds, and for a failed row its result in words."""

    do: Do
    delay_s: float = 0.0
    kind: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's case: its history with this fault counted already."""

    history: History
    retry: RetryPolicy
    inside: bool = True
    alone: bool = False

    @property
    def strikes_left(self) -> bool:
        return self.history.strikes < self.retry.strikes


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine's case: deaths in a row without a finished row."""

    fruitless: int
    health: HealthPolicy


_SUSPECTS: tuple[tuple[str, Do, str, Callable[[_Row], bool]], ...] = (
    ("the row only waited", Do.RETRY, "it cannot have done it", lambda c: not c.inside),
    ("in the engine with others", Do.SPLIT, "one of them may have done it", lambda c: not c.alone),
    ("a probe and alone, fewer than `strikes` times", Do.SPLIT, "it may have been chance", lambda c: c.strikes_left),
    ("a probe and alone, `strikes` times", Do.QUARANTINE, "nobody else was there", always),
)

ROWS: tuple[Rule, ...] = (
    Rule(
        "transient",
        "at most `retries` further attempts so far",
        Do.LATER,
        "it may pass",
        lambda c: c.history.attempts <= c.retry.retries,
    ),
    Rule("transient", "more", Do.FAIL, "it did not pass", always),
    Rule("anything else", "any", Do.FAIL, "the same input would fail again", always),
)
"""A row that came back failed, by the kind of its failure."""

UNDONE: tuple[Rule, ...] = (
    Rule("preempted", "any", Do.RETRY, "the worker was asked to go", always),
    Rule("aborted", "any", Do.RETRY, "the batch was released; rows of a cancelled job are dropped before", always),
    Rule("engine_not_ready", "any", Do.LATER, "the engine says nothing of the rows", always),
    Rule(
        "worker_lost",
        "fewer than `losses` such losses, no probe of one row",
        Do.RETRY,
        "machines do fail",
        lambda c: c.history.losses < c.retry.losses and not c.alone,
    ),
    Rule("worker_lost", "with others", Do.SPLIT, "one of them may have done it", lambda c: not c.alone),
    Rule(
        "worker_lost",
        "alone, at most `strikes` times",
        Do.SPLIT,
        "a worker may be killed from outside, so it takes one strike more",
        lambda c: c.history.strikes <= c.retry.strikes,
    ),
    Rule("worker_lost", "alone, more often", Do.QUARANTINE, "nobody else was there", always),
    *(Rule(kind, *rest) for kind in ("engine_died", "engine_hung") for rest in _SUSPECTS),
)
"""A batch that came back with rows undone, by its fault: what happens to each of those rows."""

ENGINES: tuple[Rule, ...] = (
    Rule(
        "died or hung",
        "at most `engine_restarts` times in a row without a finished row, probes not counted",
        Do.RESTART,
        "most often a row did it",
        lambda c: c.fruitless <= c.health.engine_restarts,
    ),
    Rule("died or hung", "more often", Do.EVICT, "its process, device or machine is spoilt", always),
)
"""An engine that died, asked by its host."""

TABLES = {
    "A row that came back failed": ROWS,
    "Rows undone when their batch came back": UNDONE,
    "An engine": ENGINES,
    "A worker": WORKERS,
    "A run": RUNS,
}


# ---------------------------------------------------------------- rows


def pause(policy: RetryPolicy, attempt: int, chance: float) -> float:
    """Return the seconds to wait before a further attempt.

    Parameters
    ----------
    policy : RetryPolicy
    attempt : int
        1 for the first further attempt; the pause doubles with each.
    chance : float
        A random number in [0, 1).
    """
    full = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(attempt - 1, 30))
    return full * (1 - policy.jitter * chance)


def judge_row(failed: Failed, history: History, policy: RetryPolicy, chance: float) -> Verdict:
    """Decide about a row that came back Failed; counts the attempt in its history."""
    transient = failed.kind == FailureKind.TRANSIENT
    history.attempts += transient
    rule = first(ROWS, _Row(history, policy), "transient" if transient else "anything else")
    if rule.do is Do.LATER:
        return Verdict(rule.do, pause(policy, history.attempts, chance), failed.kind, failed.message)
    tried = f" (tried {history.attempts} times)" if transient and policy.retries else ""
    return Verdict(rule.do, kind=failed.kind, message=failed.message + tried)


def judge_undone(
    fault: Fault, row: int, history: History, policy: RetryPolicy, *, alone: bool, chance: float = 0.0
) -> Verdict:
    """Decide about a row that has no result because of a fault; counts the fault in its history.

    Parameters
    ----------
    fault : Fault
    row : int
    history : History
    policy : RetryPolicy
    alone : bool
        It was a probe with no other row inside the engine, or with it on the worker.
    chance : float
        A random number in [0, 1).
    """
    lost = fault.kind is FaultKind.WORKER_LOST
    inside = lost or row in fault.suspects
    history.losses += lost
    blamed = fault.kind in DEADLY and inside
    history.strikes += blamed and alone
    rule = first(UNDONE, _Row(history, policy, inside, alone), str(fault.kind))
    history.deaths += blamed and rule.do is not Do.RETRY
    if rule.do is Do.LATER:
        return Verdict(rule.do, pause(policy, 1, chance), str(fault.kind), fault.message)
    if rule.do is not Do.QUARANTINE:
        return Verdict(rule.do, kind=str(fault.kind), message=fault.message)
    what = f"its worker was lost ({fault.message})" if lost else fault.message
    deaths = "1 death" if history.deaths == 1 else f"{history.deaths} deaths"
    message = f"{what}, with this row alone in it ({deaths} with this row on board)"
    return Verdict(rule.do, kind=str(fault.kind), message=message)


# ---------------------------------------------------------------- engines


def judge_engine(fruitless: int, health: HealthPolicy) -> Do:
    """Decide about an engine that has died so many times in a row without finishing a row."""
    return first(ENGINES, _Engine(fruitless, health)).do

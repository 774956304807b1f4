"""What to do about a fault: fault and history in, verdict out. Pure; chance is passed in.

The one owner of retries is the window, which asks here. Two tables decide.

A row came back ``Failed``:

=================  ==============================================================
kind               verdict
=================  ==============================================================
transient          retry with back-off, at most ``retries`` times; then fail
anything else      fail: the same input would fail again
=================  ==============================================================

A batch came back with rows undone:

=================  ==============================================================
fault              verdict for its undone rows
=================  ==============================================================
preempted          retry at once; nobody is blamed
aborted            retry at once (a cancelled job drops its rows before)
engine_not_ready   retry after a pause; nobody is blamed
worker_lost        retry at once; from the ``losses``-th time on: suspect
engine_died        rows inside the engine: suspect; rows that only waited: retry
engine_hung        the same
=================  ==============================================================

Suspects run again as *probes*, alone in their engine: a group is halved until the row that kills is alone; that row is
failed with its evidence, all others complete. For one such row among n suspects that costs about ``log2(n)`` restarts.

Runs on: client, scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from daskinfer.config import RetryPolicy
from daskinfer.records import Failed, FailureKind, Fault, FaultKind

__all__ = ["DEADLY", "Do", "History", "Verdict", "judge_row", "judge_undone"]

DEADLY = frozenset({FaultKind.ENGINE_DIED, FaultKind.ENGINE_HUNG, FaultKind.WORKER_LOST})
"""Faults that a row may have caused."""


class Do(Enum):
    """What happens to a row next."""

    RETRY = "retry"
    SUSPECT = "suspect"
    FAIL = "fail"


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
    """What to do, after how many seconds, and for FAIL the row's result in words."""

    do: Do
    delay_s: float = 0.0
    kind: str = ""
    message: str = ""


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
    if failed.kind != FailureKind.TRANSIENT:
        return Verdict(Do.FAIL, kind=failed.kind, message=failed.message)
    history.attempts += 1
    if history.attempts <= policy.retries:
        return Verdict(Do.RETRY, pause(policy, history.attempts, chance), failed.kind, failed.message)
    tried = f" (tried {history.attempts} times)" if policy.retries else ""
    return Verdict(Do.FAIL, kind=failed.kind, message=failed.message + tried)


def judge_undone(fault: Fault, row: int, history: History, policy: RetryPolicy, *, alone: bool) -> Verdict:
    """Decide about a row that has no result because of a fault; counts the fault in its history.

    Parameters
    ----------
    fault : Fault
    row : int
    history : History
    policy : RetryPolicy
    alone : bool
        The row was a probe of its own.
    """
    if fault.kind is FaultKind.ENGINE_NOT_READY:
        return Verdict(Do.RETRY, policy.backoff_s)
    if fault.kind not in DEADLY:
        return Verdict(Do.RETRY)
    if fault.kind is FaultKind.WORKER_LOST:
        history.losses += 1
        if history.losses < policy.losses and not alone:
            return Verdict(Do.RETRY)
    elif row not in fault.suspects:
        return Verdict(Do.RETRY)
    history.deaths += 1
    if not alone:
        return Verdict(Do.SUSPECT)
    history.strikes += 1
    # A worker may be killed from outside just while a probe is on it, so that needs one strike more than an engine.
    if history.strikes < policy.strikes + (fault.kind is FaultKind.WORKER_LOST):
        return Verdict(Do.SUSPECT)
    what = "its worker was lost" if fault.kind is FaultKind.WORKER_LOST else fault.message
    message = f"{what}, with this row alone in it ({history.deaths} deaths with this row on board)"
    return Verdict(Do.FAIL, kind=str(fault.kind), message=message)

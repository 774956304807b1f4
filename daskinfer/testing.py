"""For tests of code that uses daskinfer: an engine without a model, and checks of what became of the rows.

The echo engine answers each row with the row's own text, so a whole run needs no model, no download and no GPU. Its
options script what a real engine does at its worst: see :class:`EchoOptions`.

>>> engine = EchoEngine(echo_spec(prefix="re: ", suffix=""))
>>> engine.load()
>>> [result.output for result in run_engine(engine, [Request(0, "hello"), Request(1, "world")])]
['re: hello', 're: world']

Runs on: anywhere.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from daskinfer.config import ModelSpec
from daskinfer.engines.base import Engine
from daskinfer.engines.echo import EchoEngine
from daskinfer.engines.echo_options import EchoOptions
from daskinfer.records import Request, Result, SamplingParams

__all__ = [
    "EchoEngine",
    "EchoOptions",
    "LogEntry",
    "Request",
    "SamplingParams",
    "attempts",
    "call_counts",
    "conservation",
    "echo_spec",
    "loads",
    "read_log",
    "run_engine",
    "wait_until",
]

T = TypeVar("T")
_POLL_S = 0.02


def echo_spec(*, isolation: str = "auto", **options: Any) -> ModelSpec:
    """Return the specification of an echo engine.

    Parameters
    ----------
    isolation : {"auto", "process", "thread"}
        Where the engine runs. Faults that kill the process need "process".
    **options
        Those of :class:`EchoOptions`; paths may be ``Path`` objects.

    Raises
    ------
    UnknownOptionError
        An option that does not exist.
    ConfigError
        An option out of range.

    Examples
    --------
    >>> echo_spec(capacity=8).options
    {'capacity': 8}
    >>> echo_spec(capacty=8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    daskinfer.errors.UnknownOptionError: the echo engine has no option 'capacty'; it has capacity, dims, ...
    """
    plain = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in options.items()}
    spec = ModelSpec("echo", engine="echo", isolation=isolation, options=plain)
    EchoEngine(spec)
    return spec


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event in an echo engine's log.

    Attributes
    ----------
    pid : int
        The process that wrote it.
    event : {"load", "step", "finish", "fail", "abort", "close"}
        "step" is written before the step, with the rows in the slots; "finish" after it, with the rows that were run to
        their end; "fail" when a row fails; "abort" with the rows that were really held.
    ids : tuple of int
        The rows it is about.
    """

    pid: int
    event: str
    ids: tuple[int, ...]


def read_log(path: str | os.PathLike[str]) -> list[LogEntry]:
    """Return the events in the order in which they were written; none when there is no file yet.

    Parameters
    ----------
    path : str or path
        The ``log`` option of the engines, which may be several and in several processes.

    Examples
    --------
    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp(), "echo.jsonl")
    >>> engine = EchoEngine(echo_spec(log=log))
    >>> engine.load()
    >>> results = run_engine(engine, [Request(7, "hello")])
    >>> [(entry.event, entry.ids) for entry in read_log(log)]
    [('load', ()), ('step', (7,)), ('finish', (7,))]
    """
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    # an entry is one write, but a reader may come before the end of it
    whole = text[: text.rfind("\n") + 1]
    entries = map(json.loads, whole.splitlines())
    return [LogEntry(entry["pid"], entry["event"], tuple(entry["ids"])) for entry in entries]


def call_counts(path: str | os.PathLike[str]) -> Counter[int]:
    """Return how many times each row was run to its end, over all processes.

    Examples
    --------
    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp(), "echo.jsonl")
    >>> engine = EchoEngine(echo_spec(log=log))
    >>> results = run_engine(engine, [Request(7, "hello")]) + run_engine(engine, [Request(7, "hello")])
    >>> call_counts(log)
    Counter({7: 2})
    """
    return Counter(row for entry in read_log(path) if entry.event == "finish" for row in entry.ids)


def loads(path: str | os.PathLike[str]) -> list[int]:
    """Return the process id of each load that was begun, in order.

    Examples
    --------
    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp(), "echo.jsonl")
    >>> EchoEngine(echo_spec(log=log)).load()
    >>> len(loads(log))
    1
    """
    return [entry.pid for entry in read_log(path) if entry.event == "load"]


def attempts(faults_dir: str | os.PathLike[str]) -> Counter[int]:
    """Return how many attempts each row with scripted faults has had, over all processes.

    Parameters
    ----------
    faults_dir : str or path
        The ``faults_dir`` option of the engines.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> engine = EchoEngine(echo_spec(faults={"bad": "value_error"}, faults_dir=folder))
    >>> [result.error for result in run_engine(engine, [Request(3, "a bad row")])]
    ['error: ValueError: scripted fault of row 3']
    >>> attempts(folder)
    Counter({3: 1})
    """
    counted: Counter[int] = Counter()
    for file in Path(faults_dir).iterdir() if Path(faults_dir).exists() else ():
        counted[int(file.name.split("-")[0])] += file.stat().st_size
    return counted


def wait_until(predicate: Callable[[], T], timeout_s: float = 10.0, message: str = "") -> T:
    """Poll until the predicate returns something true, and return that.

    Parameters
    ----------
    predicate : callable
        Called every 20 ms, and at least once.
    timeout_s : float
        Seconds after which the wait has failed.
    message : str
        What was waited for.

    Raises
    ------
    AssertionError
        The predicate was still false at the deadline; the text says what was waited for and the last value.

    Examples
    --------
    >>> countdown = iter([0, 0, "ready"])
    >>> wait_until(lambda: next(countdown), message="the countdown")
    'ready'
    """
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"waited {timeout_s:g} s in vain for {message or predicate}; the last value is {value!r}"
            )
        time.sleep(_POLL_S)
    return value


def run_engine(engine: Engine, requests: Sequence[Request], *, max_steps: int = 1_000_000) -> list[Result]:
    """Give rows to a loaded engine and drive it until all are back, in the order in which they come back.

    Parameters
    ----------
    engine : Engine
        Any engine, loaded.
    requests : sequence of Request
    max_steps : int
        Steps after which the engine is not going to finish.

    Raises
    ------
    AssertionError
        A row was lost (the engine says that it holds none, or ``max_steps`` is over), came back twice, or was not given.

    Examples
    --------
    >>> run_engine(EchoEngine(echo_spec()), [Request(0, "hello")])
    [<Completed 0: stop>]
    """
    engine.add(requests)
    results: list[Result] = []
    for _ in range(max_steps):
        if len(results) >= len(requests):
            break
        finished = engine.step()
        results += finished
        stats = engine.stats()
        if not finished and not stats.running and not stats.waiting:
            break
    conservation(requests, results)
    return results


def conservation(rows: Iterable[Request | int], results: Iterable[Result]) -> None:
    """Check that every row came back once, and nothing else did.

    Parameters
    ----------
    rows : iterable of Request or int
        The requests, or their ids.
    results : iterable of Result

    Raises
    ------
    AssertionError
        Which rows are lost, came back more than once, or were never given.

    Examples
    --------
    >>> from daskinfer.records import Completed
    >>> conservation([0, 1, 2], [Completed(0, "a"), Completed(2, "c"), Completed(2, "c")])
    Traceback (most recent call last):
    AssertionError: of 3 rows, lost: 1; more than once: 2
    """
    given = Counter(row if isinstance(row, int) else row.id for row in rows)
    back = Counter(result.id for result in results)
    wrong = {
        "lost": [row for row in given if row not in back],
        "more than once": [row for row, times in back.items() if times > given[row] > 0],
        "too seldom": [row for row, times in back.items() if times < given[row]],
        "never given": [row for row in back if row not in given],
    }
    if any(wrong.values()):
        listed = "; ".join(f"{what}: {_some(ids)}" for what, ids in wrong.items() if ids)
        raise AssertionError(f"of {given.total()} rows, {listed}")


def _some(ids: list[int], most: int = 10) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(str, sorted(ids)[:most])) + more

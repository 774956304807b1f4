"""The engine's side of a host: the only caller of an engine, in a thread or in the child process.

Requests are renumbered while they are inside the engine, since two jobs may use the same row ids at once. A probe waits
until the engine is empty, runs alone, and only then are others let in.

Runs on: worker (in the engine's own process, usually).
"""

from __future__ import annotations

import pickle
import queue
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from types import NoneType
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class
from daskinfer.engines.base import Engine
from daskinfer.errors import RemoteError, describe
from daskinfer.rates import Durations
from daskinfer.records import Batch, Failed, FailureKind, Request, Result, pack_results

__all__ = ["EngineLoop", "serve"]

_NUMBERS = frozenset("biuf")
TICK_S = 0.1
"""Longest time between two messages of a working engine that finishes no row."""
STEPS_S = 0.5
"""Pause between two messages about how long steps take."""


class EngineLoop:
    """Feeds batches to an engine and says which rows of which batch a step finished.

    Parameters
    ----------
    engine : Engine
        A loaded one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: deque[Batch] = deque()
        self._origin: dict[int, tuple[str, int]] = {}
        self._inside: dict[str, dict[int, int]] = {}
        self._numbers = count()
        self._probing = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not self._inside and not self._waiting

    def add(self, batch: Batch) -> None:
        """Take a batch; it enters the engine in :meth:`admit`."""
        self._waiting.append(batch)

    def admit(self, began: Callable[[str], None]) -> None:
        """Let waiting batches into the engine.

        Parameters
        ----------
        began : callable
            Told a batch's key before the engine sees its rows: what the engine does then is that batch's doing.
        """
        while self._waiting and not self._probing and not (self._waiting[0].probe and self._inside):
            batch = self._waiting.popleft()
            self._probing = batch.probe
            inside = self._inside[batch.key] = {}
            renumbered = []
            for request in batch.requests:
                number = next(self._numbers)
                self._origin[number] = batch.key, request.id
                inside[number] = request.id
                renumbered.append(
                    Request(number, request.input, request.params, request.raw, request.system, origin=request.id)
                )
            began(batch.key)
            self.engine.add(renumbered)

    def step(self) -> tuple[dict[str, list[Result]], list[str]]:
        """Step the engine.

        Returns
        -------
        results : dict of batch key to list of Result
            The rows finished by this step, under their own ids.
        ended : list of str
            Batches that have no row left in the engine; a row it forgot is missing from the results.
        """
        finished: dict[str, list[Result]] = {}
        results = self.engine.step()
        for result in results:
            origin = self._origin.pop(result.id, None)
            if origin is not None:
                key, row = origin
                self._inside[key].pop(result.id)
                finished.setdefault(key, []).append(_sendable(_renamed(result, row)))
        if not results and self._inside:
            stats = self.engine.stats()
            if stats.running == stats.waiting == 0:
                for rows in self._inside.values():
                    self._forget(rows)
        ended = [key for key, rows in self._inside.items() if not rows]
        for key in ended:
            del self._inside[key]
        if not self._inside:
            self._probing = False
        return finished, ended

    def abort(self, key: str) -> None:
        """Forget a batch."""
        self._waiting = deque(batch for batch in self._waiting if batch.key != key)
        rows = self._inside.pop(key, None)
        if rows is not None:
            self.engine.abort(list(rows))
            self._forget(rows)
        if not self._inside:
            self._probing = False

    def _forget(self, rows: dict[int, int]) -> None:
        for number in rows:
            self._origin.pop(number, None)
        rows.clear()


def _renamed(result: Result, row: int) -> Result:
    # dataclasses.replace costs several times the constructor, on every row there is.
    object.__setattr__(result, "id", row)
    return result


def _sendable(result: Result) -> Result:
    """Return the result, or a failed one where its output cannot leave this process."""
    if isinstance(result, Failed) or isinstance(result.output, str | int | float | NoneType):
        return result
    if _is_numbers(result.output):
        return result  # to try it would cost more than all the rest of a vector's way
    kind = type(result.output)
    try:
        if hasattr(result.output, "detach"):
            raise TypeError("a tensor")  # noqa: TRY301 - it may be on a device, and the client may not have torch
        pickle.dumps(result.output)
    except Exception as error:  # noqa: BLE001 - objects refuse to be pickled in many ways
        what = f"the engine returned a {kind.__module__}.{kind.__qualname__}, which cannot be sent ({describe(error)})"
        return Failed(result.id, FailureKind.ERROR, f"{what}; return a str, a dict of plain values or a numpy array")
    return result


def _is_numbers(output: Any) -> bool:
    """Whether an output is an array of numbers, which is known without importing numpy."""
    return type(output).__module__ == "numpy" and getattr(getattr(output, "dtype", None), "kind", "") in _NUMBERS


def serve(spec: ModelSpec, inbox: queue.SimpleQueue[tuple[Any, ...]], send: Callable[[tuple[Any, ...]], None]) -> None:
    """Load the engine and run it until a ``("close",)`` message; every outcome is sent as a message.

    Sends ``("loaded", stats)`` or ``("failed", type, text)``, then ``("began", keys)``, ``("results", [(key, packed)],
    ended keys, stats)``, ``("tick", stats)`` and ``("steps", bins)``. An exception out of ``step`` leaves this function: the
    engine is dead.
    """
    engine: Engine | None = None
    try:
        engine = engine_class(spec)(spec)
        engine.load()
        stats = engine.stats()
    except BaseException as error:  # noqa: BLE001 - whatever a model's code raises, SystemExit too, is a reason to report
        remote = RemoteError.from_exception(error)
        send(("failed", remote.type_name, remote.message, remote.details))
        if engine is not None:
            engine.close()
        return
    send(("loaded", stats))
    try:
        _run(EngineLoop(engine), inbox, send)
    except BaseException as error:
        remote = RemoteError.from_exception(error, with_traceback=False)
        send(("died", remote.type_name, remote.message))  # an exit code would not say why
        raise
    finally:
        engine.close()


def _run(loop: EngineLoop, inbox: queue.SimpleQueue[tuple[Any, ...]], send: Callable[[tuple[Any, ...]], None]) -> None:
    said = told = time.monotonic()
    steps, counted = Durations(), False
    while True:
        while loop.idle or not inbox.empty():
            if loop.idle and counted:
                send(("steps", steps.flat()))
                send(("tick", loop.engine.stats()))
                counted = False
            match inbox.get():
                case ("batch", batch):
                    loop.add(batch)
                case ("abort", key):
                    loop.abort(key)
                    counted = True  # what it holds has changed
                case _:
                    return
        loop.admit(lambda key: send(("began", [key])))
        began = time.monotonic()
        results, ended = loop.step()
        now = time.monotonic()
        steps.add(now - began)
        counted = True
        if now - told > STEPS_S:
            send(("steps", steps.flat()))
            told, counted = now, False
        if results or ended:
            packed = [(key, pack_results(rows)) for key, rows in results.items()]
            send(("results", packed, ended, loop.engine.stats()))
            said = now
        elif now - said > TICK_S:
            send(("tick", loop.engine.stats()))
            said = now

"""Prompts in, results out: the loop behind ``Driver.stream`` and ``Driver.generate``.

Runs on: client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from daskinfer.errors import RowError
from daskinfer.inputs import as_input
from daskinfer.records import Failed, Input, Request, Result

if TYPE_CHECKING:
    from daskinfer.driver.driver import Driver
    from daskinfer.driver.stream import Stream

__all__ = ["answers"]

FIRST_ROWS = 64
PULL_S = 0.1
"""A slow iterator of prompts is not waited for longer than this (seconds) once it has given one."""


def answers(
    driver: Driver,
    prompts: Iterator[Any],
    make: Callable[[int, Input], Request],
    *,
    ordered: bool,
    priority: int,
    stream: Stream | None = None,
) -> Iterator[Result]:
    """Yield the result of each prompt; see :meth:`Driver.stream`.

    Parameters
    ----------
    driver : Driver
    prompts : iterator
    make : callable
        From a position and a checked prompt to a request.
    ordered : bool
    priority : int
    stream : Stream or None
        One that was opened for this; it is closed at the end.
    """
    stream = stream or driver.open_stream(ordered=ordered, seed=0)
    refused: dict[int, Failed] = {}
    given = taken = 0
    wanted, exhausted = FIRST_ROWS, False
    try:
        while True:
            offer: list[Request] = []
            if wanted and not exhausted:
                chunk, exhausted = _pull(prompts, wanted)
                for row, prompt in enumerate(chunk, given):
                    made = _request(row, prompt, make)
                    if isinstance(made, Failed):
                        refused[row] = made
                    else:
                        offer.append(made)
                given += len(chunk)
            turn = driver.turn(stream, offer, priority=priority, exhausted=exhausted)
            for result in turn.results:
                while ordered and taken < result.id:
                    yield refused.pop(taken)
                    taken += 1
                yield result
                taken += 1
            for row in sorted(refused):
                if not ordered or row == taken or turn.done:
                    yield refused.pop(row)
                    taken += 1
            if turn.done:
                return
            wanted = turn.wanted
    finally:
        driver.close_stream(stream)


def _pull(prompts: Iterator[Any], most: int) -> tuple[list[Any], bool]:
    """Take up to so many items, fewer from a slow iterator; return them and whether they were the last."""
    chunk: list[Any] = []
    deadline = time.monotonic() + PULL_S
    while len(chunk) < most and (not chunk or time.monotonic() < deadline):
        try:
            chunk.append(next(prompts))
        except StopIteration:
            return chunk, True
    return chunk, False


def _request(row: int, prompt: Any, make: Callable[[int, Input], Request]) -> Request | Failed:
    try:
        return make(row, as_input(prompt))
    except RowError as error:
        return Failed(row, error.row_kind, error.message)

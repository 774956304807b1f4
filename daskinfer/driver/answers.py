"""Prompts in, results out: the loop behind ``Driver.stream`` and ``Driver.generate``.

Runs on: client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import length_hint
from typing import TYPE_CHECKING, Any

from daskinfer.errors import RowError
from daskinfer.records import Failed, Request, Result

if TYPE_CHECKING:
    from daskinfer.driver.service import Service
    from daskinfer.driver.stream import Stream

__all__ = ["answers"]

FIRST_ROWS = 64
SLOW_S = 0.005
"""An iterator that needs longer than this (seconds) for a prompt is live: what it gives is sent at once."""


def answers(
    driver: Service,
    prompts: Iterator[Any],
    make: Callable[[int, Any], Request],
    *,
    ordered: bool,
    priority: int,
    stream: Stream | None = None,
) -> Iterator[Result]:
    """Yield the result of each prompt; see :meth:`Driver.stream`.

    Prompts are taken in the caller's thread. Those of a live iterator, such as ``iter(queue.get, None)``, are sent one by
    one; while it makes us wait for the next prompt no result is given.

    Parameters
    ----------
    driver : Service
    prompts : iterator
    make : callable
        From a position and a prompt to a request; raises ``RowError`` for a prompt that cannot be used.
    ordered : bool
    priority : int
    stream : Stream or None
        One that was opened for this; it is closed at the end.
    """
    stream = stream or driver.open_stream(ordered=ordered, seed=0)
    refused: dict[int, Failed] = {}
    given = taken = 0
    pull = _Pull(prompts)
    wanted, exhausted = FIRST_ROWS, False
    try:
        while True:
            offer: list[Request] = []
            if wanted and not exhausted:
                chunk, exhausted = pull(wanted)
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
        _let_go(driver, stream)


def _let_go(driver: Service, stream: Stream) -> None:
    """Close a stream soon, without waiting: the garbage collector may end an abandoned loop on Dask's own thread."""
    client = driver.client
    if client is not None:  # else the driver was stopped, which closes its streams
        with suppress(RuntimeError):  # the loop was closed, and with it everything there was
            client.loop.add_callback(stream.close)


class _Pull:
    """Takes prompts from an iterator: ever more at a time while it is fast, one when it is live.

    One that says how many it holds has them already; of another nobody knows for how long its next prompt takes, and those
    taken before it would wait along.
    """

    def __init__(self, prompts: Iterator[Any]) -> None:
        self._prompts = prompts
        self._most = FIRST_ROWS if length_hint(prompts) else 1

    def __call__(self, wanted: int) -> tuple[list[Any], bool]:
        """Take up to so many; return them and whether they were the last."""
        chunk: list[Any] = []
        most = min(wanted, self._most)
        while len(chunk) < most:
            began = time.monotonic()
            try:
                chunk.append(next(self._prompts))
            except StopIteration:
                return chunk, True
            if time.monotonic() - began > SLOW_S:
                self._most = 1
                return chunk, False
        self._most *= 2
        return chunk, False


def _request(row: int, prompt: Any, make: Callable[[int, Any], Request]) -> Request | Failed:
    try:
        return make(row, prompt)
    except RowError as error:
        return Failed(row, error.row_kind, error.message)

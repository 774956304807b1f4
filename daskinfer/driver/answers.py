"""Prompts in, results out: the loop behind ``Driver.stream`` and ``Driver.generate``.

Runs on: client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from operator import length_hint
from typing import TYPE_CHECKING, Any

from daskinfer.errors import RowError
from daskinfer.records import Failed, Request, Result

if TYPE_CHECKING:
    from daskinfer.driver.service import Service
    from daskinfer.driver.stream import Stream
    from daskinfer.driver.telling import JobEvents

__all__ = ["answers"]

_NUMBERS = count(1)
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
    name: str = "",
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
    name : str
        Of the job that this is for; a stream of its own has a number.
    """
    stream = stream or driver.open_stream(ordered=ordered, seed=0)
    events = driver.events(name or f"stream-{next(_NUMBERS)}", "job" if name else "stream")
    try:
        with events.of(prompts):
            yield from _answers(
                driver, stream, _Pull(prompts, make, events), events, ordered=ordered, priority=priority
            )
    finally:
        _let_go(driver, stream)


def _answers(
    driver: Service, stream: Stream, pull: _Pull, events: JobEvents, *, ordered: bool, priority: int
) -> Iterator[Result]:
    taken = 0
    wanted, refused = FIRST_ROWS, pull.refused
    while True:
        offer = pull(wanted) if wanted and not pull.exhausted else []
        turn = driver.turn(stream, offer, priority=priority, exhausted=pull.exhausted)
        for event in turn.events:
            events(event)
        events.resolved(turn.results)
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


def _let_go(driver: Service, stream: Stream) -> None:
    """Close a stream soon, without waiting: the garbage collector may end an abandoned loop on Dask's own thread."""
    client = driver.client
    if client is not None:  # else the driver was stopped, which closes its streams
        with suppress(RuntimeError):  # the loop was closed, and with it everything there was
            client.loop.add_callback(stream.close)


class _Pull:
    """Takes prompts from an iterator and makes requests of them: ever more at a time while it is fast, one when it is live.

    One that says how many it holds has them already; of another nobody knows for how long its next prompt takes, and those
    taken before it would wait along.
    """

    def __init__(self, prompts: Iterator[Any], make: Callable[[int, Any], Request], events: JobEvents) -> None:
        self.exhausted = False
        self.refused: dict[int, Failed] = {}
        self._prompts, self._make, self._events = prompts, make, events
        self._given = 0
        self._most = FIRST_ROWS if length_hint(prompts) else 1

    def __call__(self, wanted: int) -> list[Request]:
        """Take up to so many and return the requests made of them; a prompt that cannot be used is noted as refused."""
        chunk = self._chunk(wanted)
        offer: list[Request] = []
        for row, prompt in enumerate(chunk, self._given):
            made = _request(row, prompt, self._make)
            if isinstance(made, Failed):
                self.refused[row] = made
                self._events.resolved([made])
            else:
                offer.append(made)
        self._given += len(chunk)
        self._events.read(len(chunk), exhausted=self.exhausted)
        return offer

    def _chunk(self, wanted: int) -> list[Any]:
        chunk: list[Any] = []
        most = min(wanted, self._most)
        while len(chunk) < most:
            began = time.monotonic()
            try:
                chunk.append(next(self._prompts))
            except StopIteration:
                self.exhausted = True
                return chunk
            if time.monotonic() - began > SLOW_S:
                self._most = 1
                return chunk
        self._most *= 2
        return chunk


def _request(row: int, prompt: Any, make: Callable[[int, Any], Request]) -> Request | Failed:
    try:
        return make(row, prompt)
    except RowError as error:
        return Failed(row, error.row_kind, error.message)

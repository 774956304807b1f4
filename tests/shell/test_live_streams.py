"""Live iterators of prompts, and streams that are left to the garbage collector; with a driver that is only played."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from daskinfer.driver.answers import SLOW_S, _Pull, answers
from daskinfer.driver.stream import Turn
from daskinfer.driver.telling import JobEvents
from daskinfer.records import Completed, FinishReason, Request, SamplingParams, Usage


class Played:
    """A driver that answers each row in the next turn, and notes what it was offered."""

    def __init__(self) -> None:
        self.offers: list[list[int]] = []
        self.later: list[Callable[[], None]] = []
        self.client: Any = SimpleNamespace(loop=SimpleNamespace(add_callback=self.later.append))
        self.closed_in: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.stream = SimpleNamespace(close=lambda: self.closed_in.append(threading.get_ident()))

    def open_stream(self, **_: Any) -> Any:
        return self.stream

    def events(self, name: str, kind: str) -> JobEvents:
        return JobEvents(name, kind, lambda job, told: self.told.append(told))

    def turn(self, stream: Any, offer: list[Request], *, exhausted: bool, **_: Any) -> Turn:
        self.offers.append([request.id for request in offer])
        done = [Completed(r.id, str(r.input), FinishReason.STOP, Usage()) for r in offer]
        return Turn(list(done), [], 64, exhausted)


def make(row: int, prompt: Any) -> Request:
    return Request(row, prompt, SamplingParams())


def stream(driver: Any, prompts: Iterator[Any]) -> Iterator[Any]:
    return answers(driver, prompts, make, ordered=True, priority=0)


def pulling(prompts: Iterator[Any]) -> _Pull:
    return _Pull(prompts, make, Played().events("test", "stream"))


def test_rows_of_a_live_iterator_are_not_held_back_for_the_next() -> None:
    driver = Played()
    sent: list[int] = []

    def live() -> Iterator[str]:
        for n in range(6):
            sent.append(sum(map(len, driver.offers)))
            time.sleep(2 * SLOW_S)  # the source's slowness is what is tested
            yield f"row {n}"

    assert [r.output for r in stream(driver, live())] == [f"row {n}" for n in range(6)]
    assert sent == [0, 1, 2, 3, 4, 5]


def test_the_first_row_is_sent_before_the_second_is_asked_for() -> None:
    driver = Played()
    given = iter(["a", "b"])

    def first() -> str | None:
        if driver.offers:
            assert driver.offers[0] == [0]
        return next(given, None)

    assert [r.id for r in stream(driver, iter(first, None))] == [0, 1]


def test_a_fast_iterator_is_soon_taken_by_many() -> None:
    pull = pulling(str(n) for n in range(1_000))
    assert [len(pull(64)) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 64, 64]
    assert len(pulling(iter(["x"] * 100))(64)) == 64
    three, none = pulling(iter(["x"] * 3)), pulling(iter([]))
    assert [request.id for request in three(64)] == [0, 1, 2]
    assert (none(64), three.exhausted, none.exhausted) == ([], True, True)


def test_a_stream_is_a_job_whose_rows_count_once_and_that_ends() -> None:
    driver = Played()
    assert len(list(stream(driver, iter(["a", "b", "c"])))) == 3
    begun = stream(driver, iter(["a", "b"]))
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    first, *_, whole = [told["snapshot"] for told in driver.told[:-2]]
    assert (first["state"], first["done"], first["total"]) == ("running", 0, 3)
    assert (whole["state"], whole["done"], whole["total"], whole["read"]) == ("done", 3, 3, 3)
    assert [told["snapshot"]["state"] for told in driver.told[-2:]] == ["running", "interrupted"]
    assert len({told["name"] for told in driver.told}) == 2


@pytest.mark.parametrize("state", ["running", "loop closed", "driver stopped"])
def test_an_abandoned_stream_is_closed_without_waiting(state: str) -> None:
    """The collector may run on the event loop's thread, which would wait for itself."""
    driver = Played()
    begun = stream(driver, iter(["a", "b"]))
    assert next(begun).id == 0
    if state == "loop closed":

        def closed(_: Any) -> None:
            raise RuntimeError("the loop is closed")

        driver.client.loop.add_callback = closed
    elif state == "driver stopped":
        driver.client = None
    begun.close()  # type: ignore[attr-defined]
    assert driver.closed_in == []
    assert driver.later == ([driver.stream.close] if state == "running" else [])

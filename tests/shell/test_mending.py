"""What a driver does about lost workers and a lost scheduler; with a client that is only played."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from daskinfer.config import BatchPolicy, HealthPolicy, RetryPolicy
from daskinfer.driver.dispatch import REPLACE_S, Dispatcher, Replace
from daskinfer.driver.tasks import Tasks
from daskinfer.errors import ClusterError
from daskinfer.records import SamplingParams
from daskinfer.testing import echo_spec

GONE = 100.0
"""Seconds for which workers have been lost, more than they have to come back."""


def driver(replace: Replace | None = None, **scheduler: Any) -> tuple[Dispatcher, list[str]]:
    """A dispatcher, and what a run on it is told."""
    loop = SimpleNamespace(add_callback=lambda call, *args: call(*args))
    client: Any = SimpleNamespace(scheduler=SimpleNamespace(**scheduler), loop=loop)
    made = Dispatcher(client, echo_spec(), BatchPolicy(), RetryPolicy(), HealthPolicy(), {}, replace=replace)
    told: list[str] = []
    stream: Any = SimpleNamespace(publish=lambda event: told.append(event.message))
    made._streams.append(stream)
    return made, told


def test_a_cluster_that_cannot_replace_workers_is_asked_again_after_a_while_and_only_for_those_left() -> None:
    asked: list[list[str]] = []

    async def replace(names: Sequence[str]) -> Sequence[str]:
        asked.append(list(names))
        if len(asked) == 1:
            raise RuntimeError("no quota")
        return names[:1]

    async def polls(made: Dispatcher, now: float, age_s: float) -> None:
        for _ in range(3):
            made._mend({"0": age_s, "1": age_s}, now)
            assert made._replacing is not None
            await made._replacing

    async def test() -> None:
        made, told = driver(replace)
        now = time.monotonic()
        await polls(made, now, GONE)
        assert asked == [["0", "1"]]
        assert told == []
        wait_s = REPLACE_S + 1
        made._mend({"0": GONE + wait_s, "1": GONE + wait_s}, now + wait_s)
        assert made._replacing is not None
        await made._replacing
        assert asked[1:] == [["0", "1"]]
        assert told == ["worker 0 was lost and did not come back; the cluster starts another"]
        await polls(made, now + 1, GONE + 1)
        assert len(asked) == 2
        made._mend({"0": GONE + wait_s, "1": GONE + wait_s}, now + wait_s)
        await made._replacing
        assert asked[2:] == [["1"]]

    asyncio.run(test())


def test_a_driver_with_only_an_address_says_once_that_workers_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    made, told = driver()
    now = time.monotonic() + 2 * GONE
    for later in range(3):
        made._mend({"a": GONE + later, "b": GONE + later, "of others": 9_999.0, "perhaps": 5.0 + later}, now + later)
    assert told == [
        "workers a, b were lost and did not come back; start another: a driver that has only a scheduler's address cannot"
    ]
    assert [record.message for record in caplog.records] == told
    made._mend({"a": GONE}, now + 3 * GONE)  # it was there again
    assert len(told) == 2


def test_what_was_evicted_and_what_was_given_back_is_told_once_each() -> None:
    made, told = driver()
    for _ in range(2):
        made._tell({"a": "silent"}, {"b": "paused for 31 s"}, 1.0)
    made._tell({"a": "silent"}, {"b": "paused for 35 s"}, 2.0)
    assert told == [
        "a was evicted: silent; its rows run elsewhere",
        "b gave back batches: paused for 31 s; they run elsewhere",
        "b gave back batches: paused for 35 s; they run elsewhere",
    ]


@pytest.mark.parametrize("error", [OSError(), KeyError("workers"), RuntimeError("closed"), ValueError("comm")])
def test_a_worker_is_lost_whatever_the_scheduler_says_of_it(error: Exception) -> None:
    async def status(**_: Any) -> None:
        raise error

    made, _ = driver(daskinfer_status=status)
    assert asyncio.run(made.loss("w")) == "w ended unexpectedly"


def test_a_task_of_a_driver_whose_scheduler_was_lost_fails_at_once() -> None:
    made, _ = driver()
    made._error = ClusterError("the scheduler was lost")
    tasks = Tasks(made)
    for _ in range(2):
        task = tasks.submit("a prompt", SamplingParams(), 0)
        with pytest.raises(ClusterError, match="the scheduler was lost"):
            tasks.result(task, 5)
    assert tasks.counts == (0, 2)
    tasks.close()

"""The public test helpers: what they accept, and what they say when a row is lost."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from pathlib import Path

import pytest

import daskinfer.testing
from daskinfer.config import ModelSpec
from daskinfer.records import Completed, EngineStats, Failed, Result
from daskinfer.testing import (
    EchoEngine,
    LogEntry,
    Request,
    call_counts,
    conservation,
    echo_spec,
    loads,
    read_log,
    run_engine,
    wait_until,
)


class Careless:
    """An engine that answers as told: per step, the ids to give back."""

    def __init__(self, spec: ModelSpec, answers: Sequence[Sequence[int]] = (), holds: int = 0) -> None:
        self._answers, self._holds = list(answers), holds

    def load(self) -> None: ...

    def add(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Result]:
        return [Completed(row, "") for row in self._answers.pop(0)] if self._answers else []

    def abort(self, ids: Sequence[int]) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(waiting=self._holds + len(self._answers))

    def close(self) -> None: ...

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        return "string"


def drive(answers: Sequence[Sequence[int]], holds: int = 0) -> list[Result]:
    engine = Careless(echo_spec(), answers, holds)
    return run_engine(engine, [Request(i, "") for i in range(3)], max_steps=50)


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(daskinfer.testing)
    assert outcome.failed == 0
    assert outcome.attempted > 15


def test_run_engine_returns_results_as_they_come() -> None:
    assert [r.id for r in drive([[1], [], [2, 0]])] == [1, 2, 0]


@pytest.mark.parametrize(
    ("answers", "holds", "told"),
    [
        ([[0], [2]], 0, "of 3 rows, lost: 1"),
        ([[0], [2]], 1, "of 3 rows, lost: 1"),
        ([[0, 1], [1, 2]], 0, "of 3 rows, more than once: 1"),
        ([[0, 1, 7]], 0, "of 3 rows, lost: 2; never given: 7"),
    ],
)
def test_run_engine_says_which_rows_went_wrong(answers: list[list[int]], holds: int, told: str) -> None:
    with pytest.raises(AssertionError) as caught:
        drive(answers, holds)
    assert str(caught.value) == told


def test_conservation_takes_requests_or_ids_and_any_result() -> None:
    conservation([], [])
    conservation([Request(4, "a"), Request(9, "b")], [Failed(9, "error", "x"), Completed(4, "a")])
    conservation(iter([4, 9]), iter([Completed(9, "b"), Completed(4, "a")]))


def test_conservation_shortens_a_long_list() -> None:
    with pytest.raises(AssertionError, match=r"of 50 rows, lost: 0, 1, .*, 9 and 40 more$"):
        conservation(range(50), [])


def test_wait_until_says_what_it_waited_for_and_what_it_saw() -> None:
    with pytest.raises(AssertionError, match=r"waited 0 s in vain for the moon; the last value is \[\]"):
        wait_until(lambda: [], timeout_s=0, message="the moon")  # noqa: PIE807 - a call that returns a new list


def test_wait_until_returns_the_value() -> None:
    values = iter(["", None, "there"])
    assert wait_until(lambda: next(values)) == "there"


def test_a_log_without_a_file_is_empty(echo_log: Path) -> None:
    assert read_log(echo_log) == []
    assert loads(echo_log) == []
    assert not call_counts(echo_log)


def test_a_log_is_read_up_to_the_last_whole_entry(echo_log: Path) -> None:
    echo_log.write_text('{"pid":1,"event":"finish","ids":[3]}\n{"pid":1,"event":"fin')
    assert read_log(echo_log) == [LogEntry(1, "finish", (3,))]


def test_public_names_exist_and_are_sorted() -> None:
    names = daskinfer.testing.__all__
    assert sorted(names) == names
    assert all(hasattr(daskinfer.testing, name) for name in names)


def test_a_spec_takes_paths_and_the_isolation(tmp_path: Path) -> None:
    spec = echo_spec(isolation="thread", log=tmp_path / "x")
    assert (spec.engine, spec.isolation, spec.options["log"]) == ("echo", "thread", str(tmp_path / "x"))
    assert EchoEngine(spec).stats().capacity == 32

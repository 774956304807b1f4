"""What every engine must do: one suite of checks, run over all engines of :data:`CASES` by test_conformance.py.

To have another engine checked, add a case to the list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.engines.base import BatchEngine, Engine
from daskinfer.errors import RowError
from daskinfer.records import Completed, Failed, Request, Result, SamplingParams
from daskinfer.testing import echo_spec
from tests.engines import tiny

SHORT = SamplingParams(max_new_tokens=5)
ROWS = 23


class ToyEngine(BatchEngine):
    """The least an author writes: it answers a text in upper case and refuses "bad"."""

    max_batch_rows = 4

    def load(self) -> None:
        """Do nothing."""

    def infer(self, requests: Sequence[Request]) -> list[Any]:
        return [RowError("refused") if r.input == "bad" else str(r.input).upper() for r in requests]


@dataclass(frozen=True)
class Case:
    """An engine to be checked.

    ``spec`` makes the specification, given an empty folder; ``good`` makes the i-th row of a job, and ``bad`` one that
    fails.
    """

    name: str
    spec: Callable[[Path], ModelSpec]
    good: Callable[[int], Request] = lambda i: Request(i, tiny.words(1 + i % 9, i), SHORT)
    bad: Callable[[int], Request] = lambda i: Request(i, "", SHORT)


def _transformers(kind: str) -> Callable[[Path], ModelSpec]:
    def spec(folder: Path) -> ModelSpec:
        return ModelSpec(str(tiny.make(folder, kind)), engine="transformers", options={"max_batch_rows": 5})

    return spec


def _lm(folder: Path) -> ModelSpec:
    options = {"max_batch_rows": 5, "max_batch_tokens": 16, "slot_tokens": 8}
    return ModelSpec(str(tiny.make(folder)), engine="lm", options=options)


CASES = [
    Case(
        "toy",
        lambda _: ModelSpec("toy", engine="tests.engines.conformance:ToyEngine"),
        bad=lambda i: Request(i, "bad", SHORT),
    ),
    Case("echo", lambda _: ModelSpec("echo", engine="echo"), bad=lambda i: Request(i, 3.5, SHORT)),
    Case(
        "echo-ragged",
        lambda folder: echo_spec(capacity=4, lengths=[1, 4, 2], oom_over=30, log=folder / "log"),
        bad=lambda i: Request(i, 3.5, SHORT),
    ),
    Case("lm", _lm),
    Case("transformers", _transformers("llama")),
    Case("transformers-t5", _transformers("t5")),
]


# ---------------------------------------------------------------- running an engine


def drain(engine: Engine) -> list[Result]:
    """Step until nothing is held any more; an engine that gets nowhere fails the test."""
    results: list[Result] = []
    for _ in range(10_000):
        results += engine.step()
        stats = engine.stats()
        if stats.waiting == stats.running == 0:
            return results + engine.step()
    raise AssertionError("rows stay in the engine")


def answers(results: Sequence[Result]) -> dict[int, Any]:
    """Row to output or kind of failure; a row that came twice fails the test."""
    by_row = {r.id: (r.output, r.finish_reason) if isinstance(r, Completed) else r.kind for r in results}
    assert len(by_row) == len(results), "a row came back twice"
    return by_row


# ---------------------------------------------------------------- the checks


def check_protocol(engine: Engine, case: Case) -> None:
    assert isinstance(engine, Engine)
    assert engine.stats().capacity >= 1


def check_step_on_nothing_returns_at_once(engine: Engine, case: Case) -> None:
    assert engine.step() == []
    assert engine.step() == []
    engine.abort([1, 2, 3])


def check_every_row_back_once(engine: Engine, case: Case) -> None:
    results: list[Result] = []
    for start in range(0, ROWS, 4):
        engine.add([case.good(i) for i in range(start, min(start + 4, ROWS))])
        results += engine.step()
    found = answers(results + drain(engine))
    assert sorted(found) == list(range(ROWS))
    assert all(isinstance(output, tuple) for output in found.values())


def check_order_and_company_do_not_matter(engine: Engine, case: Case) -> None:
    rows = [case.good(i) for i in range(ROWS)]
    engine.add(rows)
    together = answers(drain(engine))
    random.Random(0).shuffle(rows)
    engine.add(rows)
    assert answers(drain(engine)) == together
    alone: dict[int, Any] = {}
    for row in rows[:6]:
        engine.add([row])
        alone |= answers(drain(engine))
    assert alone == {row: together[row] for row in alone}


def check_abort_forgets(engine: Engine, case: Case) -> None:
    engine.add([case.good(i) for i in range(ROWS)])
    engine.add([case.bad(ROWS)])
    engine.abort([0, 5, ROWS, 999])
    before = {r.id for r in engine.step()}
    assert not before & {0, 5, ROWS}
    engine.abort([ROWS - 1])
    after = answers(drain(engine))
    assert ROWS - 1 not in after
    assert sorted({*before, *after, ROWS - 1}) == [i for i in range(ROWS) if i not in (0, 5)]
    assert engine.step() == []


def check_aborted_rows_may_come_again(engine: Engine, case: Case) -> None:
    engine.add([case.good(3)])
    engine.abort([3])
    engine.add([case.good(3)])
    assert list(answers(drain(engine))) == [3]


def check_failures_are_values(engine: Engine, case: Case) -> None:
    engine.add([case.bad(0), case.good(1), case.bad(2), case.good(3)])
    results = {r.id: r for r in drain(engine)}
    assert sorted(results) == [0, 1, 2, 3]
    for row in (0, 2):
        failed = results[row]
        assert isinstance(failed, Failed)
        assert failed.kind
        assert failed.message
    assert isinstance(results[1], Completed)
    assert isinstance(results[3], Completed)
    engine.add([case.good(1)])
    assert answers(drain(engine)) == answers([results[1]])


def check_add_never_refuses(engine: Engine, case: Case) -> None:
    odd: list[Any] = [None, 7, b"bytes", object(), [], [None], [{}], [{"role": "user"}], {"a": 1}, "\ud800"]
    engine.add([Request(i, value, SHORT) for i, value in enumerate(odd)])
    assert sorted(answers(drain(engine))) == list(range(len(odd)))


def check_stats_only_grow(engine: Engine, case: Case) -> None:
    def counters() -> list[int]:
        s = engine.stats()
        return [
            s.steps,
            s.row_steps,
            s.full_steps,
            s.full_row_steps,
            s.prompt_tokens,
            s.completion_tokens,
            s.padded_tokens,
        ]

    engine.add([case.good(i) for i in range(ROWS)])
    assert engine.stats().waiting + engine.stats().running == ROWS
    seen = [counters()]
    while engine.stats().waiting + engine.stats().running:
        engine.step()
        seen.append(counters())
    for earlier, later in pairwise(seen):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    assert seen[-1][0] > seen[0][0]
    assert seen[-1][1] >= ROWS


def check_usage_adds_up(engine: Engine, case: Case) -> None:
    before = engine.stats()
    engine.add([case.good(i) for i in range(ROWS)])
    done = [r for r in drain(engine) if isinstance(r, Completed)]
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == sum(r.usage.prompt_tokens for r in done)
    assert after.completion_tokens - before.completion_tokens == sum(r.usage.completion_tokens for r in done)


CHECKS: list[Callable[[Engine, Case], None]] = [value for name, value in globals().items() if name.startswith("check_")]

"""The echo engine: answers, slots, counters, log, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class
from daskinfer.engines.base import Engine
from daskinfer.records import Completed, Failed, FailureKind, Result, Usage
from daskinfer.testing import (
    EchoEngine,
    Request,
    SamplingParams,
    attempts,
    conservation,
    echo_spec,
    read_log,
    run_engine,
)

DEFAULT = SamplingParams()
NO_TOKENS = SamplingParams(max_new_tokens=0)


def loaded(**options: Any) -> EchoEngine:
    engine = EchoEngine(echo_spec(**options))
    engine.load()
    return engine


def rows(n: int, params: SamplingParams = DEFAULT) -> list[Request]:
    return [Request(i, f"row {i}", params) for i in range(n)]


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("two words", "<two words>"),
        ("", "<>"),
        ([5, 6, 7], "<5 6 7>"),
        ([], "<>"),
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], "<hello>"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<ab>"),
    ],
)
@pytest.mark.parametrize("lengths", [1, 3])  # with 1 a step of plain rows takes a shorter way
def test_answer_is_the_rows_own_text(content: Any, answer: str, lengths: Any) -> None:
    (result,) = run_engine(loaded(lengths=lengths), [Request(4, content)])
    assert isinstance(result, Completed)
    assert (result.id, result.output, result.finish_reason) == (4, answer, "stop")
    assert result.usage == Usage(len(answer[1:-1].split()), lengths)


@pytest.mark.parametrize("content", [None, 7, b"bytes", {"role": "user"}, ["a", "b"], [{"role": "user"}]])
def test_c03_what_is_no_input_fails_that_row_alone(content: Any) -> None:
    results = run_engine(loaded(), [Request(0, "a"), Request(1, content), Request(2, "c")])
    failed = [r for r in results if isinstance(r, Failed)]
    assert [(r.id, r.kind) for r in failed] == [(1, FailureKind.WRONG_TYPE)]


def test_prefix_and_suffix() -> None:
    (result,) = run_engine(loaded(prefix="", suffix="!"), [Request(0, "a")])
    assert isinstance(result, Completed)
    assert result.output == "a!"


def test_vectors_depend_on_the_text_alone() -> None:
    engine = loaded(output="vector", dims=5)
    results = run_engine(engine, [Request(0, "a", NO_TOKENS), Request(1, "b"), Request(2, "a")])
    vectors = {r.id: r.output for r in results if isinstance(r, Completed)}
    assert {(v.dtype.str, v.shape) for v in vectors.values()} == {("<f4", (5,))}
    assert vectors[0].tolist() == vectors[2].tolist() != vectors[1].tolist()
    assert all(abs(x) <= 1 for v in vectors.values() for x in v.tolist())
    assert {r.finish_reason for r in results if isinstance(r, Completed)} == {None}
    assert (engine.stats().prompt_tokens, engine.stats().completion_tokens) == (3, 0)
    assert EchoEngine.output_type(engine_spec := echo_spec(output="vector", dims=5)) == "float32[5]"
    assert engine_class(engine_spec) is EchoEngine


def test_text_is_a_string_column() -> None:
    assert EchoEngine.output_type(echo_spec()) == "string"


def test_it_is_an_engine_found_by_name() -> None:
    assert isinstance(loaded(), Engine)
    assert engine_class(ModelSpec("any", engine="echo")) is EchoEngine


def test_it_loads_nothing_heavy() -> None:
    code = "import sys, daskinfer.testing; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "dask", "distributed", "pandas", "pyarrow"} & set(found)


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        (4, [4, 4, 4, 4]),
        ([1, 5], [1, 5, 1, 5]),
        ("params", [6, 6, 6, 6]),
    ],
)
def test_a_row_needs_its_length_in_steps(lengths: Any, tokens: Any) -> None:
    engine = loaded(lengths=lengths)
    results = run_engine(engine, rows(4, SamplingParams(max_new_tokens=6)))
    assert [
        r.usage.completion_tokens for r in sorted(results, key=lambda r: r.id) if isinstance(r, Completed)
    ] == tokens
    assert {r.finish_reason for r in results if isinstance(r, Completed)} == {"stop"}
    stats = engine.stats()
    assert (stats.steps, stats.row_steps, stats.completion_tokens) == (max(tokens), sum(tokens), sum(tokens))
    assert stats.prompt_tokens == 8


def test_drawn_lengths_belong_to_the_row_and_fill_the_range() -> None:
    def lengths(seed: int, ids: range) -> dict[int, int]:
        engine = loaded(lengths={"seed": seed, "low": 2, "high": 4}, capacity=7)
        results = run_engine(engine, [Request(i, "a") for i in ids])
        return {r.id: r.usage.completion_tokens for r in results if isinstance(r, Completed)}

    some = lengths(0, range(50))
    assert set(some.values()) == {2, 3, 4}
    assert some == lengths(0, range(49, -1, -1))
    assert some != lengths(1, range(50))


def test_c22_too_few_tokens_end_the_row_with_length() -> None:
    params = [SamplingParams(max_new_tokens=n) for n in (1, 2, 0, 3)]
    engine = loaded(lengths=3)
    results = run_engine(engine, [Request(i, "one two", p) for i, p in enumerate(params)])
    told = {r.id: (r.output, r.finish_reason, r.usage.completion_tokens) for r in results if isinstance(r, Completed)}
    assert told == {
        0: ("<one two>", "length", 1),
        1: ("<one two>", "length", 2),
        2: ("", "length", 0),
        3: ("<one two>", "stop", 3),
    }


@pytest.mark.parametrize("lengths", [1, 9, "params"])
def test_c22_no_tokens_need_no_step(lengths: Any) -> None:
    engine = loaded(lengths=lengths, capacity=2)
    engine.add(rows(5, NO_TOKENS))
    results = engine.step()
    assert [(r.output, r.finish_reason) for r in results if isinstance(r, Completed)] == [("", "length")] * 5
    assert engine.stats().steps == engine.stats().row_steps == 0


# ---------------------------------------------------------------- slots


def test_slots_are_refilled_in_order_of_arrival(echo_log: Path) -> None:
    engine = loaded(lengths=[3, 1, 1, 1], capacity=2, log=echo_log)
    run_engine(engine, rows(4))
    assert [e.ids for e in read_log(echo_log) if e.event == "step"] == [(0, 1), (0, 2), (0, 3)]


def test_an_idle_step_returns_at_once_and_counts_nothing() -> None:
    engine = loaded(step_s=60)
    assert engine.step() == []
    assert engine.stats().steps == 0


@pytest.mark.parametrize("lengths", [2, {"seed": 0, "low": 1, "high": 64}])
def test_occupancy_of_ragged_rows_is_full_while_rows_wait(lengths: Any) -> None:
    engine = loaded(lengths=lengths, capacity=32)
    feed = iter(rows(1500))
    results: list[Result] = []
    held = 0
    while True:
        engine.add(list(islice(feed, 128 - held)))
        results += engine.step()
        stats = engine.stats()
        held = stats.running + stats.waiting
        if not held:
            break
    conservation(range(1500), results)
    assert stats.full_steps > 50
    assert stats.occupancy >= 0.95
    assert stats.row_steps == stats.completion_tokens
    assert stats.full_row_steps <= stats.row_steps <= stats.steps * 32


def test_steps_that_leave_slots_empty_count_as_not_full() -> None:
    engine = loaded(capacity=4)
    run_engine(engine, rows(10))
    stats = engine.stats()
    assert (stats.steps, stats.row_steps, stats.full_steps, stats.full_row_steps) == (3, 10, 2, 8)


def test_abort_frees_slots_and_is_logged_for_held_rows_only(echo_log: Path) -> None:
    engine = loaded(lengths=2, capacity=2, log=echo_log)
    engine.add(rows(5))
    assert engine.step() == []
    engine.abort([0, 3, 99])
    engine.abort([99])
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    assert [r.id for _ in range(4) for r in engine.step()] == [1, 2, 4]
    assert [sorted(e.ids) for e in read_log(echo_log) if e.event == "abort"] == [[0, 3]]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    budgets=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    capacity=st.integers(1, 5),
    oom_over=st.none() | st.integers(1, 30),
)
@settings(max_examples=150)
def test_every_row_comes_back_once(sizes: Any, lengths: Any, budgets: Any, capacity: int, oom_over: int | None) -> None:
    engine = loaded(lengths=lengths, capacity=capacity, oom_over=oom_over)
    results: list[Result] = []
    added = 0
    for size in sizes:
        params = [SamplingParams(max_new_tokens=b) for b in budgets]
        engine.add([Request(i, "a b", params[i % len(params)]) for i in range(added, added + size)])
        added += size
        results += engine.step()
        assert engine.stats().running <= capacity
    results += run_engine(engine, [])
    while engine.stats().running + engine.stats().waiting:
        results += engine.step()
    conservation(range(added), results)
    stats = engine.stats()
    if oom_over is None:
        assert stats.completion_tokens == sum(r.usage.completion_tokens for r in results if isinstance(r, Completed))
        assert all(isinstance(r, Completed) for r in results)


def test_renumbered_rows_keep_their_own_ids_in_lengths_faults_and_log(echo_log: Path, fault_dir: Path) -> None:
    engine = loaded(lengths=[1, 2, 3], log=echo_log, faults={"bad": ["value_error"]}, faults_dir=fault_dir)
    prompts = {40: "a", 41: "bad", 42: "c"}
    results = run_engine(engine, [Request(i, p, origin=row) for i, (row, p) in enumerate(prompts.items())])
    assert {r.id: r.usage.completion_tokens for r in results if isinstance(r, Completed)} == {0: 2, 2: 1}
    assert [(e.event, e.ids) for e in read_log(echo_log)] == [
        ("load", ()), ("fail", (41,)), ("step", (40, 42)), ("finish", (42,)), ("step", (40,)), ("finish", (40,))
    ]  # fmt: skip
    assert attempts(fault_dir) == {41: 1}


# ---------------------------------------------------------------- a device that is too small


def test_out_of_memory_halves_what_runs_and_loses_nothing() -> None:
    engine = loaded(capacity=8, oom_over=8)
    results = run_engine(engine, [Request(i, "one two") for i in range(8)])
    assert all(isinstance(r, Completed) for r in results)
    assert [r.id for r in results] == list(range(8))
    stats = engine.stats()
    assert stats.extra == {"out_of_memory": 1}
    assert (stats.steps, stats.row_steps) == (2, 8)


def test_a_row_that_does_not_fit_alone_fails_and_its_mates_do_not() -> None:
    engine = loaded(capacity=4, oom_over=10)
    prompts = ["a", "b", "word " * 11, "c", "d"]
    results = run_engine(engine, [Request(i, p) for i, p in enumerate(prompts)])
    assert {r.id: r.kind for r in results if isinstance(r, Failed)} == {2: "out_of_memory"}


def test_c52_long_rows_cost_few_extra_steps_and_short_ones_run_at_full_width_again() -> None:
    engine = loaded(capacity=64, oom_over=2000)
    prompts = ["word " * (900 if i % 16 == 5 else 10) for i in range(64)]
    assert all(isinstance(r, Completed) for r in run_engine(engine, [Request(i, p) for i, p in enumerate(prompts)]))
    assert engine.stats().extra["out_of_memory"] <= 8
    engine.add(rows(65))
    assert len(engine.step()) == 64


def test_the_working_set_grows_with_what_is_written() -> None:
    engine = loaded(capacity=2, lengths=5, oom_over=8)
    results = run_engine(engine, [Request(0, "one two"), Request(1, "one two")])
    assert all(isinstance(r, Completed) for r in results)
    assert engine.stats().extra == {"out_of_memory": 1}  # 2 rows · (2 read + 3 written)

"""BatchEngine: choosing batches, failures of rows, memory, counters; and what foreign exceptions mean."""

from __future__ import annotations

import math
import pickle
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.config import ModelSpec
from daskinfer.engines.base import BatchEngine, failed_with, translate
from daskinfer.errors import EngineDiedError, EngineError, OutOfMemoryError, RowError, TransientError
from daskinfer.records import Completed, Failed, FailureKind, Request, Result, Usage


class Scripted(BatchEngine):
    """Rows are numbers: their length. ``limit``: rows times longest that fit. ``bad``: ids that raise."""

    max_batch_rows = 8

    def __init__(
        self, limit: float = float("inf"), bad: dict[int, BaseException] | None = None, **options: Any
    ) -> None:
        super().__init__(ModelSpec("m", options=options))
        self.limit, self.bad = limit, bad or {}
        self.calls: list[list[int]] = []
        self.tensors: list[weakref.ref[Tensor]] = []
        self.alive_at_release: list[int] = []

    def load(self) -> None: ...

    def length(self, request: Request) -> int:
        if request.input == "refused":
            raise RowError("too long", FailureKind.TOO_LONG)
        if request.input == "broken":
            raise KeyError("x")
        return int(request.input)

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        self.calls.append([r.id for r in requests])
        tensor = Tensor()
        self.tensors.append(weakref.ref(tensor))
        if len(requests) * max(int(r.input) for r in requests) > self.limit:
            raise torch_oom(tensor)
        for request in requests:
            if request.id in self.bad:
                raise self.bad[request.id]
        return [f"<{r.input}>" for r in requests]

    def release_memory(self) -> None:
        self.alive_at_release.append(sum(ref() is not None for ref in self.tensors))


class Tensor:
    """Memory that must be gone before a retry."""


class TorchError(RuntimeError):
    held: Tensor


def torch_oom(tensor: Tensor) -> TorchError:
    error: TorchError = type("OutOfMemoryError", (TorchError,), {})("CUDA out of memory")
    error.held = tensor
    return error


def rows(lengths: Sequence[Any], first: int = 0) -> list[Request]:
    return [Request(first + i, length) for i, length in enumerate(lengths)]


def drain(engine: BatchEngine) -> list[Result]:
    results: list[Result] = []
    while engine.stats().waiting:
        results += engine.step()
    return results + engine.step()


def failures(results: Sequence[Result]) -> dict[int, str]:
    return {r.id: r.kind for r in results if isinstance(r, Failed)}


# ---------------------------------------------------------------- choosing


def test_nearest_in_length_around_the_oldest() -> None:
    engine = Scripted(max_batch_rows=3)
    engine.add(rows([50, 1, 2, 49, 90, 52]))
    drain(engine)
    assert engine.calls == [[3, 0, 5], [1, 2, 4]]


def test_budget_bounds_rows_times_longest() -> None:
    engine = Scripted(max_batch_size=100)
    engine.add(rows([10] * 20 + [200]))
    drain(engine)
    assert [len(call) for call in engine.calls] == [8, 8, 4, 1]
    engine = Scripted(max_batch_size=100)
    engine.add(rows([20] * 6 + [30]))
    drain(engine)
    assert [len(call) for call in engine.calls] == [5, 2]


def test_nobody_starves() -> None:
    engine = Scripted(max_batch_rows=2)
    engine.add(rows([1000]))
    engine.add(rows([1] * 50, first=1))
    engine.step()
    assert 0 in engine.calls[0]


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 9), st.integers(1, 2000), st.integers(1, 4000))
@settings(max_examples=150)
def test_every_row_comes_back_once(lengths: list[int], most: int, size: int, limit: int) -> None:
    engine = Scripted(limit=limit, max_batch_rows=most, max_batch_size=size)
    engine.add(rows(lengths))
    results = drain(engine)
    assert sorted(r.id for r in results) == list(range(len(lengths)))
    too_long = {i for i, length in enumerate(lengths) if length > limit}
    assert failures(results) == dict.fromkeys(too_long, FailureKind.OUT_OF_MEMORY)
    for call in engine.calls:
        assert len(call) <= most
        assert len(call) == 1 or len(call) * max(lengths[i] for i in call) <= size


# ---------------------------------------------------------------- rows that fail


def test_refused_rows_fail_from_the_next_step_without_a_call() -> None:
    engine = Scripted()
    engine.add(rows(["refused", "broken"]))
    assert failures(engine.step()) == {0: FailureKind.TOO_LONG, 1: FailureKind.ERROR}
    assert engine.calls == []
    assert engine.step() == []


def test_abort_forgets_waiting_and_refused_rows() -> None:
    engine = Scripted()
    engine.add(rows([1, "refused", 1, "refused"]))
    engine.abort([0, 1, 77])
    assert sorted(r.id for r in drain(engine)) == [2, 3]
    engine.add(rows([1, 1]))
    engine.abort([0])
    assert [r.id for r in drain(engine)] == [1]


def test_prepared_row_is_what_infer_gets() -> None:
    class Preparing(Scripted):
        def prepare(self, request: Request) -> Request:
            if request.input == "no":
                raise RowError("no")
            return Request(request.id, len(request.input))

    engine = Preparing()
    engine.add(rows(["four", "no", "eleven"]))
    results = {r.id: r for r in drain(engine)}
    assert [getattr(results[i], "output", None) for i in range(3)] == ["<4>", None, "<6>"]


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_a_row_that_raises_is_found_by_halving(batch: int) -> None:
    engine = Scripted(bad={3: ValueError("row three")}, max_batch_rows=batch)
    engine.add(rows([5] * 8))
    results = drain(engine)
    assert failures(results) == {3: FailureKind.ERROR}
    assert sorted(r.id for r in results) == list(range(8))
    (failed,) = [r for r in results if isinstance(r, Failed)]
    assert failed.message == "ValueError: row three"


def test_a_row_error_keeps_its_kind() -> None:
    engine = Scripted(bad={0: RowError("no room", FailureKind.TOO_LONG)})
    engine.add(rows([5, 5]))
    assert failures(drain(engine)) == {0: FailureKind.TOO_LONG}


def test_a_transient_error_fails_the_batch_at_once_to_be_retried() -> None:
    engine = Scripted(bad={1: ConnectionError("reset")})
    engine.add(rows([5] * 4))
    assert failures(engine.step()) == dict.fromkeys(range(4), FailureKind.TRANSIENT)
    assert len(engine.calls) == 1


def test_a_dead_device_is_raised_with_its_cause() -> None:
    broken = RuntimeError("CUDA error: device-side assert triggered")
    engine = Scripted(bad={1: broken})
    engine.add(rows([5] * 4))
    with pytest.raises(EngineDiedError, match="device-side assert") as caught:
        engine.step()
    assert caught.value.__cause__ is broken


@pytest.mark.parametrize(
    ("outputs", "message"), [([], "0 outputs for 2"), ("abc", "3 outputs for 2"), (None, "NoneType"), (5, "int")]
)
def test_wrong_number_of_outputs_fails_the_rows(outputs: Any, message: str) -> None:
    class Wrong(Scripted):
        def infer(self, requests: Sequence[Request]) -> Any:
            return outputs

    engine = Wrong()
    engine.add(rows([5, 5]))
    results = drain(engine)
    assert failures(results) == {0: FailureKind.ERROR, 1: FailureKind.ERROR}
    assert all(isinstance(r, Failed) for r in results)
    assert message in getattr(results[0], "message", "") or message.replace("2", "1") in getattr(
        results[0], "message", ""
    )


def test_outputs_may_be_results_exceptions_or_plain_values() -> None:
    class Mixed(Scripted):
        def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
            return [
                "plain",
                {"a": 1},
                RowError("no", "mine"),
                Completed(3, "x", "stop", Usage(2, 3)),
                Failed(4, "own", "m"),
            ]

    engine = Mixed()
    engine.add(rows([5] * 5))
    results = {r.id: r for r in engine.step()}
    assert results[0] == Completed(0, "plain")
    assert results[1] == Completed(1, {"a": 1})
    assert results[2] == Failed(2, "mine", "no")
    assert results[4] == Failed(4, "own", "m")
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.completion_tokens) == (2, 3)


# ---------------------------------------------------------------- memory


def test_c52_long_batch_out_of_memory() -> None:
    engine = Scripted(limit=2000, max_batch_rows=64, max_batch_size=4000)
    ideal = Scripted(max_batch_rows=64, max_batch_size=4000)
    lengths = [10] * 15 + [900] + [10] * 15 + [900] + [10] * 15 + [900] + [10] * 15 + [900]
    for each in (engine, ideal):
        each.add(rows(lengths))
        results = drain(each)
        assert sorted(r.id for r in results) == list(range(64))
        assert failures(results) == {}
    assert len(engine.calls) - len(ideal.calls) <= 8
    assert engine.stats().extra == {"out_of_memory": len(engine.alive_at_release)}
    assert set(engine.alive_at_release) == {0}  # the failed call's memory is gone before the next
    engine.calls.clear()
    engine.add(rows([10] * 60, first=100))
    drain(engine)
    assert [len(call) for call in engine.calls] == [60]  # short rows run at the full budget again


def test_c52_a_row_that_never_fits_fails_alone() -> None:
    engine = Scripted(limit=1000)
    engine.add(rows([10, 3000, 10, 10]))
    results = drain(engine)
    assert failures(results) == {1: FailureKind.OUT_OF_MEMORY}
    assert sorted(r.id for r in results) == [0, 1, 2, 3]


def test_c52_the_budget_grows_back() -> None:
    engine = Scripted(limit=300)
    engine.add(rows([100] * 8))
    drain(engine)
    assert max(map(len, engine.calls[1:])) <= 4
    engine.limit = float("inf")
    engine.add(rows([100] * 400, first=10))
    drain(engine)
    assert len(engine.calls[-2]) == 8
    sized = Scripted(limit=300, max_batch_size=500)
    sized.add(rows([100] * 4))
    drain(sized)
    sized.limit = float("inf")
    sized.add(rows([100] * 100, first=10))
    sized.add(rows([1] * 8, first=200))  # another length: its budget was never touched
    drain(sized)
    assert max(len(call) for call in sized.calls if call[0] < 200) == 5


@settings(max_examples=40)
@given(limit=st.integers(100, 3_000), seed=st.integers(0, 1 << 16), calls=st.sampled_from([40, 200]))
def test_c52_there_is_no_storm_of_out_of_memory(limit: int, seed: int, calls: int) -> None:
    """Memory runs out about log2 of the calls times per length class, not once in so many calls for ever."""
    rng = random.Random(seed)
    engine = Scripted(limit=limit, max_batch_rows=32, max_batch_size=4_000)
    n = 0
    while len(engine.calls) < calls:
        more = rows([rng.choice([7, 60]) for _ in range(64)], first=n)
        n += len(more)
        engine.add(more)
        results = drain(engine)
        assert failures(results) == {}
    per_class = math.log2(4_000 / 100) + math.log2(len(engine.calls) / 16 + 1) + 2
    assert engine.stats().extra.get("out_of_memory", 0) <= 2 * per_class


def test_a_row_alone_is_tried_once_more_after_memory_was_released() -> None:
    engine = Scripted(limit=50)
    engine.add(rows([100]))
    assert engine.step() == []
    engine.limit = 1_000  # what another row had left behind is gone
    assert failures(engine.step()) == {}
    engine.limit = 50
    engine.add(rows([100], first=5))
    assert engine.step() == []
    engine.abort([5])
    engine.add(rows([100], first=5))
    assert engine.step() == []
    assert failures(engine.step()) == {5: FailureKind.OUT_OF_MEMORY}


def test_out_of_memory_inside_a_halved_batch_keeps_the_rows() -> None:
    engine = Scripted(limit=25, bad={0: ValueError("x")})
    engine.limit = 100
    engine.add(rows([10] * 8))
    engine.limit = 45  # the halves no longer fit either
    results = drain(engine)
    assert sorted(r.id for r in results) == list(range(8))
    assert failures(results) == {0: FailureKind.ERROR}


# ---------------------------------------------------------------- counters


def test_counters() -> None:
    engine = Scripted(max_batch_rows=3)
    assert engine.stats().capacity == 3
    engine.add(rows([1] * 7))
    assert engine.stats().waiting == 7
    drain(engine)
    stats = engine.stats()
    assert (stats.steps, stats.row_steps, stats.full_steps, stats.full_row_steps) == (3, 7, 2, 6)
    assert stats.occupancy == 1.0
    assert stats.extra == {}


def test_defaults_of_the_hooks() -> None:
    class Plain(BatchEngine):
        def load(self) -> None: ...

        def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
            return [r.input for r in requests]

    engine = Plain(ModelSpec("m"))
    engine.release_memory()
    engine.add([Request(0, "abc")])
    assert engine.step() == [Completed(0, "abc")]
    engine.close()
    assert Plain.output_type(ModelSpec("m")) == "string"


# ---------------------------------------------------------------- foreign exceptions


class AcceleratorError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), OutOfMemoryError),
        (torch_oom(Tensor()), OutOfMemoryError),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate"), OutOfMemoryError),
        (AcceleratorError("an illegal memory access"), EngineDiedError),
        (RuntimeError("CUDA error: an illegal memory access"), EngineDiedError),
        (ConnectionResetError(), TransientError),
        (TimeoutError(), TransientError),
        (InterruptedError(), TransientError),
        (RuntimeError("shape mismatch"), None),
        (ValueError("CUDA error: said by somebody"), None),
    ],
)
def test_translate(error: BaseException, kind: type[EngineError] | None) -> None:
    found = translate(error)
    assert found is None if kind is None else isinstance(found, kind)
    if found is not None:
        assert translate(found) is found
        assert isinstance(pickle.loads(pickle.dumps(found)), type(found))


def test_a_real_allocation_failure_is_out_of_memory() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert isinstance(translate(caught.value), OutOfMemoryError)


def test_failed_with() -> None:
    assert failed_with(1, RowError("m", "k")) == Failed(1, "k", "m")
    assert failed_with(2, TimeoutError("late")) == Failed(2, FailureKind.TRANSIENT, "TimeoutError: late")
    assert failed_with(3, KeyError("x")) == Failed(3, FailureKind.ERROR, "KeyError: 'x'")

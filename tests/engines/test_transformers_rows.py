"""The transformers engine: rows it cannot serve, counters, memory, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class
from daskinfer.engines.base import Engine
from daskinfer.engines.transformers import TransformersEngine
from daskinfer.errors import UnknownOptionError
from daskinfer.records import Completed, Failed, FailureKind, Request, Result, SamplingParams
from tests.engines import tiny
from tests.engines.conformance import answers, drain

TEN = SamplingParams(max_new_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("llama"), context=32)


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return loaded(folder)


def loaded(folder: Path, **options: Any) -> TransformersEngine:
    made = TransformersEngine(ModelSpec(str(folder), options=options))
    made.load()
    return made


def calls_of(engine: TransformersEngine) -> list[tuple[int, int]]:
    """Record the shape of every batch the model gets from now on."""
    assert engine._loaded is not None
    shapes: list[tuple[int, int]] = []
    model = engine._loaded.model
    generate = model.generate

    def recording(**given: Any) -> Any:
        shapes.append(tuple(given["input_ids"].shape))
        return generate(**given)

    model.generate = recording
    return shapes


def test_c02_a_mate_that_goes_on_takes_no_row_past_the_position_table(tmp_path: Path) -> None:
    """GPT-2 looks positions up in a table of 32: a finished row of 28 and 4 tokens must not step on with its mate."""
    engine = loaded(tiny.make(tmp_path, "gpt2", context=32))
    shapes = calls_of(engine)
    rows = [
        Request(i, [9 + (i * j * j + 3 * j) % 50 for j in range(n)], SamplingParams(max_new_tokens=20, ignore_eos=True))
        for i, n in enumerate((28, 12, 10, 31))
    ]
    engine.add(rows)
    together = by_row(drain(engine))
    assert sorted(shapes) == [(1, 28), (1, 31), (2, 12)]
    alone: list[Result] = []
    for row in rows:
        engine.add([row])
        alone += drain(engine)
    assert {i: r.output for i, r in together.items() if r.ok} == {r.id: r.output for r in alone if r.ok}  # type: ignore[union-attr]
    assert [together[i].usage.completion_tokens for i in range(4)] == [4, 20, 20, 1]  # type: ignore[union-attr]


def by_row(results: list[Result]) -> dict[int, Result]:
    assert len({r.id for r in results}) == len(results)
    return {r.id: r for r in results}


# ---------------------------------------------------------------- rows


def test_c01_one_over_long_prompt_fails_alone(engine: TransformersEngine) -> None:
    shapes = calls_of(engine)
    engine.add([Request(i, tiny.words(5000 if i == 7 else 5, i), SamplingParams(max_new_tokens=4)) for i in range(20)])
    results = by_row(drain(engine))
    assert len(results) == 20
    assert [i for i, r in results.items() if isinstance(r, Failed)] == [7]
    failed = results[7]
    assert isinstance(failed, Failed)
    assert failed.kind == FailureKind.TOO_LONG
    assert "5000 tokens" in failed.message
    assert "32" in failed.message
    assert max(width for _, width in shapes) == 5


def test_c02_prompts_at_the_limit(engine: TransformersEngine) -> None:
    sizes = {0: 30, 1: 31, 2: 32, 3: 33}
    engine.add([Request(i, tiny.words(n, i), TEN) for i, n in sizes.items()])
    together = by_row(drain(engine))
    for row, most in ((0, 2), (1, 1)):
        done = together[row]
        assert isinstance(done, Completed)
        assert (done.finish_reason, done.usage.completion_tokens) == ("length", most)
    for row in (2, 3):
        failed = together[row]
        assert isinstance(failed, Failed)
        assert failed.kind == FailureKind.TOO_LONG
        assert "no room to generate" in failed.message
    for i, n in sizes.items():
        engine.add([Request(i, tiny.words(n, i), TEN)])
        assert drain(engine) == [together[i]]


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_c04_blank_prompts(folder: Path, batch: int) -> None:
    engine = loaded(folder, max_batch_rows=batch)
    engine.add([Request(i, text, TEN) for i, text in enumerate(["", "w1", "   ", "\n\t", "w2", ""])])
    results = by_row(drain(engine))
    kinds = [r.kind if isinstance(r, Failed) else "ok" for _, r in sorted(results.items())]
    assert kinds == [FailureKind.EMPTY_PROMPT, "ok", *[FailureKind.EMPTY_PROMPT] * 2, "ok", FailureKind.EMPTY_PROMPT]
    alone = loaded(folder)
    alone.add([Request(1, "w1", TEN)])
    assert drain(alone) == [results[1]]


def test_c22_no_tokens_asked_for_is_no_model_call(engine: TransformersEngine) -> None:
    shapes = calls_of(engine)
    none = SamplingParams(max_new_tokens=0)
    engine.add([Request(0, "w1 w2", none), Request(1, tiny.words(40), none)])
    results = by_row(drain(engine))
    assert shapes == []
    for row, tokens in ((0, 2), (1, 40)):
        done = results[row]
        assert isinstance(done, Completed)
        assert (done.output, done.finish_reason) == ("", "length")
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (tokens, 0)
    engine.add(
        [Request(i, "w1 w2", SamplingParams(max_new_tokens=n, ignore_eos=True)) for i, n in enumerate((1, 2, 0))]
    )
    lengths = {r.id: r.usage.completion_tokens for r in drain(engine) if isinstance(r, Completed)}
    assert lengths == {0: 1, 1: 2, 2: 0}
    assert shapes == [(2, 2)]


def test_ids_outside_the_vocabulary_never_reach_the_model(engine: TransformersEngine) -> None:
    engine.add([Request(0, [9, len(tiny.VOCAB)], TEN), Request(1, [9, -1], TEN), Request(2, [9, 10], TEN)])
    results = by_row(drain(engine))
    assert [type(results[i]) for i in range(3)] == [Failed, Failed, Completed]
    failed = results[0]
    assert isinstance(failed, Failed)
    assert failed.kind == FailureKind.INVALID_ROW
    assert str(len(tiny.VOCAB)) in failed.message


def test_truncated_rows_say_so(engine: TransformersEngine) -> None:
    text = tiny.words(100)
    engine.add([Request(i, text, TEN.updated(truncate=side)) for i, side in enumerate(("left", "right"))])
    for result in drain(engine):
        assert isinstance(result, Completed)
        assert result.usage.truncated_tokens == 78
        assert result.usage.prompt_tokens == 22
        assert result.usage.completion_tokens == 10


def test_scores_that_are_no_numbers_fail_the_row(engine: TransformersEngine) -> None:
    assert engine._loaded is not None
    with torch.no_grad():
        engine._loaded.model.get_input_embeddings().weight[20] = torch.nan
    sampled = SamplingParams(max_new_tokens=3, temperature=1.0, seed=0)
    engine.add([Request(0, [9, 20], TEN), Request(1, [9, 10], SamplingParams(1)), Request(2, [20], sampled)])
    results = by_row(drain(engine))
    assert [type(results[i]) for i in range(3)] == [Failed, Completed, Failed]
    assert "NaN" in getattr(results[0], "message", "")


# ---------------------------------------------------------------- counters and memory


def test_padded_tokens_are_counted(engine: TransformersEngine) -> None:
    def asked(i: int, prompt: int, new: int) -> Request:
        return Request(i, tiny.words(prompt, i), SamplingParams(max_new_tokens=new, ignore_eos=True))

    assert engine.stats().padded_tokens == 0  # the warm-up has none
    engine.add([asked(0, 10, 4), asked(1, 7, 9), asked(2, 3, 1)])
    engine.step()
    # the prompts are padded to 10; the batch takes 9 steps
    assert engine.stats().padded_tokens == (0 + 3 + 7) + (5 + 0 + 8)
    assert (engine.stats().prompt_tokens, engine.stats().completion_tokens) == (20, 14)


def test_a_batch_ends_with_its_last_row(folder: Path) -> None:
    engine = loaded(folder)
    assert engine._loaded is not None
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    engine._loaded.model.register_forward_pre_hook(count)
    stop = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(len(tiny.VOCAB))))
    engine.add([Request(0, "w1 w2 w3", stop), Request(1, "w4", stop)])
    drain(engine)
    assert forwards == 1


def test_token_budget_counts_prompt_and_answer(folder: Path) -> None:
    engine = loaded(folder, max_batch_tokens=45)
    shapes = calls_of(engine)
    engine.add([Request(i, tiny.words(5, i), TEN) for i in range(7)])
    drain(engine)
    assert shapes == [(3, 5), (3, 5), (1, 5)]
    assert engine.stats().capacity == TransformersEngine.max_batch_rows


def test_out_of_memory_halves_the_batch(engine: TransformersEngine) -> None:
    engine.add([Request(i, tiny.words(2 + i, i), TEN) for i in range(12)])
    expected = answers(drain(engine))
    assert engine._loaded is not None
    generate = engine._loaded.model.generate

    def greedy_for_memory(**given: Any) -> Any:
        if given["input_ids"].shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(**given)

    engine._loaded.model.generate = greedy_for_memory
    engine.add([Request(i, tiny.words(2 + i, i), TEN) for i in range(12)])
    assert answers(drain(engine)) == expected
    assert engine.stats().extra["out_of_memory"] >= 1


def test_close_frees_the_model(folder: Path) -> None:
    engine = loaded(folder)
    assert engine._loaded is not None
    model = weakref.ref(engine._loaded.model)
    engine.add([Request(0, "w1", TEN)])
    drain(engine)
    engine.close()
    gc.collect()
    assert model() is None


# ---------------------------------------------------------------- settings


def test_found_by_name(folder: Path) -> None:
    spec = ModelSpec(str(folder), engine="transformers")
    assert engine_class(spec) is TransformersEngine
    assert isinstance(TransformersEngine(spec), Engine)


def test_unknown_option() -> None:
    with pytest.raises(UnknownOptionError, match="max_batch_size") as caught:
        TransformersEngine(ModelSpec("m", options={"max_batch_size": 3}))
    assert "max_batch_tokens" in str(caught.value)


def test_c60_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = loaded(folder)
    engine.add([Request(i, tiny.words(3 + i), TEN) for i in range(4)])
    drain(engine)
    engine.close()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""

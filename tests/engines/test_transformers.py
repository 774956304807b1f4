"""The transformers engine against ``generate`` on one row at a time, and rows of different parameters in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import quiet
from daskinfer.engines.transformers import TransformersEngine
from daskinfer.records import Completed, Request, Result, SamplingParams
from tests.engines import tiny
from tests.engines.conformance import answers, drain

NEW = 8
PROMPTS = [[(8 + 5 * i + 11 * j + i * j) % len(tiny.VOCAB) for j in range(n)] for i, n in enumerate((1, 2, 3, 5, 8))]
PROMPTS += [[9 + (i * j * j + 3 * j) % 50 for j in range(n)] for i, n in enumerate((13, 21, 29, 40), 5)]
PROMPTS += [[tiny.EOS, 10, tiny.EOS, 11], [tiny.PAD, tiny.PAD, 12, 13, tiny.PAD, 14], [20, 21, tiny.EOS]]


@dataclass
class Model:
    """A tiny model in a folder, and the same loaded with transformers alone."""

    folder: Path
    plain: Any
    known: dict[str, list[int]] = field(default_factory=dict)

    def engine(self, **options: Any) -> TransformersEngine:
        engine = TransformersEngine(ModelSpec(str(self.folder), options=options))
        engine.load()
        return engine

    def expected(self, ids: list[int], new: int = NEW, **options: Any) -> list[int]:
        key = repr((ids, new, options))
        if key not in self.known:
            with quiet():  # the reference warns of an eos inside a prompt
                self.known[key] = tiny.reference(self.plain, ids, new, **options)
        return self.known[key]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(kind: str) -> Model:
        if kind not in made:
            folder = tiny.make(tmp_path_factory.mktemp(kind), kind)
            loader = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
            with quiet():
                made[kind] = Model(folder, loader.from_pretrained(folder, dtype=torch.float32).eval())
        return made[kind]

    return get


@pytest.fixture
def llama(model: Callable[[str], Model]) -> Iterator[tuple[Model, TransformersEngine]]:
    made = model("llama")
    engine = made.engine()
    yield made, engine
    engine.close()


def requests(params: SamplingParams, prompts: Iterable[Any] = PROMPTS) -> list[Request]:
    return [Request(i, prompt, params) for i, prompt in enumerate(prompts)]


def text_of(engine: TransformersEngine, tokens: list[int]) -> str:
    assert engine._loaded is not None
    ended = tokens[-1:] == [tiny.EOS]
    return str(engine._loaded.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True))


def as_expected(engine: TransformersEngine, tokens: list[int], new: int = NEW) -> tuple[str, str, int]:
    reason = "stop" if tokens[-1:] == [tiny.EOS] else "length"
    assert reason == "stop" or len(tokens) == new
    return text_of(engine, tokens), reason, len(tokens)


def found(results: list[Result]) -> dict[int, tuple[str, str | None, int]]:
    done = {r.id: r for r in results if isinstance(r, Completed)}
    assert len(done) == len(results)
    return {i: (r.output, r.finish_reason, r.usage.completion_tokens) for i, r in done.items()}


# ---------------------------------------------------------------- the same as generate


@pytest.mark.parametrize("budget", [None, 120], ids=["rows", "tokens"])
@pytest.mark.parametrize("batch", [1, 3, 12])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_c10_greedy_is_token_equal_to_generate(
    model: Callable[[str], Model], kind: str, batch: int, budget: int | None
) -> None:
    made = model(kind)
    options = {"max_batch_rows": batch} | ({} if budget is None else {"max_batch_tokens": budget})
    engine = made.engine(**options)
    expected = {i: as_expected(engine, made.expected(ids)) for i, ids in enumerate(PROMPTS)}
    rows = requests(SamplingParams(max_new_tokens=NEW))
    for order in (rows, random.Random(batch).sample(rows, len(rows))):
        engine.add(order)
        assert found(drain(engine)) == expected
    assert len(set(expected.values())) > len(expected) // 2  # the model does tell prompts apart
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_repetition_penalty_and_min_new_tokens_are_those_of_generate(model: Callable[[str], Model], kind: str) -> None:
    made = model(kind)
    engine = made.engine()
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"min_new_tokens": NEW},
        {"repetition_penalty": 1.2, "min_new_tokens": 5},
        {},
    ]
    rows = [
        Request(i, ids, SamplingParams(max_new_tokens=NEW, **options[i % len(options)]))
        for i, ids in enumerate(PROMPTS)
    ]
    engine.add(rows)
    assert found(drain(engine)) == {
        i: as_expected(engine, made.expected(ids, **options[i % len(options)])) for i, ids in enumerate(PROMPTS)
    }


def test_c10_padding_is_not_the_tokens_own(model: Callable[[str], Model], tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, pad=False, generation={"eos_token_id": tiny.EOS})  # so that eos is what pads
    engine = TransformersEngine(ModelSpec(str(folder)))
    engine.load()
    assert engine._loaded is not None
    assert engine._loaded.special.pad == tiny.EOS
    made = model("llama")  # the same weights
    engine.add(requests(SamplingParams(max_new_tokens=NEW)))
    assert found(drain(engine)) == {i: as_expected(engine, made.expected(p)) for i, p in enumerate(PROMPTS)}
    assert engine.stats().steps == 1
    assert engine._loaded.tokenizer.padding_side == "right"
    assert engine._loaded.tokenizer.pad_token is None


# ---------------------------------------------------------------- each row by its own parameters


def test_mixed_parameters_in_one_batch_are_each_rows_own(llama: tuple[Model, TransformersEngine]) -> None:
    _, engine = llama
    kinds = [
        SamplingParams(max_new_tokens=3),
        SamplingParams(max_new_tokens=12, temperature=0.8, seed=1),
        SamplingParams(max_new_tokens=9, temperature=1.5, top_k=5, seed=1),
        SamplingParams(max_new_tokens=9, temperature=1.0, top_p=0.7, min_p=0.05, seed=2),
        SamplingParams(max_new_tokens=12, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=0),
        SamplingParams(max_new_tokens=12, stop_token_ids=(40, 52)),
        SamplingParams(max_new_tokens=12, stop=("w5", "w30 w2")),
    ]
    rows = [Request(i, PROMPTS[i % len(PROMPTS)], kinds[i % len(kinds)]) for i in range(24)]
    engine.add(rows)
    together = found(drain(engine))
    assert engine.stats().steps == 1
    alone: dict[int, tuple[str, str | None, int]] = {}
    for row in rows:
        engine.add([row])
        alone |= found(drain(engine))
    assert alone == together


def test_c15_models_own_sampling_settings_never_leak(model: Callable[[str], Model], tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 3.0, "max_length": 3}
    folder = tiny.make(tmp_path, generation=own | {"eos_token_id": tiny.EOS})
    engine = TransformersEngine(ModelSpec(str(folder)))
    engine.load()
    made = model("llama")
    greedy = [SamplingParams(max_new_tokens=NEW), SamplingParams(max_new_tokens=NEW, temperature=0.0, top_p=0.5)]
    sampled = SamplingParams(max_new_tokens=NEW, temperature=0.7, seed=3)
    rows = [Request(i, ids, sampled if i % 3 == 2 else greedy[i % 3]) for i, ids in enumerate(PROMPTS)]
    engine.add(rows)
    results = found(drain(engine))
    expected = {i: as_expected(engine, made.expected(ids)) for i, ids in enumerate(PROMPTS)}
    assert {i: r for i, r in results.items() if i % 3 != 2} == {i: r for i, r in expected.items() if i % 3 != 2}
    assert any(results[i] != expected[i] for i in expected if i % 3 == 2)


def test_c16_default_limit_is_ours_and_said(llama: tuple[Model, TransformersEngine]) -> None:
    _, engine = llama
    engine.add([Request(0, [10, 11, 12], SamplingParams(ignore_eos=True))])
    (result,) = drain(engine)
    assert isinstance(result, Completed)
    assert result.finish_reason == "length"
    assert result.usage.completion_tokens == tiny.CONTEXT - 3  # 256 were asked for; the context holds no more


def test_ends(llama: tuple[Model, TransformersEngine]) -> None:
    made, engine = llama
    ids = next(p for p in PROMPTS if tiny.EOS not in made.expected(p, 12))
    tokens = made.expected(ids, 12)
    at = next(i for i in range(2, 12) if tokens[i] not in tokens[:i] and tokens[i] >= 8)
    asked = {
        0: SamplingParams(max_new_tokens=12, stop_token_ids=(tokens[at],)),
        1: SamplingParams(max_new_tokens=12, stop=(f" {tiny.WORDS[tokens[at] - 8]}",)),
        2: SamplingParams(max_new_tokens=12, stop=(tiny.WORDS[tokens[at] - 8], "nowhere")),
        3: SamplingParams(max_new_tokens=at),
        4: SamplingParams(max_new_tokens=12, stop_token_ids=(tokens[at],), ignore_eos=True),
    }
    engine.add([Request(i, ids, params) for i, params in asked.items()])
    results = found(drain(engine))
    before = text_of(engine, tokens[:at])
    assert results[0] == results[4] == (before, "stop", at + 1)
    assert results[1] == (before, "stop", at + 1)
    assert results[2] == (before + " ", "stop", at + 1)
    assert results[3] == (before, "length", at)


def test_ignore_eos_goes_on(llama: tuple[Model, TransformersEngine]) -> None:
    made, engine = llama
    ids = next(p for p in PROMPTS if made.expected(p)[-1] == tiny.EOS)
    engine.add(
        [Request(0, ids, SamplingParams(max_new_tokens=20)), Request(1, ids, SamplingParams(20, ignore_eos=True))]
    )
    results = found(drain(engine))
    assert results[0][1] == "stop"
    assert results[0][2] < 20
    assert results[1][1:] == ("length", 20)


# ---------------------------------------------------------------- sampling


def test_c17_a_row_draws_the_same_wherever_it_runs(llama: tuple[Model, TransformersEngine]) -> None:
    made, engine = llama
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=123)
    rows = [Request(i, PROMPTS[3], params) for i in range(64)]
    engine.add(rows)
    first = answers(drain(engine))
    other = made.engine(max_batch_rows=5)
    other.add([Request(i + 1000, PROMPTS[3], params, origin=i) for i in random.Random(1).sample(range(64), 64)])
    assert {i - 1000: r for i, r in answers(drain(other)).items()} == first
    assert len(set(first.values())) > 40
    for seed, same in ((123, True), (124, False), (None, False)):
        engine.add([Request(r.id, r.input, params.updated(seed=seed)) for r in rows])
        assert (answers(drain(engine)) == first) is same


def test_c17_global_random_state_is_left_alone(model: Callable[[str], Model]) -> None:
    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), torch.rand(3).tolist()
    random.seed(1)
    torch.manual_seed(1)
    engine = model("llama").engine()
    engine.add(requests(SamplingParams(max_new_tokens=3, temperature=1.0)))
    drain(engine)
    assert (random.random(), torch.rand(3).tolist()) == expected

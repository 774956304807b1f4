"""End and pad tokens, and the context limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    RobertaConfig,
    T5Config,
)

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import SpecialTokens, context_limit, special_tokens
from daskinfer.engines.transformers import TransformersEngine
from daskinfer.errors import ConfigError
from daskinfer.records import Completed, Request, SamplingParams
from tests.engines import tiny
from tests.engines.conformance import drain


def special(tokenizer: dict[str, Any], two: bool = False, **generation: Any) -> SpecialTokens:
    config = SimpleNamespace(is_encoder_decoder=two, decoder_start_token_id=7)
    return special_tokens(
        tiny.make_tokenizer(**tokenizer), config, GenerationConfig(**generation), vocab_size=len(tiny.VOCAB)
    )


@pytest.mark.parametrize(
    ("tokenizer", "generation", "eos", "pad"),
    [
        ({}, {}, {tiny.EOS}, tiny.PAD),
        ({}, {"eos_token_id": 20}, {tiny.EOS, 20}, tiny.PAD),
        ({}, {"eos_token_id": [20, 21], "pad_token_id": 22}, {tiny.EOS, 20, 21}, tiny.PAD),
        ({"pad": False}, {"pad_token_id": 22}, {tiny.EOS}, 22),
        ({"pad": False}, {"pad_token_id": -1}, {tiny.EOS}, tiny.EOS),
        ({"pad": False}, {}, {tiny.EOS}, tiny.EOS),
        ({"pad": False, "eos": None}, {"eos_token_id": [21, 20]}, {20, 21}, 20),
        ({}, {"eos_token_id": [3, 10_000]}, {tiny.EOS}, tiny.PAD),
    ],
)
def test_c11_ends_and_padding(tokenizer: dict[str, Any], generation: dict[str, Any], eos: set[int], pad: int) -> None:
    found = special(tokenizer, **generation)
    assert (set(found.eos), found.pad) == (eos, pad)


def test_start_of_a_decoder() -> None:
    assert special({}, two=True).start == 7
    assert special({}, two=True, decoder_start_token_id=5).start == 5
    assert special({}).start is None


def test_special_tokens_by_name() -> None:
    named = special({}).named
    assert named["<|end|>"] == tiny.END
    assert named["</s>"] == tiny.EOS
    assert "w1" not in named


@pytest.mark.parametrize(("tokenizer", "said"), [({"eos": ""}, "empty string"), ({"eos": None}, "no end-of-sequence")])
def test_c11_no_usable_end(tokenizer: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        special(tokenizer)
    assert "tokenizer_config.json" in str(caught.value)


def test_c11_load_fails_with_one_message(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, eos="", pad=False)
    with pytest.raises(ConfigError, match="eos_token is the empty string"):
        TransformersEngine(ModelSpec(str(folder))).load()


@pytest.mark.parametrize(
    "variant", [{"pad": False}, {"pad": False, "eos": None, "generation": {"eos_token_id": [3, 20]}}]
)
def test_c11_batch_of_four_is_one_batch(tmp_path: Path, variant: dict[str, Any]) -> None:
    engine = TransformersEngine(ModelSpec(str(tiny.make(tmp_path, **variant))))
    engine.load()
    assert engine._loaded is not None
    largest = 0

    def look(_: Any, given: Any) -> None:
        nonlocal largest
        largest = max(largest, int(given[0].max()))

    engine._loaded.model.get_input_embeddings().register_forward_pre_hook(look)
    engine.add([Request(i, tiny.words(2 * i + 1), SamplingParams(max_new_tokens=4)) for i in range(4)])
    results = drain(engine)
    assert len(results) == 4
    assert all(isinstance(r, Completed) for r in results)
    assert engine.stats().steps == 1
    assert 0 < largest < len(tiny.VOCAB)
    assert len(engine._loaded.tokenizer) == len(tiny.VOCAB)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (GPT2Config(n_positions=1024), 1024),
        (OPTConfig(max_position_embeddings=2048), 2048),
        (BartConfig(max_position_embeddings=512), 512),
        (BertConfig(max_position_embeddings=512), 512),
        (RobertaConfig(max_position_embeddings=514, pad_token_id=1), 512),
        (T5Config(), None),
        (MambaConfig(), None),
        (BloomConfig(), None),
        (SimpleNamespace(n_ctx=77), 77),
        (SimpleNamespace(max_position_embeddings=-1), None),
    ],
)
def test_c19_limit_comes_from_the_config(config: PreTrainedConfig, limit: int | None) -> None:
    assert context_limit(config) == limit

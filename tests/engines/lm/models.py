"""Tiny random models of many architectures, and running the engine over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import Answer, Prompt, SpecialTokens, pick, quiet
from daskinfer.engines.lm import LMEngine
from daskinfer.records import Completed, Request, Result, SamplingParams
from tests.engines import tiny

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": tiny.CONTEXT,
    "initializer_range": 0.4,
    "vocab_size": len(tiny.VOCAB),
    "bos_token_id": tiny.BOS,
    "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.PAD,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    "phi": {},
    "phi3": {},
    "gemma": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "starcoder2": {"sliding_window": 16},
    "stablelm": {},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": tiny.PAD},
}
SUPPORTED = (*tiny.CAUSAL, *_EXTRA)
_REFUSED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 5.0},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4, "expand": 2},
    "falcon": {"alibi": True},
}
REFUSED = tuple(_REFUSED)


def make(folder: Path, kind: str, **changes: Any) -> Path:
    """Save a model of an architecture with its tokenizer; return the folder."""
    if kind in tiny.CAUSAL and not changes:
        return tiny.make(folder, kind)
    config = AutoConfig.for_model(kind, **_SMALL | _EXTRA.get(kind, {}) | _REFUSED.get(kind, {}) | changes)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    torch.set_rng_state(state)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LMEngine:
    """Load the engine."""
    engine = LMEngine(ModelSpec(str(folder), engine="lm", options=options))
    engine.load()
    return engine


def own_model(folder: Path) -> Any:
    """Load the model with its own attention, as the reference."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(n: int = 14, *, common: int = 40, longest: int = 24, seed: int = 1) -> dict[int, list[int]]:
    """Ragged prompts of random tokens; every second one begins with the same ``common`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = len(tiny.VOCAB)

    def draw(k: int) -> list[int]:
        return torch.randint(len(tiny.SPECIAL), vocabulary, (k,), generator=generator).tolist()

    shared = draw(common)
    return {i: (shared if i % 2 else []) + draw(1 + (5 * i) % longest) for i in range(n)}


def greedy(model: Any, ids: Sequence[int], n: int) -> list[int]:
    """What ``generate`` writes for one row, without the end token."""
    written = tiny.reference(model, ids, n)
    return written[:-1] if written and written[-1] == tiny.EOS else written


@torch.inference_mode()
def sampled(model: Any, row: int, ids: Sequence[int], params: SamplingParams) -> list[int]:
    """What the shared sampler draws for one row when the whole text is computed anew for every token."""
    answer = Answer(Prompt(row, list(ids), params), SpecialTokens(frozenset({tiny.EOS}), tiny.PAD), tokenizer=None)
    while not answer.finished:
        text = torch.tensor([[*ids, *answer.tokens]])
        answer.push(pick(model(input_ids=text).logits[:, -1], [answer])[0])
    return answer.tokens[:-1] if answer.tokens[-1] == tiny.EOS else answer.tokens


def text(tokens: Sequence[int]) -> str:
    """What the tiny tokenizer makes of tokens; without spaces, which some models' tokenizer classes leave out."""
    return str(tiny.make_tokenizer().decode(list(tokens), skip_special_tokens=True)).replace(" ", "")


def drain(engine: LMEngine, waves: Sequence[Sequence[Request]] = ()) -> dict[int, Result]:
    """Step until nothing is held, adding one wave of rows before each of the first steps; return results by row."""
    left, results = list(waves), {}
    for _ in range(20_000):
        if left:
            engine.add(left.pop(0))
        for result in engine.step():
            assert result.id not in results, "a row came back twice"
            results[result.id] = result
        stats = engine.stats()
        if not left and stats.running == stats.waiting == 0:
            return results
    raise AssertionError("the engine gets nowhere")


def outputs(results: Mapping[int, Result]) -> dict[int, str]:
    """Return the texts of completed rows, without spaces."""
    return {i: result.output.replace(" ", "") for i, result in results.items() if isinstance(result, Completed)}

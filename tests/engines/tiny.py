"""Tiny random models in folders: a word-level tokenizer made in code, and two layers of an architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from daskinfer.engines.hf import quiet

CAUSAL = ("llama", "gpt2", "qwen2", "gpt_neox", "mistral")
KINDS = (*CAUSAL, "t5")
CONTEXT = 96

UNK, PAD, BOS, EOS = 0, 1, 2, 3
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>")
END = SPECIAL.index("<|end|>")
WORDS = tuple(f"w{i}" for i in range(56))
VOCAB = {token: i for i, token in enumerate((*SPECIAL, *WORDS))}

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
TEMPLATE_WITH_BOS = "{{ bos_token }} " + TEMPLATE


def words(n: int, first: int = 0) -> str:
    """``n`` words of the vocabulary, one token each, from a starting place that tells prompts apart."""
    return " ".join(WORDS[(first + 7 * i * i + 3 * i) % len(WORDS)] for i in range(n))


def make_tokenizer(
    *, pad: bool = True, bos: bool = False, eos: str | None = "</s>", template: str | None = None
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that claims no limit and pads on the wrong side, as many do; ``bos`` is put before text."""
    backend = Tokenizer(WordLevel(VOCAB, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token=eos,
        pad_token="<pad>" if pad else None,
        additional_special_tokens=list(SPECIAL[4:]),
        padding_side="right",
        model_max_length=10**30,
    )
    made.chat_template = template
    return made


def make_model(folder: Path, kind: str = "llama", *, context: int = CONTEXT, seed: int = 0) -> None:
    """Save a random model of an architecture."""
    sizes: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.4,
    }
    width: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
    }
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, **width, num_key_value_heads=2))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, **width, num_key_value_heads=2, sliding_window=16))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **width, num_key_value_heads=2))
    elif kind == "gpt_neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **width))
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=context))
    elif kind == "t5":
        t5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        t5["tie_word_embeddings"] = False
        sizes |= {"decoder_start_token_id": PAD, "initializer_factor": 3.0}
        model = T5ForConditionalGeneration(T5Config(**sizes, **t5))
    else:
        raise ValueError(kind)
    torch.set_rng_state(state)
    model.save_pretrained(folder)


def make(
    folder: Path,
    kind: str = "llama",
    *,
    context: int = CONTEXT,
    seed: int = 0,
    generation: Mapping[str, Any] | None = None,
    **tokenizer: Any,
) -> Path:
    """Save a model with its tokenizer and, if given, a generation config of its own; return the folder."""
    with quiet():
        make_model(folder, kind, context=context, seed=seed)
    make_tokenizer(**tokenizer).save_pretrained(folder)
    if generation is not None:
        GenerationConfig(**generation).save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reference(model: Any, ids: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """What ``generate`` writes for one row: greedy unless told otherwise, the special tokens as the model has them."""
    options.setdefault("do_sample", False)
    made = model.generate(
        input_ids=torch.tensor([list(ids)]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=EOS, pad_token_id=PAD, decoder_start_token_id=PAD, **options
        ),
    )[0].tolist()
    return list(made[1:] if model.config.is_encoder_decoder else made[len(ids) :])

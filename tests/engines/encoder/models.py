"""Tiny random encoders in folders, how to run the engine over them, and plain references: one row at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)

from daskinfer.config import ModelSpec
from daskinfer.engines.encoder import EncoderEngine
from daskinfer.engines.hf import quiet
from daskinfer.records import Completed, Request, Result, SamplingParams
from tests.engines.conformance import drain
from tests.engines.tiny import BOS, EOS, PAD, VOCAB, words

MODELS: dict[str, tuple[type[Any], dict[str, type[Any]]]] = {
    "bert": (
        BertConfig,
        {"none": BertModel, "text": BertForSequenceClassification, "token": BertForTokenClassification},
    ),
    "roberta": (
        RobertaConfig,
        {"none": RobertaModel, "text": RobertaForSequenceClassification, "token": RobertaForTokenClassification},
    ),
    "distilbert": (DistilBertConfig, {"none": DistilBertModel, "text": DistilBertForSequenceClassification}),
    "mpnet": (MPNetConfig, {"none": MPNetModel, "text": MPNetForSequenceClassification}),
    "modernbert": (ModernBertConfig, {"none": ModernBertModel, "text": ModernBertForSequenceClassification}),
    "qwen2": (Qwen2Config, {"none": Qwen2Model, "text": Qwen2ForSequenceClassification}),
    "t5": (T5Config, {"none": T5EncoderModel}),
}
KINDS = tuple(MODELS)
PACKED = ("bert", "roberta", "distilbert", "qwen2")
"""Those whose vectors can be computed end to end."""

LIMIT = 48
PLAIN = SamplingParams()
RIGHT = SamplingParams(truncate="right")


def _sizes(kind: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.4,
    }
    if kind == "distilbert":
        return sizes | {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": LIMIT}
    if kind == "t5":
        return sizes | {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "initializer_factor": 3.0,
        }
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = LIMIT + 2 if kind in ("roberta", "mpnet") else LIMIT
    if kind == "modernbert":
        sizes |= {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": BOS, "sep_token_id": EOS}
    if kind == "qwen2":
        sizes["num_key_value_heads"] = 2
    return sizes


def make(folder: Path, kind: str = "bert", head: str = "none", *, seed: int = 0, **config: Any) -> Path:
    """Save a random model with its tokenizer; return the folder."""
    configuration, classes = MODELS[kind]
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with quiet():
        model = classes[head](configuration(**(_sizes(kind) | config)))
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(value, std=0.1)
        model.save_pretrained(folder)
    torch.set_rng_state(state)
    tokenizer(kind).save_pretrained(folder)
    return folder


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with the special tokens of a BERT, or of nothing but an end for others."""
    backend = Tokenizer(WordLevel(VOCAB, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    both = [("<s>", BOS), ("</s>", EOS)]
    if kind in ("qwen2", "t5"):
        backend.post_processor = TemplateProcessing(single="$A </s>", pair="$A $B:1 </s>:1", special_tokens=both)
    else:
        backend.post_processor = TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=both
        )
    backend.enable_padding(length=40)  # many tokenizer.json bring a padding and a truncation of their own
    backend.enable_truncation(40)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        cls_token="<s>",
        sep_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left" if kind == "qwen2" else "right",
        model_max_length=10**30,
    )
    names = ["input_ids", "attention_mask"]
    made.model_input_names = [*names, "token_type_ids"] if kind == "bert" else names
    return made


def sentence_folder(folder: Path, kind: str = "bert", *, seed: int = 0, **how: Any) -> Path:
    """Save a folder in the format of sentence-transformers.

    ``how`` may have ``pooling`` (the content of its config), ``dense`` (outputs), ``normalize``, ``inside`` (the folder of
    the transformer), ``settings`` (config_sentence_transformers.json) and ``bert`` (sentence_bert_config.json).
    """
    inside = how.get("inside", "")
    make(folder / inside, kind, seed=seed)
    modules = [("Transformer", inside), ("Pooling", "1_Pooling")]
    _write(folder / "1_Pooling" / "config.json", how.get("pooling", {"pooling_mode_mean_tokens": True}))
    if "dense" in how:
        modules.append(("Dense", "2_Dense"))
        _dense(folder / "2_Dense", how["dense"], seed)
    if how.get("normalize", True):
        modules.append(("Normalize", "3_Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    _write(folder / "modules.json", listed)
    if "settings" in how:
        _write(folder / "config_sentence_transformers.json", how["settings"])
    if "bert" in how:
        _write(folder / inside / "sentence_bert_config.json", how["bert"])
    return folder


def _dense(folder: Path, outputs: int, seed: int) -> None:
    from safetensors.torch import save_file

    _write(
        folder / "config.json",
        {
            "in_features": 32,
            "out_features": outputs,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    drawn = torch.Generator().manual_seed(seed)
    weights = {
        "linear.weight": torch.randn(outputs, 32, generator=drawn),
        "linear.bias": torch.randn(outputs, generator=drawn),
    }
    save_file(weights, folder / "model.safetensors")


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


# ---------------------------------------------------------------- running


TEXTS = [words(1 + (5 * i) % 11, i) for i in range(20)]


def spec_of(folder: Path, task: str = "embed", **options: Any) -> ModelSpec:
    """A specification with small batches, so that a few rows make many."""
    options.setdefault("max_batch_tokens", 24)
    return ModelSpec(str(folder), task=task, device="cpu", options=options)


def loaded(spec: ModelSpec) -> EncoderEngine:
    """A loaded engine; to be closed."""
    engine = EncoderEngine(spec)
    engine.load()
    return engine


def run(spec: ModelSpec, rows: Sequence[Any], params: SamplingParams = PLAIN) -> list[Result]:
    """The results of rows, in order."""
    engine = loaded(spec)
    try:
        engine.add([Request(i, row, params) for i, row in enumerate(rows)])
        results = sorted(drain(engine), key=lambda result: result.id)
    finally:
        engine.close()
    assert [result.id for result in results] == list(range(len(rows)))
    return results


def outputs(spec: ModelSpec, rows: Sequence[Any], params: SamplingParams = PLAIN) -> list[Any]:
    """The outputs of rows that must all succeed."""
    results = run(spec, rows, params)
    assert all(isinstance(result, Completed) for result in results), results
    return [result.output for result in results if isinstance(result, Completed)]


def vectors(spec: ModelSpec, rows: Sequence[Any], params: SamplingParams = PLAIN) -> npt.NDArray[Any]:
    """The outputs of rows as one array."""
    return np.stack(outputs(spec, rows, params))


# ---------------------------------------------------------------- references


def reference_model(folder: Path, kind: Any = AutoModel) -> tuple[Any, Any]:
    """Tokenizer and model as anybody would load them."""
    with quiet():
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    made = AutoTokenizer.from_pretrained(folder)
    made.backend_tokenizer.no_padding()
    made.backend_tokenizer.no_truncation()
    return made, model


def hidden(folder: Path, texts: Sequence[str], kind: Any = AutoModel, **call: Any) -> list[torch.Tensor]:
    """The token vectors of each text, run alone."""
    made, model = reference_model(folder, kind)
    with torch.inference_mode():
        return [model(**made(text, return_tensors="pt", padding=False, **call)).last_hidden_state[0] for text in texts]


def logits(folder: Path, kind: Any, texts: Sequence[Any]) -> torch.Tensor:
    """The numbers of a classifier for each text or pair, run alone."""
    made, model = reference_model(folder, kind)
    given = [text if isinstance(text, tuple) else (text,) for text in texts]
    with torch.inference_mode():
        return torch.cat([model(**made(*parts, return_tensors="pt", padding=False)).logits for parts in given])


def pooled(tokens: torch.Tensor, mode: str) -> torch.Tensor:
    """A text's vector, by the definition."""
    weights = torch.arange(1, len(tokens) + 1, dtype=torch.float32)[:, None]
    by_mode: dict[str, torch.Tensor] = {
        "mean": tokens.mean(0),
        "cls": tokens[0],
        "lasttoken": tokens[-1],
        "max": tokens.max(0).values,
        "mean_sqrt_len_tokens": tokens.sum(0) / len(tokens) ** 0.5,
        "weightedmean": (tokens * weights).sum(0) / weights.sum(),
    }
    return by_mode[mode]


def change_weights(folder: Path, changes: Mapping[str, torch.Tensor]) -> None:
    """Replace weights of a saved model."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(load_file(path) | dict(changes), path, metadata={"format": "pt"})

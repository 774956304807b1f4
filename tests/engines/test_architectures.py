"""Choosing an engine from a model's files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daskinfer.config import ModelSpec
from daskinfer.engines import resolve
from daskinfer.engines.architectures import describe_model, packable, task_of


def folder(at: Path, config: Any) -> Path:
    (at / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return at


def gguf(at: Path, kind: str, *, key: str = "general.architecture") -> Path:
    path = at / "model.gguf"
    name, value = key.encode(), kind.encode()
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    path.write_bytes(head + entry)
    return path


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ({"model_type": "llama"}, "lm"),
        ({"model_type": "brand-new"}, "lm"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "lm"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "transformers"),
        ({"model_type": "other", "attn_logit_softcapping": 50.0}, "transformers"),
        ({"model_type": "bloom"}, "transformers"),
        ({"model_type": "falcon", "alibi": True}, "transformers"),
        ({"model_type": "falcon", "alibi": False}, "lm"),
        ({"model_type": "mamba"}, "transformers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "transformers"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "transformers"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "transformers"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, "lm"),
        ({"model_type": "gemma3", "text_config": {"attn_logit_softcapping": None}}, "lm"),
    ],
)
def test_auto(tmp_path: Path, config: dict[str, Any], engine: str) -> None:
    assert resolve(ModelSpec(str(folder(tmp_path, config)))) == engine
    assert resolve(ModelSpec(str(tmp_path), engine="echo")) == "echo"


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "generate"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "generate"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}, "generate"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "embed"),
        ({"model_type": "bert"}, "embed"),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "embed"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "embed"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}, "classify"),
        ({"model_type": "bert", "architectures": ["BertForTokenClassification"]}, "classify"),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "sbert_ce_default_activation_function": "torch.nn.Identity",
            },
            "score",
        ),
        ({"architectures": ["BertForSequenceClassification"], "sentence_transformers": {"version": "5"}}, "score"),
        ({}, "generate"),
    ],
)
def test_the_task_a_model_was_made_for(tmp_path: Path, config: dict[str, Any], task: str) -> None:
    assert task_of(str(folder(tmp_path, config))) == task
    (tmp_path / "modules.json").write_text("[]")
    assert task_of(str(tmp_path)) == "embed"
    (tmp_path / "modules.json").write_text("{broken")
    assert task_of(str(tmp_path)) == task


def test_models_that_cannot_be_read_generate(tmp_path: Path) -> None:
    for model in ("no/such-model", "/no/such/folder", str(gguf(tmp_path, "llama")), str(tmp_path)):
        assert task_of(model) == "generate"


def test_gguf_files(tmp_path: Path) -> None:
    assert describe_model(str(gguf(tmp_path, "llama"))) == {"model_type": "llama"}
    assert not packable(describe_model(str(gguf(tmp_path, "bloom"))) or {})
    assert describe_model(str(gguf(tmp_path, "llama", key="general.name"))) is None


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 40, b"PK..not a model"])
def test_what_cannot_be_read_is_left_to_the_workers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert describe_model(str(path)) is None
    assert resolve(ModelSpec(str(path))) == "lm"
    assert describe_model(str(folder(tmp_path, "{broken"))) is None
    assert describe_model(str(folder(tmp_path, "[]"))) is None
    assert describe_model("no/such-model") is None
    assert describe_model("/no/such/folder") is None


def test_no_model_library_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from daskinfer.config import ModelSpec; from daskinfer.engines import resolve; "
        f"resolve(ModelSpec({str(folder(tmp_path, {'model_type': 'llama'}))!r})); resolve(ModelSpec('a/b')); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

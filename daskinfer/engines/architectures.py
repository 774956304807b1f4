"""What a model's files say of its architecture, read without loading anything: enough to choose a task and an engine.

Runs on: anywhere.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["describe_model", "packable", "task_of"]

_NOT_PACKABLE = frozenset(
    {
        *(
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "jamba",
            "mamba",
            "mamba2",
            "recurrent_gemma",
            "rwkv",
            "zamba",
            "zamba2",
        ),
        *("bloom", "mpt"),  # a bias on positions
        "gemma2",  # its scores are capped
        *("bart", "t5"),  # as a GGUF file says it
    }
)
_LAYERS = frozenset({"full_attention", "sliding_attention"})
_MOVING_ROPE = frozenset({"dynamic", "longrope"})
_LONGEST_NAME = 1 << 10
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_VECTORS = frozenset(  # architectures without a head that writes text, and those whose head fills in masks
    {
        *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert"),
        *("funnel", "gte", "layoutlm", "longformer", "luke", "modernbert", "mpnet", "nomic_bert", "roberta"),
        *("roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl"),
    }
)


def describe_model(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the config of a model folder, a GGUF file (its ``model_type`` only) or a hub model in this host's cache.

    None when there is nothing to read here: the workers may have it.
    """
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _config(path / "config.json")
        if path.is_file():
            kind = _gguf_architecture(path)
            return None if kind is None else {"model_type": kind}
        cached = _cached(model, "config.json", revision)
        return None if cached is None else _config(cached)
    except (OSError, ValueError):
        return None


def task_of(model: str, revision: str | None = None) -> str:
    """Return the task that a model was made for, "generate" where its files cannot be read here.

    Folders of sentence-transformers and encoders embed; models with a classification head classify, and those that
    sentence-transformers saved as cross-encoders score.
    """
    modules = _read(model, "modules.json", revision)
    if isinstance(modules, list):
        return "embed"
    config = describe_model(model, revision) or {}
    names = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(_CLASSIFIERS) for name in names):
        is_cross = "sentence_transformers" in config or "sbert_ce_default_activation_function" in config
        return "score" if is_cross else "classify"
    if config.get("model_type") in _VECTORS and not config.get("is_decoder"):
        return "embed"
    return "embed" if any(name.endswith("EncoderModel") for name in names) else "generate"


def _read(model: str, name: str, revision: str | None) -> Any:
    """Return a JSON file of a model folder or of a hub model in this host's cache; None where it is not there."""
    folder = Path(model).expanduser()
    try:
        path = folder / name if folder.is_dir() else None if folder.is_file() else _cached(model, name, revision)
        return json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError):
        return None


def packable(config: dict[str, Any]) -> bool:
    """Whether nothing in a config rules out continuous batching; the engine has the last word when it loads the model."""
    if config.get("is_encoder_decoder") or config.get("model_type") in _NOT_PACKABLE:
        return False
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    if text.get("attn_logit_softcapping") or text.get("alibi"):
        return False
    if set(text.get("layer_types") or ()) - _LAYERS:
        return False
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return not {rope.get("rope_type"), rope.get("type")} & _MOVING_ROPE


def _config(path: Path) -> dict[str, Any] | None:
    read = json.loads(path.read_text(encoding="utf-8"))
    return read if isinstance(read, dict) else None


def _cached(model: str, name: str, revision: str | None) -> Path | None:
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, name, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _gguf_architecture(path: Path) -> str | None:
    """Return ``general.architecture`` of a GGUF file, which is its first entry; None for anything else."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return None
        file.read(4 + 8 + 8)  # version, tensors, entries
        if _string(file) != "general.architecture" or file.read(4) != struct.pack("<I", 8):
            return None
        return _string(file)


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    if length > _LONGEST_NAME:
        raise ValueError(f"a name of {length} bytes")
    return _exactly(file, length).decode()


def _exactly(file: BinaryIO, n: int) -> bytes:
    read = file.read(n)
    if len(read) < n:
        raise ValueError("the file ends early")
    return read

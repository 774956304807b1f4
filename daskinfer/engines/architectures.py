"""What a model's files say of its architecture, read without loading anything: enough to choose an engine.

Runs on: anywhere.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["describe_model", "packable"]

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
        cached = _cached_config(model, revision)
        return None if cached is None else _config(cached)
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


def _cached_config(model: str, revision: str | None) -> Path | None:
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
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

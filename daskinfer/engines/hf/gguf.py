"""GGUF files, converted once to a folder of safetensors: reading the file itself takes tens of seconds each time.

The weights are stored in float32, since that is what their quantised values expand to without further loss.

Runs on: worker.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import struct
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from daskinfer.engines.hf.cache import made_once
from daskinfer.errors import ConfigError, describe
from daskinfer.folders import cache_folder

__all__ = ["converted"]

_VERSION = 1  # of what a converted folder holds; another number is another folder
_HEAD_BYTES = 1 << 20
_DIGITS_APART = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})
_PROBES = ("One fish,\n\n2 fishes: 1234 déjà vu.", "  def f(x):\n\treturn x**2  # 你好", "I'll say: it's $5.00!")


def converted(path: Path) -> Path:
    """Return the folder that a GGUF file was converted to, converting it first if need be.

    One process of the host converts; the others wait. The folder is named by the file's name, size, modification time and
    first megabyte.

    Raises
    ------
    ConfigError
        The packages for it are missing, or transformers cannot read this file.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reading {path.name} needs {' and '.join(missing)}; on every worker run: pip install 'daskinfer[gguf]'"
        )
    target = cache_folder() / "gguf" / f"{path.stem}-{_digest(path)}"
    return made_once(target, lambda folder: _convert(path, folder))


def _digest(path: Path) -> str:
    facts = path.stat()
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD_BYTES))
    head.update(f"{facts.st_size} {facts.st_mtime_ns} {_VERSION}".encode())
    return head.hexdigest()[:12]


def _convert(path: Path, folder: Path) -> None:
    try:
        tokenizer = _tokenizer(path)
        tokenizer.save_pretrained(folder)
        _check_tokenizer(tokenizer, folder)
        _model(path).save_pretrained(folder)
        for made in folder.iterdir():
            made.chmod(0o644)  # safetensors makes files that no other user of a shared cache could read
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} cannot be converted: {describe(error)}") from error


def _tokenizer(path: Path) -> Any:
    """Return the file's tokenizer, its digits split from each other where its vocabulary was learned that way."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    if _text_field(path, "tokenizer.ggml.pre") in _DIGITS_APART and isinstance(
        backend.pre_tokenizer, pre_tokenizers.ByteLevel
    ):
        # transformers does not know these kinds and would split numbers, and line breaks before them, in another way
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _text_field(path: Path, key: str) -> str | None:
    """Return a text from the file's metadata: a key, the number 8 for "text", a length and the text."""
    head = key.encode() + struct.pack("<I", 8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(head)
        if at < 0:
            return None
        start = at + len(head) + 8
        (length,) = struct.unpack("<Q", data[start - 8 : start])
        return data[start : start + length].decode()


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    from transformers import AutoTokenizer

    reloaded = AutoTokenizer.from_pretrained(folder)
    for text in _PROBES:
        if tokenizer.encode(text) != reloaded.encode(text):
            raise ConfigError(
                f"the tokenizer of {folder.name.strip('.')} changes when it is saved, so its answers would be wrong; "
                "use the model in safetensors format"
            )


def _model(path: Path) -> Any:
    """Return the model, free of the marks of quantisation: a model that bears them cannot be saved."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with redirect_stderr(io.StringIO()):  # a progress bar that heeds none of transformers' settings
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain

"""From the name of a model to a local folder, and whether that folder may be loaded.

Runs on: worker.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.engines.hf.cache import locked
from daskinfer.engines.hf.gguf import converted
from daskinfer.errors import ConfigError, UntrustedModelError, describe
from daskinfer.folders import cache_folder

__all__ = ["find", "has_safetensors"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAFE_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_UNWANTED = ("original/*", "onnx/*", "openvino/*", "consolidated*", "training_args.bin")


def find(spec: ModelSpec) -> Path:
    """Return the local folder of a model; a GGUF file is converted and a hub model is fetched, once per host.

    Raises
    ------
    ConfigError
        There is no such model, or it is not complete.
    UntrustedModelError
        It would run code of its own (``trust_remote_code``), or its weights exist only as a pickle (``allow_pickle``).
    """
    given = Path(spec.model).expanduser()
    if given.is_dir():
        folder = given
    elif given.is_file():
        if given.suffix.lower() != ".gguf":
            raise ConfigError(f"model={spec.model!r} is a file, but not a .gguf; give the model's folder")
        folder = converted(given)
    elif _HUB_NAME.fullmatch(spec.model) and given.suffix.lower() != ".gguf":
        folder = _from_hub(spec)
    else:
        raise ConfigError(f"model={spec.model!r}: there is no such folder or file on this worker")
    _check(folder, spec)
    return folder


def has_safetensors(folder: Path) -> bool:
    """Whether all weights of the folder are there as safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all((folder / name).is_file() for name in set(_json(index).get("weight_map", {}).values()))
    return any(folder.glob("*.safetensors"))


# ---------------------------------------------------------------- checks


def _check(folder: Path, spec: ModelSpec) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"model={spec.model!r} has no config.json; give a folder in Hugging Face format, or a .gguf")
    if not spec.trust_remote_code:
        _refuse_code(_json(config), spec)
    if has_safetensors(folder):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise ConfigError(f"model={spec.model!r} has no weights (*.safetensors) in {folder}, or not all of them")
    if not spec.options.get("allow_pickle"):
        raise UntrustedModelError(
            spec.model,
            f"its weights are a pickle ({pickles[0]}), which could run code when opened",
            "convert them to safetensors, or set engine_options={'allow_pickle': True} to load them weights-only",
        )


def _refuse_code(config: dict[str, Any], spec: ModelSpec) -> None:
    from transformers import CONFIG_MAPPING

    code = config.get("auto_map")
    if code and config.get("model_type") not in CONFIG_MAPPING:
        raise untrusted_code(spec, f"needs Python code of its own ({', '.join(map(str, code.values()))})")


def untrusted_code(spec: ModelSpec, reason: str) -> UntrustedModelError:
    """Return the error for a model that brings its own code, naming the setting."""
    remedy = "read that code, and if you trust it set trust_remote_code=True (--trust-remote-code)"
    return UntrustedModelError(spec.model, f"it {reason}", remedy)


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return read if isinstance(read, dict) else {}


# ---------------------------------------------------------------- the hub


def _from_hub(spec: ModelSpec) -> Path:
    """Fetch a hub model, one process per host; what the host has already is used without asking the hub."""
    folder = _snapshot(spec, local=True)
    if folder is not None and _complete(folder, spec):
        return folder
    with locked(cache_folder() / "hub" / f"{spec.model.replace('/', '--')}.lock"):
        folder = _snapshot(spec, local=True)
        if folder is None or not _complete(folder, spec):
            folder = _snapshot(spec, local=False)
    if folder is None:
        raise ConfigError(f"model={spec.model!r} is no folder on this worker, and the hub cannot be reached")
    return folder


def _snapshot(spec: ModelSpec, *, local: bool) -> Path | None:
    """Return the folder of a hub model; None where only local files may be used and there are none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [*_SAFE_FILES]
    if spec.trust_remote_code:
        wanted.append("*.py")
    if spec.options.get("allow_pickle"):
        wanted += _PICKLES
    try:
        fetched = snapshot_download(
            spec.model,
            revision=spec.revision,
            allow_patterns=wanted,
            ignore_patterns=list(_UNWANTED),
            local_files_only=local,
        )
    except LocalEntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model={spec.model!r} is no folder on this worker, and the hub does not give it: {describe(error)}"
        ) from error
    return Path(fetched)


def _complete(folder: Path, spec: ModelSpec) -> bool:
    """Whether a fetched folder can be loaded; a fetch that was killed leaves a part of it."""
    pickles = bool(spec.options.get("allow_pickle")) and any(any(folder.glob(pattern)) for pattern in _PICKLES)
    return (folder / "config.json").is_file() and (has_safetensors(folder) or pickles)

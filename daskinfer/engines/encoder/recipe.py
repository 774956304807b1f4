"""What a model's folder says of itself: its head, its labels, and how sentence-transformers makes vectors with it.

Only JSON files are read, so that the type of the output is known before anything is loaded.

Runs on: anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.engines.encoder.options import POOLINGS
from daskinfer.errors import ConfigError, describe

__all__ = ["Layer", "Recipe", "folder_of", "read_recipe"]

Read = Callable[[str], Any]
"""From the name of a JSON file in the folder to its content, or None where there is no such file."""

_SIZES = ("hidden_size", "d_model", "dim", "n_embd")
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_BERT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class Layer:
    """A step after pooling: "normalize", "dense" or "layer_norm", with its folder and configuration."""

    kind: str
    path: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """How a folder's model is used.

    Attributes
    ----------
    config : dict
        Its config.json.
    path : str
        Where in the folder the transformer is; "" for the folder itself.
    pooling : tuple of str
        Several are joined end to end.
    include_prompt : bool
        Whether the tokens of a prompt take part in pooling.
    layers : tuple of Layer
        What follows.
    prompts : dict of str to str
    default_prompt : str or None
        Name of the one that is used when none is asked for.
    max_tokens : int or None
        Longest text, of which sentence-transformers cuts the rest.
    lower_case : bool
        Texts are turned into lower case first.
    dims : int
        Length of the vectors.
    """

    config: Mapping[str, Any]
    path: str = ""
    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    layers: tuple[Layer, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    dims: int = 0

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the outputs of a classification head, in order."""
        named = self.config.get("id2label") or {
            number: label for label, number in (self.config.get("label2id") or {}).items()
        }
        if named:
            ordered = sorted((int(number), str(label)) for number, label in named.items())
            return tuple(label for _, label in ordered)
        return tuple(f"LABEL_{i}" for i in range(int(self.config.get("num_labels", 2))))

    @property
    def per_token(self) -> bool:
        """Whether the model labels tokens rather than texts."""
        return any(str(name).endswith("ForTokenClassification") for name in self.config.get("architectures") or ())

    @property
    def problem(self) -> str | None:
        """The kind of classification, where the config tells."""
        found = self.config.get("problem_type")
        return str(found) if found else None


def folder_of(spec: ModelSpec) -> Read:
    """Return how to read a model's JSON files without its weights: from a local folder, or from the hub.

    The reader raises :class:`~daskinfer.errors.ConfigError` for a file that is no JSON, or when the hub cannot be asked.
    """
    folder = Path(spec.model).expanduser()
    return _local(folder) if folder.is_dir() else _hub(spec)


def _local(folder: Path) -> Read:
    def read(name: str) -> Any:
        path = folder / name
        return _parsed(path) if path.is_file() else None

    return read


def _hub(spec: ModelSpec) -> Read:
    def read(name: str) -> Any:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            return _parsed(Path(hf_hub_download(spec.model, name, revision=spec.revision)))
        except LocalEntryNotFoundError as error:
            if name == "config.json":
                raise _absent(spec, error) from None
            return None  # a hub that cannot be reached, and a model that is in the cache without this file
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise _absent(spec, error) from None

    return read


def _absent(spec: ModelSpec, error: BaseException) -> ConfigError:
    return ConfigError(f"model={spec.model!r} is no folder here, and the hub does not give it: {describe(error)}")


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


# ---------------------------------------------------------------- sentence-transformers' files


def read_recipe(read: Read, name: str) -> Recipe:
    """Return how the model of a folder is used.

    Parameters
    ----------
    read : callable
        See :func:`folder_of`.
    name : str
        Of the model, for messages.

    Raises
    ------
    ConfigError
        There is no config.json, or a module of sentence-transformers that is not supported.
    """
    modules = read("modules.json") or []
    if modules and str(modules[0].get("type", "")).rpartition(".")[2] != "Transformer":
        raise _unknown_module(str(modules[0].get("type", "")), name)
    path = str(modules[0].get("path", "")) if modules else ""
    config = read(_join(path, "config.json"))
    if not isinstance(config, dict):
        raise ConfigError(f"model={name!r} has no config.json; give a folder in Hugging Face format")
    recipe = Recipe(config, path, dims=_size(config))
    own: Mapping[str, Any] = next(filter(None, (read(_join(path, file)) for file in _BERT_FILES)), {})
    settings = read("config_sentence_transformers.json") or {}
    prompts = {key: text for key, text in (settings.get("prompts") or {}).items() if isinstance(text, str)}
    recipe = replace(
        recipe,
        max_tokens=own.get("max_seq_length"),
        lower_case=bool(own.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=settings.get("default_prompt_name"),
    )
    for module in modules[1:]:
        recipe = _with_module(recipe, str(module.get("type", "")), str(module.get("path", "")), read, name)
    return recipe


def _with_module(recipe: Recipe, kind: str, path: str, read: Read, name: str) -> Recipe:
    config = read(_join(path, "config.json")) or {}
    match kind.rpartition(".")[2]:
        case "Pooling":
            pooling = _poolings(config, name)
            size = config.get("embedding_dimension") or config.get("word_embedding_dimension") or recipe.dims
            include = bool(config.get("include_prompt", True))
            return replace(recipe, pooling=pooling, include_prompt=include, dims=int(size) * len(pooling))
        case "Normalize":
            return replace(recipe, layers=(*recipe.layers, Layer("normalize")))
        case "Dense":
            layer = Layer("dense", path, config)
            return replace(recipe, layers=(*recipe.layers, layer), dims=int(config["out_features"]))
        case "LayerNorm":
            return replace(recipe, layers=(*recipe.layers, Layer("layer_norm", path, config)))
        case "Dropout":
            return recipe
    raise _unknown_module(kind, name)


def _unknown_module(kind: str, name: str) -> ConfigError:
    return ConfigError(
        f"model={name!r} has a module {kind!r}, which this engine does not know; it knows Transformer, Pooling, Dense, "
        "LayerNorm and Normalize. An engine of your own is named engine='pkg.mod:Class'"
    )


def _poolings(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = config.get("pooling_mode")
    modes = [found] if isinstance(found, str) else list(found or ())
    modes = modes or [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    for mode in modes:
        if mode not in POOLINGS:
            raise ConfigError(f"model={name!r}: its pooling {mode!r} is not one of {', '.join(POOLINGS)}")
    return tuple(modes)


def _size(config: Mapping[str, Any]) -> int:
    for place in (config, config.get("text_config") or {}):
        for name in _SIZES:
            if isinstance(place.get(name), int):
                return int(place[name])
    return 0


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name

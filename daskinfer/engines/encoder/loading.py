"""From a specification to what the engine runs.

Runs on: worker.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from daskinfer.config import ModelSpec
from daskinfer.engines.encoder.network import Network, load_network
from daskinfer.engines.encoder.options import EncoderOptions
from daskinfer.engines.encoder.recipe import Recipe, folder_of, read_recipe
from daskinfer.engines.encoder.rows import Tokeniser
from daskinfer.engines.encoder.task import Task
from daskinfer.engines.encoder.tasks import task_of
from daskinfer.engines.hf import find, load_tokenizer
from daskinfer.errors import ConfigError

__all__ = ["load_parts"]


def load_parts(spec: ModelSpec, options: EncoderOptions, device: torch.device) -> tuple[Network, Task, Tokeniser]:
    """Load model and tokenizer of a specification, and what its task needs besides.

    Raises
    ------
    ConfigError
        No such model, or one that does not fit the task or the options.
    """
    folder, recipe = _folder(spec)
    task = task_of(spec, options, recipe)
    inner = folder / recipe.path
    tokenizer = load_tokenizer(inner, spec)
    network = load_network(inner, spec, task.head, tokenizer.pad_token_id, device)
    task.ready(folder, device)
    tokeniser = Tokeniser(
        tokenizer,
        _longest(spec, options, network, tokenizer, recipe),
        network.vocab_size,
        prefix=task.prefix,
        pool_prefix=recipe.include_prompt,
        lower_case=recipe.lower_case,
        places=task.head == "token",
    )
    return network, task, tokeniser


def _folder(spec: ModelSpec) -> tuple[Path, Recipe]:
    """Return the local folder of a model, checked; older sentence-transformers put the transformer into one inside it."""
    given = Path(spec.model).expanduser()
    if given.is_dir():
        recipe = read_recipe(folder_of(spec), spec.model)
        find(replace(spec, model=str(given / recipe.path)))
        return given, recipe
    folder = find(spec)
    return folder, read_recipe(folder_of(replace(spec, model=str(folder))), spec.model)


def _longest(spec: ModelSpec, options: EncoderOptions, network: Network, tokenizer: Any, recipe: Recipe) -> int | None:
    wanted = options.max_tokens
    if wanted is not None:
        if network.limit is not None and wanted > network.limit:
            raise ConfigError(
                f"engine_options: max_tokens={wanted} is more than the {network.limit} positions of the model"
            )
        return wanted
    claimed = tokenizer.model_max_length
    limits = [network.limit, claimed if claimed < 10**9 else None]  # many tokenizers claim 1e30
    if spec.task == "embed":
        limits.append(recipe.max_tokens)
    return min((limit for limit in limits if limit), default=None)

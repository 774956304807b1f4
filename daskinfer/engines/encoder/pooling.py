"""From token vectors to one vector per row, and what follows: dense layers, normalisation, precision.

Token vectors come end to end without padding, so no padding can ever take part.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from daskinfer.engines.encoder.options import EncoderOptions
from daskinfer.engines.encoder.recipe import Layer, Recipe
from daskinfer.errors import ConfigError

__all__ = ["Vectors", "at_precision", "pool", "vector_type"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


def pool(tokens: torch.Tensor, lengths: Sequence[int], skips: Sequence[int], modes: Sequence[str]) -> torch.Tensor:
    """Return one vector per row, of several modes end to end.

    Parameters
    ----------
    tokens : torch.Tensor
        Vectors of all rows' tokens, shape (sum of lengths, size), float32.
    lengths, skips : sequence of int
        Tokens of each row, and how many of the first take no part. A row with nothing left is a zero vector.
    modes : sequence of str
        See :data:`~daskinfer.engines.encoder.options.POOLINGS`.
    """
    sizes = torch.tensor(lengths, device=tokens.device)
    ends = sizes.cumsum(0)
    skipped = torch.tensor(skips, device=tokens.device).minimum(sizes)
    kept = sizes - skipped
    row_of = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), sizes)
    places = torch.arange(len(tokens), device=tokens.device) - (ends - sizes)[row_of]
    if any(skips):
        taken = places >= skipped[row_of]
        pooled, row_of, places = tokens[taken], row_of[taken], places[taken]
    else:
        pooled = tokens
    found = []
    for mode in modes:
        if mode == "cls":
            found.append(tokens[(ends - sizes + skipped).minimum(ends - 1)])
        elif mode == "lasttoken":
            found.append(tokens[ends - 1])
        elif mode == "max":
            found.append(torch.segment_reduce(pooled, "max", lengths=kept, initial=-torch.inf))
        elif mode == "weightedmean":
            weights = (places + 1).to(tokens.dtype)
            summed = _sums(pooled * weights[:, None], row_of, len(lengths))
            total = weights.new_zeros(len(lengths)).index_add_(0, row_of, weights)
            found.append(summed / total.clamp(min=1e-9)[:, None])
        else:
            count = kept.clamp(min=1).to(tokens.dtype)[:, None]
            found.append(_sums(pooled, row_of, len(lengths)) / (count if mode == "mean" else count.sqrt()))
    joined = torch.cat(found, dim=1) if len(found) > 1 else found[0]
    return joined.masked_fill((kept == 0)[:, None], 0.0) if any(skips) else joined


def _sums(tokens: torch.Tensor, row_of: torch.Tensor, rows: int) -> torch.Tensor:
    return tokens.new_zeros(rows, tokens.shape[1]).index_add_(0, row_of, tokens)


class Vectors:
    """Makes vectors of token vectors, as the model's folder and the options say.

    Parameters
    ----------
    recipe : Recipe
    options : EncoderOptions
    folder : Path
        Where the dense layers' weights are.
    device : torch.device

    Raises
    ------
    ConfigError
        Weights are missing, an activation is unknown, or ``dims`` is more than the model has.
    """

    def __init__(self, recipe: Recipe, options: EncoderOptions, folder: Path, device: torch.device) -> None:
        self._modes = (options.pooling,) if options.pooling else recipe.pooling
        normalised = any(layer.kind == "normalize" for layer in recipe.layers)
        self._normalise = normalised if options.normalize is None else options.normalize
        layers = list(recipe.layers)
        while layers and layers[-1].kind == "normalize":  # done last of all, after the cut to dims
            layers.pop()
        self._steps = [_step(layer, folder, device) for layer in layers]
        self._dims = options.dims

    def __call__(self, tokens: torch.Tensor, lengths: Sequence[int], skips: Sequence[int]) -> torch.Tensor:
        """Return the vectors of rows, shape (rows, dims), float32."""
        made = pool(tokens, lengths, skips, self._modes)
        for step in self._steps:
            made = step(made)
        made = made[:, : self._dims]
        return F.normalize(made, dim=1) if self._normalise else made


def _step(layer: Layer, folder: Path, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    if layer.kind == "normalize":
        return F.normalize
    weights = {name: value.to(device).float() for name, value in _weights(folder / layer.path).items()}
    if layer.kind == "layer_norm":
        weight, bias = weights["norm.weight"], weights["norm.bias"]
        return lambda x: F.layer_norm(x, weight.shape, weight, bias)
    name = str(layer.config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{layer.path}: its activation {name!r} is not one of {', '.join(_ACTIVATIONS)}")
    matrix, offset, activation = weights["linear.weight"], weights.get("linear.bias"), _ACTIVATIONS[name]
    if not layer.config.get("use_residual"):
        return lambda x: activation(F.linear(x, matrix, offset))
    across = weights.get("residual.weight")
    return lambda x: activation(F.linear(x, matrix, offset)) + (x if across is None else F.linear(x, across))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder} has no model.safetensors; convert its pickled weights to safetensors")
    return dict(load_file(path))


# ---------------------------------------------------------------- precision


def vector_type(recipe: Recipe, options: EncoderOptions) -> str:
    """Return the type of a vector, such as ``float32[384]``.

    Raises
    ------
    ConfigError
        The model's size is unknown, ``dims`` is larger, or no multiple of eight for "binary".
    """
    dims = recipe.dims
    if options.pooling and len(recipe.pooling) > 1 and not any(layer.kind == "dense" for layer in recipe.layers):
        dims //= len(recipe.pooling)
    if dims < 1:
        raise ConfigError("the model's config.json does not tell its size (hidden_size), so vectors have no type")
    if options.dims is not None:
        if options.dims > dims:
            raise ConfigError(f"engine_options: dims={options.dims} is more than the {dims} that the model has")
        dims = options.dims
    if options.precision != "binary":
        return f"{options.precision}[{dims}]"
    if dims % 8:
        raise ConfigError(f"engine_options: precision='binary' puts eight dimensions in a byte, but there are {dims}")
    return f"uint8[{dims // 8}]"


def at_precision(vectors: npt.NDArray[np.float32], precision: str) -> npt.NDArray[Any]:
    """Return vectors in another precision; see :class:`~daskinfer.engines.encoder.options.EncoderOptions`."""
    if precision == "float16":
        limit = float(np.finfo(np.float16).max)
        return vectors.clip(-limit, limit).astype(np.float16)
    if precision == "int8":
        vectors = np.nan_to_num(vectors)  # such rows fail, whatever stands here
        largest = np.abs(vectors).max(axis=1, keepdims=True)
        return np.rint(vectors * (127.0 / np.where(largest > 0, largest, 1.0))).astype(np.int8)
    if precision == "binary":
        return np.packbits(vectors > 0, axis=1)
    return vectors

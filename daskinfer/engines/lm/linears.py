"""Linear layers for the small batches of decoding on a CPU.

Weights are laid out once as oneDNN wants them, which the usual layout costs in every call. Layers that read the same input
(query, key and value; gate and up) become one: the same sums, in one larger multiplication.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from daskinfer.engines.hf import Int8Linear, LanguageModel, Rounding
from daskinfer.engines.lm.settings import Settings
from daskinfer.errors import ConfigError

__all__ = ["PackedLinear", "QuickLinear", "fused", "pack_linears"]

_TYPICAL_ROWS = 64  # the layout is best for about so many tokens
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_mkldnn = torch.ops.mkldnn


class PackedLinear(nn.Module):
    """A linear layer with a weight in oneDNN's layout; exact in float32."""

    exact = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self.weight = _mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_ROWS)  # noqa: SLF001

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        flat = x.reshape(-1, self.in_features)
        out: torch.Tensor = _mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return out.view(*x.shape[:-1], self.out_features)


QuickLinear: TypeAlias = PackedLinear | Int8Linear
_Kind: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], QuickLinear]


class _First(nn.Module):
    """The first of several layers that read the same input: computes all, and keeps the others' parts for them."""

    def __init__(self, layer: QuickLinear, widths: list[int]) -> None:
        super().__init__()
        self.fused, self.widths = layer, widths
        self.input: torch.Tensor | None = None
        self.parts: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = torch.split(self.fused(x), self.widths, dim=-1)
        self.input, self.parts = x, dict(enumerate(others, 1))
        return first


class _Other(nn.Module):
    """A later one: takes its part, if the input is still the same."""

    def __init__(self, first: _First, index: int) -> None:
        super().__init__()
        self._first, self._index = (first,), index  # in a tuple: it is a sibling, not a child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (first,) = self._first
        if first.input is not x or self._index not in first.parts:
            first(x)
        part = first.parts.pop(self._index)
        if not first.parts:
            first.input = None
        return part


def fused(first: Any) -> QuickLinear | None:
    """Return the layer that computes a layer and those that read the same input; None where there is none."""
    return first.fused if isinstance(first, _First) else None


def pack_linears(loaded: LanguageModel, settings: Settings, rounding: Rounding) -> None:
    """Replace a model's linear layers where that is faster: on a CPU, in float32.

    Parameters
    ----------
    loaded : LanguageModel
    settings : Settings
    rounding : Rounding
        For layers in 8 bits.

    Raises
    ------
    ConfigError
        8 bits were asked for elsewhere.
    """
    usable = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    usable = usable and loaded.device.type == "cpu" and loaded.model.dtype == torch.float32
    if settings.int8 and not usable:
        raise ConfigError("engine_options: int8=True needs a CPU with oneDNN, and dtype float32")
    if not (usable and (settings.pack_weights or settings.int8)):
        return
    head = loaded.model.get_output_embeddings()
    with torch.inference_mode():
        _replace(loaded.model, partial(Int8Linear, rounding=rounding) if settings.int8 else PackedLinear, head)


def _replace(module: nn.Module, kind: _Kind, head: Any) -> None:
    """Replace the linear layers below a module; the one that gives the scores stays in full precision."""
    for names in _FUSED:
        layers = [getattr(module, name, None) for name in names]
        if all(_replaceable(layer) for layer in layers):
            _fuse(module, names, layers, kind)
    for name, child in list(module.named_children()):
        if _replaceable(child):
            setattr(module, name, (PackedLinear if child is head else kind)(*_weight(child)))
        elif not isinstance(child, _First | _Other):
            _replace(child, kind, head)


def _replaceable(layer: Any) -> bool:
    # an exact type: a subclass may compute something else
    return type(layer) in (nn.Linear, Conv1D)


def _weight(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (layer.weight.t() if isinstance(layer, Conv1D) else layer.weight), layer.bias


def _fuse(module: nn.Module, names: tuple[str, ...], layers: list[Any], kind: _Kind) -> None:
    weights, biases = zip(*map(_weight, layers), strict=True)
    if len({bias is None for bias in biases}) > 1 or len({weight.shape[1] for weight in weights}) > 1:
        return
    bias = None if biases[0] is None else torch.cat(biases)
    first = _First(kind(torch.cat(weights), bias), [weight.shape[0] for weight in weights])
    setattr(module, names[0], first)
    for index, name in enumerate(names[1:], 1):
        setattr(module, name, _Other(first, index))

"""Linear layers in 8 bits on a CPU: faster, and not exact, so the caller has to ask for it and is told what it costs.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from daskinfer.errors import ConfigError

if TYPE_CHECKING:
    from daskinfer.engines.encoder.network import Network
    from daskinfer.engines.encoder.rows import Tokens

__all__ = ["Int8Linear", "quantised"]

_onednn = torch.ops.onednn
_ZERO = 128  # inputs are unsigned, around this
_LARGEST = 64  # of a weight: processors without VNNI add two products in 16 bits, and 2 · 255 · 64 just fits


class Int8Linear(nn.Module):
    """A linear layer in 8 bits, with a scale per output and one per row of its input, so that rows stay independent."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.out_features = len(weight)
        self._scale = weight.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST
        self._zero = torch.zeros(len(weight), dtype=torch.int32)
        self._weight = _onednn.qlinear_prepack((weight / self._scale[:, None]).round().to(torch.int8), None)
        self._bias = None if layer.bias is None else layer.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        flat = x.reshape(-1, x.shape[-1])
        scale = flat.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12).div_(127)
        codes = (flat / scale).round_().add_(_ZERO).to(torch.uint8)
        out: torch.Tensor = _onednn.qlinear_pointwise(
            codes, 1.0, _ZERO, self._weight, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out.mul_(scale)
        if self._bias is not None:
            out.add_(self._bias)
        return out.view(*x.shape[:-1], self.out_features)


def quantised(network: Network, samples: Sequence[Tokens]) -> float:
    """Turn a network's linear layers into 8 bits, and return the smallest cosine with what it gave before.

    Parameters
    ----------
    network : Network
    samples : sequence of Tokens
        Rows to compare; of token vectors, all tokens are compared.

    Raises
    ------
    ConfigError
        Not on a CPU in float32.
    """
    model = network.model
    if network.device.type != "cpu" or model.dtype != torch.float32:
        raise ConfigError("engine_options: int8_weights needs a CPU and dtype float32")
    before = network(samples)
    _replace(model)
    return float(torch.cosine_similarity(before, network(samples), dim=1).min())


def _replace(module: Any) -> None:
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:  # an exact type: a subclass may compute something else
            setattr(module, name, Int8Linear(child))
        else:
            _replace(child)

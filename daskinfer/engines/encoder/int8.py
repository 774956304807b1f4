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

_quantized = torch.ops.quantized


class Int8Linear(nn.Module):
    """A linear layer with one scale per output and, at each call, one for its input."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
        zero = torch.zeros(len(scale), dtype=torch.long)
        packed = torch.quantize_per_channel(weight, scale.double(), zero, 0, torch.qint8)
        self._packed = _quantized.linear_prepack(
            packed, layer.bias.detach().float() if layer.bias is not None else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; the input takes 7 bits, since 8 would overflow on processors without VNNI."""
        found: torch.Tensor = _quantized.linear_dynamic(x, self._packed, True)
        return found


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

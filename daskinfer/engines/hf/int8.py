"""Linear layers in 8 bits on a CPU: faster, and not exact, so it has to be asked for.

Runs on: worker.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Int8Linear"]

_onednn = torch.ops.onednn
_ZERO = 128  # inputs are unsigned, around this
_LARGEST = 64  # of a weight: processors without VNNI add two products in 16 bits, and 2 · 255 · 64 just fits


class Int8Linear(nn.Module):
    """A linear layer in 8 bits, with a scale per output and one per row of its input, so that rows stay independent."""

    exact = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self._scale = weight.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST
        self._zero = torch.zeros(self.out_features, dtype=torch.int32)
        self._half = torch.tensor(_ZERO + 0.5)  # what is cut off behind the point is then rounded
        self._weight = _onednn.qlinear_prepack((weight / self._scale[:, None]).round().to(torch.int8), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        product, scale = self._product(x.reshape(-1, self.in_features))
        product.mul_(scale)
        if self.bias is not None:
            product.add_(self.bias)
        return product.view(*x.shape[:-1], self.out_features)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Multiply and add, for ``x`` of shape (tokens, in) and ``other`` of shape (tokens, out)."""
        product, scale = self._product(x)
        total = torch.addcmul(other, product, scale)
        return total if self.bias is None else total.add_(self.bias)

    def _product(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product of the codes, and what it has to be multiplied with."""
        scale = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=1e-12).div_(127)
        codes = torch.addcdiv(self._half, x, scale).to(torch.uint8)
        product: torch.Tensor = _onednn.qlinear_pointwise(
            codes, 1.0, _ZERO, self._weight, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product, scale

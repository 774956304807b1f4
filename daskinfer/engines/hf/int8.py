"""Linear layers in 8 bits on a CPU: faster, and not exact, so it has to be asked for.

Runs on: worker.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Int8Linear", "Rounding"]

_onednn = torch.ops.onednn
_ZERO = 128  # inputs are unsigned, around this
_LARGEST = 64  # of a weight: processors without VNNI add two products in 16 bits, and 2 · 255 · 64 just fits


class Rounding:
    """How the rows of an input become codes, and a product of codes numbers again; by tensor operations."""

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x ÷ scale + 128, rounded, and each row's scale, shape (rows, 1): not finite where its row is not."""
        scale = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=1e-12).div_(127)
        return x.div(scale).add_(_ZERO + 0.5).to(torch.uint8), scale  # what is cut off behind the point is then rounded

    def numbers(self, product: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return product · scale + bias; may write into the product."""
        product.mul_(scale)
        return product if bias is None else product.add_(bias)


class Int8Linear(nn.Module):
    """A linear layer in 8 bits, with a scale per output and one per row of its input, so that rows stay independent.

    Parameters
    ----------
    weight : torch.Tensor
        Shape (outputs, inputs).
    bias : torch.Tensor or None
    rounding : Rounding or None
        None: by tensor operations.
    """

    exact = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rounding: Rounding | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        self._rounding = rounding or Rounding()
        self._scale = weight.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST
        self._zero = torch.zeros(self.out_features, dtype=torch.int32)
        self._weight = _onednn.qlinear_prepack((weight / self._scale[:, None]).round().to(torch.int8), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        codes, scale = self._rounding.codes(x.reshape(-1, self.in_features))
        product: torch.Tensor = _onednn.qlinear_pointwise(
            codes, 1.0, _ZERO, self._weight, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return self._rounding.numbers(product, scale, self.bias).view(*x.shape[:-1], self.out_features)

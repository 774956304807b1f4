"""What a layer does between its multiplications: norms, rotary embedding, the gate; as tensor operations.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Activation", "Norm", "Operations"]

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm: x · w ÷ √(mean(x²) + ε), over the last dimension (Zhang and Sennrich 2019).

    Attributes
    ----------
    weight : torch.Tensor
        Shape (width,); for heads that are normed each by itself, (heads, width).
    eps : torch.Tensor
        Shape (1,) or (heads, 1).
    """

    weight: torch.Tensor
    eps: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x, shape (tokens, width) or (tokens, heads, width)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(self.weight)


class Operations:
    """The operations, on any device. What they are given is theirs: they may write into it."""

    def add_and_norm(self, x: torch.Tensor, added: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Add to x, in place, and return its norm; all of shape (tokens, width)."""
        if added is not None:
            x.add_(added)
        return norm(x)

    def turn(
        self, heads: torch.Tensor, turned: int, norm: Norm | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return the first heads normed and with their rotary embedding, shape (tokens, turned, width).

        Parameters
        ----------
        heads : torch.Tensor
            Shape (tokens, heads, width), contiguous.
        turned : int
            How many.
        norm : Norm or None
        cos, sin : torch.Tensor
            Of the tokens' positions; shape (tokens, 1, width).
        """
        x = heads[:, :turned]
        if norm is not None:
            x = norm(x)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(first half) · second half of shape (tokens, 2 · width), contiguous."""
        inner = both.shape[-1] // 2
        return activation(both[:, :inner]).mul_(both[:, inner:])

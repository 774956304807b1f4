"""What a layer does between its multiplications, compiled for the processor by Numba: one pass each over what is in cache.

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from daskinfer.engines.hf import Rounding
from daskinfer.engines.lm.compiling import CODES, GATE, NORM, NUMBERS_OF_CODES, TURN, Team, exp, matrix, pointer, quick
from daskinfer.engines.lm.operations import Activation, Norm, Operations

__all__ = ["CompiledOperations", "CompiledRounding", "code_rows", "gate_rows", "norm_rows", "number_rows", "turn_rows"]

_ALONE = 16_384  # numbers; with fewer, waking another thread takes longer than doing it
_HALF = 128.5  # around 128, and what is cut off behind the point is then rounded


@quick()
def norm_rows(part: int, parts: int, numbers: Any) -> None:
    """Add, and norm: rows, width, and the addresses of x, what is added (or 0), weight, epsilon and answer."""
    n, width, x, added, weight, eps, out = numbers[:7]
    first, stop = n * part // parts, n * (part + 1) // parts
    rows, normed, more = matrix(x, stop, width), matrix(out, stop, width), matrix(added, stop, width)
    factors, epsilon = matrix(weight, 1, width)[0], matrix(eps, 1, 1)[0, 0]
    for t in range(first, stop):
        if added:
            for d in range(width):
                rows[t, d] += more[t, d]
        squares = np.float32(0)
        for d in range(width):
            squares += rows[t, d] * rows[t, d]
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
        for d in range(width):
            normed[t, d] = rows[t, d] * scale * factors[d]


@quick()
def turn_rows(part: int, parts: int, numbers: Any) -> None:
    """Norm and turn: tokens, heads to turn, all, their width, and addresses: x, weights, epsilons (or 0), cosines, sines."""
    n, turned, heads, width, x, weight, eps, cos, sin = numbers[:9]
    first, stop = n * part // parts, n * (part + 1) // parts
    half = width // 2
    rows, cosines, sines = matrix(x, stop * heads, width), matrix(cos, stop, width), matrix(sin, stop, width)
    factors, epsilons = matrix(weight, turned, width), matrix(eps, 1, turned)[0]
    for t in range(first, stop):
        cos_low, cos_high = cosines[t, :half], cosines[t, half:]
        sin_low, sin_high = sines[t, :half], sines[t, half:]
        for h in range(turned):
            row = rows[t * heads + h]
            if weight:
                squares = np.float32(0)
                for d in range(width):
                    squares += row[d] * row[d]
                scale = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilons[h])
                for d in range(width):
                    row[d] = row[d] * scale * factors[h, d]
            low, high = row[:half], row[half:]
            for d in range(half):
                a, b = low[d], high[d]
                low[d] = a * cos_low[d] - b * sin_low[d]
                high[d] = b * cos_high[d] + a * sin_high[d]


@quick()
def gate_rows(part: int, parts: int, numbers: Any) -> None:
    """Multiply SiLU of the first half with the second: rows, their width, and the addresses of both and of the answer."""
    n, width, both, out = numbers[:4]
    first, stop = n * part // parts, n * (part + 1) // parts
    halves, products = matrix(both, 2 * stop, width), matrix(out, stop, width)
    for t in range(first, stop):
        gates, values, row = halves[2 * t], halves[2 * t + 1], products[t]
        for d in range(width):
            row[d] = gates[d] / (np.float32(1) + exp(-gates[d])) * values[d]


@quick()
def code_rows(part: int, parts: int, numbers: Any) -> None:
    """Round to 8 bits: rows, width, and the addresses of x, scales and codes."""
    n, width, x, scales, codes = numbers[:5]
    first, stop = n * part // parts, n * (part + 1) // parts
    rows, scale = matrix(x, stop, width), matrix(scales, 1, stop)[0]
    out = nb.carray(pointer(codes), (stop, width), np.uint8)
    for t in range(first, stop):
        largest, doubt = np.float32(1e-12), np.float32(0)
        for d in range(width):
            largest = max(largest, abs(rows[t, d]))
            doubt += rows[t, d] * np.float32(0)  # not a number where this one is none, which no comparison shows
        for d in range(width):
            out[t, d] = np.uint8(rows[t, d] * (np.float32(127) / largest) + np.float32(_HALF))
        scale[t] = largest / np.float32(127) + doubt


@quick()
def number_rows(part: int, parts: int, numbers: Any) -> None:
    """Scale products of codes: rows, width, and the addresses of products, scales and bias (or 0)."""
    n, width, product, scales, bias = numbers[:5]
    first, stop = n * part // parts, n * (part + 1) // parts
    rows, scale, more = matrix(product, stop, width), matrix(scales, 1, stop)[0], matrix(bias, 1, width)[0]
    for t in range(first, stop):
        for d in range(width):
            rows[t, d] *= scale[t]
        if bias:
            for d in range(width):
                rows[t, d] += more[d]


class CompiledOperations(Operations):
    """The operations for float32 on the CPU.

    Parameters
    ----------
    team : Team
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def add_and_norm(self, x: torch.Tensor, added: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Add to x, in place, and return its norm."""
        n, width = x.shape
        out = torch.empty_like(x)
        more = 0 if added is None else _address(added, n, width)
        weight, eps = _address(norm.weight, width), _address(norm.eps, 1)
        _run(self._team, NORM, x, width, _address(x, n, width), more, weight, eps, out.data_ptr())
        return out

    def turn(
        self, heads: torch.Tensor, turned: int, norm: Norm | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Norm the first heads and give them their rotary embedding, in place; return them."""
        n, count, width = heads.shape
        x, angles = _address(heads, n, count, width), (_address(cos, n, 1, width), _address(sin, n, 1, width))
        own = (0, 0) if norm is None else (_address(norm.weight, turned, width), _address(norm.eps, turned, 1))
        _run(self._team, TURN, heads, turned, count, width, x, *own, *angles)
        return heads[:, :turned]

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(first half) · second half."""
        if activation is not F.silu:
            return super().gate(both, activation)
        n, width = len(both), both.shape[1] // 2
        out = both.new_empty((n, width))
        _run(self._team, GATE, both, width, _address(both, n, 2 * width), out.data_ptr())
        return out


class CompiledRounding(Rounding):
    """Rounding to 8 bits for float32 on the CPU.

    Parameters
    ----------
    team : Team
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes, and each row's scale."""
        x = x.contiguous()
        n, width = x.shape
        codes, scale = torch.empty((n, width), dtype=torch.uint8), torch.empty((n, 1))
        _run(self._team, CODES, x, width, _address(x, n, width), scale.data_ptr(), codes.data_ptr())
        return codes, scale

    def numbers(self, product: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return product · scale + bias, in the product's place."""
        n, width = product.shape
        more = 0 if bias is None else _address(bias, width)
        _run(self._team, NUMBERS_OF_CODES, product, width, _address(product, n, width), _address(scale, n, 1), more)
        return product


def _run(team: Team, what: int, x: torch.Tensor, *numbers: int) -> None:
    """Do something to all rows of x."""
    team.run(what, 1 if x.numel() < _ALONE else team.size, 1.0, len(x), *numbers)


def _address(x: torch.Tensor, *shape: int) -> int:
    """Return where the numbers of a tensor lie.

    Raises
    ------
    ValueError
        It has another shape or type, or its numbers do not lie one behind the other.
    """
    if x.shape != shape or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"float32 of shape {shape}, one number behind the other, and not {x.dtype} of {tuple(x.shape)}"
        )
    return x.data_ptr()

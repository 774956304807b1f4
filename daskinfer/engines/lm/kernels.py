"""Attention of one or a few queries per row, compiled for the processor by Numba.

Tensor operations want the rows of a call equally long, so a step takes many small calls over padding. Here one call per
layer visits all such tokens, each over its own row, and stores their keys and values on the way.

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np
import torch

from daskinfer.engines.lm.attention import Call
from daskinfer.engines.lm.compiling import Team, exp, pointer, quick
from daskinfer.engines.lm.kv_cache import KVCache
from daskinfer.engines.lm.plan import Few

__all__ = ["FewAttention"]


@quick()
def _softmax(scores: Any, best: Any, n: int) -> Any:
    """Turn scores into weights; return the sum of e**(score - best)."""
    total = np.float32(0)
    for j in range(n):
        scores[j] = exp(scores[j] - best)
        total += scores[j]
    for j in range(n):
        scores[j] /= total
    return total


@quick()
def _run(
    first: int,
    stop: int,
    h: int,
    query: Any,
    new_keys: Any,
    new_values: Any,
    out: Any,
    sums: Any,
    keys: Any,
    values: Any,
    places: Any,
    scale: Any,
    window: int,
    scores: Any,
    held: Any,
) -> None:
    kv_heads, width, value_width = new_keys.shape[1], new_keys.shape[2], new_values.shape[2]
    shared = query.shape[1] // kv_heads
    for t in range(first, stop):
        pool, size, index, at = places[t, 0], places[t, 1], places[t, 2], places[t, 3]
        begin = 0 if window <= 0 else max(0, at - window + 1)
        n = at + 1 - begin
        row_keys = nb.carray(pointer(keys[pool]), (index + 1, kv_heads, size, width), np.float32)[index]
        row_values = nb.carray(pointer(values[pool]), (index + 1, kv_heads, size, value_width), np.float32)[index]
        head_keys, head_values = row_keys[h], row_values[h]
        for d in range(width):
            head_keys[at, d] = new_keys[t, h, d]
        for d in range(value_width):
            head_values[at, d] = new_values[t, h, d]
        for s in range(h * shared, (h + 1) * shared):
            for d in range(width):
                held[d] = query[t, s, d] * scale
            best = np.float32(-np.inf)
            for j in range(n):
                key = head_keys[begin + j]
                x = np.float32(0)
                for d in range(width):
                    x += held[d] * key[d]
                scores[j] = x
                best = max(best, x)
            total = _softmax(scores, best, n)
            if sums.shape[0]:
                sums[t, s] = best + np.log(total)
            answer = out[t, s]
            for d in range(value_width):
                answer[d] = 0
            for j in range(n):
                weight, value = scores[j], head_values[begin + j]
                for d in range(value_width):
                    answer[d] += weight * value[d]


def _side_by_side(
    bounds: Any,
    query: Any,
    new_keys: Any,
    new_values: Any,
    out: Any,
    sums: Any,
    keys: Any,
    values: Any,
    places: Any,
    scale: Any,
    window: int,
    scores: Any,
    held: Any,
) -> None:
    kv_heads = new_keys.shape[1]
    for i in nb.prange((len(bounds) - 1) * kv_heads):
        part = i // kv_heads  # neighbours, which one thread visits, read the same rows
        _run(
            bounds[part], bounds[part + 1], i % kv_heads, query, new_keys, new_values, out, sums, keys, values, places,
            scale, window, scores[i], held[i],
        )  # fmt: skip


@cache
def _compiled() -> Any:
    any3, line = nb.float32[:, :, :], nb.int64[::1]
    whole2, whole3 = nb.float32[:, ::1], nb.float32[:, :, ::1]
    signature = nb.void(
        line, any3, any3, any3, whole3, whole2, line, line, nb.int64[:, ::1], nb.float32, nb.int64, whole2, whole2
    )
    return quick(signature, parallel=True)(_side_by_side)


class FewAttention:
    """Runs the attention of a step's :class:`~daskinfer.engines.lm.plan.Few`.

    Parameters
    ----------
    team : Team
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self.threads = team.size
        self._kernel = _compiled()
        self._scores = np.empty((0, 0), np.float32)

    def __call__(
        self,
        few: Few,
        cache: KVCache,
        call: Call,
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        sums: torch.Tensor | None,
    ) -> None:
        """Store keys and values of the step's first tokens, and compute their output.

        Parameters
        ----------
        few : Few
        cache : KVCache
            Of float32 on the CPU.
        call : Call
        new : tuple of torch.Tensor
            Queries, keys and values of all tokens of the step, shape (tokens, heads, width), as ``out``.
        out : torch.Tensor
            Contiguous.
        sums : torch.Tensor or None
            Takes the log-sum-exps of the scores, shape (tokens, heads).
        """
        self._team.gather()
        query, key, value = new
        n = few.tokens
        pools = [cache.pools[size][call.layer] for size in few.sizes]
        scores = self._scratch((len(few.bounds) - 1) * key.shape[1], few.longest)
        self._kernel(
            few.bounds,
            query[:n].numpy(),
            key[:n].numpy(),
            value[:n].numpy(),
            out.numpy(),
            np.empty((0, 0), np.float32) if sums is None else sums.numpy(),
            np.array([keys.data_ptr() for keys, _ in pools]),
            np.array([values.data_ptr() for _, values in pools]),
            few.places,
            np.float32(query.shape[2] ** -0.5 if call.scale is None else call.scale),
            call.window or 0,
            scores,
            np.empty((len(scores), query.shape[2]), np.float32),
        )

    def _scratch(self, parts: int, tokens: int) -> Any:
        have_parts, have_tokens = self._scores.shape
        if have_parts < parts or have_tokens < tokens:
            self._scores = np.empty((max(parts, have_parts), max(2 * tokens, have_tokens)), np.float32)
        return self._scores

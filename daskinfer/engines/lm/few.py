"""Attention of one or a few queries per row, compiled for the processor by Numba.

Tensor operations want the rows of a call equally long, so a step takes many small calls over padding. Here one call per
layer visits all such tokens, each over its own row, and stores their keys and values on the way.

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import torch

from daskinfer.engines.lm.attention import Call, described
from daskinfer.engines.lm.compiling import FEW, Team, exp, line, matrix, pointer, quick
from daskinfer.engines.lm.kv_cache import KVCache
from daskinfer.engines.lm.plan import Few

__all__ = ["FewAttention", "attend_few"]


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
def _attend(t: int, h: int, place: Any, scale: Any, numbers: Any, scores: Any) -> None:
    """Store keys and values of a token, and attend for the queries that share this key head."""
    query, q_token, q_head, key, k_token, k_head, value, v_token, v_head, out, sums = numbers[:11]
    heads, kv_heads, width, value_width, window = numbers[11:16]
    keys, values, size, index, at = place
    begin = 0 if window <= 0 else max(0, at - window + 1)
    n = at + 1 - begin
    slot = (index * kv_heads + h) * size
    fresh, kept = line(key, t * k_token + h * k_head, width), line(keys, (slot + at) * width, width)
    for d in range(width):
        kept[d] = fresh[d]
    fresh, kept = (
        line(value, t * v_token + h * v_head, value_width),
        line(values, (slot + at) * value_width, value_width),
    )
    for d in range(value_width):
        kept[d] = fresh[d]
    head_keys = matrix(keys + 4 * (slot + begin) * width, n, width)
    head_values = matrix(values + 4 * (slot + begin) * value_width, n, value_width)
    shared = heads // kv_heads
    for s in range(h * shared, (h + 1) * shared):
        own = line(query, t * q_token + s * q_head, width)
        best = np.float32(-np.inf)
        for j in range(n):
            x = np.float32(0)
            for d in range(width):
                x += own[d] * head_keys[j, d]
            scores[j] = x * scale
            best = max(best, scores[j])
        total = _softmax(scores, best, n)
        if sums:
            line(sums, t * heads + s, 1)[0] = best + np.log(total)
        answer = line(out, (t * heads + s) * value_width, value_width)
        for d in range(value_width):
            answer[d] = 0
        for j in range(n):
            weight = scores[j]
            for d in range(value_width):
                answer[d] += weight * head_values[j, d]


@quick()
def attend_few(part: int, parts: int, scale: Any, numbers: Any) -> None:
    """Attend for a part of the tokens and key heads.

    ``numbers`` are those of :func:`~daskinfer.engines.lm.attention.described`; the addresses of the tokens' places (pool,
    slot size, slot, position), of the bounds of parts, and of the pools (keys, values); how many bounds there are, and most
    tokens that one looks at, for whose scores the last number is the address of scratch memory.
    """
    kv_heads = numbers[12]
    places_at, bounds_at, count, pools_at, longest, work = numbers[16:22]
    bounds = nb.carray(pointer(bounds_at), (count,), np.int64)
    places = nb.carray(pointer(places_at), (bounds[count - 1], 4), np.int64)
    scores = line(work, part * longest, longest)
    units = (count - 1) * kv_heads  # neighbours, which one thread visits, read the same rows
    for unit in range(units * part // parts, units * (part + 1) // parts):
        for t in range(bounds[unit // kv_heads], bounds[unit // kv_heads + 1]):
            pool, size, index, at = places[t, 0], places[t, 1], places[t, 2], places[t, 3]
            pair = nb.carray(pointer(pools_at + 16 * pool), (2,), np.int64)
            _attend(t, unit % kv_heads, (pair[0], pair[1], size, index, at), scale, numbers, scores)


class FewAttention:
    """Runs the attention of a step's :class:`~daskinfer.engines.lm.plan.Few`.

    Parameters
    ----------
    team : Team
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self.threads = team.size
        self._scores = np.empty(0, np.float32)

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
        new, out, sums : tuple of torch.Tensor, torch.Tensor, torch.Tensor or None
            As for :func:`~daskinfer.engines.lm.attention.described`.
        """
        pools = np.array([[t.data_ptr() for t in cache.pools[size][call.layer]] for size in few.sizes], np.int64)
        if len(self._scores) < self._team.size * few.longest:
            self._scores = np.empty(2 * self._team.size * few.longest, np.float32)
        scale, numbers = described(call, new, out, sums)
        self._team.run(
            FEW, self._team.size, scale, *numbers, few.places.ctypes.data, few.bounds.ctypes.data, len(few.bounds),
            pools.ctypes.data, few.longest, self._scores.ctypes.data,
        )  # fmt: skip

"""Attention of one or a few queries per row, compiled for the processor by Numba.

Tensor operations want the rows of a call equally long, so a step takes many small calls over padding. Here one call per
layer visits all such tokens, each over its own row, and stores their keys and values on the way. The softmax's powers are
those of a polynomial, exact to float32 rounding; numbers that are not finite stay so.

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numba as nb
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch.profiler import record_function

from daskinfer.engines.lm.attention import Call
from daskinfer.engines.lm.kv_cache import KVCache
from daskinfer.engines.lm.plan import Few

__all__ = ["FewAttention"]

_LEAST = np.float32(-126.0)  # 2 to this power is the smallest normal number
_LOG2_E = np.float32(1.4426950408889634)
# 2**x for 0 <= x < 1, fitted for the least relative error, which is that of float32 (8e-8)
_P1, _P2, _P3 = np.float32(0.69314700), np.float32(0.24022983), np.float32(0.05548334)
_P4, _P5, _P6 = np.float32(0.00967884), np.float32(0.00124397), np.float32(0.00021702255)
_FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; not a number has to stay one


def _quick(*signature: Any, **options: Any) -> Callable[[Any], Any]:
    """Compile a function; what is compiled is kept on disk where there is a place for it."""

    def compiled(function: Any) -> Any:
        given = {"fastmath": _FAST, "error_model": "numpy", **options}
        try:
            return nb.njit(*signature, cache=True, **given)(function)
        except RuntimeError:  # neither beside this file nor in the user's home
            return nb.njit(*signature, **given)(function)

    return compiled


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_quick()
def _softmax(scores: Any, best: Any, bits: Any, n: int) -> Any:
    """Turn scores into weights; return the sum of e**(score - best)."""
    for j in range(n):
        x = max((scores[j] - best) * _LOG2_E, _LEAST)  # in this order, which keeps what is not a number
        whole = np.floor(x)
        f = x - whole
        p = _P5 + f * _P6
        p = _P4 + f * p
        p = _P3 + f * p
        p = _P2 + f * p
        p = _P1 + f * p
        scores[j] = np.float32(1) + f * p
        bits[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)  # 2**whole, as the bits of a float32
    powers = bits.view(np.float32)
    total = np.float32(0)
    for j in range(n):
        scores[j] *= powers[j]
        total += scores[j]
    for j in range(n):
        scores[j] /= total
    return total


@_quick()
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
    bits: Any,
    held: Any,
) -> None:
    kv_heads, width, value_width = new_keys.shape[1], new_keys.shape[2], new_values.shape[2]
    shared = query.shape[1] // kv_heads
    for t in range(first, stop):
        pool, size, index, at = places[t, 0], places[t, 1], places[t, 2], places[t, 3]
        begin = 0 if window <= 0 else max(0, at - window + 1)
        n = at + 1 - begin
        row_keys = nb.carray(_pointer(keys[pool]), (index + 1, kv_heads, size, width), np.float32)[index]
        row_values = nb.carray(_pointer(values[pool]), (index + 1, kv_heads, size, value_width), np.float32)[index]
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
            total = _softmax(scores, best, bits, n)
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
    bits: Any,
    held: Any,
) -> None:
    kv_heads = new_keys.shape[1]
    for i in nb.prange((len(bounds) - 1) * kv_heads):
        part = i // kv_heads  # neighbours, which one thread visits, read the same rows
        _run(
            bounds[part], bounds[part + 1], i % kv_heads, query, new_keys, new_values, out, sums, keys, values, places,
            scale, window, scores[i], bits[i], held[i],
        )  # fmt: skip


@cache
def _compiled() -> tuple[Any, int]:
    """Compile, or find what an earlier process compiled; return the kernel, and the process whose threads it uses.

    Raises
    ------
    RuntimeError
        Numba's own pool of threads is what there is: it ends the process when two threads compute at once.
    """
    any3, line = nb.float32[:, :, :], nb.int64[::1]
    whole2, whole3 = nb.float32[:, ::1], nb.float32[:, :, ::1]
    signature = nb.void(
        line, any3, any3, any3, whole3, whole2, line, line, nb.int64[:, ::1], nb.float32, nb.int64,
        whole2, nb.int32[:, ::1], whole2,
    )  # fmt: skip
    run = _quick(signature, parallel=True, nogil=True)(_side_by_side)
    nothing, none = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1), np.float32)
    run(
        np.zeros(2, np.int64), nothing, nothing, nothing, nothing, none, np.zeros(1, np.int64), np.zeros(1, np.int64),
        np.zeros((1, 4), np.int64), np.float32(1), 0, none, np.zeros((1, 1), np.int32), none,
    )  # fmt: skip
    if nb.threading_layer() not in ("omp", "tbb"):
        raise RuntimeError(
            f"Numba's threads are those of its layer {nb.threading_layer()!r}; it needs OpenMP (libgomp) or TBB"
        )
    return run, os.getpid()


class FewAttention:
    """Runs the attention of a step's :class:`~daskinfer.engines.lm.plan.Few`.

    Raises
    ------
    RuntimeError
        Numba has no threads that several threads of a process may share, or those of the process this one was forked from.
    """

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self.threads = min(threads, nb.config.NUMBA_NUM_THREADS)
        try:
            self._kernel, self._process = _compiled()
        finally:
            torch.set_num_threads(threads)  # OpenMP is torch's, too, and Numba starts it with a thread per core
        self._check()
        self._local = threading.local()
        self._scores, self._bits = np.empty((0, 0), np.float32), np.empty((0, 0), np.int32)

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("Numba's threads did not come along when this process was forked; load the engine here")

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
        self._check()
        query, key, value = new
        n = few.tokens
        pools = [cache.pools[size][call.layer] for size in few.sizes]
        scores, bits = self._scratch((len(few.bounds) - 1) * key.shape[1], few.longest)
        if not getattr(self._local, "ready", False):
            nb.set_num_threads(self.threads)  # of the calling thread
            self._local.ready = True
        with record_function("daskinfer::few_attention"):
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
                bits,
                np.empty((len(scores), query.shape[2]), np.float32),
            )

    def _scratch(self, parts: int, tokens: int) -> tuple[Any, Any]:
        have_parts, have_tokens = self._scores.shape
        if have_parts < parts or have_tokens < tokens:
            room = max(parts, have_parts), max(2 * tokens, have_tokens)
            self._scores, self._bits = np.empty(room, np.float32), np.empty(room, np.int32)
        return self._scores, self._bits

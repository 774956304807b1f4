"""Attention of the pieces of prompts, compiled for the processor by Numba.

Tensor operations take a call per piece and layer, and are made for longer ones. Here one call per layer visits all pieces of
the step. A piece's queries, those of the heads that share a key head side by side, are taken 32 at a time, and lie across
the processor's registers; the keys they may see come by in tiles, and the softmax is kept up to date as they do (Milakov and
Gimelshein 2018; Dao et al. 2022).

Imported only where it is to be used, since Numba is an extra.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba as nb
import numpy as np
import torch

from daskinfer.engines.lm.attention import Call
from daskinfer.engines.lm.compiling import Team, add_product, exp, pointer, quick
from daskinfer.engines.lm.plan import Piece

__all__ = ["PieceAttention"]

_QUERIES, _KEYS = 32, 64  # of a tile
_NUMBERS = 16  # that describe a call
_OF_PIECE = 6  # and a piece
_LINE = 4 * _QUERIES  # bytes
_BEST, _SUM, _FACTOR = range(
    3
)  # of a query: its largest score, the sum of its weights, what brings older ones to measure
_HIDDEN = np.float32(-1e30)


@quick(inline="always")
def _tile(address: int, rows: int) -> Any:
    return nb.carray(pointer(address), (rows, _QUERIES), np.float32)


@quick(inline="always")
def _line(address: int, at: int, width: int) -> Any:
    return nb.carray(pointer(address + 4 * at), (width,), np.float32)


@quick(inline="always")
def _padded(width: int) -> int:
    return (width + 15) // 16 * 16


@quick()
def _hide(scores: Any, n: int, first: int, begins: Any, places: Any) -> None:
    """Give keys that a query may not see a score below all others; the first of the n keys is at ``first``."""
    for j in range(n):
        at = np.int32(first + j)
        for q in range(_QUERIES):
            scores[j, q] = scores[j, q] if begins[q] <= at <= places[q] else _HIDDEN


@quick()
def _soften(scores: Any, n: int, state: Any) -> None:
    """Turn n scores of each query into weights, and say what brings what was made of the keys before to their measure.

    A query that has seen no key yet takes hidden ones; the first that it sees makes nothing of them.
    """
    for q in range(_QUERIES):
        state[_FACTOR, q] = state[_BEST, q]
    for j in range(n):
        for q in range(_QUERIES):
            state[_BEST, q] = max(state[_BEST, q], scores[j, q])
    for q in range(_QUERIES):
        state[_FACTOR, q] = exp(state[_FACTOR, q] - state[_BEST, q])
        state[_SUM, q] *= state[_FACTOR, q]
    for j in range(n):
        for q in range(_QUERIES):
            scores[j, q] = exp(scores[j, q] - state[_BEST, q])
            state[_SUM, q] += scores[j, q]


@quick()
def _take(queries: int, unit: int, piece: Any, h: int, scale: Any, call: Any) -> None:
    """Lay 32 queries of a piece and a key head out, one number of each to a line; after the last it comes again."""
    query, q_token, q_head, _, _, _, _, _, _, _, _, heads, kv_heads, width, _, _ = call
    shared, begin, tokens = heads // kv_heads, piece[3], piece[5] - piece[4]
    lines = _tile(queries, width)
    for q in range(_QUERIES):
        at = min(unit * _QUERIES + q, tokens * shared - 1)
        own = _line(query, (begin + at // shared) * q_token + (h * shared + at % shared) * q_head, width)
        for d in range(width):
            lines[d, q] = own[d] * scale


@quick()
def _look(unit: int, piece: Any, shared: int, window: int, state: Any, seen: Any) -> None:
    """Begin with nothing seen; note from where to where each query may look."""
    _, _, _, _, start, stop = piece
    for q in range(_QUERIES):
        at = start + min(unit * _QUERIES + q, (stop - start) * shared - 1) // shared
        seen[0, q] = max(0, at - window + 1) if window > 0 else 0
        seen[1, q] = at
        state[_BEST, q] = _HIDDEN
        state[_SUM, q] = 0


@quick()
def _add_values(answers: int, weights: int, values: int, n: int, width: int, room: int, spare: int) -> None:
    """Add n values, weighted."""
    if room > width:
        lines = nb.carray(pointer(spare), (n, room), np.float32)
        for j in range(n):
            value = _line(values, j * width, width)
            for i in range(width):
                lines[j, i] = value[i]
        values = spare
    add_product((answers, 4 * room), (values, 4 * room), (weights, 4, _LINE), (_QUERIES, n, room))


@quick()
def _give(unit: int, piece: Any, h: int, call: Any, answers: Any, state: Any) -> None:
    """Write what came out."""
    _, _, _, _, _, _, _, _, _, out, sums, heads, kv_heads, _, width, _ = call
    _, _, _, begin, start, stop = piece
    shared = heads // kv_heads
    first = unit * _QUERIES
    for at in range(first, min(first + _QUERIES, (stop - start) * shared)):
        q, place = at - first, (begin + at // shared) * heads + h * shared + at % shared
        row, factor = _line(out, place * width, width), np.float32(1) / state[_SUM, q]
        for i in range(width):
            row[i] = answers[q, i] * factor
        if sums:
            _line(sums, place, 1)[0] = state[_BEST, q] + np.log(state[_SUM, q])


@quick()
def _attend(unit: int, piece: Any, h: int, scale: Any, call: Any, work: int) -> None:
    """Attend for 32 queries of a piece and a key head."""
    heads, kv_heads, width, value_width, window = call[11], call[12], call[13], call[14], call[15]
    keys, values, size = piece[0], piece[1], piece[2]
    room = _padded(value_width)
    scored = work + _LINE * width
    made = scored + _LINE * (_KEYS + 5)
    scores, state = _tile(scored, _KEYS), _tile(scored + _LINE * _KEYS, 3)
    seen = nb.carray(pointer(scored + _LINE * (_KEYS + 3)), (2, _QUERIES), np.int32)
    answers = nb.carray(pointer(made), (_QUERIES, room), np.float32)
    _take(work, unit, piece, h, scale, call)
    _look(unit, piece, heads // kv_heads, window, state, seen)
    answers[:] = 0
    stop = seen[1, _QUERIES - 1] + 1
    for j in range(seen[0, 0], stop, _KEYS):
        n = min(_KEYS, stop - j)
        key, value = keys + 4 * (h * size + j) * width, values + 4 * (h * size + j) * value_width
        scores[:n] = 0
        add_product((scored, _LINE), (work, _LINE), (key, 4 * width, 4), (n, width, _QUERIES))
        if j + n - 1 > seen[1, 0] or j < seen[0, _QUERIES - 1]:
            _hide(scores, n, j, seen[0], seen[1])
        _soften(scores, n, state)
        for q in range(_QUERIES):
            for i in range(room):
                answers[q, i] *= state[_FACTOR, q]
        _add_values(made, scored, value, n, value_width, room, made + 4 * _QUERIES * room)
    _give(unit, piece, h, call, answers, state)


@quick()
def _store(new: int, token: int, head: int, slot: int, h: int, piece: Any, width: int) -> None:
    """Write the piece's keys, or values, of a head into its slot."""
    _, _, size, begin, start, stop = piece
    for t in range(stop - start):
        fresh = _line(new, (begin + t) * token + h * head, width)
        kept = _line(slot, (h * size + start + t) * width, width)
        for d in range(width):
            kept[d] = fresh[d]


@quick()
def _part(part: int, parts: int, pieces: Any, scale: Any, call: Any, work: int) -> None:
    """Attend for every unit whose turn it is, counted over all pieces and key heads."""
    heads, kv_heads = call[11], call[12]
    unit = 0
    for p in range(len(pieces)):
        piece = (pieces[p, 0], pieces[p, 1], pieces[p, 2], pieces[p, 3], pieces[p, 4], pieces[p, 5])
        units = ((piece[5] - piece[4]) * (heads // kv_heads) + _QUERIES - 1) // _QUERIES
        for h in range(kv_heads):
            for u in range(units):
                if unit % parts == part:
                    _attend(u, piece, h, scale, call, work)
                unit += 1


def _all(parts: int, table: int, n: int, scale: Any, call: Any, work: int, room: int) -> None:
    _, _, _, key, k_token, k_head, value, v_token, v_head, _, _, _, kv_heads, width, value_width, _ = call
    pieces = nb.carray(pointer(table), (n, _OF_PIECE), np.int64)
    for i in nb.prange(n * kv_heads):
        p, h = i // kv_heads, i % kv_heads
        piece = (pieces[p, 0], pieces[p, 1], pieces[p, 2], pieces[p, 3], pieces[p, 4], pieces[p, 5])
        _store(key, k_token, k_head, piece[0], h, piece, width)
        _store(value, v_token, v_head, piece[1], h, piece, value_width)
    for part in nb.prange(parts):
        _part(part, parts, pieces, scale, call, work + 4 * part * room)


@cache
def _compiled() -> Any:
    number = nb.int64
    call = nb.types.UniTuple(number, _NUMBERS)
    return quick(nb.void(number, number, number, nb.float32, call, number, number), parallel=True)(_all)


class PieceAttention:
    """Runs the attention of a step's pieces of prompts.

    Parameters
    ----------
    team : Team
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._kernel = _compiled()
        self._work = np.empty(0, np.float32)

    def __call__(
        self,
        pieces: Sequence[tuple[Piece, tuple[torch.Tensor, torch.Tensor]]],
        call: Call,
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        sums: torch.Tensor | None,
    ) -> None:
        """Store keys and values of pieces, and compute their output.

        Parameters
        ----------
        pieces : sequence of tuple
            Each piece, and keys and values of where it lies, shape (heads, size, width), contiguous.
        call : Call
        new : tuple of torch.Tensor
            Queries, keys and values of all tokens of the step, shape (tokens, heads, width), as ``out``.
        out : torch.Tensor
            Contiguous.
        sums : torch.Tensor or None
            Takes the log-sum-exps of the scores, shape (tokens, heads).
        """
        self._team.gather()
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in new)
        (heads, width), (kv_heads, value_width) = query.shape[1:], value.shape[1:]
        table = np.array(
            [
                (keys.data_ptr(), values.data_ptr(), keys.shape[1], piece.begin, piece.start, piece.stop)
                for piece, (keys, values) in pieces
            ],
            np.int64,
        )
        room = _QUERIES * (width + _KEYS + 5) + (_QUERIES + _KEYS) * (value_width + 15)
        if len(self._work) < self._team.size * room:
            self._work = np.empty(self._team.size * room, np.float32)
        numbers = (
            *(number for t in (query, key, value) for number in (t.data_ptr(), t.stride(0), t.stride(1))),
            out.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            heads,
            kv_heads,
            width,
            value_width,
            call.window or 0,
        )
        scale = query.shape[2] ** -0.5 if call.scale is None else call.scale
        self._kernel(self._team.size, table.ctypes.data, len(table), scale, numbers, self._work.ctypes.data, room)

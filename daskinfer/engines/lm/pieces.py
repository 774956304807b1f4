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
from typing import Any

import numba as nb
import numpy as np
import torch

from daskinfer.engines.lm.attention import Call, described
from daskinfer.engines.lm.compiling import PIECES, STORE_PIECES, Team, add_product, exp, line, matrix, pointer, quick
from daskinfer.engines.lm.plan import Piece

__all__ = ["PieceAttention", "attend_pieces", "store_pieces"]

_QUERIES, _KEYS = 32, 64  # of a tile
_OF_PIECE = 6  # numbers
_LINE = 4 * _QUERIES  # bytes
# of a query: its largest score, the sum of its weights, and what brings older weights to the measure of newer ones
_BEST, _SUM, _FACTOR = range(3)
_HIDDEN = np.float32(-1e30)


@quick(inline="always")
def _tile(address: int, rows: int) -> Any:
    return nb.carray(pointer(address), (rows, _QUERIES), np.float32)


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
    query, q_token, q_head = call[:3]
    heads, kv_heads, width = call[11:14]
    shared, begin, tokens = heads // kv_heads, piece[3], piece[5] - piece[4]
    lines = _tile(queries, width)
    for q in range(_QUERIES):
        at = min(unit * _QUERIES + q, tokens * shared - 1)
        own = line(query, (begin + at // shared) * q_token + (h * shared + at % shared) * q_head, width)
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
        lines = matrix(spare, n, room)
        for j in range(n):
            value = line(values, j * width, width)
            for i in range(width):
                lines[j, i] = value[i]
        values = spare
    add_product((answers, 4 * room), (values, 4 * room), (weights, 4, _LINE), (_QUERIES, n, room))


@quick()
def _give(unit: int, piece: Any, h: int, call: Any, answers: Any, state: Any) -> None:
    """Write what came out."""
    out, sums, heads, kv_heads, _, width = call[9:15]
    _, _, _, begin, start, stop = piece
    shared = heads // kv_heads
    first = unit * _QUERIES
    for at in range(first, min(first + _QUERIES, (stop - start) * shared)):
        q, place = at - first, (begin + at // shared) * heads + h * shared + at % shared
        row, factor = line(out, place * width, width), np.float32(1) / state[_SUM, q]
        if state[_BEST, q] <= _HIDDEN:  # none of its own scores is a number
            factor = np.float32(np.nan)
        for i in range(width):
            row[i] = answers[q, i] * factor
        if sums:
            line(sums, place, 1)[0] = state[_BEST, q] + np.log(state[_SUM, q])


@quick()
def _attend(unit: int, piece: Any, h: int, scale: Any, call: Any, work: int) -> None:
    """Attend for 32 queries of a piece and a key head."""
    heads, kv_heads, width, value_width, window = call[11:16]
    keys, values, size = piece[:3]
    room = _padded(value_width)
    scored = work + _LINE * width
    made = scored + _LINE * (_KEYS + 5)
    scores, state = _tile(scored, _KEYS), _tile(scored + _LINE * _KEYS, 3)
    seen = nb.carray(pointer(scored + _LINE * (_KEYS + 3)), (2, _QUERIES), np.int32)
    answers = matrix(made, _QUERIES, room)
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
def _store(new: int, strides: tuple[int, int], slot: int, h: int, piece: Any, width: int) -> None:
    """Write the piece's keys, or values, of a head into its slot."""
    _, _, size, begin, start, stop = piece
    token, head = strides
    for t in range(stop - start):
        fresh = line(new, (begin + t) * token + h * head, width)
        kept = line(slot, (h * size + start + t) * width, width)
        for d in range(width):
            kept[d] = fresh[d]


@quick(inline="always")
def _piece(table: int, p: int) -> Any:
    of = nb.carray(pointer(table + 8 * _OF_PIECE * p), (_OF_PIECE,), np.int64)
    return of[0], of[1], of[2], of[3], of[4], of[5]


@quick()
def store_pieces(part: int, parts: int, numbers: Any) -> None:
    """Store keys and values of every piece and key head whose turn it is; ``numbers`` are those of :func:`attend_pieces`."""
    _, _, _, key, k_token, k_head, value, v_token, v_head = numbers[:9]
    kv_heads, width, value_width, _, table, count = numbers[12:18]
    for i in range(part, count * kv_heads, parts):
        piece, h = _piece(table, i // kv_heads), i % kv_heads
        _store(key, (k_token, k_head), piece[0], h, piece, width)
        _store(value, (v_token, v_head), piece[1], h, piece, value_width)


@quick()
def attend_pieces(part: int, parts: int, scale: Any, numbers: Any) -> None:
    """Attend for every unit whose turn it is, counted over all pieces and key heads.

    ``numbers`` are those of :func:`~daskinfer.engines.lm.attention.described`, the address of a table of pieces (addresses
    of keys and values, slot size, first token in the step, first and last own token), their number, and the address and size
    of a part's scratch memory.
    """
    heads, kv_heads = numbers[11], numbers[12]
    table, count, work, room = numbers[16:20]
    unit = 0
    for p in range(count):
        piece = _piece(table, p)
        units = ((piece[5] - piece[4]) * (heads // kv_heads) + _QUERIES - 1) // _QUERIES
        for h in range(kv_heads):
            for u in range(units):
                if unit % parts == part:
                    _attend(u, piece, h, scale, numbers, work + 4 * part * room)
                unit += 1


class PieceAttention:
    """Runs the attention of a step's pieces of prompts.

    Parameters
    ----------
    team : Team
    """

    def __init__(self, team: Team) -> None:
        self._team = team
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
        new, out, sums : tuple of torch.Tensor, torch.Tensor, torch.Tensor or None
            As for :func:`~daskinfer.engines.lm.attention.described`.
        """
        width, value_width = new[1].shape[2], new[2].shape[2]
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
        scale, numbers = described(call, new, out, sums)
        numbers += table.ctypes.data, len(table), self._work.ctypes.data, room
        self._team.run(STORE_PIECES, self._team.size, scale, *numbers)
        self._team.run(PIECES, self._team.size, scale, *numbers)

"""From the chunks of a step to what the attention layers need: which tokens lie where, and what each may see.

The tokens of all chunks lie one behind the other, without padding: first those of rows that go on by one token, in the
order of their slots, then the pieces of prompts, and tokens with guesses behind them. With a compiled kernel, rows that have
few tokens in the step come first, in any order. Everything here is worked out once per step and used by every layer.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from daskinfer.engines.lm.layout import Layout
from daskinfer.engines.lm.sequences import Chunk, Row, Segment, Sequence

__all__ = ["DecodeGroup", "Few", "Piece", "SharedPart", "StepPlan"]

_FEW = 16  # tokens of a row in one step; as many as one with its guesses has


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Neighbouring slots ``first`` to ``stop`` of a pool, whose rows are the step's tokens ``begin`` to ``end``."""

    size: int
    first: int
    stop: int
    begin: int
    end: int
    positions: torch.Tensor  # in the slot, of the new token
    longest: int
    chained: bool
    kept: dict[Any, torch.Tensor | None] = field(default_factory=dict)

    def targets(self, heads: int) -> torch.Tensor:
        """Return where the new keys go in the pool seen as (rows · heads · size) tokens."""
        found = self.kept.get(heads)
        if found is None:
            rows = torch.arange(self.first, self.stop, device=self.positions.device)
            slots = rows[:, None] * heads + torch.arange(heads, device=rows.device)
            found = self.kept[heads] = (slots * self.size + self.positions[:, None]).reshape(-1)
        return found

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return 0 where a row may look and -inf elsewhere; shape (rows, 1, 1, longest); None: everywhere."""
        key = ("mask", window)
        if key not in self.kept:
            at = torch.arange(self.longest, device=self.positions.device)
            seen = at <= self.positions[:, None]
            if window is not None:
                seen &= at > self.positions[:, None] - window
            self.kept[key] = None if bool(seen.all()) else _as_bias(seen, dtype)[:, None, None]
        return self.kept[key]

    def bias(self, window: int | None, dtype: torch.dtype, kv_heads: int, queries: int) -> torch.Tensor:
        """Return :meth:`mask` for all heads, shape (rows · kv_heads, queries, longest); 0 where all may look everywhere."""
        key = ("bias", window, kv_heads, queries)
        found = self.kept.get(key)
        if found is None:
            mask = self.mask(window, dtype)
            rows = self.stop - self.first
            if mask is None:
                found = torch.zeros((1, 1, 1), dtype=dtype, device=self.positions.device)
            else:
                found = mask.expand(rows, kv_heads, queries, self.longest).reshape(-1, queries, self.longest)
            self.kept[key] = found
        return found


@dataclass(slots=True, eq=False)
class Few:
    """The step's first tokens, of rows that have few tokens in it.

    Attributes
    ----------
    sizes : list of int
        Of the pools where the rows are.
    places : numpy.ndarray
        Shape (tokens, 4): for each token its pool (an index of ``sizes``), the size and index of its slot, and its position
        in the slot.
    bounds : numpy.ndarray
        Where the tokens are cut into parts of about the same work, never within a row; first 0, last the number of tokens.
    longest : int
        Most tokens that one of them looks at.
    """

    sizes: list[int]
    places: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    longest: int

    @classmethod
    def of(cls, chunks: Listing[Chunk], layout: Layout, parts: int) -> Few | None:
        """Lay out chunks of rows; None: there are none."""
        if not chunks:
            return None
        places: list[tuple[int, int, int, int]] = []
        sizes: dict[int, int] = {}
        ends, work = [], []
        for chunk in chunks:
            size, index = _place(layout, chunk.sequence)
            pool = sizes.setdefault(size, len(sizes))
            places += [(pool, size, index, at) for at in range(chunk.start, chunk.stop)]
            ends.append(len(places))
            work.append((chunk.stop - chunk.start) * chunk.stop)
        done = np.cumsum(work)
        middles = done - np.array(work) / 2
        cuts = np.searchsorted(middles, done[-1] * np.arange(1, parts) / parts)  # at the nearest border
        bounds = np.unique(np.array([0, *([0, *ends][cut] for cut in cuts), len(places)], dtype=np.int64))
        longest = max(chunk.stop for chunk in chunks)
        return cls(list(sizes), np.array(places, dtype=np.int64), bounds, longest)


@dataclass(slots=True, eq=False)
class Piece:
    """Tokens ``begin`` to ``end`` of the step: own tokens ``start`` to ``stop`` of a row in a slot, or of a segment."""

    place: tuple[int, int] | Segment
    start: int
    stop: int
    begin: int
    end: int
    chained: bool
    kept: dict[Any, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return 0 where a token may look and -inf elsewhere; shape (tokens, stop); None: plainly causal."""
        if self.start == 0 and (window is None or window >= self.stop):
            return None
        if window not in self.kept:
            own = torch.arange(self.start, self.stop, device=device)[:, None]
            at = torch.arange(self.stop, device=device)
            seen = at <= own
            if window is not None:
                seen &= at > own - window
            self.kept[window] = _as_bias(seen, dtype)
        return self.kept[window]


@dataclass(slots=True, eq=False)
class SharedPart:
    """A segment, and the step's tokens that look at it."""

    segment: Segment
    tokens: torch.Tensor
    positions: torch.Tensor  # of these tokens, counted from the segment's first
    kept: dict[Any, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return 0 where a token may look and -inf elsewhere; shape (tokens, segment); None: everywhere."""
        if window is None:
            return None
        if window not in self.kept:
            at = torch.arange(len(self.segment.tokens), device=self.positions.device)
            seen = at > self.positions[:, None] - window
            self.kept[window] = None if bool(seen.all()) else _as_bias(seen, dtype)
        return self.kept[window]


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step.

    Attributes
    ----------
    ids, positions : torch.Tensor
        Shape (1, tokens).
    few : Few or None
        What a compiled kernel takes together.
    groups, pieces, shared : list
        What the attention layers do besides; with compiled kernels there are no groups.
    rows : list of Row
        Those that get a token, with a guess of several tokens once more for each of these.
    last : torch.Tensor
        Index of the token from which each of them follows.
    chained : torch.Tensor or None
        Tokens that look at segments, as indices.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    few: Few | None
    groups: list[DecodeGroup]
    pieces: list[Piece]
    shared: list[SharedPart]
    rows: list[Row]
    last: torch.Tensor

    @classmethod
    def of(cls, chunks: Listing[Chunk], layout: Layout, device: torch.device, parts: int = 0) -> StepPlan:
        """Lay out the chunks of a step; their rows have their places in the layout.

        Parameters
        ----------
        chunks : sequence of Chunk
        layout : Layout
        device : torch.device
        parts : int
            What a compiled kernel takes together is cut into so many parts; 0: there is none.
        """
        rows = [c for c in chunks if isinstance(c.sequence, Row)]
        few = [c for c in rows if c.stop - c.start <= _FEW] if parts else []
        decoding = [] if parts else [c for c in rows if c.start and c.stop - c.start == 1]
        decoding.sort(key=lambda c: _place(layout, c.sequence))
        first = few or decoding
        taken = set(map(id, first))
        ordered = first + [c for c in chunks if id(c) not in taken]
        ids: list[int] = []
        positions: list[int] = []
        begins: list[int] = []
        for chunk in ordered:
            begins.append(len(ids))
            offset = chunk.sequence.offset
            ids += chunk.sequence.tokens[chunk.start : chunk.stop]
            positions += range(offset + chunk.start, offset + chunk.stop)
        sampling = [
            (chunk.sequence, end - back)
            for chunk, end in zip(ordered, [*begins[1:], len(ids)], strict=True)
            if isinstance(chunk.sequence, Row) and chunk.samples
            for back in range(1 + len(chunk.sequence.guess), 0, -1)
        ]
        return cls(
            torch.tensor([ids], device=device),
            torch.tensor([positions], device=device),
            Few.of(few, layout, parts),
            _groups(decoding, layout, device),
            [_piece(c, b, layout) for c, b in zip(ordered[len(first) :], begins[len(first) :], strict=True)],
            _shared(ordered, begins, device),
            [row for row, _ in sampling],
            torch.tensor([last for _, last in sampling], dtype=torch.long, device=device),
        )


def _place(layout: Layout, sequence: Sequence) -> tuple[int, int]:
    place = layout.places[sequence]
    return place.size, place.index


def _groups(decoding: list[Chunk], layout: Layout, device: torch.device) -> list[DecodeGroup]:
    groups = []
    first = 0
    places = [_place(layout, chunk.sequence) for chunk in decoding]
    for end in range(1, len(decoding) + 1):
        if end < len(decoding) and places[end] == (places[end - 1][0], places[end - 1][1] + 1):
            continue
        members = decoding[first:end]
        at = [chunk.start for chunk in members]
        size, index = places[first]
        groups.append(
            DecodeGroup(
                size,
                index,
                index + len(members),
                first,
                end,
                torch.tensor(at, device=device),
                max(at) + 1,
                any(chunk.sequence.chain for chunk in members),
            )
        )
        first = end
    return groups


def _piece(chunk: Chunk, begin: int, layout: Layout) -> Piece:
    sequence = chunk.sequence
    place = sequence if isinstance(sequence, Segment) else _place(layout, sequence)
    end = begin + chunk.stop - chunk.start
    return Piece(place, chunk.start, chunk.stop, begin, end, bool(sequence.chain))


def _shared(chunks: list[Chunk], begins: list[int], device: torch.device) -> list[SharedPart]:
    tokens: dict[Segment, list[int]] = {}
    positions: dict[Segment, list[int]] = {}
    for chunk, begin in zip(chunks, begins, strict=True):
        offset = chunk.sequence.offset
        for segment in chunk.sequence.chain:
            own = offset - segment.offset
            tokens.setdefault(segment, []).extend(range(begin, begin + chunk.stop - chunk.start))
            positions.setdefault(segment, []).extend(range(own + chunk.start, own + chunk.stop))
    return [
        SharedPart(s, torch.tensor(t, device=device), torch.tensor(positions[s], device=device))
        for s, t in tokens.items()
    ]


def _as_bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)

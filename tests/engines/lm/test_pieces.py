"""Pieces of prompts attend by the compiled kernel as they do by tensor operations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from daskinfer.engines.lm.attention import Call, Kernels, Runner
from daskinfer.engines.lm.compiling import add_product
from daskinfer.engines.lm.few import FewAttention
from daskinfer.engines.lm.kernels import gathered
from daskinfer.engines.lm.kv_cache import KVCache, LayerShape
from daskinfer.engines.lm.layout import Layout
from daskinfer.engines.lm.pieces import PieceAttention
from daskinfer.engines.lm.plan import StepPlan
from daskinfer.engines.lm.sequences import Chunk, Row, Segment

pytestmark = pytest.mark.usefixtures("require_kernel")
CPU = torch.device("cpu")
SPANS = [(0, 1), (0, 17), (0, 64), (30, 131), (3, 36), (100, 300)]
"""Of the rows' tokens, what is computed in the step."""
SHAPES = [(9, 3, 64, 64), (4, 4, 8, 8), (6, 2, 5, 12), (2, 1, 80, 80)]
"""Heads, key heads, their width and that of values."""


class Step:
    """A step of one layer, from seeded numbers, by tensor operations or compiled; the first rows may share a segment."""

    def __init__(self, shape: tuple[int, int, int, int], *, compiled: bool, shared: bool = False) -> None:
        heads, kv_heads, width, value_width = shape
        generator = torch.Generator().manual_seed(0)
        layout = Layout(10_000)
        rows = [Row.of(i, [0] * stop, 1) for i, (_, stop) in enumerate(SPANS)]
        assert all(layout.reserve(row, len(row.tokens)) for row in rows)
        self.cache = KVCache({0: LayerShape(kv_heads, width, value_width)}, torch.float32, CPU)
        self.cache.apply(layout.take_operations())
        chunks = [Chunk(row, *span) for row, span in zip(rows, SPANS, strict=True)]
        if shared:
            segment = Segment([0] * 20)
            self.cache.begin(segment)
            chunks.append(Chunk(segment, 0, 20))
            for row in rows[:4]:
                row.chain = (segment,)
        self.held = [t for pools in (self.cache.pools, self.cache.segments) for pool in pools.values() for t in pool[0]]
        for tensor in self.held:
            tensor.normal_(generator=generator)
        team = gathered()
        self.runner = Runner(self.cache, Kernels(FewAttention(team), PieceAttention(team)) if compiled else None)
        self.plan = self.runner.plan = StepPlan.of(chunks, layout, CPU)
        assert len(self.plan.pieces) == len(chunks)
        n = self.plan.ids.shape[1]
        together = torch.randn(n, heads + kv_heads, width, generator=generator)
        values = torch.randn(n, kv_heads, value_width, generator=generator)
        self.new = [t.transpose(0, 1) for t in (together[:, :heads], together[:, heads:], values)]

    def run(self, window: int | None = None, scale: float | None = None) -> torch.Tensor:
        query, key, value = self.new
        return self.runner.attend(Call(0, scale, window, masked=False, wishes=()), query, key, value)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [None, 1, 8, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_attend_as_by_tensor_operations(
    shape: tuple[int, int, int, int], window: int | None, shared: bool
) -> None:
    plain, compiled = (Step(shape, compiled=compiled, shared=shared) for compiled in (False, True))
    torch.testing.assert_close(compiled.run(window), plain.run(window), atol=5e-6, rtol=1e-5)
    for ours, theirs in zip(compiled.held, plain.held, strict=True):
        assert torch.equal(ours, theirs), "keys and values are stored, and nothing else is written"


def test_large_scores_overflow_nothing() -> None:
    plain, compiled = (Step(SHAPES[0], compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled.run(scale=100.0), plain.run(scale=100.0), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_no_number_stays_in_its_row_and_is_seen_there(which: int, bad: float) -> None:
    step = Step(SHAPES[1], compiled=True)
    piece = step.plan.pieces[2]
    step.new[which][:, piece.begin] = bad
    out = step.run().isfinite().all(dim=-1).all(dim=-1)
    assert not out[piece.begin]
    outside = torch.ones(len(out), dtype=torch.bool)
    outside[piece.begin : piece.end] = False
    assert out[outside].all()


def test_scores_that_overflow_downwards_are_seen() -> None:
    step = Step(SHAPES[1], compiled=True)
    piece = step.plan.pieces[2]
    step.new[0][:, piece.begin] = 3e38
    step.new[1][:, piece.begin] = -3e38
    assert step.run()[piece.begin].isnan().all()


def test_queries_of_any_layout_are_taken() -> None:
    plain, compiled = (Step(SHAPES[0], compiled=compiled) for compiled in (False, True))
    expected = plain.run()
    compiled.new = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in compiled.new]
    assert compiled.new[0].stride(2) != 1
    torch.testing.assert_close(compiled.run(), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("m", "n", "width"), [(1, 1, 16), (4, 7, 32), (7, 5, 48), (9, 0, 16)])
@pytest.mark.parametrize("turned", [False, True])
def test_products(m: int, n: int, width: int, turned: bool) -> None:
    rng = np.random.default_rng(0)
    out, x, a = (rng.normal(size=size).astype(np.float32) for size in ((m, width), (n, width), (m, n)))
    expected = out + a @ x
    held = np.ascontiguousarray(a.T) if turned else a
    factors = (held.ctypes.data, 4, 4 * m) if turned else (held.ctypes.data, 4 * n, 4)
    add_product((out.ctypes.data, 4 * width), (x.ctypes.data, 4 * width), factors, (m, n, width))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

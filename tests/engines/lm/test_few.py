"""The compiled kernel attends as torch does, for rows of every length, and leaves no doubtful number out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from daskinfer.engines.lm.attention import Call
from daskinfer.engines.lm.few import FewAttention
from daskinfer.engines.lm.kernels import _shared, gathered, version_of
from daskinfer.engines.lm.kv_cache import KVCache, LayerShape
from daskinfer.engines.lm.layout import Layout
from daskinfer.engines.lm.plan import Few
from daskinfer.engines.lm.sequences import Chunk, Row
from daskinfer.records import Request, SamplingParams
from tests.engines.lm.models import drain, greedy, load, outputs, own_model, prompts, text

pytestmark = pytest.mark.usefixtures("require_kernel")
SPANS = [(0, 1), (5, 6), (3, 19), (40, 41), (63, 64), (64, 70), (90, 91), (200, 203)]
"""Of the rows' tokens, what is computed in the step."""


class Step:
    """A step of one layer with rows in slots of several sizes, filled with seeded numbers."""

    def __init__(self, heads: int, kv_heads: int, width: int, value_width: int, parts: int = 2) -> None:
        self.layout = Layout(10_000)
        rows = [Row.of(i, [0] * stop, 1) for i, (_, stop) in enumerate(SPANS)]
        for row in rows:
            assert self.layout.reserve(row, len(row.tokens))
        self.cache = KVCache({3: LayerShape(kv_heads, width, value_width)}, torch.float32, torch.device("cpu"))
        self.cache.apply(self.layout.take_operations())
        generator = torch.Generator().manual_seed(0)
        for pool in self.cache.pools.values():
            for tensor in pool[3]:
                tensor.normal_(generator=generator)
        chunks = [Chunk(row, *span) for row, span in zip(rows, SPANS, strict=True)]
        few = Few.of(chunks, self.layout, parts)
        assert few is not None
        self.few, self.rows, self.attend = few, rows, FewAttention(gathered())
        n = len(few.places) + 2  # behind them come tokens of others
        self.query, self.key, self.value = (
            torch.randn(n, count, size, generator=generator)
            for count, size in ((heads, width), (kv_heads, width), (kv_heads, value_width))
        )
        self.out, self.sums = torch.full((n, heads, value_width), 7.0), torch.full((n, heads), 7.0)

    def run(self, window: int | None = None, scale: float | None = None, *, sums: bool = True) -> None:
        call = Call(3, scale, window, masked=False, wishes=())
        self.attend(
            self.few, self.cache, call, (self.query, self.key, self.value), self.out, self.sums if sums else None
        )

    def expected(self, window: int | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention by torch over what the slots hold after the run."""
        outs, sums, at = [], [], 0
        for row, (start, stop) in zip(self.rows, SPANS, strict=True):
            place = self.layout.places[row]
            keys, values = (tensor[place.index] for tensor in self.cache.pools[place.size][3])
            for end in range(start, stop):
                assert torch.equal(keys[:, end], self.key[at])
                assert torch.equal(values[:, end], self.value[at])
                begin = 0 if window is None else max(0, end - window + 1)
                shared = self.query.shape[1] // keys.shape[0]
                seen_keys, seen = (t[:, begin : end + 1].repeat_interleave(shared, 0) for t in (keys, values))
                scores = torch.einsum("hd,hjd->hj", self.query[at], seen_keys) * scale
                outs.append(torch.einsum("hj,hjd->hd", F.softmax(scores, dim=-1), seen))
                sums.append(scores.logsumexp(-1))
                at += 1
        return torch.stack(outs), torch.stack(sums)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(6, 2, 16, 16), (3, 3, 5, 12), (9, 3, 64, 64)])
def test_it_attends_as_torch_does(
    heads: int, kv_heads: int, width: int, value_width: int, window: int | None, parts: int
) -> None:
    step = Step(heads, kv_heads, width, value_width, parts)
    step.run(window, scale=0.4)
    out, sums = step.expected(window, 0.4)
    n = len(step.few.places)
    torch.testing.assert_close(step.out[:n], out, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(step.sums[:n], sums, atol=1e-5, rtol=1e-6)
    assert (step.out[n:] == 7).all(), "tokens of others are not touched"
    assert (step.sums[n:] == 7).all()


def test_the_usual_scale_and_no_sums() -> None:
    step = Step(4, 2, 16, 16)
    step.run(sums=False)
    torch.testing.assert_close(step.out[: len(step.few.places)], step.expected(None, 0.25)[0], atol=3e-6, rtol=1e-5)
    assert (step.sums == 7).all()


def test_large_scores_overflow_nothing() -> None:
    step = Step(4, 2, 16, 16)
    step.run(scale=300.0)
    torch.testing.assert_close(step.out[: len(step.few.places)], step.expected(None, 300.0)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_is_no_number_stays_in_its_row_and_is_seen_there(which: str, bad: float) -> None:
    step = Step(4, 2, 16, 16)
    at = 1  # the token of the second row
    getattr(step, which)[at] = bad
    step.run()
    finite = step.out[: len(step.few.places)].isfinite().all(dim=-1)
    assert not finite[at].any()
    assert finite[torch.arange(len(finite)) != at].all()


@pytest.mark.parametrize(
    ("spans", "parts", "bounds"),
    [
        ([(99, 100), (100, 101)], 2, [0, 1, 2]),
        ([(99, 100), (100, 101), (101, 102)], 3, [0, 1, 2, 3]),
        ([(49, 50)] * 7 + [(399, 400)], 2, [0, 7, 8]),
        ([(0, 16), (5, 6), (9, 10)], 2, [0, 16, 18]),
        ([(5, 6)], 4, [0, 1]),
    ],
)
def test_parts_are_even_and_end_where_rows_end(spans: list[tuple[int, int]], parts: int, bounds: list[int]) -> None:
    layout = Layout(10_000)
    rows = [Row.of(i, [0] * stop, 1) for i, (_, stop) in enumerate(spans)]
    assert all(layout.reserve(row, len(row.tokens)) for row in rows)
    few = Few.of([Chunk(row, *span) for row, span in zip(rows, spans, strict=True)], layout, parts)
    assert few is not None
    assert few.bounds.tolist() == bounds


def test_torch_keeps_its_threads() -> None:
    """In a process of its own, since Numba starts its threads once."""
    script = (
        "import torch; torch.set_num_threads(1); from daskinfer.engines.lm.kernels import gathered; "
        "team = gathered(); assert (torch.get_num_threads(), team.size) == (1, 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_was_compiled_from_other_source_is_not_used(tmp_path: Path) -> None:
    modules: list[ModuleType] = []
    for source in ("A = 1", "A = 2"):
        path = tmp_path / f"module_{len(modules)}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        modules.append(importlib.util.module_from_spec(spec))
    one, other = modules
    assert version_of(one) == version_of(one)
    assert len({version_of(one), version_of(other), version_of(one, other)}) == 3
    kept = [_shared(version_of(module)).__closure__[0].cell_contents for module in modules]
    assert kept == [version_of(one), version_of(other)], "Numba tells functions apart by what they hold, too"


def test_another_type_is_refused() -> None:
    step = Step(2, 2, 8, 8)
    step.query = step.query.double()
    with pytest.raises(TypeError, match=r"for float32.*torch\.float64"):
        step.run()


def test_threads_of_a_parent_process_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(2, 2, 8, 8)
    monkeypatch.setattr("daskinfer.engines.lm.compiling.os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="forked"):
        step.run()


def test_memory_that_is_not_there_leaves_no_small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(2, 2, 8, 8)
    with monkeypatch.context() as without:
        without.setattr("daskinfer.engines.lm.few.np.empty", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            step.run()
    step.run(scale=0.4)
    torch.testing.assert_close(step.out[: len(step.few.places)], step.expected(None, 0.4)[0], atol=3e-6, rtol=1e-5)


def test_without_numba_tensor_operations_do_it(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    rows = [Request(row, ids, SamplingParams(max_new_tokens=6)) for row, ids in prompts().items()]
    expected = {row.id: text(greedy(own_model(folder), row.input, 6)) for row in rows}
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setitem(sys.modules, "daskinfer.engines.lm.kernels", None)
        engine = load(folder)
        assert engine.stats().extra["compiled_kernels"] is compiled
        assert outputs(drain(engine, [rows])) == expected

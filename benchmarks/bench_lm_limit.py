"""Claim: engine "lm" reaches at least 70 % of what the processor multiplies in float32; and where the rest goes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from _common import Spread, arguments, write_result
from _lm import Rows, add, loaded, parts, ragged, run
from torch.profiler import ProfilerActivity, profile, record_function

from daskinfer.engines.lm import LMEngine

KINDS = {
    "multiplication": ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "onednn::qlinear_pointwise"),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::baddbmm",
        "aten::bmm",
        "compiled FewAttention.__call__",
        "compiled PieceAttention.__call__",
    ),
    "norms, rotary embedding and gates": (
        "compiled CompiledOperations.add_and_norm",
        "compiled CompiledOperations.turn",
        "compiled CompiledOperations.gate",
    ),
    "cache": ("aten::index_copy_", "aten::copy_", "aten::fill_", "aten::zero_"),
}


def speeds(threads: int) -> tuple[float, float]:
    """Return the float32 GFLOP/s that large multiplications keep up, and the best single one."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = []
    for _ in range(60 * threads):
        begun = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - begun)
    gflop = 2 * 1024**3 / 1e9
    return gflop * len(seconds) / sum(seconds), gflop / min(seconds)


def work(config: Any, tokens: int, scored: int) -> float:
    """Return the GFLOP of the linear layers, for tokens read and tokens written."""
    width, inner, heads, kv = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    head = width // heads
    layer = width * head * (heads + 2 * kv) + width * heads * head + 3 * width * inner
    return float(2 * (tokens * layer * config.num_hidden_layers + scored * width * config.vocab_size) / 1e9)


@contextlib.contextmanager
def _named(*functions: tuple[type, str]) -> Iterator[None]:
    """Let the profiler see functions that are no tensor operations, as "compiled Class.name"."""

    def seen(owner: type, name: str) -> Any:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            with record_function(f"compiled {owner.__name__}.{name}"):
                return function(*args)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, seen(owner, name)))
        yield


def compiled() -> list[tuple[type, str]]:
    """Return the methods that are compiled; none where Numba is not installed."""
    try:
        from daskinfer.engines.lm.compiled import CompiledOperations
        from daskinfer.engines.lm.few import FewAttention
        from daskinfer.engines.lm.pieces import PieceAttention
    except ImportError:
        return []
    attention = [(FewAttention, "__call__"), (PieceAttention, "__call__")]
    return [*attention, *((CompiledOperations, name) for name in ("add_and_norm", "turn", "gate"))]


def budget(engine: LMEngine, rows: Rows, steps: int) -> dict[str, float]:
    """Return the share of some steps' time by kind of operation; the profiler makes small operations look dearer."""
    add(engine, rows)
    for _ in range(steps):  # until rows are being answered while others are read
        engine.step()
    with _named(*compiled()), profile(activities=[ProfilerActivity.CPU]) as profiled:
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = time.perf_counter() - begun
    engine.abort(range(len(rows)))
    shares: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key in names), "other tensor operations")
        shares[kind] += event.self_cpu_time_total / 1e6 / seconds
    shares["python and profiler"] = 1 - sum(shares.values())
    return {kind: round(share, 3) for kind, share in shares.items()}


def main() -> None:
    parser = arguments("Against the processor's limit.", rows=64, threads=2, profiled=6)
    options = parser.parse_args()
    engine = loaded(options.threads, share_prefixes=False)
    have = parts(engine)
    rows = ragged(have.tokenizer, options.rows, options.seed)
    run(engine, rows)
    written = sum(n for _, n in rows)
    gflop = work(have.model.config, sum(len(ids) for ids, _ in rows) + written, written)
    seconds, limits, bursts = [], [], []
    for _ in range(options.repeats):
        before, best_before = speeds(options.threads)
        begun = time.perf_counter()
        run(engine, rows)
        seconds.append(time.perf_counter() - begun)
        after, best_after = speeds(options.threads)
        limits.append((before + after) / 2)
        bursts.append(max(best_before, best_after))
    results = {
        "seconds": Spread.of(seconds),
        "gemm_gflops": Spread.of(limits),
        "gemm_gflops_best_burst": Spread.of(bursts),
        "gflop": round(gflop),
        "share_of_limit": Spread.of([gflop / s / limit for s, limit in zip(seconds, limits, strict=True)]),
        "share_of_best_burst": Spread.of([gflop / s / burst for s, burst in zip(seconds, bursts, strict=True)]),
        "output_tokens_per_s": Spread.of([written / s for s in seconds]),
        "budget": budget(engine, rows, options.profiled) if options.profiled else {},
    }
    write_result("lm_limit", options, results)


if __name__ == "__main__":
    main()

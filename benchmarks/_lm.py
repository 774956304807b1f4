"""The ragged generation workload, and running engine "lm" over it.

``ragged(tokenizer, 64)`` is W64: 64 prompts of 20 to 400 tokens and 8 to 128 new tokens each, both log-normal, greedy, with
end tokens ignored so that every system does the same work. The text is the standard library's own documentation.

Runs on: anywhere.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from daskinfer.config import ModelSpec
from daskinfer.demo import generation_model
from daskinfer.engines.lm import LMEngine
from daskinfer.records import Completed, Request, SamplingParams

MODULES = [
    "argparse",
    "asyncio",
    "collections",
    "csv",
    "datetime",
    "decimal",
    "functools",
    "heapq",
    "http.client",
    "itertools",
    "json",
    "logging",
    "os",
    "pathlib",
    "random",
    "re",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "typing",
    "unittest",
    "urllib.parse",
    "zipfile",
]
Rows = list[tuple[list[int], int]]


def library_text() -> str:
    """Return the docstrings of some modules of the standard library and of what they hold, each once."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for owner in (module, *(member for _, member in sorted(vars(module).items(), key=lambda item: item[0]))):
            if inspect.ismodule(owner) and owner is not module:
                continue
            for thing in (owner, *(vars(owner).values() if inspect.isclass(owner) else ())):
                text = inspect.getdoc(thing) if callable(thing) or inspect.ismodule(thing) else None
                if text and len(text) > 80:
                    found[text] = None
    return "\n\n".join(found)


def library_ids(tokenizer: Any) -> list[int]:
    """Return the tokens of :func:`library_text`."""
    return list(tokenizer(library_text(), add_special_tokens=False)["input_ids"])


def ragged(tokenizer: Any, n: int, seed: int = 0) -> Rows:
    """Return prompt and number of new tokens of ``n`` rows."""
    rng = np.random.default_rng(seed)
    prompt_lengths = np.clip(np.exp(rng.normal(4.4, 0.7, n)), 20, 400).astype(int)
    new_tokens = np.clip(np.exp(rng.normal(3.2, 0.8, n)), 8, 128).astype(int)
    ids = library_ids(tokenizer)
    rng = np.random.default_rng(seed + 1)
    starts = [int(rng.integers(0, len(ids) - length)) for length in prompt_lengths]
    return [(ids[s : s + int(k)], int(m)) for s, k, m in zip(starts, prompt_lengths, new_tokens, strict=True)]


def loaded(threads: int, **options: Any) -> LMEngine:
    """Return the engine, loaded with SmolLM2-135M-Instruct in float32."""
    engine = LMEngine(ModelSpec(generation_model(), engine="lm", threads=threads, options=options))
    engine.load()
    return engine


def parts(engine: LMEngine) -> Any:
    """Return the model, tokenizer and special tokens that an engine loaded."""
    assert engine._loaded is not None  # noqa: SLF001 - the rivals tokenise in the same way
    return engine._loaded  # noqa: SLF001


def folder(engine: LMEngine) -> str:
    """Return the folder of the model that an engine loaded."""
    return str(parts(engine).model.config._name_or_path)  # noqa: SLF001 - transformers has no other name for it


def add(engine: LMEngine, rows: Rows) -> None:
    """Give the rows to the engine."""
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for _, n in rows]
    engine.add([Request(i, ids, p) for i, ((ids, _), p) in enumerate(zip(rows, params, strict=True))])


def run(engine: LMEngine, rows: Rows) -> list[str]:
    """Answer the rows; return the texts in order."""
    add(engine, rows)
    found: dict[int, str] = {}
    while len(found) < len(rows):
        for result in engine.step():
            assert isinstance(result, Completed), result
            found[result.id] = result.output
    return [found[i] for i in range(len(rows))]


def paired(ours: Callable[[], Sequence[str]], theirs: Callable[[], Sequence[str]], repeats: int) -> dict[str, Any]:
    """Time two ways of doing the same in turn, after one untimed run of each; return seconds, ratios and equal rows.

    On a machine that does other things too, processor seconds of one thread tell more than wall seconds.
    """
    from _common import Spread

    a, b = ours(), theirs()
    wall: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, function in enumerate((ours, theirs)):
            begun, used = time.perf_counter(), time.process_time()
            function()
            wall[side].append(time.perf_counter() - begun)
            cpu[side].append(time.process_time() - used)
    return {
        "seconds": Spread.of(wall[0]),
        "rival_seconds": Spread.of(wall[1]),
        "times_faster": Spread.of([y / x for x, y in zip(*wall, strict=True)]),
        "cpu_seconds": Spread.of(cpu[0]),
        "rival_cpu_seconds": Spread.of(cpu[1]),
        "times_less_cpu": Spread.of([y / x for x, y in zip(*cpu, strict=True)]),
        "rows": len(a),
        "equal_rows": sum(x == y for x, y in zip(a, b, strict=True)),
    }

"""Claim: engine "lm" with weights in 8 bits is at least 1.3 times as fast again; and what that costs in perplexity."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from _common import arguments, write_result
from _lm import library_ids, loaded, paired, parts, ragged, run

from daskinfer.engines.lm import LMEngine


@torch.inference_mode()
def perplexity(engine: LMEngine, tokens: int, piece: int = 256) -> float:
    """Return the perplexity of a text in pieces; the model computes it through the engine's own layers."""
    from daskinfer.engines.lm.attention import Recorder, install

    have, core = parts(engine), engine._core  # noqa: SLF001
    assert core is not None
    install(have.model, Recorder())  # plain causal attention, without a cache
    ids = library_ids(have.tokenizer)[:tokens]
    losses = []
    for first in range(0, len(ids) - piece + 1, piece):
        part = torch.tensor([ids[first : first + piece]])
        logits = have.model(input_ids=part, position_ids=torch.arange(piece)[None], use_cache=False).logits[0]
        losses.append(float(F.cross_entropy(logits[:-1], part[0, 1:])))
    install(have.model, core._runner)  # noqa: SLF001
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    options = arguments("Weights in 8 bits.", rows=64, threads=2, tokens=8192).parse_args()
    small, full = (
        loaded(options.threads, int8=True, share_prefixes=False),
        loaded(options.threads, share_prefixes=False),
    )
    rows = ragged(parts(full).tokenizer, options.rows, options.seed)
    results = paired(lambda: run(small, rows), lambda: run(full, rows), options.repeats)
    before, after = perplexity(full, options.tokens), perplexity(small, options.tokens)
    results |= {"perplexity_float32": before, "perplexity_int8": after, "perplexity_change": after / before - 1}
    write_result("lm_int8", options, results)


if __name__ == "__main__":
    main()

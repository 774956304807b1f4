"""transformers' continuous batching as a rival of engine "lm": answers rows for ``bench_lm_continuous.py``.

What goes in and comes out stands in ``_rival.py``.

Runs on: anywhere; nothing of daskinfer is needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def answer(manager: Any, rows: list[Any], turn: int) -> list[list[int]]:
    """Return the rows' new tokens."""
    for i, (ids, n) in enumerate(rows):
        manager.add_request(ids, request_id=f"{turn}/{i}", max_new_tokens=n)
    found: dict[str, list[int]] = {}
    while len(found) < len(rows):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
    return [found[f"{turn}/{i}"] for i in range(len(rows))]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    asked = json.loads(sys.stdin.readline())
    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32, attn_implementation="sdpa").eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128),
        continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=512),
    )
    manager.start()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        for turn, _ in enumerate(sys.stdin):
            begun = time.perf_counter()
            tokens = answer(manager, asked["rows"], turn)
            print(json.dumps({"seconds": time.perf_counter() - begun, "tokens": tokens}), file=answers, flush=True)
    finally:
        manager.stop(block=True)


if __name__ == "__main__":
    main()

"""Claim: engine "lm" is at least twice as fast as transformers' own continuous batching, both warm."""

from __future__ import annotations

from typing import Any

import torch
from _common import arguments, write_result
from _lm import Rows, folder, loaded, paired, parts, ragged, run
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


class Rival:
    """transformers' continuous batching, kept warm between runs."""

    def __init__(self, model: str, tokenizer: Any, rows: Rows) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._tokenizer, self._rows = tokenizer, rows
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
        self._manager = self._model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=512),
        )
        self._manager.start()
        self._turn = 0

    def __call__(self) -> list[str]:
        """Answer the rows."""
        self._turn += 1
        for i, (ids, n) in enumerate(self._rows):
            self._manager.add_request(ids, request_id=f"{self._turn}/{i}", max_new_tokens=n)
        found: dict[str, list[int]] = {}
        while len(found) < len(self._rows):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        return [
            self._tokenizer.decode(found[f"{self._turn}/{i}"], skip_special_tokens=True) for i in range(len(self._rows))
        ]

    def close(self) -> None:
        """Stop its thread."""
        self._manager.stop(block=True)


def main() -> None:
    options = arguments("Against transformers' continuous batching.", rows=64, threads=2).parse_args()
    engine = loaded(options.threads, share_prefixes=False)
    have = parts(engine)
    rows = ragged(have.tokenizer, options.rows, options.seed)
    rival = Rival(folder(engine), have.tokenizer, rows)
    try:
        results = paired(lambda: run(engine, rows), rival, options.repeats)
    finally:
        rival.close()
    write_result("lm_continuous", options, results)


if __name__ == "__main__":
    main()

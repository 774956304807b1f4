"""Claim: engine "lm" is at least 4 times as fast as ``transformers.generate`` in batches of 16 in input order."""

from __future__ import annotations

from typing import Any

import torch
from _common import arguments, write_result
from _lm import Rows, folder, loaded, paired, parts, ragged, run
from transformers import AutoModelForCausalLM, GenerationConfig


def generate(model: Any, tokenizer: Any, rows: Rows, batch: int) -> list[str]:
    """Answer the rows in batches, padded on the left."""
    texts = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        width = max(len(ids) for ids, _ in part)
        ids = torch.zeros((len(part), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(part):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        config = GenerationConfig(max_new_tokens=max(n for _, n in part), do_sample=False, pad_token_id=0)
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        texts += [tokenizer.decode(row[:n], skip_special_tokens=True) for row, (_, n) in zip(made, part, strict=True)]
    return texts


def main() -> None:
    options = arguments("Against generate in static batches.", rows=64, batch=16, threads=2).parse_args()
    engine = loaded(options.threads, share_prefixes=False)
    have = parts(engine)
    model = AutoModelForCausalLM.from_pretrained(folder(engine), dtype=torch.float32).eval()
    rows = ragged(have.tokenizer, options.rows, options.seed)
    with torch.inference_mode():
        results = paired(
            lambda: run(engine, rows),
            lambda: generate(model, have.tokenizer, rows, options.batch),
            options.repeats,
        )
    write_result("lm_generate", options, results)


if __name__ == "__main__":
    main()

"""vLLM as a rival of engine "lm": answers rows for ``bench_lm_vllm.py``, in an environment of its own.

What goes in and comes out stands in ``_rival.py``; everything else goes to stderr.

Runs on: anywhere with vllm; nothing of daskinfer is needed.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its engine process print
    asked = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams, TokensPrompt

    model = LLM(asked["model"], dtype="float32", max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in asked["rows"]]
    params = [SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True) for _, new in asked["rows"]]
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()

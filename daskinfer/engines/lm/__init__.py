"""Continuous batching for causal language models, on any torch device.

::

    Request ─ hf.PromptEncoder ─▶ Prompt ─ Scheduler ─▶ Chunks ─ StepPlan ─▶ model with packed attention ─ choose ─▶ tokens
                                            │  ▲                               │  ▲
                                    Layout ◀┘  └ Prefixes                      ▼  │
                                       └──────────── operations ───────────▶ KVCache

``sequences``, ``prefixes``, ``layout`` and ``scheduler`` are pure: they decide about tokens and memory, and know no tensors.

Runs on: worker.
"""

from daskinfer.engines.lm.engine import LMEngine

__all__ = ["LMEngine"]

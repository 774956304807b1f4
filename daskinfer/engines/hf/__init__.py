"""What our torch engines share: loading, tokenising, special tokens, picking tokens, ending answers.

::

    ModelSpec ─ load_language_model ─▶ LanguageModel(model, tokenizer, special, limit, …)
    Request   ─ PromptEncoder.encode ─▶ Prompt (token ids, room for the answer)          or RowError
    Prompt    ─ Answer ◀─ push(token) ─ pick(logits, answers)                             until finished
    Answer    ─ result ─▶ Completed | Failed

An engine that is no text generator uses the lower half: :func:`find`, :func:`load_tokenizer`, :func:`load_weights`.

Runs on: worker.
"""

from daskinfer.engines.hf.answers import NOT_A_NUMBER, Answer
from daskinfer.engines.hf.int8 import Int8Linear, Rounding
from daskinfer.engines.hf.loading import (
    LanguageModel,
    load_language_model,
    load_tokenizer,
    load_weights,
    pick_device,
    pick_dtype,
    quiet,
    release_device_memory,
    set_threads,
)
from daskinfer.engines.hf.prompts import Prompt, PromptEncoder
from daskinfer.engines.hf.sampling import pick
from daskinfer.engines.hf.sources import find
from daskinfer.engines.hf.special import SpecialTokens, context_limit, special_tokens

__all__ = [
    "NOT_A_NUMBER",
    "Answer",
    "Int8Linear",
    "LanguageModel",
    "Prompt",
    "PromptEncoder",
    "Rounding",
    "SpecialTokens",
    "context_limit",
    "find",
    "load_language_model",
    "load_tokenizer",
    "load_weights",
    "pick",
    "pick_device",
    "pick_dtype",
    "quiet",
    "release_device_memory",
    "set_threads",
    "special_tokens",
]

"""End-of-sequence and padding tokens, and how long a sequence may be.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskinfer.errors import ConfigError

__all__ = ["SpecialTokens", "context_limit", "special_tokens"]

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_POSITIONS_AFTER_PAD = frozenset({"camembert", "longformer", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids with a meaning to generation.

    Attributes
    ----------
    eos : frozenset of int
        Each of them ends a sequence; never empty.
    pad : int
        Fills the places that are masked; always within the vocabulary.
    start : int or None
        What a decoder with an encoder begins with.
    named : dict of str to int
        All special tokens by their text.
    """

    eos: frozenset[int]
    pad: int
    start: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)


def special_tokens(tokenizer: Any, config: Any, generation_config: Any, vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a generating model.

    The ends are those of the generation config (one or a list) and of the tokenizer, since either may know the one that
    a chat ends with. A model without a pad token is padded with an end token: padding is masked by position, so its value
    does not matter, and a new token would lie outside the embedding table.

    Parameters
    ----------
    tokenizer, config, generation_config : Any
        transformers' objects of the model.
    vocab_size : int
        Rows of the embedding table.

    Raises
    ------
    ConfigError
        There is no usable end token, or its text is empty.
    """
    if tokenizer.eos_token == "":
        raise ConfigError(
            "the tokenizer's eos_token is the empty string, so generation would not know where to end; "
            "set eos_token in tokenizer_config.json"
        )
    eos = frozenset(_valid([*_ids(generation_config.eos_token_id), *_ids(tokenizer.eos_token_id)], vocab_size))
    if not eos:
        raise ConfigError(
            "the model has no end-of-sequence token, so generation would not know where to end; "
            "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        )
    own_eos = _valid(_ids(tokenizer.eos_token_id), vocab_size)
    pads = [*_ids(tokenizer.pad_token_id), *_ids(generation_config.pad_token_id), *own_eos, min(eos)]
    starts = [*_ids(generation_config.decoder_start_token_id), *_ids(getattr(config, "decoder_start_token_id", None))]
    named = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    start = next(iter(_valid(starts, vocab_size)), None) if config.is_encoder_decoder else None
    return SpecialTokens(eos, _valid(pads, vocab_size)[0], start, named)


def context_limit(config: Any) -> int | None:
    """Return the most tokens a sequence may have, from the model's config; None where the model has no such limit.

    The tokenizer's ``model_max_length`` is no help: many checkpoints have 1e30 there.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "relative_attention_num_buckets", None) is not None:
        return None  # positions are relative; n_positions only tells the training length
    for name in _LIMITS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            if getattr(config, "model_type", "") in _POSITIONS_AFTER_PAD:
                return limit - (config.pad_token_id or 0) - 1  # positions begin behind the pad token's id
            return limit
    return None


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, Iterable) else [int(value)]


def _valid(ids: list[int], vocab_size: int) -> list[int]:
    return [token for token in ids if 0 <= token < vocab_size]

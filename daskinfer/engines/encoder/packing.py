"""Attention over rows that lie end to end in one sequence: each row sees itself only.

Rows of the same length that lie next to each other are computed together. Nothing is padded, so nothing is masked.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface

__all__ = ["ATTENTION", "NotPackableError", "installed", "laid_out", "layout"]

ATTENTION = "daskinfer_rows"
_HARMLESS = frozenset(
    ("dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache_position", "scaling")
)

_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("lengths of the rows that lie end to end", default=None)


class NotPackableError(Exception):
    """The model's attention is of another kind; the text says what it asked for."""


@contextmanager
def laid_out(lengths: Sequence[int]) -> Iterator[None]:
    """Say how long the rows of the next forward pass are, for this thread."""
    token = _lengths.set(tuple(lengths))
    try:
        yield
    finally:
        _lengths.reset(token)


def layout() -> tuple[int, ...] | None:
    """Return the lengths of the rows that lie end to end, or None when rows are padded."""
    return _lengths.get()


def installed(model: Any) -> None:
    """Give a model this attention.

    Raises
    ------
    ValueError
        The model's class does not let its attention be replaced.
    """
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **wishes: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers asks for it: tensors of shape (1, heads, tokens, size)."""
    _check(attention_mask, wishes)
    causal = wishes.get("is_causal")
    causal = bool(getattr(module, "is_causal", False)) if causal is None else bool(causal)
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    out = torch.empty(*queries.shape[:2], values.shape[-1], dtype=query.dtype, device=query.device)
    begin = 0
    for length, same in groupby(_lengths.get() or (len(queries),)):
        rows = sum(1 for _ in same)
        end = begin + rows * length
        found = F.scaled_dot_product_attention(
            _rows(queries[begin:end], rows),
            _rows(keys[begin:end], rows),
            _rows(values[begin:end], rows),
            is_causal=causal and length > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[begin:end].view(rows, length, *out.shape[1:]).copy_(found.transpose(1, 2))
        begin = end
    return out[None], None


def _rows(tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Return tokens of rows of one length, (tokens, heads, size), as (rows, heads, length, size)."""
    return tokens.view(rows, -1, *tokens.shape[1:]).transpose(1, 2)


def _check(mask: torch.Tensor | None, wishes: dict[str, Any]) -> None:
    asked = sorted(name for name, wish in wishes.items() if wish is not None and name not in _HARMLESS)
    if mask is not None:
        asked.append("a mask of its own")
    if asked:
        raise NotPackableError(", ".join(asked))

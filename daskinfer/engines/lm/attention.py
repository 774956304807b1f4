"""Attention over packed tokens, registered with transformers, so that models are taken as they are.

A layer first stores the keys and values of all tokens of the step. Then each group of rows attends to its slots, each piece
of a prompt to its own, and all tokens behind a shared segment attend to that segment in one call; the parts of one token
are put together by their log-sum-exps, which is exact. Where there are compiled kernels, they do the first two of these.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from daskinfer.engines.lm.kv_cache import KVCache, LayerShape
from daskinfer.engines.lm.plan import DecodeGroup, Few, Piece, StepPlan

__all__ = ["NAME", "Attention", "Call", "Kernels", "Recorder", "Runner", "described", "install"]

NAME = "daskinfer_packed"
_ATTRIBUTE = "daskinfer_runner"
_New: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Slot: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # keys and values, shape (heads, size, width), contiguous
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - returns the log-sum-exps too


def install(model: Any, runner: Any) -> None:
    """Make every attention layer of a model call ``runner.attend``."""
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _ATTRIBUTE, runner)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Return shape (1, tokens, heads, width) for queries (1, heads, tokens, width) and the like keys and values."""
    call = Call(
        module.layer_idx,
        kwargs.get("scaling"),
        kwargs.get("sliding_window"),
        attention_mask is not None,
        tuple(sorted(k for k in ("softcap", "s_aux", "position_bias") if kwargs.get(k) is not None)),
    )
    return getattr(module, _ATTRIBUTE).attend(call, query[0], key[0], value[0])[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer said when it called: its index, scale and window, whether it had a mask, and what else it wanted."""

    layer: int
    scale: float | None
    window: int | None
    masked: bool
    wishes: tuple[str, ...]


class Attention(Protocol):
    """What runs the attention of a layer."""

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return shape (tokens, heads, width) for queries (heads, tokens, width) and the like keys and values."""
        ...


@dataclass(slots=True)
class Recorder:
    """Plain causal attention over one prompt that notes what the layers are like."""

    calls: list[Call] = field(default_factory=list)
    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend, and note."""
        self.calls.append(call)
        self.shapes[call.layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=call.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class FewKernel(Protocol):
    """What runs the attention of rows that have few tokens in a step; see :mod:`daskinfer.engines.lm.few`."""

    threads: int

    def __call__(
        self,
        few: Few,
        cache: KVCache,
        call: Call,
        new: _New,
        out: torch.Tensor,
        sums: torch.Tensor | None,
    ) -> None:
        """Store keys and values of those rows, and write their output."""
        ...


class PieceKernel(Protocol):
    """What runs the attention of pieces of prompts; see :mod:`daskinfer.engines.lm.pieces`."""

    def __call__(
        self,
        pieces: Sequence[tuple[Piece, _Slot]],
        call: Call,
        new: _New,
        out: torch.Tensor,
        sums: torch.Tensor | None,
    ) -> None:
        """Store keys and values of those pieces, and write their output."""
        ...


def described(call: Call, new: _New, out: torch.Tensor, sums: torch.Tensor | None) -> tuple[float, tuple[int, ...]]:
    """Return a call's scale, and the integers that compiled functions know it by.

    These are address, and numbers from token to token and from head to head, of queries, keys and values; the addresses of
    ``out`` and ``sums`` (or 0); heads, key heads, their width and that of values; the window (or 0).

    Parameters
    ----------
    call : Call
    new : tuple of torch.Tensor
        Queries, keys and values of all tokens of the step, shape (tokens, heads, width); the numbers of a head lie one
        behind the other.
    out : torch.Tensor
        The like, contiguous.
    sums : torch.Tensor or None
        Shape (tokens, heads), contiguous.

    Raises
    ------
    TypeError
        They are not float32.
    """
    query, key, value = new
    if any(t.dtype != torch.float32 for t in (*new, out)):
        raise TypeError(f"compiled attention is for float32, and these are {[str(t.dtype) for t in (*new, out)]}")
    scale = query.shape[2] ** -0.5 if call.scale is None else call.scale
    return scale, (
        *(number for t in new for number in (t.data_ptr(), t.stride(0), t.stride(1))),
        out.data_ptr(),
        0 if sums is None else sums.data_ptr(),
        query.shape[1],
        key.shape[1],
        query.shape[2],
        value.shape[2],
        call.window or 0,
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """Compiled attention."""

    few: FewKernel
    pieces: PieceKernel


class Runner:
    """Runs the attention of the step that :attr:`plan` holds.

    Parameters
    ----------
    cache : KVCache
    kernels : Kernels or None
        Do what there is in a plan for them.
    """

    def __init__(self, cache: KVCache, kernels: Kernels | None = None) -> None:
        self.cache = cache
        self._kernels = kernels
        self.plan: StepPlan | None = None

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store keys and values, and return the output of all tokens, shape (tokens, heads, width)."""
        plan = self.plan
        assert plan is not None, "a layer ran outside a step"
        heads, tokens = query.shape[:2]
        query = query.transpose(0, 1)
        out = torch.empty((tokens, heads, value.shape[2]), dtype=query.dtype, device=query.device)
        sums = torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if plan.shared else None
        if self._kernels is None:
            self._store(plan, call.layer, key, value)
            for group in plan.groups:
                self._decode(group, call, query, out, sums)
            for piece in plan.pieces:
                self._read(piece, call, query, out, sums)
        else:
            assert not plan.groups, "with kernels, a plan is made for them"
            new = _lined(query), _lined(key.transpose(0, 1)), _lined(value.transpose(0, 1))
            if plan.few is not None:
                self._kernels.few(plan.few, self.cache, call, new, out, sums)
            if plan.pieces:
                slots = [(piece, self._slot(piece, call.layer)) for piece in plan.pieces]
                self._kernels.pieces(slots, call, new, out, sums)
        if sums is not None:
            self._look_back(plan, call, query, out, sums)
        return out

    def _store(self, plan: StepPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        heads = key.shape[0]
        for group in plan.groups:
            targets = group.targets(heads)
            for pool, new in zip(self.cache.pools[group.size][layer], (key, value), strict=True):
                width = new.shape[2]
                fresh = new[:, group.begin : group.end].transpose(0, 1).reshape(-1, width)
                pool.view(-1, width).index_copy_(0, targets, fresh)
        for piece in plan.pieces:
            for slot, new in zip(self._slot(piece, layer), (key, value), strict=True):
                slot[:, piece.start : piece.stop] = new[:, piece.begin : piece.end]

    def _slot(self, piece: Piece, layer: int) -> _Slot:
        if isinstance(piece.place, tuple):
            keys, values = self.cache.pools[piece.place[0]][layer]
            return keys[piece.place[1]], values[piece.place[1]]
        keys, values = self.cache.segments[piece.place][layer]
        return keys[0], values[0]

    def _decode(
        self, group: DecodeGroup, call: Call, query: torch.Tensor, out: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        keys, values = (
            t[group.first : group.stop, :, : group.longest] for t in self.cache.pools[group.size][call.layer]
        )
        a, b = group.begin, group.end
        rows, heads = b - a, query.shape[1]
        kv_heads = keys.shape[1]
        shared = heads // kv_heads
        grouped = query[a:b].reshape(rows, kv_heads, shared, -1)
        plain = query.device.type == "cpu" and query.dtype == torch.float32  # others would be rounded in between
        if plain and not (sums is not None and group.chained):
            # flash attention is made for many queries; with a few per row plain products are quicker
            bias = group.bias(call.window, query.dtype, kv_heads, shared)
            scale = grouped.shape[3] ** -0.5 if call.scale is None else call.scale
            scores = torch.baddbmm(bias, grouped.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=scale)
            torch.bmm(
                scores.softmax(dim=-1), values.flatten(0, 1), out=out[a:b].view(rows * kv_heads, shared, out.shape[2])
            )
            return
        mask = group.mask(call.window, query.dtype)
        if sums is None or not group.chained:
            o = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=call.scale)
        else:
            o, lse = attention_with_sums(grouped, keys, values, mask, call.scale)
            sums[a:b] = lse.reshape(rows, heads)
        out[a:b] = o.reshape(rows, heads, -1)

    def _read(
        self, piece: Piece, call: Call, query: torch.Tensor, out: torch.Tensor, sums: torch.Tensor | None
    ) -> None:
        keys, values = (t[None, :, : piece.stop] for t in self._slot(piece, call.layer))
        a, b = piece.begin, piece.end
        mask = piece.mask(call.window, query.dtype, query.device)
        own = query[a:b].transpose(0, 1)[None]
        if sums is None or not piece.chained:
            o = F.scaled_dot_product_attention(
                own, keys, values, attn_mask=mask, is_causal=mask is None, scale=call.scale, enable_gqa=True
            )
        else:
            o, lse = attention_with_sums(own, keys, values, mask, call.scale, causal=mask is None)
            sums[a:b] = lse[0].transpose(0, 1)
        out[a:b] = o[0].transpose(0, 1)

    def _look_back(
        self, plan: StepPlan, call: Call, query: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Add what the tokens see in shared segments."""
        for part in plan.shared:
            keys, values = self.cache.segments[part.segment][call.layer]
            mask = part.mask(call.window, query.dtype)
            own = query[part.tokens].transpose(0, 1)[None]
            o, lse = attention_with_sums(own, keys, values, mask, call.scale)
            seen, before = lse[0].transpose(0, 1), sums[part.tokens]
            if mask is not None:
                seen = seen.masked_fill((mask == -torch.inf).all(dim=-1)[:, None], -torch.inf)
            both = torch.logaddexp(before, seen)
            kept = out[part.tokens] * (before - both).exp_()[..., None].to(out.dtype)
            out[part.tokens] = kept.add_(o[0].transpose(0, 1) * (seen - both).exp_()[..., None].to(out.dtype))
            sums[part.tokens] = both


def _lined(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the numbers of its last dimension one behind the other."""
    return x if x.stride(2) == 1 else x.contiguous()


def attention_with_sums(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the log-sum-exp of its scores, shape (batch, heads, queries), in float32.

    The sum of a query that may look nowhere is not defined.
    """
    if query.device.type == "cpu" and keys.shape[3] == values.shape[3]:
        if mask is not None and mask.dim() == 2:
            mask = mask[None, None]
        o, lse = _flash_cpu(query, keys, values, 0.0, causal, attn_mask=mask, scale=scale)
        return o, lse.float()
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (keys, values))
    scores = (query @ keys.transpose(-1, -2)).float() * (query.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    if causal:
        n, m = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool, device=scores.device).triu_(1), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().nan_to_num_(0.0).to(values.dtype) @ values, lse

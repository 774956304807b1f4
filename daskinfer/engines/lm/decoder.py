"""The forward pass of Llama and its kin without the cost of going through modules: for the small steps of a CPU.

A step of a few rows spends as long in hundreds of small operations as in its multiplications. The layers that most models
share (norm, attention with rotary embedding, sum, norm, gated MLP, sum) are therefore run from here, on the model's own
weights, with a third of the operations; in the last layer only the tokens that are asked for go on behind the attention.
Whether a model is of this kind is not guessed from its name: its parts must be those known here, and its scores must come
out the same. Otherwise its own forward pass is used.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from daskinfer.engines.hf import LanguageModel
from daskinfer.engines.lm.attention import Attention, Call, Recorder, install
from daskinfer.engines.lm.linears import QuickLinear, fused

__all__ = ["Decoder", "decoder_of"]

_PROMPT = 12
_TOLERANCE = 2e-4  # of the largest score; what another order of float32 sums may change
_TOLERANCE_INT8 = 5e-2  # a last bit may tip an input into the next of its 255 codes
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class _OtherKindError(Exception):
    """The model has parts that are not known here."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root mean square norm: x · w ÷ √(mean(x²) + ε), over the last dimension (Zhang and Sennrich 2019)."""

    weight: torch.Tensor
    eps: torch.Tensor

    @classmethod
    def of(cls, module: Any) -> _Norm:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not isinstance(eps, float) or weight is None or weight.dim() != 1 or list(module.named_children()):
            raise _OtherKindError(f"its norms are {type(module).__name__}")
        return cls(weight.detach(), torch.tensor(eps, dtype=weight.dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    call: Call
    before: _Norm
    qkv: QuickLinear
    query_norm: _Norm | None
    key_norm: _Norm | None
    heads: int
    kv_heads: int
    out: QuickLinear
    after: _Norm
    gate_up: QuickLinear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: QuickLinear

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention, keep: torch.Tensor | None
    ) -> torch.Tensor:
        tokens, width = x.shape[0], cos.shape[-1]
        turned = self.heads + self.kv_heads
        qkv = self.qkv(self.before(x)).view(tokens, turned + self.kv_heads, width)
        together, value = qkv[:, :turned], qkv[:, turned:]
        if self.query_norm is not None and self.key_norm is not None:
            together = torch.cat(
                (self.query_norm(together[:, : self.heads]), self.key_norm(together[:, self.heads :])), 1
            )
        together = _rotated(together, cos, sin)
        query, key = together[:, : self.heads], together[:, self.heads :]
        seen = attention.attend(self.call, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        seen = seen.reshape(tokens, -1)
        if keep is not None:
            seen, x = seen[keep], x[keep]
        x = self.out.plus(seen, x)
        both = self.gate_up(self.after(x))
        inner = both.shape[-1] // 2
        return self.down.plus(self.activation(both[:, :inner]).mul_(both[:, inner:]), x)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotary embedding of x, shape (tokens, heads, width); cosines and sines are (tokens, 1, width)."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class Decoder:
    """Runs a model's layers on packed tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its linear layers are packed.
    calls : sequence of Call
        What each layer's attention asked for.

    Raises
    ------
    _OtherKindError
        The model has other parts.
    """

    def __init__(self, model: Any, calls: Sequence[Call]) -> None:
        base = getattr(model, "model", None)
        if base is None or {name for name, _ in base.named_children()} != {
            "embed_tokens",
            "layers",
            "norm",
            "rotary_emb",
        }:
            raise _OtherKindError("its parts have other names")
        self._embed: nn.Module = base.embed_tokens
        self._rotary: nn.Module = base.rotary_emb
        self._layers = [_layer(layer, call) for layer, call in zip(base.layers, calls, strict=True)]
        self._norm = _Norm.of(base.norm)
        self._head: nn.Module = model.get_output_embeddings()

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Return the scores behind the tokens ``last``, shape (len(last), vocabulary).

        Parameters
        ----------
        ids, positions : torch.Tensor
            Shape (1, tokens).
        last : torch.Tensor
            Indices of tokens.
        attention : Attention
            Runs the layers' attention.
        """
        x = self._embed(ids)
        cos, sin = (part[0, :, None] for part in self._rotary(x, positions))
        x = x[0]
        for layer in self._layers[:-1]:
            x = layer(x, cos, sin, attention, None)
        x = self._layers[-1](x, cos, sin, attention, last)
        scores: torch.Tensor = self._head(self._norm(x))
        return scores


def decoder_of(loaded: LanguageModel, calls: Sequence[Call]) -> Decoder | None:
    """Return the quick forward pass of a model whose linear layers are packed; None where its own has to be used."""
    model = loaded.model
    try:
        decoder = Decoder(model, sorted(calls, key=lambda call: call.layer))
        same = _same(decoder, loaded)
    except (_OtherKindError, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return decoder if same else None


def _same(decoder: Decoder, loaded: LanguageModel) -> bool:
    """Whether model and decoder give the same scores, at positions all over the model's context."""
    ids = torch.arange(_PROMPT, device=loaded.device)[None] * 7 % loaded.vocab_size
    spread = max((loaded.limit or 4096) // _PROMPT, 1)
    positions = torch.arange(_PROMPT, device=loaded.device)[None] * spread
    recorder = Recorder()
    install(loaded.model, recorder)
    with torch.inference_mode():
        expected = loaded.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        found = decoder(ids, positions, torch.arange(_PROMPT, device=loaded.device), recorder)
    exact = all(linear.exact for layer in decoder._layers for linear in (layer.qkv, layer.down))  # noqa: SLF001
    allowed = (_TOLERANCE if exact else _TOLERANCE_INT8) * max(float(expected.abs().max()), 1e-6)
    return found.shape == expected.shape and float((expected - found).abs().max()) <= allowed


def _layer(layer: Any, call: Call) -> _Layer:
    attention, mlp = _parts(layer, _LAYER, "self_attn", "mlp")
    norms = _HEAD_NORMS if hasattr(attention, "q_norm") else set()
    out, *head_norms = _parts(attention, _ATTENTION | norms, "o_proj", *sorted(norms, reverse=True))
    down, act = _parts(mlp, _MLP, "down_proj", "act_fn")
    qkv, gate_up = fused(attention.q_proj), fused(mlp.gate_proj)
    if qkv is None or gate_up is None or not isinstance(out, QuickLinear) or not isinstance(down, QuickLinear):
        raise _OtherKindError("its linear layers are not packed")
    width = attention.head_dim
    heads = out.in_features // width
    return _Layer(
        call,
        _Norm.of(layer.input_layernorm),
        qkv,
        _Norm.of(head_norms[0]) if norms else None,
        _Norm.of(head_norms[1]) if norms else None,
        heads,
        (qkv.out_features // width - heads) // 2,
        out,
        _Norm.of(layer.post_attention_layernorm),
        gate_up,
        F.silu if isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" else act,
        down,
    )


def _parts(module: Any, expected: set[str], *names: str) -> list[Any]:
    found = {name for name, _ in module.named_children()}
    if found != expected:
        raise _OtherKindError(f"{type(module).__name__} has other parts")
    return [getattr(module, name) for name in names]

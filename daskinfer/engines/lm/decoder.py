"""The forward pass of Llama and its kin without the cost of going through modules: for the small steps of a CPU.

A step of a few rows spends as long in hundreds of small operations as in its multiplications. The layers that most models
share (norm, attention with rotary embedding, sum, norm, gated MLP, sum) are therefore run from here, on the model's own
weights, with a third of the operations; in the last layer only the tokens that are asked for go on behind the attention.
Whether a model is of this kind is not guessed from its name: its parts must be those known here, and its scores must come
out the same. Otherwise its own forward pass is used.

Runs on: worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from daskinfer.engines.hf import LanguageModel
from daskinfer.engines.lm.attention import Attention, Call, Recorder, install
from daskinfer.engines.lm.linears import QuickLinear, fused
from daskinfer.engines.lm.operations import Activation, Norm, Operations
from daskinfer.errors import describe

__all__ = ["Decoder", "decoder_of"]

_PROMPT, _SHORT, _TRIALS = 12, 3, 8
_TOLERANCE = 2e-4  # of the largest number; what another order of float32 sums may change
_TOLERANCE_INT8 = 0.1  # of the largest score, where inputs have tipped into others of their 255 codes
_logger = logging.getLogger(__name__)
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


_State = tuple[torch.Tensor, torch.Tensor | None]  # tokens, and what is still to be added to them


class _OtherKindError(Exception):
    """The model has parts that are not known here."""


@dataclass(frozen=True, slots=True)
class _Layer:
    call: Call
    do: Operations
    before: Norm
    qkv: QuickLinear
    head_norm: Norm | None
    heads: int
    kv_heads: int
    out: QuickLinear
    after: Norm
    gate_up: QuickLinear
    activation: Activation
    down: QuickLinear

    def __call__(
        self, state: _State, cos: torch.Tensor, sin: torch.Tensor, attention: Attention, keep: torch.Tensor | None
    ) -> _State:
        x, added = state
        do, turned, width = self.do, self.heads + self.kv_heads, cos.shape[-1]
        heads = self.qkv(do.add_and_norm(x, added, self.before)).view(len(x), turned + self.kv_heads, width)
        together, value = do.turn(heads, turned, self.head_norm, cos, sin), heads[:, turned:]
        query, key = together[:, : self.heads], together[:, self.heads :]
        seen = attention.attend(self.call, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        seen = seen.reshape(len(x), -1)
        if keep is not None:
            seen, x = seen[keep], x[keep]
        both = self.gate_up(do.add_and_norm(x, self.out(seen), self.after))
        return x, self.down(do.gate(both, self.activation))


class Decoder:
    """Runs a model's layers on packed tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its linear layers are packed.
    calls : sequence of Call
        What each layer's attention asked for.
    operations : Operations
        Do what is between the multiplications.

    Raises
    ------
    _OtherKindError
        The model has other parts.
    """

    def __init__(self, model: Any, calls: Sequence[Call], operations: Operations) -> None:
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
        self._do = operations
        self._layers = [_layer(layer, call, operations) for layer, call in zip(base.layers, calls, strict=True)]
        self._norm = _norm(base.norm)
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
        x, cos, sin = self._begin(ids, positions)
        state: _State = x, None
        for layer in self._layers[:-1]:
            state = layer(state, cos, sin, attention, None)
        state = self._layers[-1](state, cos, sin, attention, last)
        scores: torch.Tensor = self._head(self._do.add_and_norm(*state, self._norm))
        return scores

    def parts(
        self, ids: torch.Tensor, positions: torch.Tensor, states: Sequence[torch.Tensor], attention: Attention
    ) -> list[torch.Tensor]:
        """Return what each part makes of what the model gave it: embedding, layers (the last one normed), scores.

        Parameters
        ----------
        ids, positions : torch.Tensor
            Shape (1, tokens).
        states : sequence of torch.Tensor
            What the model's layers were given, and last what its scores follow from; shape (tokens, width).
        attention : Attention
            Runs the layers' attention.
        """
        x, cos, sin = self._begin(ids, positions)
        given = zip(self._layers, states[:-1], strict=True)
        *layers, last = (layer((state.clone(), None), cos, sin, attention, None) for layer, state in given)
        sums = [x + added for x, added in layers if added is not None]
        return [x, *sums, self._do.add_and_norm(*last, self._norm), self._head(states[-1])]

    def _begin(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the embedding of tokens, and cosines and sines of their positions."""
        x = self._embed(ids)
        cos, sin = (part[0, :, None] for part in self._rotary(x, positions))
        return x[0], cos, sin


def decoder_of(loaded: LanguageModel, calls: Sequence[Call], operations: Operations) -> Decoder | None:
    """Return the quick forward pass of a model whose linear layers are packed; None where its own has to be used."""
    try:
        decoder = Decoder(loaded.model, sorted(calls, key=lambda call: call.layer), operations)
        if _same(decoder, loaded):
            return decoder
        reason = "its scores are others"
    except Exception as error:  # noqa: BLE001 - a model may be made of anything, and its own forward pass is always there
        reason = describe(error)
    _logger.debug("%s runs by its own forward pass: %s", type(loaded.model).__name__, reason)
    return None


def _same(decoder: Decoder, loaded: LanguageModel) -> bool:
    """Whether model and decoder compute the same, at positions all over the model's context.

    In 8 bits the last bit of a sum now and then tips an input into its next code, which changes all that follows. So each
    part is given what the model gave it, and has to agree for one of several short prompts.
    """
    exact = all(linear.exact for layer in decoder._layers for linear in (layer.qkv, layer.down))  # noqa: SLF001
    agreed: list[bool] = []
    for trial in range(1 if exact else _TRIALS):
        tokens = _PROMPT if exact else _SHORT
        ids = (torch.arange(tokens, device=loaded.device)[None] + trial * tokens) * 7 % loaded.vocab_size
        positions = torch.arange(tokens, device=loaded.device)[None] * max((loaded.limit or 4096) // tokens, 1)
        recorder = Recorder()
        install(loaded.model, recorder)
        with torch.inference_mode():
            made = loaded.model(input_ids=ids, position_ids=positions, use_cache=False, output_hidden_states=True)
            states, scores = [state[0] for state in made.hidden_states], made.logits[0]
            found = decoder(ids, positions, torch.arange(tokens, device=loaded.device), recorder)
            parts = decoder.parts(ids, positions, states, recorder)
        if not _agrees(found, scores, None, _TOLERANCE if exact else _TOLERANCE_INT8):
            return False
        before = [None, *states[:-2], None, None]  # a layer adds to what it was given; the last one's sum is normed
        pairs = zip(parts, [*states, scores], before, strict=True)
        now = [_agrees(part, expected, base, _TOLERANCE) for part, expected, base in pairs]
        agreed = [a or b for a, b in zip(agreed or now, now, strict=True)]
        if all(agreed):
            return True
    return False


def _agrees(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | None, tolerance: float) -> bool:
    """Whether two results are the same but for rounding, as compared with what was added to ``base``."""
    added = expected if base is None else expected - base
    return found.shape == expected.shape and float((expected - found).abs().max()) <= tolerance * float(
        added.abs().max()
    )


def _layer(layer: Any, call: Call, operations: Operations) -> _Layer:
    attention, mlp = _parts(layer, _LAYER, "self_attn", "mlp")
    norms = _HEAD_NORMS if hasattr(attention, "q_norm") else set()
    out, *head_norms = _parts(attention, _ATTENTION | norms, "o_proj", *sorted(norms, reverse=True))
    down, act = _parts(mlp, _MLP, "down_proj", "act_fn")
    qkv, gate_up = fused(attention.q_proj), fused(mlp.gate_proj)
    if qkv is None or gate_up is None or not isinstance(out, QuickLinear) or not isinstance(down, QuickLinear):
        raise _OtherKindError("its linear layers are not packed")
    width = attention.head_dim
    heads = out.in_features // width
    kv_heads = (qkv.out_features // width - heads) // 2
    return _Layer(
        call,
        operations,
        _norm(layer.input_layernorm),
        qkv,
        _head_norm(head_norms, (heads, kv_heads)) if norms else None,
        heads,
        kv_heads,
        out,
        _norm(layer.post_attention_layernorm),
        gate_up,
        F.silu if isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" else act,
        down,
    )


def _norm(module: Any) -> Norm:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or list(module.named_children()):
        raise _OtherKindError(f"its norms are {type(module).__name__}")
    return Norm(weight.detach(), weight.new_tensor([eps]))


def _head_norm(modules: Sequence[Any], heads: tuple[int, int]) -> Norm:
    """Return the norms of queries and of keys as one for all these heads."""
    norms = [_norm(module) for module in modules]
    pairs = list(zip(norms, heads, strict=True))
    return Norm(
        torch.cat([norm.weight.expand(count, -1) for norm, count in pairs]),
        torch.cat([norm.eps.expand(count, 1) for norm, count in pairs]),
    )


def _parts(module: Any, expected: set[str], *names: str) -> list[Any]:
    found = {name for name, _ in module.named_children()}
    if found != expected:
        raise _OtherKindError(f"{type(module).__name__} has other parts")
    return [getattr(module, name) for name in names]

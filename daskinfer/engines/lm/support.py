"""Whether a model's attention is of the kind that this engine computes: asked of the model itself, at load.

The model runs one short prompt twice, once with its own attention and once with ours, which notes what each layer asks for.

Runs on: worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from daskinfer.engines.hf import LanguageModel
from daskinfer.engines.lm.attention import Call, Recorder, install

__all__ = ["UnsupportedError", "probe"]

_PROMPT = 12
_LAYERS = ("full_attention", "sliding_attention")
_MOVING_ROPE = ("dynamic", "longrope")  # their angles depend on the longest row of a batch
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


class UnsupportedError(Exception):
    """The model needs something that this engine does not do; the text says what."""


def probe(loaded: LanguageModel) -> Recorder:
    """Return what each attention layer asks for, and what it keeps of a token. The model's attention is ours afterwards.

    Raises
    ------
    UnsupportedError
        The model cannot be run by this engine.
    """
    model = loaded.model
    _check_config(model.config, encoder_decoder=loaded.encoder_decoder)
    missing = {"input_ids", "position_ids", "use_cache"} - set(inspect.signature(model.forward).parameters)
    if missing:
        raise UnsupportedError(f"its forward takes no {' and no '.join(sorted(missing))}")
    ids = torch.arange(_PROMPT, device=loaded.device)[None] % loaded.vocab_size
    positions = torch.arange(_PROMPT, device=loaded.device)[None]
    recorder = Recorder()
    with torch.inference_mode():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        try:
            install(model, recorder)
            with _explained():
                found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        except ValueError as error:
            raise UnsupportedError(f"its attention cannot be replaced ({error})") from error
    _check_calls(recorder.calls, model.config)
    scale = float(expected.float().abs().max())
    if not float((expected - found).float().abs().max()) <= _TOLERANCE.get(expected.dtype, 2e-1) * max(scale, 1.0):
        raise UnsupportedError("its attention computes something else (a bias on positions, perhaps)")
    return recorder


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        raise UnsupportedError(f"its layers do not run with packed attention ({error})") from error


def _check_config(config: Any, *, encoder_decoder: bool) -> None:
    if encoder_decoder:
        raise UnsupportedError("it has an encoder")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_LAYERS)
    if kinds:
        raise UnsupportedError(f"it has layers of type {', '.join(sorted(kinds))}")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in _MOVING_ROPE:
            raise UnsupportedError(
                f"its rotary embedding is of type {part['rope_type']!r}, which depends on batch mates"
            )


def _check_calls(calls: list[Call], config: Any) -> None:
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = [call.layer for call in calls]
    expected = getattr(config, "num_hidden_layers", len(layers))
    if len(layers) != expected or len(set(layers)) != expected:
        raise UnsupportedError(f"{len(set(layers))} of its {expected} layers attend in the usual way")
    if any(call.masked for call in calls):
        raise UnsupportedError("its layers bring a mask of their own")
    wishes = sorted({wish for call in calls for wish in call.wishes})
    if wishes:
        raise UnsupportedError(f"its attention uses {', '.join(wishes)}")
    kinds = getattr(config, "layer_types", None) or ()
    for call in calls:
        if call.layer < len(kinds) and (kinds[call.layer] == "sliding_attention") != (call.window is not None):
            raise UnsupportedError("its layers do not tell their sliding window")

"""Packed, fused and 8-bit linear layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import Int8Linear, Rounding, load_language_model
from daskinfer.engines.lm.linears import PackedLinear, pack_linears
from daskinfer.engines.lm.settings import Settings
from daskinfer.errors import ConfigError
from tests.engines.lm.models import SUPPORTED

IDS = torch.arange(8, 30)[None]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_a_packed_layer_is_the_layer(bias: bool, tokens: int) -> None:
    layer = nn.Linear(24, 40, bias=bias)
    x = torch.randn(1, tokens, 24)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(layer.weight, layer.bias)(x), layer(x))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_packed_model_is_the_model(kind: str, model_folder: Callable[[str], Path]) -> None:
    loaded = load_language_model(ModelSpec(str(model_folder(kind))))
    with torch.inference_mode():
        before = loaded.model(input_ids=IDS, use_cache=False).logits
        pack_linears(loaded, Settings(), Rounding())
        left = [m for m in loaded.model.modules() if type(m) in (nn.Linear, Conv1D)]
        after = loaded.model(input_ids=IDS, use_cache=False).logits
        again = loaded.model(input_ids=IDS, use_cache=False).logits
    assert not left
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert torch.equal(after, again)


def test_eight_bits_are_near_and_rows_stay_independent(model_folder: Callable[[str], Path]) -> None:
    loaded = load_language_model(ModelSpec(str(model_folder("llama"))))
    with torch.inference_mode():
        before = loaded.model(input_ids=IDS, use_cache=False).logits
        pack_linears(loaded, Settings(int8=True), Rounding())
        after = loaded.model(input_ids=IDS, use_cache=False).logits
        shorter = loaded.model(input_ids=IDS[:, :9], use_cache=False).logits
    assert torch.cosine_similarity(before, after, dim=-1).min() > 0.95
    assert not torch.equal(before, after)
    torch.testing.assert_close(after[:, :9], shorter, atol=1e-4, rtol=1e-4)
    assert isinstance(loaded.model.lm_head, PackedLinear)
    assert sum(isinstance(m, Int8Linear) for m in loaded.model.modules()) == 2 * 4


def test_eight_bits_need_a_cpu_in_float32(model_folder: Callable[[str], Path]) -> None:
    loaded = load_language_model(ModelSpec(str(model_folder("llama")), dtype="bfloat16"))
    with pytest.raises(ConfigError, match="int8=True needs a CPU with oneDNN, and dtype float32"):
        pack_linears(loaded, Settings(int8=True), Rounding())
    pack_linears(loaded, Settings(), Rounding())
    assert type(loaded.model.lm_head) is nn.Linear

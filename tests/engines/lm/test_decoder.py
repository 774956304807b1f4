"""The quick way through Llama and its kin: taken where it computes the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from daskinfer.config import ModelSpec
from daskinfer.engines.hf import LanguageModel, Rounding, load_language_model
from daskinfer.engines.lm.attention import Recorder, install
from daskinfer.engines.lm.decoder import Decoder, decoder_of
from daskinfer.engines.lm.linears import pack_linears
from daskinfer.engines.lm.operations import Operations
from daskinfer.engines.lm.settings import Settings
from daskinfer.engines.lm.support import probe
from tests.engines.lm.models import SUPPORTED, make

QUICK = ("llama", "mistral", "qwen2", "qwen3")
Folder = Callable[[str], Path]


def prepared(folder: Path, **settings: Any) -> tuple[LanguageModel, Decoder | None]:
    """Load a model, pack it, and ask for its decoder."""
    loaded = load_language_model(ModelSpec(str(folder)))
    asked = probe(loaded)
    pack_linears(loaded, Settings(**settings), Rounding())
    return loaded, decoder_of(loaded, asked.calls, Operations())


@pytest.mark.parametrize("kind", QUICK)
def test_scores_are_those_of_the_model(kind: str, model_folder: Folder) -> None:
    loaded, decoder = prepared(model_folder(kind))
    assert decoder is not None
    ids = torch.arange(40)[None] * 3 % loaded.vocab_size
    positions, last = torch.arange(40)[None], torch.tensor([0, 7, 39])
    recorder = Recorder()
    install(loaded.model, recorder)
    with torch.inference_mode():
        expected = loaded.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        found = decoder(ids, positions, last, recorder)
    torch.testing.assert_close(found, expected[last], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(set(SUPPORTED) - set(QUICK)))
def test_models_of_other_kinds_run_by_themselves(kind: str, model_folder: Folder) -> None:
    assert prepared(model_folder(kind))[1] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"tie_word_embeddings": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_variants_of_llama_are_quick_too(changes: dict[str, Any], tmp_path: Path) -> None:
    assert prepared(make(tmp_path, "llama", **changes))[1] is not None


def test_windows_are_kept(tmp_path: Path) -> None:
    _, decoder = prepared(make(tmp_path, "mistral", sliding_window=16))
    assert decoder is not None
    assert [layer.call.window for layer in decoder._layers] == [16, 16]


def test_a_model_that_computes_something_else_runs_by_itself(model_folder: Folder) -> None:
    loaded = load_language_model(ModelSpec(str(model_folder("llama"))))
    calls = probe(loaded).calls
    pack_linears(loaded, Settings(), Rounding())
    embed = loaded.model.model.embed_tokens
    embed.register_forward_hook(lambda module, args, out: out * 1.01)
    assert decoder_of(loaded, calls, Operations()) is not None  # the module is called, so what it was given counts
    mlp = loaded.model.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, out: out * 1.01)
    assert decoder_of(loaded, calls, Operations()) is None


def test_eight_bits_take_the_quick_way(model_folder: Folder) -> None:
    assert prepared(model_folder("llama"), int8=True)[1] is not None
    assert prepared(model_folder("granite"), int8=True)[1] is None


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "other", [{"residual_multiplier": 0.97}, {"attention_multiplier": 0.4}, {"logits_scaling": 1.03}]
)
def test_small_differences_are_seen(int8: bool, other: dict[str, float], tmp_path: Path) -> None:
    same = {"residual_multiplier": 1.0, "attention_multiplier": 8**-0.5, "logits_scaling": 1.0}
    assert prepared(make(tmp_path / "same", "granite", **same), int8=int8)[1] is not None
    found = prepared(make(tmp_path / "other", "granite", **(same | other)), int8=int8)[1]
    assert (found is None) == ("attention_multiplier" not in other), "a layer's own scale is asked for in its call"


def test_a_model_of_strange_parts_runs_by_itself(model_folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_language_model(ModelSpec(str(model_folder("llama"))))
    calls = probe(loaded).calls
    pack_linears(loaded, Settings(), Rounding())
    strange: dict[str, int] = {}
    loaded.model.model.rotary_emb.forward = lambda x, position_ids: strange["cos"]
    with caplog.at_level("DEBUG", "daskinfer.engines.lm.decoder"):
        assert decoder_of(loaded, calls, Operations()) is None
    assert "LlamaForCausalLM runs by its own forward pass: KeyError" in caplog.text


def test_weights_that_are_not_packed_do_not(model_folder: Folder) -> None:
    assert prepared(model_folder("llama"), pack_weights=False)[1] is None

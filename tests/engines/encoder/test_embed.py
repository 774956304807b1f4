"""Vectors: equal to a plain reference whatever the batch, the layout and the pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import T5EncoderModel

from daskinfer.engines.encoder import EncoderEngine
from daskinfer.engines.encoder.options import POOLINGS
from daskinfer.engines.encoder.pooling import at_precision, pool
from daskinfer.engines.hf import Int8Linear
from daskinfer.errors import ConfigError
from daskinfer.records import Completed, Failed, SamplingParams
from tests.engines.encoder.models import (
    KINDS,
    LIMIT,
    PACKED,
    RIGHT,
    TEXTS,
    change_weights,
    hidden,
    loaded,
    make,
    pooled,
    run,
    sentence_folder,
    spec_of,
    vectors,
)
from tests.engines.tiny import words


@pytest.mark.parametrize("kind", KINDS)
def test_c24_vectors_are_those_of_each_row_alone(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path, kind)
    call = {"kind": T5EncoderModel} if kind == "t5" else {}
    expected = torch.stack([pooled(tokens, "mean") for tokens in hidden(folder, TEXTS, **call)]).numpy()
    for packing in (True, False):
        found = vectors(spec_of(folder, packing=packing), TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_packed_where_the_model_allows_it(tmp_path: Path, kind: str) -> None:
    engine = loaded(spec_of(make(tmp_path, kind)))
    try:
        assert engine.stats().extra["packed"] is (kind in PACKED)
    finally:
        engine.close()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("mode", POOLINGS)
def test_c24_each_pooling_is_its_definition(tmp_path: Path, mode: str, packing: bool) -> None:
    folder = make(tmp_path, "bert")
    expected = torch.stack([pooled(tokens, mode) for tokens in hidden(folder, TEXTS)]).numpy()
    found = vectors(spec_of(folder, pooling=mode, packing=packing), TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
def test_c24_last_token_is_the_rows_own_whatever_side_the_tokenizer_pads(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path, kind)
    expected = torch.stack([tokens[-1] for tokens in hidden(folder, TEXTS)]).numpy()
    for packing in (True, False):
        found = vectors(spec_of(folder, pooling="lasttoken", packing=packing), TEXTS)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mates", [[], [words(2, i) for i in range(7)], [words(40, i) for i in range(7)]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c24_mates_do_not_matter(tmp_path: Path, mates: list[str], dtype: str) -> None:
    from dataclasses import replace

    spec = replace(spec_of(make(tmp_path), normalize=True, max_batch_tokens=1000), dtype=dtype)
    alone = vectors(spec, [TEXTS[3]])[0]
    found = vectors(spec, [TEXTS[3], *mates])[0]
    assert np.abs(found - alone).max() < (1e-5 if dtype == "float32" else 0.02)
    assert abs(np.linalg.norm(found) - 1) < 1e-3


def test_a_batch_of_one_is_a_vector(tmp_path: Path) -> None:
    found = vectors(spec_of(make(tmp_path)), [TEXTS[0]])
    assert found.shape == (1, 32)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "binary"])
def test_c24_a_zero_vector_stays_zero_and_says_so(tmp_path: Path, precision: str) -> None:
    folder = make(tmp_path, "bert")
    zero = torch.zeros(32)
    change_weights(folder, {f"encoder.layer.1.output.LayerNorm.{name}": zero.clone() for name in ("weight", "bias")})
    for result in run(spec_of(folder, normalize=True, precision=precision), TEXTS[:3]):
        assert isinstance(result, Completed)
        assert result.finish_reason == "zero_vector"
        assert not result.output.any()


def test_c24_a_vector_of_no_numbers_is_a_failure(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert")
    change_weights(folder, {"encoder.layer.1.output.LayerNorm.bias": torch.full((32,), float("nan"))})
    for result in run(spec_of(folder, normalize=True), TEXTS[:3]):
        assert isinstance(result, Failed)
        assert "not numbers" in result.message


# ---------------------------------------------------------------- what the folder and the options say


def test_a_sentence_transformers_folder_is_followed(tmp_path: Path) -> None:
    folder = sentence_folder(
        tmp_path,
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 32},
        normalize=True,
    )
    assert EncoderEngine.output_type(spec_of(folder)) == "float32[64]"
    expected = torch.stack([torch.cat([t[0], t.mean(0)]) for t in hidden(folder, TEXTS)])
    expected = torch.nn.functional.normalize(expected, dim=1)
    np.testing.assert_allclose(vectors(spec_of(folder), TEXTS), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_a_dense_layer_and_a_transformer_in_a_folder_inside(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = sentence_folder(tmp_path, dense=24, normalize=False, inside="0_Transformer")
    assert EncoderEngine.output_type(spec_of(folder)) == "float32[24]"
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    means = torch.stack([t.mean(0) for t in hidden(folder / "0_Transformer", TEXTS)])
    expected = torch.tanh(means @ weights["linear.weight"].T + weights["linear.bias"])
    np.testing.assert_allclose(vectors(spec_of(folder), TEXTS), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_normalize_can_be_switched(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, normalize=True)
    raw = vectors(spec_of(folder, normalize=False), TEXTS)
    unit = vectors(spec_of(folder), TEXTS)
    assert np.allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, rtol=1e-5, atol=1e-5)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 1e-3


def test_matryoshka_vectors_are_cut_then_normalised(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, normalize=True)
    whole = vectors(spec_of(folder, normalize=False), TEXTS)[:, :16]
    assert EncoderEngine.output_type(spec_of(folder, dims=16)) == "float32[16]"
    found = vectors(spec_of(folder, dims=16), TEXTS)
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole, axis=1, keepdims=True), rtol=1e-5, atol=1e-5)


def test_prompts_by_text_by_name_and_by_default(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "w1 w2 ", "none": "", "null": None}, "default_prompt_name": "query"}
    folder = sentence_folder(tmp_path, settings=settings)
    expected = vectors(spec_of(folder, prompt=""), [f"w1 w2 {text}" for text in TEXTS])
    for options in ({}, {"prompt_name": "query"}, {"prompt": "w1 w2 "}):
        np.testing.assert_allclose(vectors(spec_of(folder, **options), TEXTS), expected, rtol=1e-6, atol=1e-6)
    bare = vectors(spec_of(folder, prompt_name="none"), TEXTS)
    np.testing.assert_allclose(bare, vectors(spec_of(folder, prompt=""), TEXTS), rtol=1e-6, atol=1e-6)
    assert np.abs(bare - expected).max() > 1e-3
    with pytest.raises(ConfigError, match=r"no prompt 'passage'; it has 'query', 'none'"):
        loaded(spec_of(folder, prompt_name="passage"))


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_prompt_may_be_left_out_of_pooling(tmp_path: Path, mode: str) -> None:
    pooling = {"pooling_mode": mode, "include_prompt": False, "word_embedding_dimension": 32}
    folder = sentence_folder(tmp_path, pooling=pooling, normalize=False)
    tokens = hidden(folder, [f"w1 w2 {text}" for text in TEXTS])
    kept = [t[3:] for t in tokens]  # the first special token and two words
    if mode == "weightedmean":
        weights = [torch.arange(1, len(t) + 1, dtype=torch.float32)[3:, None] for t in tokens]
        expected = torch.stack([(t * w).sum(0) / w.sum() for t, w in zip(kept, weights, strict=True)])
    else:
        expected = torch.stack([pooled(t, mode) for t in kept])
    np.testing.assert_allclose(vectors(spec_of(folder, prompt="w1 w2 "), TEXTS), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_lower_case_is_followed(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, bert={"max_seq_length": 12, "do_lower_case": True})
    assert np.array_equal(vectors(spec_of(folder), ["W1 W2"]), vectors(spec_of(folder), ["w1 w2"]))


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = make(tmp_path)
    found = run(spec_of(folder), [[2, 10, 11, 3], [10, 99999]])
    assert isinstance(found[0], Completed)
    assert found[0].usage.prompt_tokens == 4
    assert isinstance(found[1], Failed)
    assert "99999" in found[1].message


# ---------------------------------------------------------------- empty and over-long


@pytest.mark.parametrize("text", ["", "   ", "\n\t "])
def test_an_empty_text_fails(tmp_path: Path, text: str) -> None:
    (found,) = run(spec_of(make(tmp_path)), [text])
    assert isinstance(found, Failed)
    assert found.kind == "empty_prompt"


def test_an_over_long_text_fails_and_names_both_numbers(tmp_path: Path) -> None:
    first, second = run(spec_of(make(tmp_path)), [words(LIMIT), words(LIMIT - 2)])
    assert isinstance(first, Failed)
    assert first.kind == "too_long"
    assert f"{LIMIT + 2} tokens" in first.message
    assert f"at most {LIMIT}" in first.message
    assert isinstance(second, Completed)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_over_long_text_is_cut_where_asked(tmp_path: Path, side: str) -> None:
    folder = make(tmp_path)
    listed = words(LIMIT + 5).split()
    kept = listed[: LIMIT - 2] if side == "right" else listed[-(LIMIT - 2) :]
    (found,) = run(spec_of(folder), [" ".join(listed)], SamplingParams(truncate=side))
    assert isinstance(found, Completed)
    assert found.usage.prompt_tokens == LIMIT
    assert found.usage.truncated_tokens == 7
    np.testing.assert_allclose(found.output, vectors(spec_of(folder), [" ".join(kept)])[0], rtol=1e-6, atol=1e-6)


def test_the_folders_own_length_counts_and_can_be_raised(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, bert={"max_seq_length": 10})
    (short,) = run(spec_of(folder), [words(20)], RIGHT)
    (long,) = run(spec_of(folder, max_tokens=40), [words(20)], RIGHT)
    assert isinstance(short, Completed)
    assert isinstance(long, Completed)
    assert (short.usage.prompt_tokens, long.usage.prompt_tokens) == (10, 22)
    with pytest.raises(ConfigError, match=f"max_tokens=400 is more than the {LIMIT} positions"):
        loaded(spec_of(folder, max_tokens=400))


# ---------------------------------------------------------------- precision


def test_precisions_keep_the_direction(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    exact = vectors(spec_of(folder), TEXTS)
    for precision, dtype, least in (("float16", np.float16, 0.99999), ("int8", np.int8, 0.9999)):
        assert EncoderEngine.output_type(spec_of(folder, precision=precision)) == f"{precision}[32]"
        found = vectors(spec_of(folder, precision=precision), TEXTS)
        assert found.dtype == dtype
        plain = found.astype(np.float64)
        cosine = (plain * exact).sum(1) / np.linalg.norm(plain, axis=1) / np.linalg.norm(exact, axis=1)
        assert cosine.min() > least
    assert EncoderEngine.output_type(spec_of(folder, precision="binary")) == "uint8[4]"
    bits = vectors(spec_of(folder, precision="binary"), TEXTS)
    assert np.array_equal(np.unpackbits(bits, axis=1).astype(bool), exact > 0)


def test_numbers_beyond_float16_stay_finite() -> None:
    found = at_precision(np.array([[1e9, -1e9, 1.0]], np.float32), "float16")
    assert np.isfinite(found).all()


def test_int8_weights_tell_their_cosine(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    engine = loaded(spec_of(folder, int8_weights=True))
    try:
        cosine = engine.stats().extra["int8_cosine"]
    finally:
        engine.close()
    assert 0.5 < cosine < 1.0
    found = vectors(spec_of(folder, int8_weights=True), TEXTS)
    alone = np.stack([vectors(spec_of(folder, int8_weights=True), [text])[0] for text in TEXTS[:3]])
    np.testing.assert_allclose(found[:3], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_int8_does_not_overflow(rows: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(384, 64)
    with torch.inference_mode():
        layer.weight.fill_(0.5)
        x = torch.full((rows, 384), 2.0)
        assert torch.allclose(Int8Linear(layer.weight, layer.bias)(x), layer(x), rtol=1e-5)
        layer.weight.normal_()
        x.normal_()
        exact = layer(x)
        assert (Int8Linear(layer.weight, layer.bias)(x) - exact).norm() < 0.03 * exact.norm()


# ---------------------------------------------------------------- the function underneath


@st.composite
def _rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    return lengths, [draw(st.integers(0, length)) for length in lengths]


@settings(max_examples=60)
@given(_rows(), st.lists(st.sampled_from(POOLINGS), min_size=1, max_size=3), st.integers(0, 99))
def test_c24_pooling_of_a_row_is_that_of_the_row_alone(
    rows: tuple[list[int], list[int]], modes: list[Any], seed: int
) -> None:
    lengths, skips = rows
    tokens = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(seed))
    together = pool(tokens, lengths, skips, modes)
    assert together.isfinite().all()
    for row, part in enumerate(torch.split(tokens, lengths)):
        alone = pool(part, [lengths[row]], [skips[row]], modes)[0]
        assert torch.allclose(together[row], alone, atol=1e-6)
        if skips[row] == lengths[row]:
            assert not together[row].any()

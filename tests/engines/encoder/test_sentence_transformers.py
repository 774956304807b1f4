"""The same vectors and scores as sentence-transformers, where that is installed; and on real text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from daskinfer import demo
from daskinfer.config import ModelSpec
from daskinfer.engines.hf import quiet
from daskinfer.errors import ConfigError
from daskinfer.records import SamplingParams
from tests.engines.encoder.models import (
    RIGHT,
    TEXTS,
    hidden,
    make,
    outputs,
    pooled,
    sentence_folder,
    spec_of,
    vectors,
)

DATA = "DASKINFER_PASSAGES"
"""The variable that names a folder with BEIR's dbpedia-entity."""
LONG = [*TEXTS, " ".join(TEXTS), *TEXTS[:3]]


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="needs sentence-transformers, to compare with")


@pytest.fixture(scope="module")
def passages() -> list[str]:
    """200 passages of different lengths."""
    path = Path(os.environ.get(DATA, "nowhere")) / "corpus.jsonl"
    if not path.is_file():
        pytest.skip(f"needs BEIR's dbpedia-entity in ${DATA}, which is not part of the project")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = sorted((f"{row['title']} {row['text']}".strip() for row in rows), key=len)
    return texts[:: len(texts) // 60]


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return demo.embedding_model()
    except ConfigError as error:
        pytest.skip(str(error))


def _encoded(library: Any, folder: str | Path, texts: list[str], **options: Any) -> npt.NDArray[np.float32]:
    encode = {name: options.pop(name) for name in ("prompt_name", "normalize_embeddings") if name in options}
    with quiet():
        theirs = library.SentenceTransformer(str(folder), device="cpu", **options)
    found: npt.NDArray[np.float32] = theirs.encode(texts, batch_size=8, show_progress_bar=False, **encode)
    return found


# ---------------------------------------------------------------- tiny random models


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("bert", {}),
        ("roberta", {"normalize": False}),
        ("distilbert", {"pooling": {"pooling_mode_cls_token": True, "word_embedding_dimension": 32}}),
        ("mpnet", {"pooling": {"pooling_mode_max_tokens": True, "word_embedding_dimension": 32}}),
        ("qwen2", {"pooling": {"pooling_mode": "lasttoken", "embedding_dimension": 32}}),
        ("bert", {"pooling": {"pooling_mode": ["weightedmean", "mean_sqrt_len_tokens"], "embedding_dimension": 32}}),
        ("bert", {"dense": 24}),
        ("bert", {"bert": {"max_seq_length": 16, "do_lower_case": False}}),
        ("t5", {}),
    ],
)
def test_tiny_models_equal_theirs(library: Any, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    if "pooling" not in how:
        how = {**how, "pooling": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}}
    if kind in ("roberta", "mpnet"):  # theirs lets these overrun their positions unless told
        how = {**how, "bert": {"max_seq_length": 48, "do_lower_case": False}}
    folder = sentence_folder(tmp_path, kind, **how)
    expected = _encoded(library, folder, LONG)
    np.testing.assert_allclose(vectors(spec_of(folder), LONG, RIGHT), expected, rtol=1e-5, atol=1e-5)


def test_prompts_and_matryoshka_equal_theirs(library: Any, tmp_path: Path) -> None:
    settings = {"prompts": {"query": "w1 w2 ", "document": "w3 "}, "default_prompt_name": "document"}
    pooling = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32, "include_prompt": False}
    folder = sentence_folder(tmp_path, pooling=pooling, settings=settings)
    expected = _encoded(library, folder, TEXTS)
    np.testing.assert_allclose(vectors(spec_of(folder), TEXTS), expected, rtol=1e-5, atol=1e-5)
    expected = _encoded(library, folder, TEXTS, prompt_name="query", truncate_dim=16, normalize_embeddings=True)
    np.testing.assert_allclose(
        vectors(spec_of(folder, prompt_name="query", dims=16), TEXTS), expected, rtol=1e-5, atol=1e-5
    )


def test_a_plain_model_equals_theirs(library: Any, tmp_path: Path) -> None:
    folder = make(tmp_path)
    expected = _encoded(library, folder, TEXTS)
    np.testing.assert_allclose(vectors(spec_of(folder), TEXTS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs_", [1, 3])
def test_cross_encoders_equal_theirs(library: Any, tmp_path: Path, outputs_: int) -> None:
    names = {i: f"LABEL_{i}" for i in range(outputs_)}
    folder = make(tmp_path, "bert", "text", id2label=names, label2id={name: i for i, name in names.items()})
    pairs = [(TEXTS[i], TEXTS[-1 - i]) for i in range(len(TEXTS))]
    with quiet():
        theirs = library.CrossEncoder(str(folder), device="cpu")
    expected = theirs.predict(pairs, batch_size=4, show_progress_bar=False)
    found = np.array(outputs(spec_of(folder, "score"), [list(pair) for pair in pairs]), np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- a real model


def test_a_real_model_on_real_text_equals_theirs(library: Any, model: str, passages: list[str]) -> None:
    spec = ModelSpec(model, task="embed", device="cpu")
    np.testing.assert_allclose(vectors(spec, passages, RIGHT), _encoded(library, model, passages), rtol=1e-5, atol=1e-5)


def test_a_real_model_on_real_text_equals_the_reference(model: str, passages: list[str]) -> None:
    some = passages[::6]
    tokens = hidden(Path(model), some, truncation=True, max_length=256)
    expected = torch.nn.functional.normalize(torch.stack([pooled(t, "mean") for t in tokens]), dim=1).numpy()
    found = vectors(ModelSpec(model, task="embed", device="cpu"), some, SamplingParams(truncate="right"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    half = vectors(ModelSpec(model, task="embed", device="cpu", options={"precision": "float16"}), some, RIGHT)
    cosine = (half.astype(np.float32) * expected).sum(1) / np.linalg.norm(half.astype(np.float32), axis=1)
    assert cosine.min() >= 0.9999

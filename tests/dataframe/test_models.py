"""Vectors, labels, scores and texts of tiny models in columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from daskinfer.errors import ConfigError, UnknownOptionError
from tests.dataframe.conftest import text_frame
from tests.engines.encoder.models import LIMIT, make
from tests.engines.tiny import make as make_writer
from tests.engines.tiny import words

pytestmark = pytest.mark.filterwarnings("ignore:.*inplace keyword")  # Dask reads and writes Parquet with it
HERE = {"isolation": "thread", "threads": 1}
LABEL = pa.struct([("label", pa.string()), ("score", pa.float32())])
THREE: dict[str, Any] = {"id2label": {0: "neg", 1: "neu", 2: "pos"}}
NLI: dict[str, Any] = {
    "id2label": {0: "CONTRADICTION", 1: "neutral", 2: "Entailment"},
    "label2id": {"CONTRADICTION": 0, "neutral": 1, "Entailment": 2},
}
TEXTS = [words(3), None, words(5), "", words(2, 4), words(3)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("classifier"), "bert", "text", **THREE)


def both(frame: pd.DataFrame) -> Any:
    """The same frame in two partitions."""
    return dd.from_pandas(frame, npartitions=2)


def test_vectors(encoder: Path) -> None:
    frame = text_frame(TEXTS)
    lazy = both(frame).infer.embed("text", model=encoder, normalize=True, **HERE)
    assert lazy.dtypes["vector"] == pd.ArrowDtype(pa.list_(pa.float32(), 32))
    made = lazy.compute(scheduler="sync")
    assert made.dtypes.equals(lazy.dtypes)
    assert made["vector"].isna().tolist() == [False, True, False, True, False, False]
    vectors = np.stack(made["vector"].dropna().to_numpy())
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[-1], abs=1e-6)
    shorter = frame.infer.embed("text", model=encoder, dims=8, precision="float16", output="v", **HERE)
    assert shorter["v"].dtype == pd.ArrowDtype(pa.list_(pa.float16(), 8))


def test_vectors_survive_parquet(encoder: Path, tmp_path: Path) -> None:
    with dask.config.set(scheduler="sync"):
        made = both(text_frame(TEXTS)).infer.embed("text", model=encoder, **HERE)
        made.to_parquet(tmp_path / "out")
        read = dd.read_parquet(tmp_path / "out", dtype_backend="pyarrow")
        assert read.dtypes["vector"].pyarrow_dtype.equals(made.dtypes["vector"].pyarrow_dtype)
        stored, wanted = read["vector"].compute().dropna(), made["vector"].compute().dropna()
        assert np.array_equal(np.stack(stored.to_numpy()), np.stack(wanted.to_numpy()))


def test_labels(classifier: Path) -> None:
    lazy = both(text_frame(TEXTS)).infer.classify("text", model=classifier, **HERE)
    assert lazy.dtypes["label"] == pd.ArrowDtype(LABEL)
    made = lazy.compute(scheduler="sync")
    names = made["label"].struct.field("label")
    assert set(names.dropna()) <= {"neg", "neu", "pos"}
    assert made["label_error"].isna().tolist() == [True, False, True, False, True, True]
    ranked = text_frame(TEXTS).infer.classify("text", model=classifier, top_k=2, **HERE)
    assert ranked["label"].dtype == pd.ArrowDtype(pa.list_(LABEL))
    assert [len(labels) for labels in ranked["label"].dropna()] == [2, 2, 2, 2]


def test_labels_of_one_s_own(tmp_path: Path) -> None:
    nli = make(tmp_path, "bert", "text", **NLI)
    made = text_frame(TEXTS).infer.classify("{text}", labels=["news", "sport"], model=nli, **HERE)
    assert set(made["label"].struct.field("label").dropna()) <= {"news", "sport"}


def test_pairs(tmp_path: Path) -> None:
    cross = make(tmp_path, "bert", "text", num_labels=1)
    frame = text_frame(TEXTS).assign(b=[words(2), words(3), None, words(1), words(4), words(2)])
    lazy = both(frame).infer.score("text", "b", model=cross, **HERE)
    assert lazy.dtypes["score"] == pd.Float32Dtype()
    made = lazy.compute(scheduler="sync")
    assert made["score"].isna().tolist() == [False, True, True, True, False, False]
    kinds = [error.partition(":")[0] for error in made["score_error"].dropna()]
    assert kinds == ["missing_prompt", "missing_prompt", "empty_prompt"]
    many = frame.assign(b=[[words(2), words(3)]] * 6)
    ranked = many.infer.score("text", "b", model=cross, rank=True, **HERE)
    assert sorted(item["index"] for item in ranked["score"].iloc[0]) == [0, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_c19_too_long_is_an_error_or_says_what_was_cut_and_where(encoder: Path, side: str) -> None:
    frame = text_frame([words(3), words(LIMIT + 10)])
    failed = frame.infer.embed("text", model=encoder, **HERE)
    assert failed["vector_error"].str.startswith("too_long").tolist() == [pd.NA, True]
    cut = frame.infer.embed("text", model=encoder, on_long="truncate", side=side, **HERE)
    assert cut["vector_error"].isna().all()
    assert cut["vector_truncated_tokens"].dtype == pd.Int64Dtype()
    assert cut["vector_truncated_tokens"].tolist() == [0, 12]
    assert cut["vector_truncated_side"].isna().tolist() == [True, False]
    assert cut["vector_truncated_side"].iloc[1] == side


def test_text_of_a_small_model(tmp_path: Path) -> None:
    folder = make_writer(tmp_path)
    frame = text_frame([words(3), words(4), None, words(3)])
    lazy = both(frame).infer.generate("{text}", model=folder, max_new_tokens=4, raw=True, details=True, **HERE)
    made = lazy.compute(scheduler="threads")
    assert made.dtypes.equals(lazy.dtypes)
    pd.testing.assert_frame_equal(
        made, frame.infer.generate("{text}", model=folder, max_new_tokens=4, raw=True, details=True, **HERE)
    )
    assert made["output"].iloc[0] == made["output"].iloc[3]
    assert made["output_completion_tokens"].dropna().between(1, 4).all()


def test_options_are_checked_before_anything_runs(encoder: Path, tmp_path: Path) -> None:
    frame = text_frame(["a"])
    with pytest.raises(UnknownOptionError, match="poling"):
        frame.infer.embed("text", model=encoder, poling="mean")
    with pytest.raises(ConfigError, match=r"no folder|cannot be|no such|not"):
        frame.infer.embed("text", model=tmp_path / "nowhere")
    lazy = both(frame).infer.embed("text", model="/only/on/workers", output_type="float32[7]")
    assert lazy.dtypes["vector"] == pd.ArrowDtype(pa.list_(pa.float32(), 7))


def test_c26_describing_vectors_loads_no_model(encoder: Path) -> None:
    weights = encoder / "model.safetensors"
    weights.rename(encoder / "away")
    try:
        lazy = both(text_frame(["a"])).infer.embed("text", model=encoder)
        assert lazy.dtypes["vector"] == pd.ArrowDtype(pa.list_(pa.float32(), 32))
        assert len(lazy) == 1
    finally:
        (encoder / "away").rename(weights)

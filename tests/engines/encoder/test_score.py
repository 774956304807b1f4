"""Scores of pairs, and rankings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from daskinfer.engines.encoder import EncoderEngine
from daskinfer.errors import ConfigError
from daskinfer.records import Completed, Failed, SamplingParams
from tests.engines.encoder.models import LIMIT, RIGHT, TEXTS, logits, make, outputs, run, spec_of
from tests.engines.tiny import edit_json, words

ONE: dict[str, Any] = {"id2label": {0: "LABEL_0"}}
PAIRS = [(TEXTS[i], TEXTS[(3 * i + 1) % len(TEXTS)]) for i in range(len(TEXTS))]


def _rows() -> list[dict[str, str]]:
    return [{"text": first, "text_pair": second} for first, second in PAIRS]


@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "qwen2"])
@pytest.mark.parametrize("packing", [True, False])
def test_a_score_is_that_of_the_pair_alone(tmp_path: Path, kind: str, packing: bool) -> None:
    folder = make(tmp_path, kind, "text", **ONE)
    spec = spec_of(folder, "score", packing=packing)
    assert EncoderEngine.output_type(spec) == "float32"
    expected = logits(folder, AutoModelForSequenceClassification, PAIRS)[:, 0].sigmoid().tolist()
    found = outputs(spec, _rows())
    assert found == pytest.approx(expected, abs=1e-5)
    assert all(isinstance(score, float) for score in found)
    assert outputs(spec, [list(pair) for pair in PAIRS]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "entry",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_the_cross_encoders_own_activation(tmp_path: Path, entry: dict[str, Any]) -> None:
    folder = make(tmp_path, "bert", "text", **ONE)
    edit_json(folder / "config.json", **entry)
    numbers = logits(folder, AutoModelForSequenceClassification, PAIRS)[:, 0]
    assert outputs(spec_of(folder, "score"), _rows()) == pytest.approx(numbers.tolist(), abs=1e-5)
    found = outputs(spec_of(folder, "score", activation="sigmoid"), _rows())
    assert found == pytest.approx(numbers.sigmoid().tolist(), abs=1e-5)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", **ONE)
    edit_json(folder / "config.json", sbert_ce_default_activation_function="my.Own")
    with pytest.raises(ConfigError, match=r"'my\.Own' is not known; set the option activation"):
        EncoderEngine.output_type(spec_of(folder, "score"))


def test_a_model_with_several_outputs_gives_vectors(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", id2label={0: "a", 1: "b", 2: "c"})
    spec = spec_of(folder, "score")
    assert EncoderEngine.output_type(spec) == "float32[3]"
    found = np.stack(outputs(spec, _rows()))
    np.testing.assert_allclose(
        found, logits(folder, AutoModelForSequenceClassification, PAIRS).numpy(), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ConfigError, match="has 3 outputs; rank needs a model with one"):
        EncoderEngine.output_type(spec_of(folder, "score", rank=True))


def test_a_list_is_ranked(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", **ONE)
    spec = spec_of(folder, "score", rank=True)
    assert EncoderEngine.output_type(spec) == "struct<index: int32, score: float32>[]"
    rows = [{"text": TEXTS[i], "text_pair": TEXTS[i + 1 : i + 1 + size]} for i, size in enumerate((1, 2, 5, 13))]
    for row, ranking in zip(rows, outputs(spec, rows), strict=True):
        pairs = [(row["text"], other) for other in row["text_pair"]]
        expected = logits(folder, AutoModelForSequenceClassification, pairs)[:, 0].sigmoid()
        assert [item["index"] for item in ranking] == expected.argsort(descending=True, stable=True).tolist()
        assert [item["score"] for item in ranking] == pytest.approx(
            expected.sort(descending=True).values.tolist(), abs=1e-5
        )


def test_a_list_is_not_ranked_unasked(tmp_path: Path) -> None:
    spec = spec_of(make(tmp_path, "bert", "text", **ONE), "score")
    (found,) = run(spec, [{"text": "w1", "text_pair": ["w2", "w3"]}])
    assert isinstance(found, Failed)
    assert "set the option rank" in found.message


def test_over_long_pairs(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", **ONE)
    pair = [words(4), words(LIMIT)]
    first, second = run(spec_of(folder, "score"), [pair, pair[:1] * 2])
    assert isinstance(first, Failed)
    assert first.kind == "too_long"
    assert isinstance(second, Completed)
    (cut,) = run(spec_of(folder, "score"), [pair], RIGHT)
    assert isinstance(cut, Completed)
    assert cut.usage.truncated_tokens == 4 + LIMIT + 3 - LIMIT
    kept = (pair[0], " ".join(pair[1].split()[: LIMIT - 3 - 4]))
    expected = logits(folder, AutoModelForSequenceClassification, [kept]).sigmoid().item()
    assert cut.output == pytest.approx(expected, abs=1e-5)
    (left,) = run(spec_of(folder, "score"), [pair], SamplingParams(truncate="left"))
    assert isinstance(left, Completed)
    assert left.usage.prompt_tokens == LIMIT

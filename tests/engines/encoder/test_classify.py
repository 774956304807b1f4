"""Labels: of texts and pairs, several at once, zero-shot, and of spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, pipeline

from daskinfer.engines.encoder import EncoderEngine
from daskinfer.engines.encoder.labels import spans
from daskinfer.engines.encoder.rows import Tokens
from daskinfer.engines.hf import quiet
from daskinfer.errors import ConfigError
from daskinfer.records import Completed, Failed
from tests.engines.encoder.models import TEXTS, change_weights, logits, make, outputs, reference_model, run, spec_of
from tests.engines.tiny import edit_json, words

THREE: dict[str, Any] = {"id2label": {0: "neg", 1: "neu", 2: "pos"}}
FOUR: dict[str, Any] = {
    "id2label": {0: "a", 1: "b", 2: "c", 3: "d"},
    "label2id": {"a": 0, "b": 1, "c": 2, "d": 3},
    "problem_type": "multi_label_classification",
}
NLI: dict[str, Any] = {
    "id2label": {0: "CONTRADICTION", 1: "neutral", 2: "Entailment"},
    "label2id": {"CONTRADICTION": 0, "neutral": 1, "Entailment": 2},
}
FIVE = TEXTS[:5]


def _scores(folder: Path, texts: list[Any]) -> torch.Tensor:
    return logits(folder, AutoModelForSequenceClassification, texts)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "qwen2"])
def test_c25_one_label_equals_the_row_alone(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path, kind, "text", **THREE)
    expected = _scores(folder, TEXTS).softmax(-1)
    for packing in (True, False):
        found = outputs(spec_of(folder, "classify", packing=packing), TEXTS)
        assert [row["label"] for row in found] == [("neg", "neu", "pos")[i] for i in expected.argmax(-1)]
        assert [row["score"] for row in found] == pytest.approx(expected.max(-1).values.tolist(), abs=1e-5)


def test_heads_that_look_at_the_first_token_are_packed(tmp_path: Path) -> None:
    for kind, packed in (("bert", True), ("roberta", True), ("modernbert", False), ("qwen2", False)):
        engine = EncoderEngine(spec_of(make(tmp_path / kind, kind, "text"), "classify"))
        engine.load()
        assert engine.stats().extra["packed"] is packed
        engine.close()


@pytest.mark.parametrize("rows_per_batch", [1, 2, 5])
@pytest.mark.parametrize(("top_k", "type_"), [(None, "s"), (1, "s"), (3, "s[]"), (2, "s[]"), (0, "s[]")])
def test_c25_the_shape_is_the_same_for_all_rows_and_batches(
    tmp_path: Path, rows_per_batch: int, top_k: int | None, type_: str
) -> None:
    folder = make(tmp_path, "bert", "text", **THREE)
    options = {} if top_k is None else {"top_k": top_k}
    spec = spec_of(folder, "classify", max_batch_rows=rows_per_batch, **options)
    label = "struct<label: string, score: float32>"
    assert EncoderEngine.output_type(spec) == type_.replace("s", label)
    found = outputs(spec, FIVE)
    for row in found:
        if type_ == "s":
            assert row.keys() == {"label", "score"}
        else:
            assert len(row) == (top_k or 3)
            assert [item["score"] for item in row] == sorted((item["score"] for item in row), reverse=True)
        if top_k in (0, 3):
            assert sum(item["score"] for item in row) == pytest.approx(1, abs=1e-5)


def test_c25_label_names_as_configs_have_them(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", **THREE)
    expected = [row["label"] for row in outputs(spec_of(folder, "classify"), FIVE)]
    edit_json(folder / "config.json", id2label={"2": "pos", "0": "neg", "1": "neu"})
    assert [row["label"] for row in outputs(spec_of(folder, "classify"), FIVE)] == expected


def test_c25_several_labels_are_independent(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", **FOUR)
    spec = spec_of(folder, "classify")
    assert EncoderEngine.output_type(spec).endswith("[]")
    expected = _scores(folder, FIVE).sigmoid()
    for row, scores in zip(outputs(spec, FIVE), expected, strict=True):
        assert {item["label"]: item["score"] for item in row} == pytest.approx(
            dict(zip("abcd", scores.tolist(), strict=True)), abs=1e-5
        )
    for row, scores in zip(outputs(spec_of(folder, "classify", threshold=0.5), FIVE), expected, strict=True):
        assert len(row) == int((scores >= 0.5).sum())
    best = outputs(spec_of(folder, "classify", top_k=1), FIVE)
    assert [item["label"] for item in best] == ["abcd"[i] for i in expected.argmax(-1)]


def test_c25_one_output_is_no_softmax(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", id2label={0: "toxic"}, problem_type=None)
    numbers = _scores(folder, FIVE)[:, 0]
    found = outputs(spec_of(folder, "classify"), FIVE)
    assert [row["score"] for row in found] == pytest.approx(numbers.sigmoid().tolist(), abs=1e-5)
    edit_json(folder / "config.json", problem_type="regression")
    found = outputs(spec_of(folder, "classify"), FIVE)
    assert [row["score"] for row in found] == pytest.approx(numbers.tolist(), abs=1e-5)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_the_activation_can_be_chosen(tmp_path: Path, activation: str) -> None:
    folder = make(tmp_path, "bert", "text", **THREE)
    numbers = _scores(folder, FIVE)
    expected = {"softmax": numbers.softmax(-1), "sigmoid": numbers.sigmoid(), "none": numbers}[activation]
    found = outputs(spec_of(folder, "classify", activation=activation, top_k=1), FIVE)
    assert [row["score"] for row in found] == pytest.approx(expected.max(-1).values.tolist(), abs=1e-5)


def test_pairs_are_classified(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text", **THREE)
    pairs = [(TEXTS[i], TEXTS[i + 1]) for i in range(6)]
    expected = _scores(folder, pairs).softmax(-1).max(-1).values.tolist()
    rows = [{"text": first, "text_pair": second} for first, second in pairs]
    found = outputs(spec_of(folder, "classify"), rows)
    assert [row["score"] for row in found] == pytest.approx(expected, abs=1e-5)


def test_empty_over_long_and_odd_rows_fail_alone(tmp_path: Path) -> None:
    spec = spec_of(make(tmp_path, "bert", "text"), "classify")
    found = run(spec, ["  ", words(100), 3, TEXTS[0], None, {"text": "a"}, {"text": "", "text_pair": "b"}])
    kinds = [result.kind if isinstance(result, Failed) else None for result in found]
    assert kinds == ["empty_prompt", "too_long", "wrong_type", None, "missing_prompt", "invalid_row", "empty_prompt"]


def test_c24_numbers_that_are_none_fail(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "text")
    change_weights(folder, {"classifier.bias": torch.full((2,), float("nan"))})
    assert all(isinstance(result, Failed) for result in run(spec_of(folder, "classify"), FIVE))


# ---------------------------------------------------------------- zero-shot


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_is_transformers_pipeline(tmp_path: Path, multi_label: bool) -> None:
    folder = make(tmp_path, "bert", "text", **NLI)
    labels = ["w1", "w2 w3", "w4"]
    tokenizer, model = reference_model(folder, AutoModelForSequenceClassification)
    with quiet():
        reference = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
        expected = reference(FIVE, labels, hypothesis_template="w9 {}", multi_label=multi_label)
    spec = spec_of(folder, "classify", labels=labels, hypothesis="w9 {}", multi_label=multi_label, top_k=0)
    for row, other in zip(outputs(spec, FIVE), expected, strict=True):
        assert [item["label"] for item in row] == other["labels"]
        assert [item["score"] for item in row] == pytest.approx(other["scores"], abs=1e-5)
    one = outputs(spec_of(folder, "classify", labels=labels, hypothesis="w9 {}"), FIVE)
    assert all(row.keys() == {"label", "score"} for row in one)


def test_zero_shot_needs_a_model_of_inference(tmp_path: Path) -> None:
    spec = spec_of(make(tmp_path, "bert", "text", **THREE), "classify", labels=["a", "b"])
    with pytest.raises(ConfigError, match=r"outputs neg, neu, pos; labels= \(zero-shot\) needs a model of natural"):
        EncoderEngine.output_type(spec)


# ---------------------------------------------------------------- spans

BIO: dict[str, Any] = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}}


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # of these tests' tokenizer; they are words
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_spans_are_transformers_pipeline(tmp_path: Path, kind: str, aggregation: str) -> None:
    folder = make(tmp_path, kind, "token", **BIO)
    tokenizer, model = reference_model(folder, AutoModelForTokenClassification)
    with quiet():
        reference = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=aggregation)
        expected = [reference(text) for text in TEXTS]
    spec = spec_of(folder, "classify", aggregation=aggregation)
    assert EncoderEngine.output_type(spec).startswith("struct<label: string, score: float32, start: int32")
    name = "entity" if aggregation == "none" else "entity_group"
    for text, row, other in zip(TEXTS, outputs(spec, TEXTS), expected, strict=True):
        assert [(item["label"], item["start"], item["end"]) for item in row] == [
            (item[name], item["start"], item["end"]) for item in other
        ]
        assert [item["score"] for item in row] == pytest.approx([float(item["score"]) for item in other], abs=1e-5)
        assert all(item["text"] == text[item["start"] : item["end"]] for item in row)


def test_options_of_texts_are_refused_for_spans(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "token", **BIO)
    with pytest.raises(ConfigError, match="top_k is for classifiers of texts"):
        EncoderEngine.output_type(spec_of(folder, "classify", top_k=2))


def test_a_text_without_spans_is_an_empty_list(tmp_path: Path) -> None:
    folder = make(tmp_path, "bert", "token", **BIO)
    change_weights(folder, {"classifier.bias": torch.tensor([1e4, 0, 0, 0, 0])})
    (found,) = run(spec_of(folder, "classify"), [TEXTS[0]])
    assert isinstance(found, Completed)
    assert found.output == []


_TOKENS = Tokens(
    ids=[2, 10, 11, 12, 13, 14, 3],
    spans=[(0, 0), (0, 3), (3, 5), (6, 8), (8, 11), (12, 13), (0, 0)],
    words=[None, 0, 0, 1, 1, 2, None],
)
_TEXT = "Annie Smith ."
_NAMES = ("O", "B-PER", "I-PER")
_NUMBERS = torch.tensor(
    [
        [1.0, 0.0, 0.0],
        [0.3, 0.7, 0.0],  # Ann
        [0.8, 0.2, 0.0],  # ie
        [0.4, 0.0, 0.6],  # Sm
        [0.1, 0.0, 0.9],  # ith
        [1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
    ]
)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("none", [("B-PER", "Ann", 0.7), ("I-PER", "Sm", 0.6), ("I-PER", "ith", 0.9)]),
        ("simple", [("PER", "Ann", 0.7), ("PER", "Smith", 0.75)]),
        ("first", [("PER", "Annie Smith", 0.65)]),
        ("average", [("PER", "Smith", 0.75)]),
        ("max", [("PER", "Smith", 0.9)]),
    ],
)
def test_words_of_several_tokens(how: str, expected: list[tuple[str, str, float]]) -> None:
    found = spans(_NUMBERS, _TOKENS, _TEXT, _NAMES, how)
    assert [(item["label"], item["text"]) for item in found] == [(label, text) for label, text, _ in expected]
    assert [item["score"] for item in found] == pytest.approx([score for *_, score in expected], abs=1e-6)

"""Texts and pairs of texts: what the tasks embed, classify and score take, given directly and by columns."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from daskinfer.errors import ConfigError, InputError, MissingColumnError, RowError
from daskinfer.inputs import as_pair, as_texts, check_of
from daskinfer.prompts import Problem, prompter

PAIR = {"text": "a", "text_pair": "b"}


@pytest.mark.parametrize(
    "value", [PAIR, ("a", "b"), ["a", "b"], np.array(["a", "b"]), pa.scalar(PAIR), pa.scalar(["a", "b"])]
)
def test_a_pair_in_all_its_forms(value: Any) -> None:
    assert as_pair(value) == PAIR
    assert check_of("score")(value, "the pair") == PAIR
    assert check_of("classify")(value, "the text") == PAIR


def test_the_second_text_may_be_a_list() -> None:
    for second in (["b", "c"], ("b", "c"), np.array(["b", "c"], object), pa.scalar(["b", "c"])):
        assert as_pair(("a", second)) == {"text": "a", "text_pair": ["b", "c"]}
    assert as_texts("b", "it") == "b"


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ("one text", "wrong_type", "the pair holds str, not a pair of texts"),
        (None, "missing_prompt", "the pair is missing"),
        ([], "wrong_type", "a list of two"),
        (["a", "b", "c"], "wrong_type", "a list of two"),
        (["a", 3], "wrong_type", "the second text of the pair holds int, not text"),
        (["a", ""], "empty_prompt", "the second text of the pair is empty"),
        ({"text": "a"}, "invalid_row", "the keys 'text'; a pair has"),
        ({}, "invalid_row", "the keys none; a pair has"),
        ({"query": "a", "document": "b"}, "invalid_row", "'query', 'document'"),
        ({"text": "a", "text_pair": None}, "missing_prompt", "the second text of the pair is missing"),
        ({"text": "a", "text_pair": []}, "empty_prompt", "is an empty list"),
        ({"text": "a", "text_pair": ["b", " "]}, "empty_prompt", "item 2 of the second text"),
        ({"text": "a", "text_pair": "\ud800"}, "invalid_row", "half of a surrogate pair"),
    ],
)
def test_what_is_no_pair(value: Any, kind: str, said: str) -> None:
    with pytest.raises(RowError, match=said) as caught:
        as_pair(value)
    assert caught.value.row_kind == kind


def test_a_classifier_takes_texts_and_pairs_and_the_others_what_prompts_may_be() -> None:
    assert check_of("classify")("a", "the text") == "a"
    with pytest.raises(RowError, match="the text holds int, not text"):
        check_of("classify")(3, "the text")
    for task in ("generate", "embed"):
        assert check_of(task)([1, 2], "the text") == [1, 2]
        with pytest.raises(RowError, match="the text holds dict"):
            check_of(task)(PAIR, "the text")


# ---------------------------------------------------------------- by columns


def rendered(task: str, columns: Any, row: dict[str, Any]) -> Any:
    made = prompter(columns=columns, available=tuple(row), task=task)
    return made.render({name: [value] for name, value in row.items()}, 1)[0]


def test_pairs_come_from_two_columns_or_from_one_that_holds_them() -> None:
    row = {"id": 1, "query": "a", "passage": "b", "both": ("a", "b")}
    assert rendered("score", ("query", "passage"), row) == PAIR
    assert rendered("score", "both", row) == PAIR
    assert rendered("classify", ["query", "passage"], row) == PAIR
    assert rendered("classify", ["query"], row) == "a"
    assert rendered("embed", "query", row) == "a"
    assert rendered("score", ("query", "passage"), row | {"passage": ["b", "c"]})["text_pair"] == ["b", "c"]


def test_a_pair_that_cannot_be_used_names_its_column() -> None:
    found = rendered("score", ("query", "passage"), {"query": "a", "passage": None})
    assert isinstance(found, Problem)
    assert (found.kind, found.message) == ("missing_prompt", "column 'passage' is missing (None)")


def test_the_obvious_columns_of_a_task() -> None:
    assert prompter(available=("id", "text", "text_pair"), task="score").columns == ("text", "text_pair")
    assert prompter(available=("pair",), task="score").columns == ("pair",)
    assert prompter(available=("id", "text", "prompt"), task="embed").columns == ("text",)
    assert prompter(available=("id", "prompt"), task="classify").columns == ("prompt",)
    assert prompter(available=("review",), task="classify").columns == ("review",)
    assert prompter(prompt="{title}: {text}", available=("title", "text"), task="embed").columns == ("title", "text")
    with pytest.raises(InputError, match=r"which columns hold the pairs.*'id', 'query'"):
        prompter(available=("id", "query"), task="score")
    with pytest.raises(InputError, match="no columns"):
        prompter(available=(), task="score")
    with pytest.raises(InputError, match="which column holds"):
        prompter(available=("id", "messages"), task="embed")


def test_what_a_task_does_not_take() -> None:
    with pytest.raises(ConfigError, match="task 'embed' takes texts, not chats"):
        prompter(messages="chat", available=("chat",), task="embed")
    with pytest.raises(ConfigError, match="task 'score' compares two"):
        prompter(prompt="{a}", available=("a",), task="score")
    with pytest.raises(ConfigError, match="name of one column"):
        prompter(columns=("a", "b"), available=("a", "b"), task="embed")
    for columns in (("a", "x"), "x"):
        with pytest.raises(MissingColumnError, match="'x'"):
            prompter(columns=columns, available=("a", "b"), task="score")


def test_the_order_of_two_columns_is_part_of_the_fingerprint() -> None:
    one, other = (
        prompter(columns=names, available=("a", "b"), task="score").fingerprint() for names in (("a", "b"), ("b", "a"))
    )
    assert one != other

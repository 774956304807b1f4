import pickle
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.errors import ConfigError, InputError, MissingColumnError, RowError, TemplateError
from daskinfer.inputs import as_input
from daskinfer.prompts import Problem, prompter

NULLS = [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT, np.datetime64("NaT")]


def render_one(value: Any, **how: Any) -> Any:
    [result] = prompter(**(how or {"columns": "text"}), available=("text",)).render({"text": [value]}, 1)
    return result


def kind_of(result: Any) -> Any:
    return result.kind if isinstance(result, Problem) else None


# ---------------------------------------------------------------- which way


@pytest.mark.parametrize(
    ("available", "fingerprint"),
    [
        (("id", "prompt", "messages"), {"columns": "prompt"}),
        (("id", "messages"), {"messages": "messages"}),
        (("review",), {"columns": "review"}),
    ],
)
def test_without_settings_the_obvious_column_is_used(available: Any, fingerprint: Any) -> None:
    made = prompter(available=available)
    assert made.fingerprint() == fingerprint
    assert made.columns == tuple(fingerprint.values())


def test_without_settings_several_columns_are_listed() -> None:
    with pytest.raises(InputError, match=r"'id', 'review'.*columns=.*prompt="):
        prompter(available=("id", "review"))
    with pytest.raises(InputError, match="no columns"):
        prompter(available=())


def test_only_one_way_may_be_given() -> None:
    with pytest.raises(ConfigError, match="prompt and messages are both given"):
        prompter(prompt="{a}", messages="a", available=("a",))


@pytest.mark.parametrize("columns", [("a", "b"), (), ("",), [None], 3, b"a", ("a", 1)])
def test_columns_is_one_name(columns: Any) -> None:
    with pytest.raises((ConfigError, MissingColumnError), match=r"columns="):
        prompter(columns=columns, available=("a", "b"))


@pytest.mark.parametrize("columns", ["a", ("a",), ["a"]])
def test_a_column_may_come_alone_or_in_a_sequence(columns: Any) -> None:
    assert prompter(columns=columns, available=("a", "b")).columns == ("a",)


def test_a_missing_column_names_those_there() -> None:
    for how in ({"columns": "x"}, {"messages": "x"}, {"prompt": "{x}"}):
        with pytest.raises(MissingColumnError, match=r"needs a column 'x'; the input has 'a', 'b'"):
            prompter(**how, available=("a", "b"))


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("Summarise: {text}", "Summarise: good"),
        ("{text}{text}", "goodgood"),
        ('{{"k": 1}} {text}', '{"k": 1} good'),
        ("{first name}, {text}", "Ada, good"),
        ("{price:.2f} {text:>6}", "3.50   good"),
        ("{a.b} {c[0]} {0}", "dot bracket zero"),
        ("{when:%Y}: {price}, {n}, {yes}", "2024: 3.5, 7, True"),
        ("{big} {money}", "12345678901234567890 1.10"),
    ],
)
def test_templates_are_filled(template: Any, expected: Any) -> None:
    row = {
        "text": "good",
        "first name": "Ada",
        "price": np.float64(3.5),
        "n": np.int64(7),
        "yes": np.bool_(True),
        "when": date(2024, 2, 29),
        "big": 12345678901234567890,
        "money": Decimal("1.10"),
        "a.b": "dot",
        "c[0]": "bracket",
        "0": "zero",
    }
    made = prompter(prompt=template, available=tuple(row))
    assert made.render({name: [row[name]] for name in made.columns}, 1) == [expected]
    assert made.fingerprint() == {"prompt": template}


def test_a_template_asks_for_its_columns_once_in_order() -> None:
    assert prompter(prompt="{b} {a} {b}", available=("a", "b", "c")).columns == ("b", "a")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{text", "literal braces"),
        ("text}", "literal braces"),
        ("{text:{width}}", "only plain formats"),
        ("{}", "names no column"),
        ("{0}", "names no column"),
        ("{text.upper}", "do not look inside"),
        ("{text[0]}", "do not look inside"),
        ("{text!r}", "conversion"),
        ("no field", "names no column, so all rows"),
        ("text", r"columns='text'"),
        ("", "names no column"),
        ("\ud800 {text}", "surrogate"),
    ],
)
def test_malformed_templates_say_what_to_do(template: Any, reason: Any) -> None:
    with pytest.raises(TemplateError, match=reason):
        prompter(prompt=template, available=("text",))


def test_a_template_must_be_text() -> None:
    with pytest.raises(ConfigError, match="must be a template"):
        prompter(prompt=3, available=("text",))  # type: ignore[arg-type]


def test_json_in_a_template_leads_to_a_hint_about_braces() -> None:
    with pytest.raises(MissingColumnError, match=r"write \{\{ and \}\} for literal braces"):
        prompter(prompt='Answer as {"score": 1}: {text}', available=("text",))


def test_values_are_data_not_templates() -> None:
    assert render_one("{text} {0} {{", prompt="{text}") == "{text} {0} {{"


@pytest.mark.parametrize("value", [b"raw", bytearray(b"raw"), ["x"], {"a": 1}, {1}, object(), np.array([1, 2])])
def test_templates_do_not_take_bytes_and_containers(value: Any) -> None:
    problem = render_one(value, prompt="{text}")
    assert kind_of(problem) == "wrong_type"
    assert type(value).__name__ in problem.message


@pytest.mark.parametrize("value", [*NULLS, pa.scalar(None, pa.string())])
def test_c03_a_null_in_a_template_is_a_missing_prompt(value: Any) -> None:
    problem = render_one(value, prompt="Summarise: {text}")
    assert kind_of(problem) == "missing_prompt"
    assert "column 'text' is missing" in problem.message


@pytest.mark.parametrize(
    ("value", "spec"), [("abc", ".2f"), (3, "%Y"), pytest.param(10**5000, "", id="huge"), (1 + 2j, "d")]
)
def test_a_value_that_a_format_cannot_write_fails_its_row(value: Any, spec: Any) -> None:
    problem = render_one(value, prompt=f"{{text:{spec}}}")
    assert kind_of(problem) == "wrong_type"
    assert type(value).__name__ in problem.message


def test_c04_a_template_is_empty_only_as_a_whole() -> None:
    assert render_one("", prompt="Say {text}") == "Say "
    assert kind_of(render_one(" \n", prompt=" {text}\t")) == "empty_prompt"


# ---------------------------------------------------------------- a column of prompts


def test_c03_nulls_and_wrong_types_fail_their_rows_only() -> None:
    column = ["ok", None, float("nan"), pd.NA, 7, 3.5, b"raw", True, ["x"]]
    results = prompter(columns="text", available=("text",)).render({"text": pd.Series(column, dtype=object)}, 9)
    assert results[0] == "ok"
    assert [kind_of(r) for r in results[1:]] == ["missing_prompt"] * 3 + ["wrong_type"] * 5
    for name, problem in zip(("int", "float", "bytes", "bool", "list"), results[4:], strict=True):
        assert isinstance(problem, Problem)
        assert name in problem.message


@pytest.mark.parametrize("dtype", ["str", "string", "string[pyarrow]", pd.ArrowDtype(pa.large_string())])
def test_c03_nulls_of_every_string_dtype_are_missing(dtype: Any) -> None:
    series = pd.Series(["ok", None], dtype=dtype, index=[5, 5])
    results = prompter(columns="text", available=("text",)).render({"text": series}, 2)
    assert results[0] == "ok"
    assert kind_of(results[1]) == "missing_prompt"


@pytest.mark.parametrize("array", [pa.array(["ok", None]), pa.chunked_array([["ok"], [None]])])
def test_c03_arrow_columns_are_read_as_python_values(array: Any) -> None:
    results = prompter(columns="text", available=("text",)).render({"text": array}, 2)
    assert results[0] == "ok"
    assert kind_of(results[1]) == "missing_prompt"


@pytest.mark.parametrize("value", ["", " ", "\n\t", [], np.array([], dtype=int)])
def test_c04_blank_prompts_are_empty(value: Any) -> None:
    assert kind_of(render_one(value)) == "empty_prompt"


@pytest.mark.parametrize("value", ["\ud800", "ok \udc00 no"])
def test_c03_lone_surrogates_fail_their_row(value: Any) -> None:
    problem = render_one(value)
    assert kind_of(problem) == "invalid_row"
    assert "not valid Unicode" in problem.message
    assert kind_of(render_one(value, prompt="é {text}")) == "invalid_row"


def test_text_comes_out_as_plain_str() -> None:
    for value in (np.str_("grün"), pa.scalar("grün")):
        result = render_one(value)
        assert type(result) is str
        assert result == "grün"


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), [np.int64(1), 2], pa.scalar([1, 2])])
def test_lists_of_whole_numbers_are_token_ids(ids: Any) -> None:
    result = render_one(ids)
    assert result == [1, 2]
    assert {type(token) for token in result} == {int}


@pytest.mark.parametrize("ids", [[1, -1], [1, True], [1.5], [None], [{"role": "user", "content": "hi"}]])
def test_other_lists_are_row_problems(ids: Any) -> None:
    assert kind_of(render_one(ids)) in ("wrong_type", "invalid_row")


def test_messages_in_a_prompt_column_lead_to_a_hint() -> None:
    assert "messages=" in render_one([{"role": "user", "content": "hi"}]).message


def test_a_comparison_that_raises_is_no_null() -> None:
    class Odd:
        def __ne__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    assert kind_of(render_one(Odd())) == "wrong_type"


def test_columns_of_another_length_are_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="zip"):
        prompter(columns="text", available=("text",)).render({"text": ["a"]}, 2)


@given(st.lists(st.one_of(st.text(), st.none(), st.integers(), st.floats(), st.binary(), st.lists(st.integers()))))
def test_every_row_gets_a_prompt_or_a_problem_and_nothing_else(values: Any) -> None:
    for how in ({"columns": "text"}, {"prompt": "{text}"}, {"messages": "text"}):
        results = prompter(**how, available=("text",)).render({"text": values}, len(values))
        assert len(results) == len(values)
        for result in results:
            assert isinstance(result, Problem | str | list)
            assert result


@given(st.text().filter(lambda t: "\x00" not in t))
def test_messages_of_problems_never_hold_the_value(secret: Any) -> None:
    value = {"secret": f"<<{secret}>>"}
    assert f"<<{secret}>>" not in render_one(value).message
    assert f"<<{secret}>>" not in render_one(f"<<{secret}>>\ud800").message


# ---------------------------------------------------------------- chat messages

CHAT = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "yo"}],
    [
        {"role": "user", "content": "a", "name": "Ada"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


def test_c09_a_chat_column_is_the_same_after_parquet(tmp_path: Path) -> None:
    frame = pd.DataFrame({"chat": CHAT})
    frame.to_parquet(tmp_path / "chat.parquet")
    read = pd.read_parquet(tmp_path / "chat.parquet")
    before = read["chat"].map(repr).tolist()
    made = prompter(messages="chat", available=("chat",))
    assert made.render({"chat": read["chat"]}, 3) == CHAT
    assert made.render({"chat": pa.array(CHAT)}, 3) == CHAT
    assert read["chat"].map(repr).tolist() == before


def test_c09_parts_beside_text_work() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "url": "x.png", "detail": None}]
    [result] = prompter(messages="m", available=("m",)).render({"m": [({"role": "user", "content": parts},)]}, 1)
    assert result == [{"role": "user", "content": [parts[0], {"type": "image", "url": "x.png"}]}]


def test_messages_may_be_json_text() -> None:
    text = '[{"role": "user", "content": "hi", "name": null, "n": 1.5}]'
    assert render_one(text, messages="text") == [{"role": "user", "content": "hi", "n": 1.5}]


def test_messages_are_plain_types_whatever_the_source() -> None:
    message = {"role": np.str_("user"), "content": "hi", "k": np.int64(3), "v": np.array([1.5]), "f": np.bool_(True)}
    result = render_one([message], messages="text")
    assert result == [{"role": "user", "content": "hi", "k": 3, "v": [1.5], "f": True}]
    assert [type(v) for v in result[0].values()] == [str, str, int, list, bool]


def test_tool_calls_need_no_content() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert render_one(chat, messages="text")[1] == {"role": "assistant", "tool_calls": [{"id": "1"}]}
    assert render_one(chat[1:], messages="text") == [{"role": "assistant", "tool_calls": [{"id": "1"}]}]


def nested(depth: Any) -> Any:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (None, "missing_prompt", "missing"),
        ("null", "missing_prompt", "missing"),
        ("", "empty_prompt", "no messages"),
        ([], "empty_prompt", "no messages"),
        ([{"role": "user", "content": " "}], "empty_prompt", "only empty"),
        ([{"role": "user", "content": []}], "empty_prompt", "only empty"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}]}], "empty_prompt", "only empty"),
        ("hello", "wrong_type", "not JSON"),
        ("[" * 100_000, "wrong_type", "not JSON"),
        ('{"role": "user"}', "wrong_type", "dict"),
        ({"role": "user", "content": "hi"}, "wrong_type", "dict"),
        (7, "wrong_type", "int"),
        (["hi"], "wrong_type", "message 1"),
        (
            [{"role": "user", "content": "hi"}, {"content": "x"}],
            "invalid_row",
            "message 2 of column 'text' has no role",
        ),
        ([{"role": "", "content": "x"}], "invalid_row", "no role"),
        ([{"role": "user"}], "invalid_row", "no content"),
        ([{"role": "user", "content": 3}], "wrong_type", "int"),
        ([{"role": "user", "content": b"x"}], "wrong_type", "bytes"),
        ([{"role": "user", "content": ["x"]}], "invalid_row", "part"),
        ([{"role": "user", "content": [{"text": "x"}]}], "invalid_row", "part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_row", "without text"),
        ([{"role": "user", "content": [None]}], "invalid_row", "part"),
        ([{"role": "user", "content": "\ud800"}], "invalid_row", "not valid Unicode"),
        ([{"role": "user", "content": "x", "more": nested(60)}], "invalid_row", "deep"),
    ],
)
def test_malformed_messages_are_row_problems(value: Any, kind: Any, says: Any) -> None:
    problem = render_one(value, messages="text")
    assert kind_of(problem) == kind
    assert says in problem.message


# ---------------------------------------------------------------- direct inputs


def test_direct_inputs_are_checked_in_the_same_way() -> None:
    assert as_input("hi") == "hi"
    assert as_input((1, 2)) == [1, 2]
    assert as_input(CHAT[1]) == CHAT[1]
    with pytest.raises(RowError, match="the prompt is missing") as caught:
        as_input(None)
    assert caught.value.row_kind == "missing_prompt"


def test_prompters_pickle() -> None:
    for how in ({"columns": "a"}, {"prompt": "{a}!"}, {"messages": "a"}):
        made = prompter(**how, available=("a",))
        assert pickle.loads(pickle.dumps(made)) == made

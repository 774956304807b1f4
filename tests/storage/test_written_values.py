"""What is written, as text and back: strict JSON, exact CSV, types of the added columns."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskinfer.errors import ConfigError, OutputError
from daskinfer.records import Completed, Failed, Result, Usage
from daskinfer.storage import Intervals, open_source
from daskinfer.storage.kinds import Kind, encode, infer, json_field
from daskinfer.storage.outputs import OutputColumns, arrow_type
from daskinfer.storage.singlefile import read_single, write_single


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def strict(text: str) -> list[Any]:
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def written(kind: str, *tables: pa.Table) -> str:
    file = io.BytesIO()
    write_single(kind, file, tables, tables[0].schema)
    return file.getvalue().decode()


EVERY_TYPE = pa.table(
    {
        "s": pa.array(['é"\n\t\u2028', "", None]),
        "b": pa.array([True, None, False]),
        "i": pa.array([1, None, 2**64 - 1], pa.uint64()),
        "f": pa.array([1.0, math.nan, -math.inf]),
        "f32": pa.array([0.1, 1, 1e-20], pa.float32()),
        "f16": pa.array(np.array([0.5, np.nan, 2], np.float16)),
        "dec": pa.array([Decimal("12.30"), None, Decimal("-0.05")], pa.decimal128(30, 2)),
        "ns": pa.array([1, None, 1704067200123456789], pa.timestamp("ns")),
        "day": pa.array([date(2024, 1, 2), None, None]),
        "time": pa.array([time(1, 2, 3, 4), None, None]),
        "bytes": pa.array([b"a\xff", None, b""]),
        "vector": pa.array([[1, 2.5], None, [math.nan, math.inf]], pa.list_(pa.float32(), 2)),
        "list": pa.array([[1.5, None], [], None], pa.list_(pa.float64())),
        "struct": pa.array([{"x": [math.inf, 1.0], "y": "é"}, None, {"x": None, "y": None}]),
        "cat": pa.array(["x", "y", None]).dictionary_encode(),
        "null": pa.nulls(3),
    }
).append_column(json_field("json"), pa.array(['{"a": [1, null]}', None, '"x"']))

AS_JSON = [
    {
        "s": 'é"\n\t\u2028', "b": True, "i": 1, "f": 1.0, "f32": 0.1, "f16": 0.5, "dec": 12.3,
        "ns": "1970-01-01T00:00:00.000000001", "day": "2024-01-02", "time": "01:02:03.000004", "bytes": "Yf8=",
        "vector": [1.0, 2.5], "list": [1.5, None], "struct": {"x": [None, 1.0], "y": "é"}, "cat": "x", "null": None,
        "json": {"a": [1, None]},
    },
    {
        "s": "", "b": None, "i": None, "f": None, "f32": 1.0, "f16": None, "dec": None, "ns": None, "day": None,
        "time": None, "bytes": None, "vector": None, "list": [], "struct": None, "cat": "y", "null": None, "json": None,
    },
    {
        "s": None, "b": False, "i": 2**64 - 1, "f": None, "f32": 1e-20, "f16": 2.0, "dec": -0.05,
        "ns": "2024-01-01T00:00:00.123456789", "day": None, "time": None, "bytes": "", "vector": [None, None],
        "list": None, "struct": {"x": None, "y": None}, "cat": None, "null": None, "json": "x",
    },
]  # fmt: skip


def test_c21_json_is_strict_for_every_type() -> None:
    text = written("jsonl", EVERY_TYPE, EVERY_TYPE.slice(1))
    rows = strict(text)
    assert rows == [*AS_JSON, *AS_JSON[1:]]
    assert [list(row) for row in rows] == [EVERY_TYPE.schema.names] * 5
    assert '"dec": 12.30' in text, "decimals keep their digits"
    assert "é" in text, "characters stay readable"


def test_c21_values_of_engines_become_strict_json() -> None:
    output = OutputColumns("out", "json")
    values = [
        {"logprobs": [-0.1, -math.inf, math.nan], "top": np.float32(0.5), "n": np.int64(7), "zero": np.array(3)},
        np.float32("nan"),
        np.array([1.5, np.inf]),
    ]
    made = pa.Table.from_arrays(
        output.arrays([Completed(i, value) for i, value in enumerate(values)]), schema=pa.schema(output.fields)
    )
    rows = strict(written("jsonl", made))
    assert [row["out"] for row in rows] == [
        {"logprobs": [-0.1, None, None], "top": 0.5, "n": 7, "zero": 3},
        None,
        [1.5, None],
    ]
    assert [row["error"] for row in rows] == [None, None, None]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN and infinities as null; whole numbers in a column of numbers may be floats."""
    if isinstance(one, float) and not math.isfinite(one):
        return other is None
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool) or one is None:
        return one is other
    return bool(one == other)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON), max_size=12), st.integers(1, 5))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_json_lines_in_and_out_is_the_same(tmp_path: Path, rows: list[dict[str, Any]], size: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(path)
    blocks = list(source.blocks([], source.columns, skip=Intervals(), rows=size))
    if not source.columns:
        return
    assert not any(block.bad for block in blocks)
    found = strict(written("jsonl", *(block.kept for block in blocks)))
    expected = [{name: row.get(name) for name in source.columns} for row in rows]
    assert len(found) == len(expected)
    assert all(map(same, expected, found)), (expected, found)


@given(st.lists(JSON, max_size=8), st.lists(JSON, max_size=8))
def test_kinds_never_cast(first: list[Any], later: list[Any]) -> None:
    kind = infer(first)
    array, misfits = encode(kind, first)
    assert not misfits, "what a kind was inferred from fits it"
    array, misfits = encode(kind, later)
    assert array.type == kind.arrow
    for at, (given_value, kept) in enumerate(zip(later, array.to_pylist(), strict=True)):
        if at in misfits or given_value is None:
            assert kept is None
        elif kind is Kind.JSON:
            assert kept is None or same(given_value, json.loads(kept))
        elif isinstance(given_value, float) and math.isnan(given_value):
            assert kept is None or math.isnan(kept)
        else:
            assert kept == given_value
            assert isinstance(kept, bool) == isinstance(given_value, bool)
            assert isinstance(kept, str) == isinstance(given_value, str)


# ---------------------------------------------------------------- CSV


def test_csv_fields() -> None:
    rows = list(csv.DictReader(io.StringIO(written("csv", EVERY_TYPE), newline="")))
    assert rows[0]["s"] == 'é"\n\t\u2028'
    assert rows[0]["struct"] == '{"x": [null, 1.0], "y": "é"}'
    assert rows[2]["json"] == '"x"'
    assert {name: value for name, value in rows[1].items() if value} == {"f32": "1.0", "list": "[]", "cat": "y"}
    assert rows[1]["s"] == rows[1]["i"] == rows[1]["b"] == ""
    assert written("tsv", EVERY_TYPE.select(["s", "i"])).startswith("s\ti\n")


def test_csv_of_one_empty_column_keeps_its_rows() -> None:
    rows = list(csv.reader(io.StringIO(written("csv", pa.table({"a": ["", "x"]})))))
    assert rows == [["a"], [""], ["x"]]


# ---------------------------------------------------------------- reading a finished file back


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize(
    "description", ["string", "float32[2]", "struct<a: string, b: int64>", "json", "float64", "string[]"]
)
def test_a_file_that_is_read_back_is_written_again_the_same(tmp_path: Path, kind: str, description: str) -> None:
    output = OutputColumns("out", description)
    answers: dict[str, list[Any]] = {
        "string": ["x", "", 'é"\n'],
        "float32[2]": [np.array([0.1, 2], np.float32), [1, 2.5], np.array([np.nan, 1], np.float32)],
        "struct<a: string, b: int64>": [{"a": "x", "b": 1}, {"a": None}, {}],
        "json": ["x", [1], {"a": None}],
        "float64": [0.1, 1, math.inf],
        "string[]": [["a", ""], [], [None]],
    }
    results = [Completed(i, value, "stop", Usage(i, 2)) for i, value in enumerate(answers[description])]
    arrays = output.arrays([*results, Failed(3, "x", "é, why"), Completed(4, answers[description][0])])
    kept = EVERY_TYPE.take(pa.array([0, 1, 2, 1, 0]))
    table = pa.Table.from_arrays([*kept.columns, *arrays], schema=pa.schema([*kept.schema, *output.fields]))
    path = tmp_path / "out"
    with path.open("wb") as file:
        write_single(kind, file, [table.slice(0, 2), table.slice(2)], table.schema)
    again = list(read_single(kind, path, table.schema, output))
    assert sum(part.num_rows for part in again) == 5
    assert [error for part in again for error in part.column("error").to_pylist()] == [
        None,
        None,
        None,
        "x: é, why",
        None,
    ]
    with (tmp_path / "again").open("wb") as file:
        write_single(kind, file, again, table.schema)
    if kind == "parquet":
        import pyarrow.parquet as pq

        assert str(pq.read_table(tmp_path / "again").to_pylist()) == str(pq.read_table(path).to_pylist())
    else:
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("text", [b'{"out": "torn', b'{"out": 5}\n', b"\x00" * 50, b'{"out": "x", "error": 3}\n'])
def test_c36_a_damaged_finished_file_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "out.jsonl").write_bytes(text)
    output = OutputColumns("out", "string")
    with pytest.raises(OutputError, match=r"out.jsonl is not as this run left it .*; restore it, or start again"):
        list(read_single("jsonl", tmp_path / "out.jsonl", pa.schema(output.fields), output))


# ---------------------------------------------------------------- added columns


def test_descriptions_of_types() -> None:
    for description, expected in (
        ("string", pa.string()),
        (" float32[384] ", pa.list_(pa.float32(), 384)),
        ("float32[]", pa.list_(pa.float32())),
        ("struct<a: string, b: float64[3]>[]", pa.list_(pa.struct([("a", "string"), ("b", pa.list_(pa.float64(), 3))]))),
        ("json", pa.string()),
        ("uint8", pa.uint8()),
    ):  # fmt: skip
        assert arrow_type(description) == expected
    for wrong in (
        "",
        "text",
        "struct",
        "struct<>",
        "struct<a>",
        "struct<a: string",
        "float32[",
        "float32[-1]",
        "string string",
        "é",
    ):
        with pytest.raises(ConfigError, match="output_type="):
            arrow_type(wrong)


def test_c19_rows_say_what_was_cut_off_and_failed_rows_are_null_with_their_error() -> None:
    results: list[Result] = [
        Completed(0, "", "stop", Usage(3, 0, 7)),
        Failed(1, "too_long", "1 > 0"),
        Completed(2, "é", None),
    ]
    made = pa.Table.from_arrays(OutputColumns().arrays(results), names=list(OutputColumns().names)).to_pylist()
    none = {
        "output": None,
        "finish_reason": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "truncated_tokens": None,
        "error": None,
    }
    assert made == [
        {
            **none,
            "output": "",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "truncated_tokens": 7,
        },
        {**none, "error": "too_long: 1 > 0"},
        {**none, "output": "é", "prompt_tokens": 0, "completion_tokens": 0, "truncated_tokens": 0},
    ]


@pytest.mark.parametrize(
    ("description", "good", "wrong"),
    [
        ("string", "x", [b"x", 5, ["x"], {"a": 1}, "\ud800"]),
        ("int64", 5, [5.0, True, "5", 2**63]),
        ("float32[2]", np.ones(2, np.float32), [np.ones(3, np.float32), "ab", [1, "x"], 1.0]),
        ("struct<a: int64>", {"a": 1}, [{"b": 1}, {"a": 1.5}, "x"]),
        ("json", {"a": 1}, [{1, 2}, object()]),
    ],
)
def test_an_output_of_another_type_fails_its_row_alone(description: str, good: Any, wrong: list[Any]) -> None:
    output = OutputColumns("out", description)
    arrays = output.arrays(
        [Completed(0, good), *(Completed(i, value) for i, value in enumerate(wrong, 1)), Completed(9, good)]
    )
    answers, errors = arrays[0].to_pylist(), arrays[-1].to_pylist()
    assert answers[0] == answers[-1] is not None
    assert answers[1:-1] == [None] * len(wrong)
    assert errors[0] is errors[-1] is None
    assert all(error.startswith("wrong_type: ") for error in errors[1:-1])


def test_half_characters_in_errors_do_not_stop_the_run() -> None:
    assert OutputColumns().arrays([Failed(0, "error", "\ud800 bad")])[-1].to_pylist() == ["error: ? bad"]

"""Rows in memory: DataFrames, sequences, iterators."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from daskinfer.errors import MissingColumnError, SourceError
from daskinfer.storage import Intervals, Source, open_source
from daskinfer.storage.kinds import is_json


def table(source: Source, *, keep: tuple[str, ...] | None = None, rows: int = 2) -> pa.Table:
    kept = source.columns if keep is None else keep
    blocks = list(source.blocks([], kept, skip=Intervals(), rows=rows))
    assert not any(block.bad for block in blocks)
    return pa.concat_tables([block.kept for block in blocks])


def values(source: Source, name: str, skip: Intervals | None = None) -> dict[int, Any]:
    return {
        row: value
        for block in source.blocks([name], [], skip=skip or Intervals(), rows=2)
        for row, value in zip(block.ids, block.values[name], strict=True)
    }


# ---------------------------------------------------------------- pandas


def test_typed_columns_keep_their_type() -> None:
    frame = pd.DataFrame(
        {
            "i": pd.array([1, None, 3], "Int64"),
            "f": [0.5, np.nan, 1.0],
            "s": pd.array(["NA", None, "007"], "str"),
            "p": pd.array(["a", None, "b"], "string[pyarrow]"),
            "arrow": pd.Series([[1], None, [2, 3]], dtype=pd.ArrowDtype(pa.list_(pa.int8()))).array,
            "c": pd.Categorical(["x", "y", "x"]),
            "t": pd.to_datetime(pd.Series(["2024-01-01", None, "2024-01-03"]), utc=True).array,
            "b": pd.array([True, None, False], "boolean"),
            "f32": np.array([0.1, 2, 3], np.float32),
        },
        index=["r", "s", "t"],
    )
    source = open_source(frame)
    assert source.columns == tuple(frame.columns)
    assert source.total == 3
    assert source.files == ()
    found = table(source)
    expected = pa.Table.from_pandas(frame, preserve_index=False)
    assert found.cast(found.schema).equals(expected.replace_schema_metadata(None))


def test_c03_values_come_through_as_they_are() -> None:
    given = ["ok", None, float("nan"), pd.NA, 7, 3.5, b"raw", True, ["x"]]
    source = open_source(pd.DataFrame({"p": pd.Series(given, dtype=object)}))
    found = list(values(source, "p").values())
    assert [type(value) for value in found] == [type(value) for value in given]
    assert found[0] == "ok"
    assert found[3] is pd.NA
    assert str(open_source(pd.DataFrame({"p": pd.array(["a", None], "str")})).columns) == "('p',)"


def test_object_columns_get_an_exact_type_or_json_text() -> None:
    frame = pd.DataFrame(
        {
            "s": pd.Series(["a", None, "b"], dtype=object),
            "i": pd.Series([1, None, 2], dtype=object),
            "mixed": pd.Series([1, "a", None], dtype=object),
            "big": pd.Series([2**80, 1, None], dtype=object),
            "days": pd.Series([date(2024, 1, 2), None, date(2025, 1, 2)], dtype=object),
            "dec": pd.Series([Decimal("1.5"), None, Decimal("2.25")], dtype=object),
            "bytes": pd.Series([b"\xff", b"", None], dtype=object),
            "lists": pd.Series([np.array([1.5, np.nan]), None, np.array([2.0])], dtype=object),
            "same": pd.Series([{"a": 1}, {"a": None}, None], dtype=object),
            "keys": pd.Series([{"a": 1}, {"b": 2}, None], dtype=object),
            "none": pd.Series([None, None, None], dtype=object),
        }
    )
    source = open_source(frame)
    schema = source.schema(source.columns)
    assert {field.name: ("json" if is_json(field) else str(field.type)) for field in schema} == {
        "s": "string", "i": "int64", "mixed": "json", "big": "json", "days": "date32[day]", "dec": "decimal128(3, 2)",
        "bytes": "binary", "lists": "list<item: double>", "same": "struct<a: int64>", "keys": "json", "none": "null",
    }  # fmt: skip
    found = table(source).to_pydict()
    assert found["keys"] == ['{"a": 1}', '{"b": 2}', None]
    assert found["mixed"] == ["1", '"a"', None]
    assert found["days"] == [date(2024, 1, 2), None, date(2025, 1, 2)]
    assert found["same"] == [{"a": 1}, {"a": None}, None]


def test_object_value_without_any_form_is_a_bad_row() -> None:
    source = open_source(pd.DataFrame({"p": ["a", "b"], "o": pd.Series([object(), 1], dtype=object)}))
    (block,) = source.blocks(["p"], ["o"], skip=Intervals(), rows=5)
    assert block.bad == {0: "the DataFrame, row 0: column 'o' holds a object, which has no JSON form; correct it"}
    assert block.values["p"] == [None, "b"]
    assert block.kept.column("o").to_pylist() == [None, "1"]


def test_frames_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(SourceError, match="two columns called 'a'"):
        open_source(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    assert open_source(pd.DataFrame([[1, 2]])).columns == ("0", "1")
    with pytest.raises(SourceError, match=r"column 'c' \(complex128\) has no Arrow type"):
        open_source(pd.DataFrame({"c": [1j]})).schema(["c"])
    with pytest.raises(MissingColumnError):
        open_source(pd.DataFrame({"c": [1]})).schema(["d"])


def test_c27_empty_frame_keeps_its_columns() -> None:
    source = open_source(pd.DataFrame({"a": pd.array([], "Int64"), "b": pd.array([], "str")}))
    assert source.columns == ("a", "b")
    assert source.total == 0
    assert list(source.blocks(["a"], ["b"], skip=Intervals(), rows=5)) == []
    assert source.schema(["a"]).field("a").type == pa.int64()


def test_frame_rows_are_skipped_by_position() -> None:
    source = open_source(pd.DataFrame({"a": range(10)}, index=range(100, 110)))
    skip = Intervals([(0, 2), (5, 8)])
    assert values(source, "a", skip) == {2: 2, 3: 3, 4: 4, 8: 8, 9: 9}


# ---------------------------------------------------------------- sequences and iterators


def test_texts_conversations_and_mappings() -> None:
    chat = [{"role": "user", "content": "é"}]
    assert values(open_source(["a", None, "b"]), "prompt") == {0: "a", 1: None, 2: "b"}
    source = open_source((chat, chat))
    assert source.columns == ("messages",)
    assert values(source, "messages") == {0: chat, 1: chat}
    assert table(source).to_pydict() == {"messages": ['[{"role": "user", "content": "é"}]'] * 2}
    source = open_source([{"a": 1, "b": "x"}, {"b": "y", "c": [1]}])
    assert source.columns == ("a", "b", "c")
    assert source.total == 2
    assert table(source).to_pydict() == {"a": [1, None], "b": ["x", "y"], "c": [None, "[1]"]}
    assert values(open_source([[1, 2, 3], [4]]), "prompt") == {0: [1, 2, 3], 1: [4]}


def test_sequences_can_be_read_again_and_skipped() -> None:
    source = open_source([f"p{i}" for i in range(6)])
    assert values(source, "prompt") == {i: f"p{i}" for i in range(6)}
    assert values(source, "prompt", Intervals([(0, 2), (3, 5)])) == {2: "p2", 5: "p5"}


def test_iterators_are_read_lazily_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.storage.memory._ITERATOR_ROWS", 4)
    taken: list[int] = []

    def rows() -> Iterator[dict[str, int]]:
        for i in range(10**9):
            taken.append(i)
            yield {"a": i}

    source = open_source(rows())
    assert source.columns == ("a",)
    assert source.total is None
    assert len(taken) == 4
    blocks = source.blocks(["a"], ["a"], skip=Intervals([(0, 3)]), rows=2)
    assert [next(blocks).values["a"] for _ in range(3)] == [[3, 4], [5, 6], [7, 8]]
    assert len(taken) == 9
    with pytest.raises(SourceError, match="can be read once; make a new one, or a list"):
        next(source.blocks(["a"], [], skip=Intervals(), rows=2))
    assert not source.is_empty


def test_numpy_values_in_rows() -> None:
    source = open_source(iter([{"i": np.int64(1), "f": np.float32(0.5), "s": np.str_("x"), "v": np.ones(2)}] * 2))
    schema = source.schema(["i", "f", "s", "v"])
    assert [str(field.type) for field in schema] == ["int64", "double", "string", "string"]
    assert table(source).to_pydict() == {"i": [1, 1], "f": [0.5, 0.5], "s": ["x", "x"], "v": ["[1.0, 1.0]"] * 2}


def test_records_of_pandas_with_missing_texts() -> None:
    source = open_source([{"s": "a", "n": 1}, {"s": float("nan"), "n": float("nan")}, {"s": pd.NA, "n": 2}])
    found = table(source)
    assert found.column("s").to_pylist() == ["a", None, None]
    assert str(found.column("n").to_pylist()) == "[1.0, nan, 2.0]"


def test_rows_of_another_shape_are_bad_rows() -> None:
    source = open_source([{"a": "x"}, "y", {"a": 5}, {"a": "z"}], name="my rows")
    blocks = list(source.blocks(["a"], ["a"], skip=Intervals([(0, 1)]), rows=9))
    assert [list(block.ids) for block in blocks] == [[1, 2, 3]]
    assert blocks[0].bad == {0: "my rows, row 1: a str ('y'), not a mapping like the others"}
    with pytest.raises(SourceError, match="a column 1; the names of columns must be text"):
        open_source([{1: "x"}])


def test_later_misfit_in_an_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.storage.memory._ITERATOR_ROWS", 2)
    source = open_source(iter([{"a": 1}, {"a": 2}, {"a": "3"}]))
    (block,) = source.blocks(["a"], ["a"], skip=Intervals(), rows=9)
    assert "column 'a' holds '3' (str), but the first rows hold int64" in block.bad[2]
    assert block.kept.column("a").to_pylist() == [1, 2, None]


def test_c27_no_rows() -> None:
    empty: list[Any] = [[], iter(())]
    for given in empty:
        source = open_source(given)
        assert source.is_empty
        assert source.columns == ()
        assert list(source.blocks(["a"], ["b"], skip=Intervals(), rows=2)) == []
        assert source.schema(["b"]).names == ["b"]


def test_digest_tells_inputs_apart() -> None:
    one, other = [{"a": 1, "b": b"x"}], [{"a": 2, "b": b"x"}]
    assert open_source(one).digest == open_source(iter(one)).digest == open_source(pd.DataFrame(one)).digest
    assert open_source(one).digest != open_source(other).digest
    assert open_source([object()]).digest == open_source([object()]).digest


@pytest.mark.parametrize("given", [5, b"x", {"a": [1]}, None, {"a", "b"}, pa.table({"a": [1]})])
def test_what_is_not_rows_is_refused(given: Any) -> None:
    with pytest.raises(SourceError, match=r"is not rows; give a path, a pandas DataFrame .*, or an iterable"):
        open_source(given)


def test_dask_collections_other_than_frames_are_refused_with_advice() -> None:
    import dask.bag as db
    import dask.dataframe as dd

    for given in (db.from_sequence(["a"]), dd.from_pandas(pd.DataFrame({"a": [1]}), npartitions=1)["a"]):
        with pytest.raises(SourceError, match=r"a dask\..* is not rows"):
            open_source(given)


def test_an_open_source_is_passed_through() -> None:
    source = open_source(["a"])
    assert open_source(source) is source


def test_dates_and_bytes_in_rows_keep_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskinfer.storage.memory._ITERATOR_ROWS", 2)
    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows: list[dict[str, Any]] = [
        {"t": when, "d": date(2024, 1, 2), "b": b"x", "m": when, "c": Decimal("1.20")},
        {"t": None, "d": None, "b": None, "m": [1], "c": None},
        {"t": datetime(2024, 1, 1), "d": when, "b": "x", "m": date(2024, 1, 1), "c": 1},
        {"t": pd.Timestamp("2024-01-02", tz="UTC"), "d": date(1, 1, 1), "b": b"", "m": None, "c": None},
    ]
    source = open_source(iter(rows))
    schema = source.schema(["t", "d", "b", "m", "c"])
    assert [str(field.type) for field in schema] == [
        "timestamp[us, tz=UTC]",
        "date32[day]",
        "binary",
        "string",
        "string",
    ]
    (block,) = source.blocks([], schema.names, skip=Intervals(), rows=9)
    assert list(block.bad) == [2]
    assert "but the first rows hold timestamp[us, tz=UTC]" in block.bad[2]
    found = block.kept.to_pydict()
    assert found["t"] == [when, None, None, datetime(2024, 1, 2, tzinfo=UTC)]
    assert found["d"] == [date(2024, 1, 2), None, None, date(1, 1, 1)]
    assert found["b"] == [b"x", None, None, b""]
    assert found["m"] == ['"2024-01-01T00:00:00+00:00"', "[1]", '"2024-01-01"', None]
    assert found["c"] == ['"1.20"', None, "1", None]

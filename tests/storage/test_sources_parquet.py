"""Rows of Parquet files: exact Arrow types, and no reading of what is skipped."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskinfer.errors import SourceError
from daskinfer.storage import Intervals, open_source
from daskinfer.storage.base import FILE_ROWS

TABLE = pa.table(
    {
        "dec": pa.array([Decimal("1.20"), None, Decimal("-3.00")], pa.decimal128(9, 2)),
        "ns": pa.array([1, None, 3], pa.timestamp("ns", "Europe/Berlin")),
        "nested": pa.array([[{"role": "user", "content": "é"}], [], None]),
        "cat": pa.array(["x", "y", None]).dictionary_encode(),
        "large": pa.array(["NA", "007", None], pa.large_string()),
        "u8": pa.array([1, 255, None], pa.uint8()),
        "nan": pa.array([float("nan"), None, 1.0]),
        "bin": pa.array([b"\xff", b"", None]),
    }
)


def test_types_stay_exactly_as_they_are(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    source = open_source(tmp_path / "in.parquet")
    schema = source.schema(source.columns)
    assert [field.type for field in schema] == [field.type for field in pq.read_schema(tmp_path / "in.parquet")]
    assert schema.metadata is None
    (block,) = source.blocks(["large", "nested", "ns", "nan"], source.columns, skip=Intervals(), rows=10)
    assert block.kept.drop_columns("nan").equals(TABLE.drop_columns("nan").cast(block.kept.drop_columns("nan").schema))
    assert str(block.kept.column("nan").to_pylist()) == str([float("nan"), None, 1.0])
    assert block.values["large"] == ["NA", "007", None]
    assert block.values["nested"] == TABLE.column("nested").to_pylist()
    assert not block.bad


def test_skipped_row_groups_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"a": range(100), "b": range(100)}), tmp_path / "in.parquet", row_group_size=10)
    asked: list[list[int]] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, row_groups: list[int], **kwargs: Any) -> Any:
        asked.append(row_groups)
        return real(self, *args, row_groups=row_groups, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    source = open_source(tmp_path / "in.parquet")
    done = Intervals([(0, 35), (37, 38), (50, 90), (99, 100)])
    blocks = list(source.blocks(["a"], ["b"], skip=done, rows=8))
    found = [row for block in blocks for row in block.ids]
    assert found == [value for block in blocks for value in block.values["a"]]
    assert found == [value for block in blocks for value in block.kept.column("b").to_pylist()]
    assert found == [i for i in range(100) if i not in done]
    assert asked == [[3, 4], [9]]
    asked.clear()
    assert list(source.blocks(["a"], ["b"], skip=Intervals([(0, 100)]), rows=8)) == []
    assert asked == []


def test_row_counts_are_known(tmp_path: Path) -> None:
    for name, rows in (("a", 3), ("b", 0), ("c", 2)):
        pq.write_table(pa.table({"x": pa.array(range(rows), pa.int64())}), tmp_path / f"{name}.parquet")
    source = open_source(tmp_path)
    assert source.total == 5
    assert [file.rows for file in source.files] == [3, 0, 2]
    blocks = list(source.blocks(["x"], [], skip=Intervals(), rows=2))
    assert [list(block.ids) for block in blocks] == [[0, 1], [2], [2 * FILE_ROWS, 2 * FILE_ROWS + 1]]
    assert all(block.kept.num_rows == len(block) for block in blocks)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int16(), pa.string()), pa.string()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int64(), pa.float64(), None),
        (pa.int64(), pa.string(), None),
        (pa.timestamp("ms"), pa.timestamp("us"), None),
    ],
)
def test_files_may_differ_in_type_where_nothing_is_lost(tmp_path: Path, one: Any, other: Any, expected: Any) -> None:
    for name, kind in (("a", one), ("b", other)):
        pq.write_table(pa.table({"x": pa.nulls(2, kind)}), tmp_path / f"{name}.parquet")
    source = open_source(tmp_path)
    if expected is None:
        with pytest.raises(
            SourceError, match=r"b.parquet: column 'x' is .*, but .* in a.parquet; give the files the same"
        ):
            source.schema(["x"])
        assert source.schema([]) == pa.schema([])
    else:
        assert source.schema(["x"]).field("x").type == expected
        blocks = list(source.blocks([], ["x"], skip=Intervals(), rows=5))
        assert [block.kept.num_rows for block in blocks] == [2, 2]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "in.parquet")
    whole = (tmp_path / "in.parquet").read_bytes()
    for text in (b"", whole[:-20], b"PAR1" + b"\x00" * 100):
        (tmp_path / "in.parquet").write_bytes(text)
        with pytest.raises(SourceError, match=r"in.parquet: is not a readable Parquet file"):
            _ = open_source(tmp_path / "in.parquet").columns
    pq.write_table(pa.table({"a": range(10)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"b": range(10)}), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"b.parquet: has no column 'a'"):
        open_source(str(tmp_path / "[ab].parquet")).schema(["a"])


def test_remote_parquet() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    with fs.open("/daskinfer-pq/in.parquet", "wb") as file:
        pq.write_table(pa.table({"a": range(5)}), file)
    try:
        source = open_source("memory://daskinfer-pq/in.parquet")
        assert source.total == 5
        assert [b.values["a"] for b in source.blocks(["a"], [], skip=Intervals([(1, 3)]), rows=9)] == [[0, 3, 4]]
    finally:
        fs.rm("/daskinfer-pq", recursive=True)


def test_c09_chat_column_written_by_pandas(tmp_path: Path) -> None:
    import pandas as pd

    rows = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "c"}],
        [{"role": "user", "content": "d", "name": "n"}],
    ]
    pd.DataFrame({"messages": rows}).to_parquet(tmp_path / "in.parquet")
    (block,) = open_source(tmp_path / "in.parquet").blocks(["messages"], ["messages"], skip=Intervals(), rows=9)
    without = [[{k: v for k, v in m.items() if v is not None} for m in row] for row in block.values["messages"]]
    assert without == rows
    assert block.kept.column("messages").to_pylist() == block.values["messages"]
    when = datetime(2024, 1, 1, tzinfo=UTC)
    pd.DataFrame({"t": [when]}).to_parquet(tmp_path / "t.parquet")
    (block,) = open_source(tmp_path / "t.parquet").blocks(["t"], ["t"], skip=Intervals(), rows=9)
    assert block.values["t"] == [when]

"""Vectors in files: fixed-size lists of the declared type, whatever rows are in a part, and exact."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskinfer.checkpoint.parquetio import as_stored, write_table
from daskinfer.records import Completed, Failed, Result
from daskinfer.storage.encodings import encodings
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.outputs import OutputColumns
from daskinfer.storage.singlefile import write_single

TYPES = {"float32[4]": np.float32, "float16[4]": np.float16, "int8[4]": np.int8, "uint8[4]": np.uint8}


def results_of(rows: list[Any]) -> list[Result]:
    return [Failed(i, "error", "no") if row is None else Completed(i, row) for i, row in enumerate(rows)]


def table_of(description: str, rows: list[Any]) -> pa.Table:
    columns = OutputColumns(description=description)
    stored = as_stored(pa.schema(columns.fields))
    return pa.Table.from_arrays(columns.arrays(results_of(rows)), schema=pa.schema(columns.fields)).cast(stored)


@pytest.mark.parametrize("description", TYPES)
@pytest.mark.parametrize("rows", ["vectors", "some", "nulls", "none"])
def test_c24_vectors_keep_type_and_numbers_in_parquet(tmp_path: Path, description: str, rows: str) -> None:
    drawn = np.random.default_rng(0).integers(0, 100, (3, 4)).astype(TYPES[description])
    given: list[Any] = {"vectors": list(drawn), "some": [drawn[0], None], "nulls": [None, None], "none": []}[rows]
    table = table_of(description, given)
    path = tmp_path / "some.parquet"
    with path.open("wb") as file:
        write_single("parquet", file, [table], table.schema)
    back = pq.read_table(path)
    kind = back.schema.field("output").type
    assert (kind.list_size, kind.value_type) == (4, pa.from_numpy_dtype(TYPES[description]))
    assert back["output"].to_pylist() == [None if row is None else row.tolist() for row in given]
    frame = pd.read_parquet(path)
    assert frame["output"].isna().tolist() == [row is None for row in given]


def test_vectors_become_arrow_without_an_object_per_number() -> None:
    class Counted(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            raise AssertionError("a list of numbers was made")

    for description, dtype in TYPES.items():
        rows = [np.ones(4, dtype).view(Counted) for _ in range(3)]
        assert table_of(description, rows)["output"].null_count == 0


def test_a_vector_of_another_length_or_type_fails_its_row() -> None:
    columns = OutputColumns(description="float32[4]")
    made = columns.arrays(results_of([np.ones(3, np.float32), np.ones(4, np.float32)]))
    assert made[0].to_pylist() == [None, [1.0] * 4]
    assert "cannot hold" in made[-1].to_pylist()[0]


@pytest.mark.parametrize(("kind", "empty"), [("jsonl", None), ("csv", "")])
def test_vectors_in_text_are_json_and_exact(kind: str, empty: str | None) -> None:
    vectors = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    for description, rows in (("float32[4]", vectors), ("int8[4]", (vectors * 50).astype(np.int8))):
        file = io.BytesIO()
        table = table_of(description, [*rows, None])
        write_single(kind, file, [table], table.schema)
        file.seek(0)
        if kind == "jsonl":
            found = [json.loads(line)["output"] for line in file]
        else:
            cells = pd.read_csv(file, keep_default_na=False)["output"].tolist()
            found = [json.loads(cell) if cell else cell for cell in cells]
        assert np.array_equal(np.array(found[:2], rows.dtype), rows)
        assert found[2] == empty


def test_vectors_are_encoded_neither_as_a_dictionary_nor_byte_by_byte() -> None:
    schema = pa.schema(
        [("id", pa.string()), ("output", pa.list_(pa.float32(), 4)), ("half", pa.list_(pa.float16(), 4))]
    )
    file = io.BytesIO()
    rows = [{"id": "a", "output": [1.0] * 4, "half": [np.float16(1)] * 4}] * 5
    pq.write_table(pa.Table.from_pylist(rows, schema), file, **encodings(schema))
    group = pq.ParquetFile(file).metadata.row_group(0)
    used = {group.column(i).path_in_schema.split(".")[0]: set(group.column(i).encodings) for i in range(3)}
    assert "RLE_DICTIONARY" in used["id"]
    assert "BYTE_STREAM_SPLIT" in used["output"]
    assert "RLE_DICTIONARY" not in used["output"] | used["half"]
    assert encodings(pa.schema([("id", pa.string())])) == {}


def test_a_large_chunk_has_row_groups_that_fit_into_memory(tmp_path: Path) -> None:
    def groups(rows: int, dims: int) -> list[int]:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * dims, np.float32)), dims)
        write_table(tmp_path / "f.parquet", tmp_path / "f.tmp", pa.table({"v": vectors}), FileOps())
        about = pq.ParquetFile(tmp_path / "f.parquet").metadata
        return [about.row_group(at).num_rows for at in range(about.num_row_groups)]

    assert groups(10, 4) == [10]
    several = groups(50_000, 384)
    assert sum(several) == 50_000
    assert max(several) * 384 * 4 <= 16 << 20
    assert min(several[:-1]) * 384 * 4 >= 15 << 20

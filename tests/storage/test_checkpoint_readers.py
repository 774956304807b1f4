"""What pandas and Dask see in an output, finished and unfinished; columns and types through the whole way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskinfer.checkpoint import CheckpointPolicy
from daskinfer.records import Completed, Failed, Usage
from daskinfer.storage import open_source
from tests.storage.harness import FaultyOps, Run, opened, rows_of

SINKS = ["out", "out.jsonl", "out.parquet", "out.csv"]


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's use of pandas
def test_pandas_and_dask_see_each_row_once_at_any_moment(tmp_path: Path) -> None:
    import dask.dataframe as dd

    source, seen, sink = open_source(pd.DataFrame({"id": range(40)})), list[int](), tmp_path / "out"

    def watch() -> None:
        if not list(sink.glob("data-*")):
            return
        ids = pd.read_parquet(sink)["id"].tolist()
        assert ids == sorted(set(ids))
        if len(ids) != (seen[-1] if seen else 0):
            lazily = dd.read_parquet(sink)
            assert lazily["id"].compute(scheduler="sync").tolist() == ids
            assert lazily.columns.tolist() == [
                "id",
                "output",
                "finish_reason",
                "prompt_tokens",
                "completion_tokens",
                "truncated_tokens",
                "error",
            ]
            seen.append(len(ids))

    ops = FaultyOps()
    with opened(sink, source, ops, CheckpointPolicy(chunk_rows=8, flush_s=0.0)) as checkpoint:
        ops.watch = watch
        Run(seed=1).drive(checkpoint, source)
    watch()
    assert seen[-1] == 40
    assert len(seen) >= 3
    assert (sink / "_manifest.json").exists(), "readers pass over it"


def test_unfinished_parts_are_not_seen(tmp_path: Path) -> None:
    source = open_source(pd.DataFrame({"id": range(40)}))
    with opened(tmp_path / "out", source, policy=CheckpointPolicy(flush_s=0.0, interrupt_files=1)) as checkpoint:
        checkpoint.begin(next(source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=40)))
        checkpoint.add([Completed(row, "x") for row in (*range(9), 20, 30)], 5.0)
        checkpoint.interrupt(6.0)
    assert len(list((tmp_path / "out").rglob("*.part"))) == 1
    assert pd.read_parquet(tmp_path / "out")["id"].tolist() == list(range(9))


@pytest.mark.parametrize("sink", ["out", "out.parquet"])
def test_kept_columns_keep_type_and_value(tmp_path: Path, sink: str) -> None:
    table = pa.table(
        {
            "id": pa.array(["NA", "007", None] * 10),
            "dec": pa.array([None, 1, 2] * 10, pa.int32()).cast(pa.decimal128(20, 3)),
            "t": pa.array([1, None, 3] * 10, pa.timestamp("ns", "Asia/Tokyo")),
            "nested": pa.array([[{"role": "user", "content": "é"}], [], None] * 10),
            "cat": pa.array(["x", None, "y"] * 10).dictionary_encode(),
            "large": pa.array(["a", None, ""] * 10, pa.large_string()),
            "vector": pa.array([[1.5, 2.5], None, [0.0, 1.0]] * 10, pa.list_(pa.float32(), 2)),
            "nan": pa.array([float("nan"), None, 1.0] * 10),
            "u": pa.array([2**64 - 1, None, 0] * 10, pa.uint64()),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=7)
    for stop in (13, None):
        source = open_source(tmp_path / "in.parquet")
        with opened(tmp_path / sink, source, resume=True) as checkpoint:
            Run(stop_after=stop).drive(checkpoint, source)
    found = pq.read_table(tmp_path / sink)
    kept = found.select(table.column_names)
    assert [field.type for field in kept.schema] == [field.type for field in pq.read_schema(tmp_path / "in.parquet")]
    assert str(kept.to_pylist()) == str(table.to_pylist())
    assert [str(field.type) for field in found.schema][-6:] == ["string", "string", *["int64"] * 3, "string"]


def test_json_values_come_back_in_json_lines_and_as_text_in_parquet(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "007", "meta": {"é": [1, 2.5, None]}},
        {"id": "NA", "meta": "text"},
        {"id": "", "meta": None},
        {"id": None},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for sink in ("out.jsonl", "out.parquet", "out.csv"):
        source = open_source(tmp_path / "in.jsonl")
        with opened(tmp_path / sink, source) as checkpoint:
            Run().drive(checkpoint, source)
    found = rows_of(tmp_path / "out.jsonl")
    assert [{"id": row["id"], "meta": row["meta"]} for row in found] == [{"meta": None, **row} for row in rows]
    assert [row["meta"] for row in rows_of(tmp_path / "out.parquet")] == ['{"é": [1, 2.5, null]}', '"text"', None, None]
    assert [row["id"] for row in rows_of(tmp_path / "out.csv")] == ["007", "NA", "", ""]
    chained = open_source(tmp_path / "out.parquet")
    with opened(tmp_path / "again.jsonl", chained, keep=("id", "meta")) as checkpoint:
        Run().drive(checkpoint, chained)
    assert [row["meta"] for row in rows_of(tmp_path / "again.jsonl")] == [row.get("meta") for row in rows]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(constant)


def test_c21_output_lines_parse_strictly(tmp_path: Path) -> None:
    source = open_source([{"id": i} for i in range(4)])
    with opened(tmp_path / "out.jsonl", source, output_type="json") as checkpoint:
        checkpoint.begin(next(source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=4)))
        values = [{"lp": [-0.1, -np.inf, np.nan]}, np.float32(0.1), {"n": np.int64(3), "a": np.array(1)}, "text"]
        checkpoint.add([Completed(i, value, "stop", Usage(1, 1)) for i, value in enumerate(values)], 1.0)
        checkpoint.finish(2.0)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse)["output"] for line in lines]
    assert found == [{"lp": [-0.1, None, None]}, pytest.approx(0.1), {"n": 3, "a": 1}, "text"]


def test_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((20, 8)).astype(np.float32)
    source = open_source([{"id": i} for i in range(20)])
    with opened(tmp_path / "out", source, output_type="float32[8]", output_column="embedding") as checkpoint:
        checkpoint.begin(next(source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=20)))
        for row in range(20):
            checkpoint.add([Failed(row, "x", "y") if row == 3 else Completed(row, vectors[row])], float(row))
        checkpoint.finish(30.0)
    column = pq.read_table(tmp_path / "out").column("embedding")
    assert column.type == pa.list_(pa.float32(), 8)
    assert column[3].as_py() is None
    assert np.array_equal(np.stack([v for v in column.to_numpy() if v is not None]), np.delete(vectors, 3, axis=0))


def test_c33_ids_of_users_are_only_data(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "", None, "c"]
    for sink in SINKS:
        source = open_source([{"custom_id": name, "text": f"t{at}"} for at, name in enumerate(ids)])
        with opened(tmp_path / sink, source) as checkpoint:
            for block in source.blocks(["text"], checkpoint.keep, skip=checkpoint.done, rows=4):
                checkpoint.begin(block)
                answers = [
                    Completed(row, text.upper()) for row, text in zip(block.ids, block.values["text"], strict=True)
                ]
                checkpoint.add(answers[::-1], 1.0)
            checkpoint.finish(2.0)
        rows = rows_of(tmp_path / sink)
        assert [row["output"] for row in rows] == [f"T{at}" for at in range(6)], "each row has its own answer"
        assert [row["custom_id"] or None for row in rows] == [name or None for name in ids]


def test_c34_every_row_is_there_when_all_fail(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n{"id": \n{"id": 3}\n')
    for sink in SINKS:
        source = open_source(tmp_path / "in.jsonl")
        with opened(tmp_path / sink, source) as checkpoint:
            (block,) = source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=9)
            checkpoint.begin(block)
            checkpoint.add([Failed(row, "invalid_row", block.bad.get(row, "x")) for row in block.ids], 1.0)
            counts = checkpoint.finish(2.0)
        assert (counts.rows, counts.failed) == (3, 3)
        rows = rows_of(tmp_path / sink)
        assert [bool(row["error"]) for row in rows] == [True] * 3
        assert "in.jsonl, line 2: not valid JSON" in rows[1]["error"]
        assert [str(row["id"] or "") for row in rows] == ["1", "", "3"]


def test_pandas_and_dask_are_not_loaded_for_files() -> None:
    code = (
        "import sys; import daskinfer.checkpoint, daskinfer.storage; from daskinfer.storage import open_source;"
        "print([m for m in ('pandas', 'dask', 'distributed', 'torch') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_nothing_is_kept(tmp_path: Path) -> None:
    for sink in SINKS:
        source = open_source([{"id": i} for i in range(30)])
        for stop in (17, None):
            asked: dict[str, Any] = {"keep": (), "resume": True}
            with opened(tmp_path / sink, source, **asked) as checkpoint:
                Run(stop_after=stop).drive(checkpoint, source)
        rows = rows_of(tmp_path / sink)
        assert len(rows) == 30
        assert next(iter(rows[0])) == "output"
        assert [row["output"] or "" for row in rows] == ["" if i % 7 == 3 else f"answer {i} é" for i in range(30)]

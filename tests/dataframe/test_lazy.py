"""``df.infer`` on dask.dataframe: what is known before, what the optimiser may do, local schedulers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.base import compute

from daskinfer.config import ModelSpec
from daskinfer.dataframe.expr import InferredFrame
from daskinfer.dataframe.partition import infer_partition
from daskinfer.errors import RowFailedError
from daskinfer.testing import call_counts, echo_spec, loads, read_log
from tests.dataframe.engines import LoadsNowhere, Rows, ShowInput

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask writes Parquet with it


@pytest.fixture(autouse=True)
def _in_this_thread() -> Any:
    with dask.config.set(scheduler="sync"):
        yield


def frame_of(n: int = 24) -> pd.DataFrame:
    text = pd.array([f"t{i}" if i % 7 else None for i in range(n)], dtype="string[pyarrow]")
    return pd.DataFrame(
        {
            "text": text,
            "n": range(n),
            "lang": pd.array(["en", "fr"] * (n // 2), dtype="string[pyarrow]"),
            "unused": [1.5] * n,
        }
    )


def lazy(frame: pd.DataFrame, npartitions: int = 4) -> Any:
    return dd.from_pandas(frame, npartitions=npartitions, sort=False)


def inferred(log: Path) -> int:
    """Rows that an engine was asked for so far."""
    return sum(call_counts(log).values())


# ---------------------------------------------------------------- what is known before


def test_c26_nothing_runs_before_compute(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    ddf = lazy(frame_of(), 3)
    made = ddf.infer.apply(LoadsNowhere, "text", client=os.getpid(), calls=str(calls))
    made = made[made.n > 2]
    made = made.assign(upper=made.output)
    assert list(made.columns) == ["text", "n", "lang", "unused", "output", "output_error", "upper"]
    assert made.dtypes["output"] == pd.StringDtype("pyarrow")
    assert repr(made)
    assert len(ddf.infer.apply(LoadsNowhere, "text", client=os.getpid(), calls=str(calls))) == 24
    assert not calls.exists()
    got = made.compute()
    called = calls.read_text().split()
    assert len(called) == len(set(called)) == 18
    assert sorted(got["output"].dropna()) == sorted(called)


@pytest.mark.parametrize("dtype", ["object", "str", "string[pyarrow]", "string[python]", "large", "category"])
@pytest.mark.parametrize("convert", [True, False])
def test_c30_every_partition_has_the_declared_dtypes(light: ModelSpec, dtype: str, convert: bool) -> None:
    kind: Any = pd.ArrowDtype(pa.large_string()) if dtype == "large" else dtype
    values = [None, None, "a", "b", None, "c"]
    frame = pd.DataFrame({"text": pd.Series(values, dtype=kind), "v": pd.Series([1, None, 3] * 2, dtype="Int64")})
    with dask.config.set({"dataframe.convert-string": convert}):
        made = lazy(frame, 3).infer.generate("text", model=light, details=True, on_long="truncate")
        parts = [part.compute() for part in made.partitions]
        assert all(part.dtypes.equals(made.dtypes) for part in parts)
        assert [len(part) for part in parts] == [2, 2, 2]
        assert dd.concat([made, made]).compute().dtypes.equals(made.dtypes)


def test_c30_typed_outputs_are_structs(light: ModelSpec) -> None:
    made = lazy(frame_of()).infer.apply(Rows, "text", isolation="thread", errors="raise", messages=None)
    assert made.dtypes["output"] == pd.ArrowDtype(pa.struct([("row", pa.int64()), ("seeded", pa.bool_())]))
    with pytest.raises(RowFailedError, match="missing_prompt"):
        made.compute()
    usable = made[made.text.notnull()]
    assert usable.compute().dtypes.equals(made.dtypes)


def test_the_description_of_an_inference_is_the_same_twice(light: ModelSpec) -> None:
    ddf = lazy(frame_of())
    names = {ddf.infer.generate("{text}", model=light, **more)._name for more in ({}, {}, {"max_new_tokens": 3})}
    assert len(names) == 2
    assert all(name.startswith("infer-generate-") for name in names)


# ---------------------------------------------------------------- what is kept


def test_index_order_and_partitions_are_kept(light: ModelSpec) -> None:
    frame = frame_of().set_index(pd.Index([i // 3 for i in range(24)], name="key"))
    ddf = dd.from_pandas(frame, npartitions=4)
    made = ddf.infer.generate("{text}", model=light)
    assert made.divisions == ddf.divisions
    assert made.known_divisions
    assert made.npartitions == ddf.npartitions
    pd.testing.assert_frame_equal(made.compute(), frame.infer.generate("{text}", model=light))
    assert made.loc[2:3].compute().index.tolist() == [2, 2, 2, 3, 3, 3]


def test_c27_empty_partitions_have_the_same_columns_and_load_nothing(
    light: ModelSpec, echo_log: Path, tmp_path: Path
) -> None:
    ddf = lazy(frame_of())
    made = ddf[(ddf.n >= 6) & (ddf.n < 18)].infer.generate("{text}", model=light)
    parts = [part.compute() for part in made.partitions]
    assert [len(part) for part in parts] == [0, 6, 6, 0]
    assert all(part.dtypes.equals(made.dtypes) for part in parts)
    made.to_parquet(tmp_path / "out")
    pd.testing.assert_frame_equal(dd.read_parquet(tmp_path / "out").compute(), pd.concat(parts), check_dtype=False)
    before = len(loads(echo_log))
    nothing = ddf[ddf.n < 0].infer.generate("{text}", model=light).compute()
    assert len(nothing) == 0
    assert nothing.dtypes.equals(made.dtypes)
    assert len(loads(echo_log)) == before == 1


def test_sampled_rows_are_seeded_by_partition_and_place() -> None:
    made = lazy(frame_of()).infer.apply(Rows, "lang", isolation="thread", temperature=1.0).compute()
    rows = [output["row"] for output in made["output"]]
    assert len(set(rows)) == 24
    assert rows[:7] == [0, 1, 2, 3, 4, 5, 1 << 40]
    assert all(output["seeded"] for output in made["output"])


def test_c09_conversations_from_parquet_are_those_that_were_written(tmp_path: Path) -> None:
    chats = [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
        [{"role": "user", "content": "a", "name": "Al"}, {"role": "user", "content": "c"}],
    ]
    frame: Any = pd.DataFrame({"messages": chats})
    frame.to_parquet(tmp_path / "chats.parquet")
    made = dd.read_parquet(tmp_path / "chats.parquet").infer.apply(ShowInput, messages="messages", isolation="thread")
    assert [json.loads(text) for text in made["output"].compute()] == chats


# ---------------------------------------------------------------- what the optimiser does


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """A dataset of four files."""
    lazy(frame_of()).to_parquet(tmp_path / "in")
    return dd.read_parquet(tmp_path / "in")


def columns_read(collection: Any) -> list[str]:
    (read,) = [e for e in collection.expr.simplify().walk() if type(e).__name__.startswith("ReadParquet")]
    return sorted(read.columns)


def test_unused_columns_are_not_read(stored: Any, light: ModelSpec) -> None:
    made = stored.infer.generate("{text}", model=light)
    assert columns_read(made[["output"]]) == ["text"]
    assert columns_read(made["output"]) == ["text"]
    assert columns_read(made[["n", "output"]]) == ["n", "text"]
    assert made["output"].compute().notna().sum() == 20
    assert columns_read(made[made.output == "<t1>"][["n"]]) == ["n", "text"]


def test_an_inference_that_nobody_uses_is_left_out(stored: Any, light: ModelSpec, echo_log: Path) -> None:
    made = stored.infer.generate("{text}", model=light)
    assert columns_read(made[["n"]]) == ["n"]
    assert made["n"].sum().compute() == sum(range(24))
    assert len(made) == 24
    assert made.index.compute().size == 24
    assert read_log(echo_log) == []


def test_rows_that_are_filtered_before_are_not_inferred(stored: Any, light: ModelSpec, echo_log: Path) -> None:
    got = stored[stored.lang == "en"].infer.generate("{text}", model=light).compute()
    assert len(got) == 12
    assert inferred(echo_log) == got["text"].notna().sum() == 10


def test_a_filter_on_input_columns_goes_first(stored: Any, light: ModelSpec, echo_log: Path) -> None:
    made = stored.infer.generate("{text}", model=light)
    got = made[(made.lang == "en") & (made.n > 5)][["n", "output"]]
    assert columns_read(got) == ["lang", "n", "text"]
    assert got.compute()["n"].tolist() == list(range(6, 24, 2))
    assert inferred(echo_log) == 8


def test_a_filter_on_the_answers_comes_after_and_infers_once(stored: Any, light: ModelSpec, echo_log: Path) -> None:
    made = stored.infer.generate("{text}", model=light)
    got = made[(made.output == "<t1>") | (made.n == 3)]
    assert got.compute()["n"].tolist() == [1, 3]
    assert inferred(echo_log) == 20


def test_answers_that_are_used_filtered_and_whole_are_inferred_once(
    stored: Any, light: ModelSpec, echo_log: Path
) -> None:
    made = stored.infer.generate("{text}", model=light)
    english, whole = compute(made[made.lang == "en"].output.count(), made.output.count())
    assert (english, whole) == (10, 20)
    joined = made.assign(same=made.output == made.output, long=stored.n)
    assert joined.compute()["same"].count() == 20
    assert inferred(echo_log) <= 50


@pytest.mark.parametrize(("n", "npartitions", "rows"), [(5, 1, 4), (8, 2, 6)])
def test_head_infers_only_what_it_shows(
    stored: Any, light: ModelSpec, echo_log: Path, n: int, npartitions: int, rows: int
) -> None:
    got = stored.infer.generate("{text}", model=light).head(n, npartitions=npartitions)
    assert len(got) == n
    assert inferred(echo_log) == rows


def test_head_after_a_filter_infers_one_partition(stored: Any, light: ModelSpec, echo_log: Path) -> None:
    made = stored.infer.generate("{text}", model=light)
    assert len(made[made.output != ""].head(2)) == 2
    assert inferred(echo_log) == 5
    assert len(made.partitions[2].compute()) == 6
    assert inferred(echo_log) == 5 + 5


def test_answers_compose(stored: Any, light: ModelSpec) -> None:
    made = stored.infer.generate("{text}", model=light)
    counted = made.groupby("lang")["output"].count().compute()
    assert counted.to_dict() == {"en": 10, "fr": 10}
    other = dd.from_pandas(pd.DataFrame({"lang": ["en"], "name": ["English"]}), npartitions=1)
    assert made.merge(other, on="lang")["output"].count().compute() == 10
    twice = made.infer.embed("{output}", model="echo", engine="echo", isolation="thread",
                             engine_options={"output": "vector", "dims": 2})  # fmt: skip
    assert columns_read(twice[["vector"]]) == ["text"]
    assert twice["vector"].count().compute() == 20


def test_an_inference_has_tasks_of_its_own(stored: Any, light: ModelSpec) -> None:
    made = stored.infer.generate("{text}", model=light).assign(a=1)
    keys = [key[0] for key in made.optimize().__dask_graph__()]
    assert sum(key.startswith("infer-generate-") for key in keys) == made.npartitions
    assert isinstance(stored.infer.generate("{text}", model=light).expr, InferredFrame)


# ---------------------------------------------------------------- schedulers


def test_threads_share_one_engine(light: ModelSpec, echo_log: Path) -> None:
    frame = frame_of()
    made = lazy(frame, 8).infer.generate("{text}", model=light).compute(scheduler="threads", num_workers=4)
    pd.testing.assert_frame_equal(made, lazy(frame).compute().infer.generate("{text}", model=light))
    assert len(loads(echo_log)) == 1


@pytest.mark.cluster
def test_processes_each_load_once(echo_log: Path) -> None:
    frame = lazy(frame_of(), 6).compute()
    spec = echo_spec(log=echo_log, isolation="thread")
    made = dd.from_pandas(frame, npartitions=6).infer.generate("{text}", model=spec)
    with dask.config.set({"multiprocessing.context": "fork"}):
        got = made.compute(scheduler="processes", num_workers=2)
    pd.testing.assert_frame_equal(got, frame.infer.generate("{text}", model=spec))
    assert len(loads(echo_log)) <= 3
    assert len(set(loads(echo_log))) == len(loads(echo_log))


def test_a_partition_is_a_function_of_a_pandas_frame(light: ModelSpec) -> None:
    inference = lazy(frame_of()).infer.generate("{text}", model=light).expr.inference
    assert "t0" not in repr(inference)
    made = infer_partition(frame_of(), inference, 3)
    assert made["output"].notna().sum() == np.sum([i % 7 > 0 for i in range(24)])

"""``driver.run`` over a dask.dataframe: the resumable way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.delayed import delayed
from distributed import Client

from daskinfer import Driver
from daskinfer.errors import MissingColumnError, SourceChangedError
from daskinfer.storage import Intervals, open_source
from daskinfer.testing import call_counts


def parts(rows: int = 50) -> tuple[pd.DataFrame, Any]:
    """A frame, and the same in six partitions of which two are empty."""
    frame = pd.DataFrame(
        {
            "id": pd.array([f"{i:04d}" for i in range(rows)], dtype="string[pyarrow]"),
            "text": pd.array([f"t{i}" if i % 7 else None for i in range(rows)], dtype="string[pyarrow]"),
            "unused": range(rows),
        }
    )
    split = [frame.iloc[at] for at in np.array_split(np.arange(rows), 4)]
    split = [*split[:2], frame.iloc[:0], *split[2:], frame.iloc[:0]]
    return frame, dd.from_delayed([delayed(part) for part in split], meta=frame.iloc[:0])


def test_partitions_are_one_source_with_rows_counted_through() -> None:
    frame, ddf = parts()
    source = open_source(ddf)
    with dask.config.set(scheduler="sync"):
        blocks = list(source.blocks(["text"], ["id"], skip=Intervals([(3, 20), (40, 50)]), rows=8))
    ids = [row for block in blocks for row in block.ids]
    assert ids == [*range(3), *range(20, 40)]
    assert [v for block in blocks for v in block.kept["id"].to_pylist()] == frame["id"].iloc[ids].tolist()
    assert source.total is None
    assert not source.is_empty
    with pytest.raises(MissingColumnError):
        next(iter(source.blocks(["nothing"], [], skip=Intervals(), rows=8)))


def test_objects_become_json() -> None:
    frame = pd.DataFrame({"m": [[{"role": "user", "content": "a"}], None], "n": pd.Series(["x", 5], dtype=object)})
    with dask.config.set({"dataframe.convert-string": False}):
        source = open_source(dd.from_pandas(frame, npartitions=1))
    with dask.config.set(scheduler="sync"):
        (block,) = source.blocks(["m"], ["m", "n"], skip=Intervals(), rows=8)
    assert block.kept["m"].to_pylist() == ['[{"role": "user", "content": "a"}]', None]
    assert not block.bad


@pytest.mark.cluster
def test_a_run_over_a_dask_frame_is_resumed(client: Client, echo_log: Path, tmp_path: Path) -> None:
    frame, ddf = parts()
    with Driver("echo", engine="echo", cluster=client, engine_options={"log": str(echo_log)}) as driver:
        first = driver.run(ddf, tmp_path / "out", prompt="{text}", keep=["id"], limit=20)
        rest = driver.run(ddf, tmp_path / "out", prompt="{text}", keep=["id"], resume=True)
        assert (first.completed + first.failed, rest.completed + rest.failed) in {(20, 30), (20, 50)}
        with pytest.raises(SourceChangedError):
            driver.run(ddf[ddf.unused > 1], tmp_path / "out", prompt="{text}", keep=["id"], resume=True)
    written = pd.read_parquet(tmp_path / "out")
    assert written["id"].tolist() == frame["id"].tolist()
    assert written["output"].isna().tolist() == frame["text"].isna().tolist()
    assert max(call_counts(echo_log).values()) == 1

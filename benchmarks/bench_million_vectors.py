"""A million scripted vectors of 384 floats: complete, in input order, in bounded memory, readable as fixed-size lists.

    python benchmarks/bench_million_vectors.py [--rows 1000000] [--dims 384] [--workers 2]

As ``bench_million.py``, but the echo engine answers with vectors, made from a hash of the text. The output is then read by
pyarrow, pandas and dask.dataframe: each has to see lists of ``dims`` float32, and every vector has to be that of its row.

Runs on: anywhere.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _common import arguments, machine_line, write_result
from bench_million import measured, write_input

from daskinfer.testing import EchoEngine, Request, echo_spec, run_engine

CHECKED_EVERY = 97


def echo_options(dims: int) -> dict[str, Any]:
    """The engine's options."""
    return {"capacity": 2048, "output": "vector", "dims": dims}


def vectors_of(texts: list[str], dims: int) -> npt.NDArray[np.float32]:
    """The vectors that the engine makes of texts."""
    engine = EchoEngine(echo_spec(**echo_options(dims)))
    engine.load()
    results = run_engine(engine, [Request(i, text) for i, text in enumerate(texts)])
    return np.stack([result.output for result in sorted(results, key=lambda r: r.id)])  # type: ignore[union-attr]


def check(out: Path, rows: int, *, dims: int) -> int:
    """Read the output with three libraries; return how many rows are where they belong."""
    import dask.dataframe as dd
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    files = sorted(out.glob("data-*.parquet"))
    for file in files:
        table = pq.read_table(file, columns=["id", "output", "error"])
        column = table["output"].combine_chunks()
        if column.type.list_size != dims or column.type.value_type != pa.float32() or column.null_count:
            raise AssertionError(f"{file.name}: {column.type} with {column.null_count} nulls")
        if table["id"].to_pylist() != [f"{i:07}" for i in range(row, row + len(table))]:
            raise AssertionError(f"{file.name}: not in input order")
        got = column.flatten().to_numpy().reshape(len(table), dims)
        chosen = range(0, len(table), CHECKED_EVERY)
        wanted = vectors_of([f"short row number {row + i}" for i in chosen], dims)
        if not np.array_equal(got[::CHECKED_EVERY], wanted):
            raise AssertionError(f"{file.name}: vectors of other rows")
        row += len(table)
    frame = pd.read_parquet(files[0], columns=["output"])
    if np.stack(frame["output"].to_list()).shape != (len(frame), dims):
        raise AssertionError("pandas")
    lazy = dd.read_parquet(str(out), columns=["output"])
    part = lazy.partitions[lazy.npartitions - 1].compute()
    if np.stack(part["output"].to_list()).dtype != np.float32 or len(lazy) != rows:
        raise AssertionError("dask.dataframe")
    return row


def main() -> None:
    """Measure, print and write the result."""
    options = arguments(__doc__ or "", rows=1_000_000, workers=2, dims=384).parse_args()
    print(machine_line())
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        write_input(source, options.rows)
        results = {}
        for name, separate in (("scheduler in the driver's process", False), ("scheduler of its own", True)):
            results[name] = measured(
                source,
                options.rows,
                options.workers,
                separate=separate,
                echo=echo_options(options.dims),
                check=partial(check, dims=options.dims),
            )
            print(name, results[name])
    write_result("million_vectors", options, results)


if __name__ == "__main__":
    main()

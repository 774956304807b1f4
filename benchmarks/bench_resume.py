"""Finding out what is done before a resumed run: 100 million rows in 200,000 part files, in seconds and little memory.

    python benchmarks/bench_resume.py [--rows 100000000] [--parts 200000] [--window 4096] [--folder DIR] [--kinds KIND …]

Three outputs are made as a run makes them, but without waiting for the disk, and then opened to be resumed:

* parts of rows that were finished in the order of the input;
* parts of rows that were finished out of order, each taken at random from a window of rows in flight;
* published chunks, of as many rows as the parts.

Each is opened ``--repeats`` times, in a fresh process every time: the time until the first row that is left to run is known
(on the wall, and of the processor alone, for a machine that has other things to do), and the memory that took (the largest
resident set, sampled every 50 ms, less the one before). The first time stands apart: the files' contents are not in the
system's cache then, if the file system lets go of them when it is asked to.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from _common import RssSampler, Spread, arguments, machine_line, write_result

from daskinfer.checkpoint import Checkpoint
from daskinfer.checkpoint.layout import locate
from daskinfer.checkpoint.parts import Parts
from daskinfer.checkpoint.published import Published
from daskinfer.storage import open_source
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals

KINDS = ("in order", "out of order", "published")
CHUNK_ROWS = 100_000
GROUP_ROWS = 1_000_000


class HastyOps(FileOps):
    """Writes without waiting for the disk."""

    def close(self, file: Any) -> None:
        file.close()

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)


# ---------------------------------------------------------------- making the outputs


def write_input(path: Path, rows: int) -> None:
    """Write so many equal rows; they take next to no room."""
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, GROUP_ROWS):
            count = min(GROUP_ROWS, rows - start)
            writer.write_table(pa.table({"text": pa.repeat(pa.scalar("a row"), count)}, schema=schema), GROUP_ROWS)


def opened(source: Path, out: Path, *, resume: bool) -> tuple[Checkpoint, Any]:
    """Open the output of a run over the input."""
    rows = open_source(source)
    fingerprint = {"model": "m"}
    return Checkpoint.open(
        str(out), source=rows, fingerprint=fingerprint, keep=[], now=time.time(), resume=resume
    ), rows


def portions(rows: int, parts: int, window: int, seed: int) -> Iterator[Any]:
    """Yield the ids of each part; with a window of 0 in the order of the input."""
    size = -(-rows // parts)
    rng = np.random.default_rng(seed)
    flying, following = np.arange(min(window, rows)), min(window, rows)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        if not window:
            yield np.arange(start, start + count)
            continue
        rng.shuffle(flying)
        done, flying = flying[:count], flying[count:]
        if len(done) < count:
            raise ValueError(f"window={window}: must hold a part, which is {count} rows")
        more = np.arange(following, min(rows, following + count))
        flying, following = np.concatenate((flying, more)), following + len(more)
        yield np.sort(done)


def make(kind: str, source: Path, out: Path, options: Any) -> None:
    """Make an output in which all rows are done."""
    checkpoint, _ = opened(source, out, resume=False)
    added = checkpoint.schema
    checkpoint.close()
    size = -(-options.rows // options.parts)
    values = {"output": "an answer", "finish_reason": "stop", "error": None}
    columns = [pa.repeat(pa.scalar(values.get(field.name, 3), field.type), size) for field in added]
    answers = pa.Table.from_arrays(columns, schema=added)
    layout = locate(out)
    published, parts = Published(layout, HastyOps()), Parts(layout, HastyOps(), added)
    layout.parts.mkdir(exist_ok=True)
    window = options.window if kind == "out of order" else 0
    for ids in portions(options.rows, options.parts, window, options.seed):
        table = answers.slice(0, len(ids))
        if kind == "published":
            published.publish(table.schema, [table], Intervals([(int(ids[0]), int(ids[-1]) + 1)]))
        else:
            parts.write(f"{int(ids[0]) // CHUNK_ROWS * CHUNK_ROWS:019d}", ids, table)


def forget(folder: Path) -> None:
    """Ask the system to drop the files' contents from its cache."""
    os.sync()
    for root, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(root, name), os.O_RDONLY)  # noqa: PTH118 - very many
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


# ---------------------------------------------------------------- opening them


def resume(source: Path, out: Path, rows: int, answers: Any) -> None:
    """Open the output in this process and send the figures back."""
    warm, _ = opened(source, out.with_name("warm"), resume=False)  # so that what is imported late is there
    warm.close()
    gc.collect()
    before = psutil.Process().memory_info().rss
    with RssSampler() as sampler:
        began, cpu = time.perf_counter(), time.process_time()
        checkpoint, read = opened(source, out, resume=True)
        left = next(read.blocks(["text"], [], skip=checkpoint.done, rows=2048), None)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert left is None
    assert (checkpoint.rows_done, checkpoint.remaining) == (rows, 0)
    checkpoint.close()
    memory = (sampler.peak_bytes - before) / 1e6
    answers.put({"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "memory_mb": round(memory, 1)})


def measured(kind: str, folder: Path, source: Path, options: Any) -> dict[str, Any]:
    """Make one output, if it is not there, and open it several times."""
    out = folder / kind.replace(" ", "-")
    if not out.exists():
        began = time.perf_counter()
        make(kind, source, out, options)
        print(f"{kind}: made in {time.perf_counter() - began:.0f} s", flush=True)
    files = sum(len(names) for _, _, names in os.walk(out))
    forget(out)
    context = multiprocessing.get_context("spawn")
    found: list[dict[str, float]] = []
    for _ in range(options.repeats):
        answers = context.Queue()
        process = context.Process(target=resume, args=(source, out, options.rows, answers))
        process.start()
        found.append(answers.get(timeout=900))
        process.join()
        print(f"{kind}: {found[-1]}", flush=True)
    if not options.keep:
        shutil.rmtree(out)
    first, *others = found
    return {
        "rows": options.rows,
        "files": files,
        "from_disk": first,
        **{name: Spread.of(round(one[name], 1) for one in others or found) for name in first},
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__ or "", repeats=4, rows=100_000_000, parts=200_000, window=4096)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="which outputs")
    parser.add_argument("--folder", type=Path, help="where the outputs are made, or are; by default a temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the outputs in --folder, for another time")
    options = parser.parse_args()
    print(machine_line())
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "in.parquet"
        if not source.exists():
            write_input(source, options.rows)
        results = {kind: measured(kind, folder, source, options) for kind in options.kinds}
    write_result("resume", options, results)


if __name__ == "__main__":
    main()

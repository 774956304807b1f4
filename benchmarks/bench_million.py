"""A million short rows through the echo engine on two workers: complete, in input order, in bounded driver memory.

    python benchmarks/bench_million.py [--rows 1000000] [--workers 2]

Two runs, each in a process of its own: with the scheduler inside the driver's process (a LocalCluster), and with scheduler
and workers as processes of their own. Memory is the driver process's resident set, sampled every 50 ms: the peak after the
50,000th row less the value at that row, and, so that a slow growth is seen, the peaks of each fifth of the time from there
to the end. The files of the output are then read back in order and compared with the input.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from _common import RssSampler, arguments, machine_line, write_result

MARK = 50_000
ECHO: dict[str, Any] = {"capacity": 2048}
Check = Callable[[Path, int], int]


def write_input(path: Path, rows: int) -> None:
    """Write the rows."""
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            file.write(json.dumps({"id": f"{row:07}", "text": f"short row number {row}"}) + "\n")


def run(source: str, out: str, scheduler: str | None, workers: int, echo: dict[str, Any], answers: Any) -> None:
    """Run in this process and send the figures back."""
    from daskinfer import Driver
    from daskinfer.records import Event, RowsResolved

    done, at_mark = 0, 0
    me = psutil.Process()
    sampler: RssSampler | None = None

    def watch(event: Event) -> None:
        nonlocal done, at_mark, sampler
        if isinstance(event, RowsResolved):
            done += event.completed + event.failed
            if not at_mark and done >= MARK:
                at_mark = me.memory_info().rss
                sampler = RssSampler()
                sampler.__enter__()

    driver = Driver(
        "echo", engine="echo", engine_options=echo, cluster=scheduler, workers=None if scheduler else workers
    )
    with driver:
        driver.wait_until_ready()
        began = time.perf_counter()
        report = driver.run(source, out, columns="text", keep=["id"], observers=[watch])
        seconds = time.perf_counter() - began
    assert sampler is not None
    sampler.__exit__(None, None, None)
    sizes = [size for _, size in sampler.samples]
    fifths = [max(sizes[len(sizes) * at // 5 : len(sizes) * (at + 1) // 5]) for at in range(5)]
    answers.put(
        {
            "rows": report.rows,
            "failed": report.failed,
            "seconds": round(seconds, 1),
            "rows_per_s": round(report.rows / seconds),
            "rss_at_mark_mb": round(at_mark / 1e6, 1),
            "rss_peak_mb": round(sampler.peak_bytes / 1e6, 1),
            "growth_mb": round((sampler.peak_bytes - at_mark) / 1e6, 1),
            "rss_peaks_by_fifth_mb": [round(peak / 1e6, 1) for peak in fifths],
        }
    )


def check(out: Path, rows: int) -> int:
    """Read the output's files in the order of their names; return how many rows are where they belong."""
    import pyarrow.parquet as pq

    row = 0
    for file in sorted(out.glob("data-*.parquet")):
        table = pq.read_table(file, columns=["id", "output", "error"])
        for got, output, error in zip(*(table[name].to_pylist() for name in ("id", "output", "error")), strict=True):
            if got != f"{row:07}" or output != f"<short row number {row}>" or error is not None:
                raise AssertionError(f"row {row}: {got}, {output}, {error}")
            row += 1
    if row != rows:
        raise AssertionError(f"{row} of {rows} rows")
    return row


def separately(workers: int, folder: Path) -> tuple[str, list[subprocess.Popen[bytes]]]:
    """Start a scheduler and workers as processes of their own; return the scheduler's address and the processes."""
    file = folder / "scheduler.json"
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    common = [sys.executable, "-m", "distributed.cli"]
    command = ["--scheduler-file", str(file), "--no-dashboard"]
    started = [
        subprocess.Popen([*common[:2], "distributed.cli.dask_scheduler", "--port", "0", *command], **options)  # type: ignore[call-overload]
    ]
    while not file.exists():
        time.sleep(0.05)
    started += [
        subprocess.Popen(  # type: ignore[call-overload]
            [*common[:2], "distributed.cli.dask_worker", *command, "--nthreads", "9"], **options
        )
        for _ in range(workers)
    ]
    return str(file), started


def measured(
    source: Path, rows: int, workers: int, *, separate: bool, echo: dict[str, Any] = ECHO, check: Check = check
) -> dict[str, Any]:
    """Run once in a fresh process, with these options of the echo engine, and check the output."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        scheduler, processes = separately(workers, Path(folder)) if separate else (None, [])
        try:
            answers = context.Queue()
            process = context.Process(target=run, args=(str(source), str(out), scheduler, workers, echo, answers))
            process.start()
            figures: dict[str, Any] = answers.get(timeout=3600)
            process.join()
        finally:
            for started in processes:
                started.terminate()
                started.wait()
        figures["in_input_order"] = check(out, rows)
    return figures


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__ or "", rows=1_000_000, workers=2)
    options = parser.parse_args()
    print(machine_line())
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        write_input(source, options.rows)
        results = {}
        for name, separate in (("scheduler in the driver's process", False), ("scheduler of its own", True)):
            results[name] = measured(source, options.rows, options.workers, separate=separate)
            print(name, results[name])
    write_result("million", options, results)


if __name__ == "__main__":
    main()

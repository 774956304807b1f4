"""A writer that is really killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd

from daskinfer.checkpoint import Checkpoint
from daskinfer.records import Completed
from daskinfer.storage import open_source
from tests.storage.harness import rows_of

ROWS = 200


def write(path: str, sink: str, seed: str) -> None:
    """Answer the rows in a scattered order, 50 ms apart by the checkpoint's clock, and say each on stdout."""
    source, rng = open_source(path), random.Random(int(seed))
    with Checkpoint.open(sink, source=source, fingerprint={"model": "m"}, now=0.0, resume=True) as checkpoint:
        now, waiting = 0.0, list[int]()
        for block in source.blocks(["text"], checkpoint.keep, skip=checkpoint.done, rows=16):
            checkpoint.begin(block)
            waiting += block.ids
            while len(waiting) > 20:
                row = waiting.pop(rng.randrange(len(waiting)))
                now += 0.05
                checkpoint.add([Completed(row, f"answer {row}", "stop")], now)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
        checkpoint.add([Completed(row, f"answer {row}", "stop") for row in waiting], now)
        checkpoint.finish(now)


def start(tmp_path: Path, sink: str, seed: int) -> subprocess.Popen[str]:
    code = "import sys; from tests.storage.test_checkpoint_process import write; write(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "in.csv"), str(tmp_path / sink), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_c35_what_was_finished_before_a_kill_is_on_disk(tmp_path: Path) -> None:
    pd.DataFrame({"id": range(ROWS), "text": ["é"] * ROWS}).to_csv(tmp_path / "in.csv", index=False)
    for sink, stops in (("out", (60, 100, None)), ("out.jsonl", (60, None))):
        finished = set[int]()
        for attempt, stop_at in enumerate(stops):
            with start(tmp_path, sink, attempt) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    assert int(line) not in finished, "a row that is on disk was run again"
                    finished.add(int(line))
                    if stop_at is not None and len(finished) >= stop_at:
                        process.send_signal(signal.SIGKILL)
                        break
                process.stdout.read()
            assert process.returncode == (0 if stop_at is None else -signal.SIGKILL)
            if stop_at is not None:
                assert not (tmp_path / "out.jsonl").exists(), "no half of a file is taken for the file"
                source = open_source(tmp_path / "in.csv")
                with Checkpoint.open(
                    str(tmp_path / sink), source=source, fingerprint={"model": "m"}, now=0.0, resume=True
                ) as checkpoint:
                    safe = {row for row in finished if row in checkpoint.done}
                assert len(safe) >= 0.8 * len(finished)
                finished = safe
        assert [int(row["id"]) for row in rows_of(tmp_path / sink)] == list(range(ROWS))
        assert [row["output"] for row in rows_of(tmp_path / sink)] == [f"answer {row}" for row in range(ROWS)]

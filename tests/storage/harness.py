"""A disk that fails on demand, and a driver in a dozen lines."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from daskinfer.checkpoint import Checkpoint, CheckpointPolicy
from daskinfer.checkpoint.layout import data_span, locate
from daskinfer.records import Completed, Failed, Result, Usage
from daskinfer.storage import Block, Source
from daskinfer.storage.fileops import FileOps


class CrashError(BaseException):
    """The process is gone: nothing may be done any more, as after a SIGKILL."""


class FaultyOps(FileOps):
    """File operations without fsync that crash or fail at a given one, and can leave a torn file behind.

    Parameters
    ----------
    crash_at : int or None
        The operation (from 0) at which, before it is done, the process dies.
    tear : int
        How many bytes of the file being written are there then; it has its temporary name.
    fail_at : int or None
        The operation that raises ENOSPC, once.
    watch : callable, optional
        Called after every operation.
    """

    def __init__(
        self,
        crash_at: int | None = None,
        tear: int = 0,
        fail_at: int | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.count = 0
        self.crash_at, self.tear, self.fail_at, self.watch = crash_at, tear, fail_at, watch
        self.names: list[str] = []

    def _step(self, name: str) -> None:
        at, self.count = self.count, self.count + 1
        self.names.append(name)
        if self.crash_at is not None and at >= self.crash_at:
            raise CrashError(f"{name}, operation {at}")
        if at == self.fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.watch is not None:
            self.watch()

    def make_folder(self, path: Path) -> None:
        self._step("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> IO[bytes]:
        self._step("create")
        return super().create(path)

    def close(self, file: IO[bytes]) -> None:
        try:
            self._step("close")
        except CrashError:
            file.truncate(self.tear)
            raise
        file.close()

    def replace(self, source: Path, target: Path) -> None:
        self._step("replace")
        source.replace(target)

    def remove(self, path: Path) -> None:
        self._step("remove")
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._step("remove_folder")
        super().remove_folder(path)


@dataclass
class Run:
    """One go at a job.

    Attributes
    ----------
    seen : list of int
        Rows that were run.
    done : set of int
        Rows that were skipped because they were done.
    """

    seed: int = 0
    block_rows: int = 7
    batch_rows: int = 3
    in_flight: int = 20
    step_s: float = 0.5
    stop_after: int | None = None
    limit: int | None = None
    fails: Callable[[int], bool] = lambda row: row % 7 == 3
    say: str = "answer"
    watch: Callable[[Checkpoint], None] | None = None
    seen: list[int] = field(default_factory=list)

    def answer(self, row: int) -> Result:
        self.seen.append(row)
        if self.fails(row):
            return Failed(row, "error", f"row {row} é")
        return Completed(row, f"{self.say} {row} é", "stop", Usage(row % 100, 3))

    def drive(self, checkpoint: Checkpoint, source: Source, needed: Sequence[str] = ()) -> str:
        """Run until the end, or until so many rows have results; return how it ended."""
        rng, now, waiting, taken, resolved = random.Random(self.seed), 0.0, list[int](), 0, 0
        blocks: Iterator[Block] = source.blocks(needed, checkpoint.keep, skip=checkpoint.done, rows=self.block_rows)
        block: Block | None = next(blocks, None)
        while block is not None or waiting:
            while block is not None and len(waiting) < self.in_flight:
                if self.limit is not None and taken + len(block) > self.limit:
                    block = None
                    break
                taken += len(block)
                checkpoint.begin(block)
                waiting += block.ids
                block = next(blocks, None)
            batch = [waiting.pop(rng.randrange(len(waiting))) for _ in range(min(self.batch_rows, len(waiting)))]
            now += self.step_s
            checkpoint.add([self.answer(row) for row in batch], now)
            resolved += len(batch)
            if self.watch is not None:
                self.watch(checkpoint)
            if self.stop_after is not None and resolved >= self.stop_after:
                checkpoint.interrupt(now)
                return "interrupted"
        checkpoint.finish(now, complete=self.limit is None)
        return "finished"


def opened(
    sink: Path | str, source: Source, ops: FileOps | None = None, policy: CheckpointPolicy | None = None, **asked: Any
) -> Checkpoint:
    """Open a checkpoint with a small policy."""
    return Checkpoint.open(
        str(sink),
        source=source,
        fingerprint=asked.pop("fingerprint", {"model": "m"}),
        now=asked.pop("now", 0.0),
        ops=ops or FaultyOps(),
        policy=policy or CheckpointPolicy(chunk_rows=12, flush_s=1.0, chunk_s=60.0),
        **asked,
    )


def forget_lock(sink: Path) -> None:
    """Do what the death of the owner does: the lock is stale."""
    locate(sink).lock.unlink(missing_ok=True)


def leftovers(sink: Path) -> list[str]:
    """Return the names of files that no finished output may have."""
    layout = locate(sink)
    places = [layout.folder, layout.target.parent]
    found = [path.name for place in places if place.is_dir() for path in place.rglob("*.tmp")]
    return found + [path.name for path in layout.folder.glob("_*") if path.name != "_manifest.json"]


def visible(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a reader of the folder sees now, in the order of the names."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(("_", ".")))
    assert all(data_span(path.name) or path.name == "data-empty.parquet" for path in paths)
    return [row for path in paths for row in pq.read_table(path, partitioning=None).to_pylist()]


def rows_of(sink: Path) -> list[dict[str, Any]]:
    """Return the rows of a finished output."""
    layout = locate(sink)
    if layout.kind == "jsonl":
        return [json.loads(line) for line in sink.read_text().split("\n")[:-1]]
    if layout.kind == "parquet":
        found: list[dict[str, Any]] = pq.read_table(sink, partitioning=None).to_pylist()
        return found
    if layout.kind in ("csv", "tsv"):
        import csv

        with sink.open(newline="") as file:
            return list(csv.DictReader(file, delimiter="\t" if layout.kind == "tsv" else ","))
    return visible(layout.folder)

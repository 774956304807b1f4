"""Whatever happens, every row is in the output once, and rows that are on disk are not run again."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.checkpoint import Checkpoint, CheckpointPolicy
from daskinfer.checkpoint.layout import locate
from daskinfer.storage import open_source
from daskinfer.storage.base import FILE_ROWS
from tests.storage.harness import CrashError, FaultyOps, Run, forget_lock, leftovers, opened, rows_of, visible


def make_input(folder: Path, sizes: list[int]) -> list[int]:
    """Write a folder of files and return the ids of all rows."""
    folder.mkdir()
    ids = list[int]()
    for number, size in enumerate(sizes):
        rows = range(number * FILE_ROWS, number * FILE_ROWS + size)
        lines = [json.dumps({"id": row, "tags": ["é", row % 5]}) + "\n" for row in rows]
        (folder / f"{number:02d}.jsonl").write_text("".join(lines))
        ids += rows
    return ids


def durable(checkpoint: Checkpoint, run: Run) -> set[int]:
    """Return the rows of this run that are on disk."""
    pending = {result.id for chunk in checkpoint._chunking.chunks for _, _, result in chunk.pending}
    return set(run.seen) - pending


def check_ids(rows: list[int]) -> None:
    assert len(rows) == len(set(rows)), "a row is there twice"
    assert rows == sorted(rows), "rows are out of order"


SESSION = st.fixed_dictionaries(
    {
        "crash_at": st.none() | st.integers(0, 120),
        "tear": st.integers(0, 300),
        "stop_after": st.none() | st.integers(1, 40),
        "seed": st.integers(0, 5),
        "block_rows": st.integers(1, 12),
        "batch_rows": st.integers(1, 9),
        "in_flight": st.integers(1, 40),
        "step_s": st.sampled_from([0.1, 0.5, 2.0, 20.0]),
    }
)

pytestmark = pytest.mark.usefixtures("pieces_of_few_rows")


JOB = {
    "sizes": st.lists(st.integers(0, 25), min_size=1, max_size=4),
    "sessions": st.lists(SESSION, max_size=5),
    "chunk_rows": st.integers(1, 30),
    "files": st.integers(1, 3),
    "kind": st.sampled_from(["out", "out", "out.jsonl", "out.parquet", "out.csv"]),
}


@given(**JOB)
@settings(max_examples=20)
def test_c35_c36_crashes_and_interrupts_anywhere_change_nothing(**job: Any) -> None:
    check_job(**job)


@pytest.mark.slow
@given(**JOB)
@settings(max_examples=300)
@pytest.mark.timeout(900)
def test_many_crashes_and_interrupts_anywhere_change_nothing(**job: Any) -> None:
    check_job(**job)


def check_job(sizes: list[int], sessions: list[dict[str, Any]], chunk_rows: int, files: int, kind: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="daskinfer-"))
    try:
        ids = make_input(folder / "in", sizes)
        policy = CheckpointPolicy(chunk_rows=chunk_rows, flush_s=1.0, chunk_s=30.0, interrupt_files=files)
        undisturbed = folder / f"undisturbed{kind[3:]}"
        source = open_source(folder / "in")
        with opened(undisturbed, source, policy=policy) as checkpoint:
            Run().drive(checkpoint, source)
        sink, safe = folder / kind, set[int]()
        for given_session in [*sessions, {}]:
            session = dict(given_session)
            ops = FaultyOps(session.pop("crash_at", None), session.pop("tear", 0))
            run, source = Run(**session), open_source(folder / "in")
            try:
                checkpoint = opened(sink, source, ops, policy, resume=True)
                assert all(row in checkpoint.done for row in safe), "a row that was on disk would be run again"
                run.watch = lambda now, run=run: safe.update(durable(now, run))
                ended = run.drive(checkpoint, source)
                checkpoint.close()
                assert not set(run.seen) & {row for row in ids if row in checkpoint.done}
                assert len(run.seen) == len(set(run.seen))
                if ended == "interrupted":
                    safe.update(run.seen)
            except CrashError:
                pass
            finally:
                forget_lock(sink)
            layout = locate(sink)
            if layout.folder.is_dir():
                check_ids([int(row["id"]) for row in visible(layout.folder)])
        assert rows_of(sink) == rows_of(undisturbed)
        assert [int(row["id"]) for row in rows_of(sink)] == ids
        assert leftovers(sink) == []
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["out", "out.jsonl"])
def test_every_single_operation_may_be_the_last(tmp_path: Path, kind: str) -> None:
    ids = make_input(tmp_path / "in", [9, 0, 20])
    sink, at = tmp_path / kind, 0
    while True:
        ops, source, run = FaultyOps(crash_at=at, tear=at % 50), open_source(tmp_path / "in"), Run(seed=at, step_s=1.0)
        try:
            checkpoint = opened(sink, source, ops)
            run.drive(checkpoint, source)
            checkpoint.close()
            break
        except CrashError:
            forget_lock(sink)
        source, again = open_source(tmp_path / "in"), Run(seed=at + 1)
        with opened(sink, source, resume=True) as checkpoint:
            again.drive(checkpoint, source)
        assert [row["id"] for row in rows_of(sink)] == ids
        assert leftovers(sink) == []
        shutil.rmtree(locate(sink).folder)
        sink.unlink() if sink.is_file() else None
        at += 1
    assert at > 30


def test_a_reader_sees_each_row_at_most_once_after_every_operation(tmp_path: Path) -> None:
    ids = make_input(tmp_path / "in", [30, 25])
    sink, counts = tmp_path / "out", list[int]()

    def watch() -> None:
        rows = [row["id"] for row in visible(sink)]
        check_ids(rows)
        assert len(rows) >= (counts[-1] if counts else 0), "rows that were there are gone"
        counts.append(len(rows))

    for stop in (17, None):
        source, run = open_source(tmp_path / "in"), Run(seed=3, step_s=2.0, stop_after=stop)
        ops = FaultyOps()
        with opened(sink, source, ops, resume=True) as checkpoint:
            ops.watch = watch
            run.drive(checkpoint, source)
    assert counts[-1] == len(ids)
    assert len(set(counts)) > 4, "rows become visible chunk by chunk"


def test_c35_disk_full_surfaces_and_a_rerun_resumes(tmp_path: Path) -> None:
    ids = make_input(tmp_path / "in", [40])
    for at in range(6, 61, 5):
        sink = tmp_path / f"out{at}"
        source, run, ops = open_source(tmp_path / "in"), Run(step_s=1.0), FaultyOps(fail_at=at)
        with pytest.raises(OSError, match="No space left"), opened(sink, source, ops) as checkpoint:
            run.drive(checkpoint, source)
        assert not list(sink.rglob("*.tmp"))
        assert not (sink / "_lock").exists()
        source, again = open_source(tmp_path / "in"), Run()
        with opened(sink, source, resume=True) as checkpoint:
            assert not set(run.seen) - {row for row in ids if row in checkpoint.done}, (
                "leaving puts what is pending on disk"
            )
            again.drive(checkpoint, source)
        assert [row["id"] for row in rows_of(sink)] == ids


def test_a_failed_write_can_be_tried_again(tmp_path: Path) -> None:
    ids = make_input(tmp_path / "in", [40])
    for at in range(6, 62, 7):
        source, run, ops = open_source(tmp_path / "in"), Run(step_s=1.0), FaultyOps(fail_at=at)
        failures = 0
        with opened(tmp_path / f"out{at}", source, ops) as checkpoint:
            for block in source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=10):
                checkpoint.begin(block)
                for row in block.ids:
                    try:
                        checkpoint.add([run.answer(row)], float(row))
                    except OSError:
                        failures += 1
            try:
                checkpoint.finish(100.0)
            except OSError:
                failures += 1
                checkpoint.finish(100.0)
        assert failures == (ops.names[at] not in ("remove", "remove_folder")), (
            "what cannot be deleted stays, and does no harm"
        )
        assert [row["id"] for row in rows_of(tmp_path / f"out{at}")] == ids


def test_an_exception_in_the_run_loses_nothing_that_has_a_result(tmp_path: Path) -> None:
    make_input(tmp_path / "in", [40])
    source, run = open_source(tmp_path / "in"), Run(step_s=0.0)
    with pytest.raises(RuntimeError, match="boom"), opened(tmp_path / "out", source) as checkpoint:  # noqa: PT012
        block = next(source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=40))
        checkpoint.begin(block)
        checkpoint.add([run.answer(row) for row in (5, 7, 6)], 0.0)
        assert checkpoint.committed == 0
        raise RuntimeError("boom")
    with opened(tmp_path / "out", open_source(tmp_path / "in"), resume=True) as checkpoint:
        assert list(checkpoint.done) == [(5, 8)]

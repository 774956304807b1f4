"""Failed rows are tried again in place; nothing else of the output moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskinfer.checkpoint import Counts
from daskinfer.checkpoint.layout import locate
from daskinfer.errors import OutputError
from daskinfer.records import Completed
from daskinfer.storage import open_source
from daskinfer.storage.base import FILE_ROWS
from tests.storage.harness import CrashError, FaultyOps, Run, forget_lock, leftovers, opened, rows_of, visible

pytestmark = pytest.mark.usefixtures("pieces_of_few_rows")

SINKS = ["out", "out.jsonl", "out.parquet", "out.csv"]
FAILED = [3, 10, 17, 24]


def never(row: int) -> bool:
    return False


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return an input file with 30 rows, of which 4 fail."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": i, "x": [i, "é"], "dec": 1.50}) + "\n" for i in range(30)))
    return path


def run(path: Path, sink: Path, done: Run, ops: FaultyOps | None = None, **asked: Any) -> str:
    source = open_source(path)
    with opened(sink, source, ops, **asked) as checkpoint:
        return done.drive(checkpoint, source)


@pytest.mark.parametrize("sink", SINKS)
def test_only_failed_rows_are_run_and_replaced(job: Path, tmp_path: Path, sink: str) -> None:
    run(job, tmp_path / sink, Run())
    before = rows_of(tmp_path / sink)
    source, again = open_source(job), Run(fails=lambda row: row == 10, say="retried")
    with opened(tmp_path / sink, source, retry_failed=True) as checkpoint:
        assert checkpoint.remaining == 4
        assert checkpoint.rows_done == 26
        again.drive(checkpoint, source)
        assert checkpoint.committed == 4
        for _ in range(2):
            assert checkpoint.finish(9.0) == Counts(30, 1)
            assert checkpoint.interrupt(9.0) == 30, "after the end it changes nothing"
    assert sorted(again.seen) == FAILED
    after = rows_of(tmp_path / sink)
    assert [int(row["id"]) for row in after] == list(range(30))
    for old, new in zip(before, after, strict=True):
        if int(old["id"]) not in (3, 17, 24):
            assert new == old
        else:
            number = type(new["prompt_tokens"])
            assert new == {
                **old, "output": f"retried {old['id']} é", "error": "" if sink == "out.csv" else None,
                "finish_reason": "stop", "prompt_tokens": number(old["id"]), "completion_tokens": number(3),
                "truncated_tokens": number(0),
            }  # fmt: skip
    assert leftovers(tmp_path / sink) == []
    manifest = json.loads(locate(tmp_path / sink).manifest.read_text())
    assert (manifest["complete"], manifest["failed"]) == (True, 1)
    last = Run(fails=never)
    run(job, tmp_path / sink, last, retry_failed=True)
    assert last.seen == [10]


def test_untouched_lines_of_a_single_file_stay_character_by_character(job: Path, tmp_path: Path) -> None:
    for sink in ("out.jsonl", "out.csv"):
        run(job, tmp_path / sink, Run())
        before = (tmp_path / sink).read_text().split("\n")
        run(job, tmp_path / sink, Run(fails=never), retry_failed=True)
        after = (tmp_path / sink).read_text().split("\n")
        changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert changed == [row + (sink == "out.csv") for row in FAILED]


def test_chunks_without_failures_are_not_written_again(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out", Run(fails=lambda row: row == 29))
    files = sorted((tmp_path / "out").glob("data-*"))
    before = {path.name: path.stat().st_mtime_ns for path in files}
    run(job, tmp_path / "out", Run(fails=never), retry_failed=True)
    after = {path.name: path.stat().st_mtime_ns for path in files}
    assert [name for name in before if before[name] != after[name]] == [files[-1].name]


@pytest.mark.parametrize("sink", SINKS)
def test_unfinished_outputs(job: Path, tmp_path: Path, sink: str) -> None:
    """Alone, only failed rows are run; together with resume, the others too."""
    first = Run(stop_after=16, seed=4)
    run(job, tmp_path / sink, first)
    failed = [row for row in first.seen if row in FAILED]
    assert failed
    again = Run(fails=never)
    run(job, tmp_path / sink, again, retry_failed=True)
    assert sorted(again.seen) == sorted(failed)
    run(job, tmp_path / sink, nothing := Run(), retry_failed=True)
    assert nothing.seen == []
    rest = Run(stop_after=10)
    run(job, tmp_path / sink, rest, resume=True)
    last = Run(fails=never)
    run(job, tmp_path / sink, last, resume=True, retry_failed=True)
    rows = set(range(30)) - set(first.seen) - set(rest.seen)
    assert sorted(last.seen) == sorted(rows | {row for row in rest.seen if row in FAILED})
    after = rows_of(tmp_path / sink)
    assert [int(row["id"]) for row in after] == list(range(30))
    assert not any(row["error"] for row in after)
    assert leftovers(tmp_path / sink) == []


def test_kept_types_survive_a_retry(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "id": range(30),
            "cat": pd.Categorical(["x", None, "y"] * 10),
            "t": pd.date_range("2024-01-01", periods=30, tz="Europe/Berlin").as_unit("ns"),
            "n": pd.array([1, None, 3] * 10, "Int8"),
        }
    )
    source = open_source(frame)
    with opened(tmp_path / "out", source) as checkpoint:
        Run().drive(checkpoint, source)
    before = pq.read_table(tmp_path / "out")
    source = open_source(frame)
    with opened(tmp_path / "out", source, retry_failed=True) as checkpoint:
        Run(fails=never).drive(checkpoint, source)
    after = pq.read_table(tmp_path / "out")
    assert after.schema.equals(before.schema)
    assert after.select(["id", "cat", "t", "n"]).equals(before.select(["id", "cat", "t", "n"]))
    kept = pa.Table.from_pandas(frame, preserve_index=False)
    assert (
        after.select(["id", "cat", "t", "n"])
        .unify_dictionaries()
        .combine_chunks()
        .equals(kept.cast(after.select([0, 1, 2, 3]).schema))
    )
    assert after.column("error").null_count == 30


def test_chunks_over_several_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in range(12):
        (tmp_path / f"in/{name:02d}.jsonl").write_text("".join(f'{{"id": {name * 2 + i}}}\n' for i in range(2)))
    fails = Run(fails=lambda row: row % FILE_ROWS == 1)
    for sink in SINKS:
        source = open_source(tmp_path / "in")
        with opened(tmp_path / sink, source) as checkpoint:
            fails.drive(checkpoint, source)
        again = Run(fails=never)
        run(tmp_path / "in", tmp_path / sink, again, retry_failed=True)
        assert sorted(again.seen) == [name * FILE_ROWS + 1 for name in range(12)]
        assert [int(row["id"]) for row in rows_of(tmp_path / sink)] == list(range(24))
        assert not any(row["error"] for row in rows_of(tmp_path / sink))


def test_there_is_nothing_to_retry_yet(job: Path, tmp_path: Path) -> None:
    done = Run()
    run(job, tmp_path / "out", done, retry_failed=True)
    assert len(done.seen) == 30


def test_c36_a_finished_file_that_was_changed_is_refused(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out.jsonl", Run())
    whole = (tmp_path / "out.jsonl").read_bytes()
    for text in (whole[:-30], whole + b"\x00" * 4096, whole + whole, b"", whole.replace(b'"id": 7', b'"id":7')):
        (tmp_path / "out.jsonl").write_bytes(text)
        with pytest.raises(OutputError, match=r"out.jsonl (is not as this run left it|does not hold the 30 rows)"):
            run(job, tmp_path / "out.jsonl", Run(), retry_failed=True)
        assert (tmp_path / "out.jsonl").read_bytes() == text
    (tmp_path / "out.jsonl").write_bytes(whole)
    run(job, tmp_path / "out.jsonl", Run(fails=never), retry_failed=True)
    assert not any(row["error"] for row in rows_of(tmp_path / "out.jsonl"))


@given(
    crash_at=st.integers(0, 60),
    tear=st.integers(0, 200),
    stop=st.none() | st.integers(1, 10),
    chunk_rows=st.integers(1, 12),
    kind=st.sampled_from(SINKS),
    step_s=st.sampled_from([0.1, 2.0]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_retry_may_crash_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    crash_at: int,
    tear: int,
    stop: int | None,
    chunk_rows: int,
    kind: str,
    step_s: float,
) -> None:
    from daskinfer.checkpoint import CheckpointPolicy

    folder = tmp_path_factory.mktemp("retry")
    path, sink = folder / "in.jsonl", folder / kind
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(25)))
    policy = CheckpointPolicy(chunk_rows=chunk_rows, flush_s=1.0)
    source = open_source(path)
    with opened(sink, source, policy=policy) as checkpoint:
        Run(fails=lambda row: row % 3 == 0).drive(checkpoint, source)
    before = {int(row["id"]): row for row in rows_of(sink)}
    source, run_ = open_source(path), Run(fails=never, say="retried", stop_after=stop, step_s=step_s, batch_rows=2)
    try:
        checkpoint = opened(sink, source, FaultyOps(crash_at, tear), policy, retry_failed=True)
        run_.drive(checkpoint, source)
        checkpoint.close()
    except CrashError:
        pass
    finally:
        forget_lock(sink)
    layout = locate(sink)
    seen = [row["id"] for row in visible(layout.folder)]
    assert len(seen) == len(set(seen))
    source, last = open_source(path), Run(fails=never, say="retried")
    with opened(sink, source, policy=policy, retry_failed=True) as checkpoint:
        last.drive(checkpoint, source)
    after = {int(row["id"]): row for row in rows_of(sink)}
    assert list(after) == list(range(25))
    for row, new in after.items():
        assert new["output"] == (f"retried {row} é" if row % 3 == 0 else before[row]["output"])
        assert not new["error"]
    assert leftovers(sink) == []


def test_a_second_result_for_a_row_is_ignored(job: Path, tmp_path: Path) -> None:
    source = open_source(job)
    with opened(tmp_path / "out", source) as checkpoint:
        blocks = source.blocks([], checkpoint.keep, skip=checkpoint.done, rows=12)
        checkpoint.begin(next(blocks))
        checkpoint.add([Completed(i, "first") for i in range(12)], 1.0)
        checkpoint.add([Completed(3, "second")], 5.0)
        checkpoint.begin(next(blocks))
        checkpoint.add([Completed(12, "first"), Completed(12, "second"), Completed(3, "third")], 9.0)
        with pytest.raises(ValueError, match="a result for row 24, which was not registered"):
            checkpoint.add([Completed(24, "x")], 9.0)
        with pytest.raises(ValueError, match="row 0 was registered before"):
            checkpoint.begin(next(open_source(job).blocks([], checkpoint.keep, skip=checkpoint.done, rows=12)))
        with pytest.raises(ValueError, match="11 registered rows have no result"):
            checkpoint.finish(9.0)
        checkpoint.interrupt(9.0)
    assert [row["output"] for row in visible(tmp_path / "out")] == ["first"] * 13


def test_a_block_with_other_columns_is_refused(job: Path, tmp_path: Path) -> None:
    source = open_source(job)
    with (
        opened(tmp_path / "out", source) as checkpoint,
        pytest.raises(ValueError, match="not the columns of this output"),
    ):
        checkpoint.begin(next(source.blocks([], ["id"], skip=checkpoint.done, rows=12)))

"""Before anything is run: what is refused, what is resumed, what is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskinfer.checkpoint import Checkpoint, Counts
from daskinfer.checkpoint.layout import locate
from daskinfer.checkpoint.manifest import differences
from daskinfer.errors import (
    ConfigError,
    FingerprintError,
    MissingColumnError,
    OutputClashError,
    OutputError,
    OutputExistsError,
    SourceChangedError,
)
from daskinfer.storage import open_source
from daskinfer.storage.base import FILE_ROWS
from daskinfer.storage.outputs import OutputColumns
from tests.storage.harness import FaultyOps, Run, leftovers, opened, rows_of

RESUME: dict[str, Any] = {"resume": True}
OVERWRITE: dict[str, Any] = {"overwrite": True}
SINKS = ["out", "out.jsonl", "out.parquet", "out.csv"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return an input file with 30 rows."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": f"é {i}"}) + "\n" for i in range(30)))
    return path


def run(
    path: Path | str, sink: Path | str, stop_after: int | None = None, ops: FaultyOps | None = None, **asked: Any
) -> tuple[Run, str]:
    source, done = open_source(path), Run(stop_after=stop_after)
    with opened(sink, source, ops, **asked) as checkpoint:
        return done, done.drive(checkpoint, source)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---------------------------------------------------------------- the whole way


@pytest.mark.parametrize("sink", SINKS)
def test_c38_stop_and_resume_with_the_same_configuration(job: Path, tmp_path: Path, sink: str) -> None:
    first, ended = run(job, tmp_path / sink, stop_after=15, resume=True)
    assert ended == "interrupted"
    assert (tmp_path / sink).exists() == (sink == "out"), "a single file appears when it is complete"
    second, ended = run(job, tmp_path / sink, resume=True)
    assert ended == "finished"
    assert sorted(first.seen + second.seen) == list(range(30)), "no row is run twice"
    rows = rows_of(tmp_path / sink)
    assert [int(row["id"]) for row in rows] == list(range(30))
    for row in rows:
        failed = int(row["id"]) % 7 == 3
        none = "" if sink.endswith("csv") else None
        assert (row["output"], row["error"]) == (
            (none, f"error: row {row['id']} é") if failed else (f"answer {row['id']} é", none)
        )
        assert row["text"] == f"é {row['id']}"
    assert leftovers(tmp_path / sink) == []


@pytest.mark.parametrize("sink", SINKS)
def test_a_complete_output_has_nothing_left(job: Path, tmp_path: Path, sink: str) -> None:
    run(job, tmp_path / sink)
    before = rows_of(tmp_path / sink)
    source, again = open_source(job), Run()
    with opened(tmp_path / sink, source, resume=True) as checkpoint:
        assert (checkpoint.remaining, checkpoint.rows_done) == (0, 30)
        again.drive(checkpoint, source)
        assert checkpoint.finish(0.0) == Counts(30, 4)
    assert again.seen == []
    assert rows_of(tmp_path / sink) == before
    work = locate(tmp_path / sink).folder
    assert [p.name for p in work.iterdir() if not p.name.startswith("data-")] == ["_manifest.json"]
    assert bool(list(work.glob("data-*"))) == (sink == "out"), "a single file does not keep its chunks"


def test_the_manifest_says_what_the_output_is(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out", fingerprint={"model": "m", "params": {"n": 1}}, now=100.0)
    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["files"] == [
        {"path": str(job), "size": job.stat().st_size, "mtime": job.stat().st_mtime, "rows": 30},
    ]
    assert manifest["fingerprints"] == [{"at": 100.0, "values": {"model": "m", "params": {"n": 1}}}]
    assert (manifest["complete"], manifest["rows"], manifest["failed"], manifest["created"]) == (True, 30, 4, 100.0)
    assert manifest["columns"] == {
        "id": "int64", "text": "string", "output": "string", "finish_reason": "string", "prompt_tokens": "int64",
        "completion_tokens": "int64", "truncated_tokens": "int64", "error": "string",
    }  # fmt: skip
    assert set(manifest["versions"]) == {"daskinfer", "pyarrow", "python"}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_c27_an_empty_job_has_an_empty_output_with_its_columns(tmp_path: Path, sink: str, text: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    source = open_source(tmp_path / "in.jsonl")
    with opened(tmp_path / sink, source, keep=("id",)) as checkpoint:
        assert Run().drive(checkpoint, source) == "finished"
    names = ["id", "output", "finish_reason", "prompt_tokens", "completion_tokens", "truncated_tokens", "error"]
    if sink in ("out", "out.parquet"):
        assert list(pd.read_parquet(tmp_path / sink).columns) == names
        assert pq.read_table(tmp_path / sink).num_rows == 0
    else:
        assert (tmp_path / sink).read_text() == ("" if sink == "out.jsonl" else ",".join(names) + "\n")
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n')
    run(tmp_path / "in.jsonl", tmp_path / sink, overwrite=True)
    assert [int(row["id"]) for row in rows_of(tmp_path / sink)] == [1]


def test_a_limit_gives_what_there_is_and_can_be_lifted(job: Path, tmp_path: Path) -> None:
    for sink in SINKS:
        source, some = open_source(job), Run(limit=14, block_rows=7)
        with opened(tmp_path / sink, source) as checkpoint:
            some.drive(checkpoint, source)
        assert [int(row["id"]) for row in rows_of(tmp_path / sink)] == list(range(14))
        source, rest = open_source(job), Run()
        with opened(tmp_path / sink, source, resume=True) as checkpoint:
            assert checkpoint.rows_done == 14
            rest.drive(checkpoint, source)
        assert sorted(some.seen + rest.seen) == list(range(30))
        assert [int(row["id"]) for row in rows_of(tmp_path / sink)] == list(range(30))


def test_new_files_come_last_whatever_their_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, rows in (("b", 10), ("d", 5)):
        (tmp_path / f"in/{name}.jsonl").write_text("".join(f'{{"id": "{name}{i}"}}\n' for i in range(rows)))
    for sink in SINKS:
        run(tmp_path / "in", tmp_path / sink)
    for name in "ac":
        (tmp_path / f"in/{name}.jsonl").write_text(f'{{"id": "{name}0"}}\n')
    for sink in SINKS:
        done, _ = run(tmp_path / "in", tmp_path / sink, resume=True)
        assert done.seen in ([2 * FILE_ROWS, 3 * FILE_ROWS], [3 * FILE_ROWS, 2 * FILE_ROWS])
        names = [row["id"] for row in rows_of(tmp_path / sink)]
        assert names == [f"b{i}" for i in range(10)] + [f"d{i}" for i in range(5)] + ["a0", "c0"]


def test_frames_and_iterators_resume_by_position(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": range(30), "cat": pd.Categorical(["x", "y", "x"] * 10)})
    for make in (lambda: frame, lambda: iter(frame.to_dict("records"))):
        sink = tmp_path / f"out{id(make)}"
        first, second = Run(stop_after=11), Run()
        for done in (first, second):
            source = open_source(make())
            with opened(sink, source, resume=True) as checkpoint:
                done.drive(checkpoint, source)
        assert sorted(first.seen + second.seen) == list(range(30))
        assert [row["id"] for row in rows_of(sink)] == list(range(30))
    more = pd.concat([frame, frame], ignore_index=True)
    source, third = open_source(more.to_dict("records")), Run()
    with opened(sink, source, resume=True) as checkpoint:
        assert checkpoint.remaining == 30
        third.drive(checkpoint, source)
    assert sorted(third.seen) == list(range(30, 60))


# ---------------------------------------------------------------- output that is there


def test_existing_output_is_not_touched_without_being_asked_to(job: Path, tmp_path: Path) -> None:
    for sink in SINKS:
        run(job, tmp_path / sink)
        before = everything(tmp_path)
        with pytest.raises(OutputExistsError, match=r"30 rows done\).*resume=True .* overwrite=True"):
            run(job, tmp_path / sink)
        assert everything(tmp_path) == before


def test_unfinished_output_is_existing_output(job: Path, tmp_path: Path) -> None:
    for sink in SINKS:
        run(job, tmp_path / sink, stop_after=12)
        with pytest.raises(OutputExistsError):
            run(job, tmp_path / sink)


def test_overwrite_starts_again_and_keeps_a_single_file_until_it_is_replaced(job: Path, tmp_path: Path) -> None:
    for sink in SINKS:
        run(job, tmp_path / sink)
        old = rows_of(tmp_path / sink)
        done, _ = run(job, tmp_path / sink, stop_after=12, overwrite=True, fingerprint={"model": "other"})
        assert len(done.seen) >= 12
        if sink != "out":
            assert rows_of(tmp_path / sink) == old
        rest, _ = run(job, tmp_path / sink, resume=True, fingerprint={"model": "other"})
        assert len(done.seen) + len(rest.seen) == 30
        assert rows_of(tmp_path / sink) == old


def test_nothing_done_is_nothing_there(job: Path, tmp_path: Path) -> None:
    for sink in SINKS:
        with opened(tmp_path / sink, open_source(job), fingerprint={"model": "typo"}):
            pass
        run(job, tmp_path / sink)
        assert len(rows_of(tmp_path / sink)) == 30


def test_a_finished_file_that_was_removed_is_made_again(job: Path, tmp_path: Path) -> None:
    for asked in ({}, RESUME):
        run(job, tmp_path / "out.jsonl", **asked)
        assert len(rows_of(tmp_path / "out.jsonl")) == 30
        (tmp_path / "out.jsonl").unlink()


def test_what_is_not_ours_is_never_deleted(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    for asked in ({}, RESUME, OVERWRITE):
        with pytest.raises(OutputError, match=r"not daskinfer's \(thesis.tex\); choose another folder"):
            run(job, folder, **asked)
    assert everything(folder) == {"thesis.tex": b"x"}
    (tmp_path / "mine.jsonl").write_text("x")
    with pytest.raises(OutputExistsError):
        run(job, tmp_path / "mine.jsonl")
    with pytest.raises(OutputError, match="was not written by daskinfer"):
        run(job, tmp_path / "mine.jsonl", resume=True)
    assert (tmp_path / "mine.jsonl").read_text() == "x"
    assert not (tmp_path / ".mine.jsonl.daskinfer").exists(), "a refusal leaves nothing behind"
    run(job, tmp_path / "mine.jsonl", overwrite=True)
    assert len(rows_of(tmp_path / "mine.jsonl")) == 30


def test_a_lost_or_damaged_manifest_is_an_error_with_advice(job: Path, tmp_path: Path) -> None:
    for text in (None, "", "{", "[]", '{"format": 1}'):
        sink = tmp_path / f"out{text}"
        run(job, sink, stop_after=15)
        manifest = sink / "_manifest.json"
        manifest.unlink() if text is None else manifest.write_text(text)
        with pytest.raises(OutputError, match=r"_manifest.json is (gone|damaged).*overwrite=True"):
            run(job, sink, resume=True)
        run(job, sink, overwrite=True)
        assert len(rows_of(sink)) == 30
    manifest.write_text('{"format": 99}')
    with pytest.raises(OutputError, match="another version of daskinfer"):
        run(job, sink, resume=True)


# ---------------------------------------------------------------- refusals before anything runs


def test_c38_another_configuration_is_refused_with_a_diff(job: Path, tmp_path: Path) -> None:
    old = {"model": "a", "params": {"max_new_tokens": 256, "stop": ["x"]}}
    for at, (new, diff) in enumerate(
        (
            ({**old, "model": "b"}, ("model: 'a' → 'b'",)),
            ({**old, "params": {"max_new_tokens": 64, "stop": ["x"]}}, ("params.max_new_tokens: 256 → 64",)),
            ({"model": "a", "params": {"max_new_tokens": 256}}, ("params.stop: ['x'] → (not set)",)),
        )
    ):
        sink = tmp_path / f"out{at}"
        run(job, sink, stop_after=15, fingerprint=old)
        before = everything(sink)
        with pytest.raises(FingerprintError) as caught:
            run(job, sink, resume=True, fingerprint=new)
        assert caught.value.differences == diff
        assert diff[0] in str(caught.value)
        assert everything(sink) == before
        run(job, sink, resume=True, force=True, fingerprint=new, now=5.0)
        recorded = json.loads((sink / "_manifest.json").read_text())["fingerprints"]
        assert [entry["values"] for entry in recorded] == [old, new]
        run(job, sink, resume=True, fingerprint=new)


def test_c38_the_same_configuration_in_other_words(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out", stop_after=15, fingerprint={"stop": ("a",), "n": 1})
    run(job, tmp_path / "out", resume=True, fingerprint={"n": 1, "stop": ["a"]})
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == ()


def test_other_columns_cannot_be_mixed_even_by_force(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out", stop_after=15)
    for asked, diff in (
        ({"keep": ("id",)}, r"keep: \['id', 'text'\] → \['id'\]"),
        ({"output_column": "answer"}, "output column: 'output' → 'answer'"),
        ({"output_type": "float32[3]"}, r"output type: 'string' → 'float32\[3\]'"),
    ):
        with pytest.raises(OutputError, match=f"begun with other columns:\n  {diff}"):
            run(job, tmp_path / "out", resume=True, force=True, **asked)


def test_an_output_of_a_version_with_other_columns_is_refused_clearly(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, arrays = vars(OutputColumns)["fields"].func, OutputColumns.arrays

    def older(self: OutputColumns) -> list[pa.Field]:
        return [field for field in real(self) if field.name != "truncated_tokens"]

    with monkeypatch.context() as patched:
        patched.setattr(OutputColumns, "fields", property(older))
        patched.setattr(
            OutputColumns, "arrays", lambda self, results: arrays(self, results)[:-2] + arrays(self, results)[-1:]
        )
        run(job, tmp_path / "out", stop_after=15)
    with pytest.raises(OutputError, match=r"begun with other columns:\n  column 'truncated_tokens': none → int64\n"):
        run(job, tmp_path / "out", resume=True)


def test_changed_input_is_refused(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out", stop_after=15)
    stat, text = job.stat(), job.read_text()
    job.write_text(text + '{"id": 30}\n')
    with pytest.raises(SourceChangedError, match=r"in.jsonl has changed \(it had \d+ bytes and now has \d+\) since"):
        run(job, tmp_path / "out", resume=True)
    job.write_text(text)
    os.utime(job, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    with pytest.raises(SourceChangedError, match="was modified since this run began"):
        run(job, tmp_path / "out", resume=True)
    os.utime(job, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "other.jsonl").write_text(text)
    with pytest.raises(SourceChangedError, match=r"in.jsonl has disappeared from the input"):
        run(tmp_path / "other.jsonl", tmp_path / "out", resume=True)
    run(job, tmp_path / "out", resume=True)


def test_other_rows_in_memory_are_refused(tmp_path: Path) -> None:
    for rows in (["a", "b"], pd.DataFrame({"a": [1, 2]})):
        source = open_source(rows)
        sink = tmp_path / type(rows).__name__
        with opened(sink, source) as checkpoint:
            Run().drive(checkpoint, source)
    with pytest.raises(SourceChangedError, match="another input"):
        opened(tmp_path / "list", open_source(["a", "c"]), resume=True)
    with pytest.raises(SourceChangedError, match="another input"):
        opened(tmp_path / "DataFrame", open_source(pd.DataFrame({"a": [2, 1]})), resume=True)


def test_c35_output_is_not_input(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(job.read_text())
    (tmp_path / "link.jsonl").symlink_to(job)
    (tmp_path / "hard.jsonl").hardlink_to(job)
    before = everything(tmp_path)
    for source, sink in (
        (job, job), (job, tmp_path / "link.jsonl"), (job, tmp_path / "hard.jsonl"), (tmp_path / "link.jsonl", job),
        (folder, folder), (folder / "a.jsonl", folder), (folder, folder / "out"), (folder, folder / "out.jsonl"),
        (folder, folder / "a.jsonl"), (f"{folder}/*.jsonl", folder / "out.jsonl"),
        (f"{folder}/**/*.jsonl", folder / "x/o.jsonl"), (job, f"{tmp_path}/data/../in.jsonl"),
    ):  # fmt: skip
        for asked in ({}, RESUME, OVERWRITE):
            with pytest.raises(OutputError, match=r"part of the input|holds the input file"):
                run(source, sink, **asked)
    assert everything(tmp_path) == before
    run(f"{folder}/*.jsonl", folder / "sub/out.jsonl")


def test_c35_unwritable_places_are_refused_and_nothing_is_left(job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = everything(tmp_path)
    for sink in ("file/out", "file/out.jsonl", "file"):
        with pytest.raises(OutputError, match=r"cannot be written .*change its rights, or choose another place"):
            run(job, tmp_path / sink)
    for at in range(4):
        with pytest.raises(OutputError, match="cannot be written"):
            run(job, tmp_path / "deep/er/out", ops=FaultyOps(fail_at=at))
        assert everything(tmp_path) == before
        assert not (tmp_path / "deep").exists()


def test_names_of_columns_that_clash(job: Path, tmp_path: Path) -> None:
    job.write_text('{"id": 1, "output": 2, "error": 3, "text": "x"}\n')
    with pytest.raises(OutputClashError, match="'output', 'error'"):
        run(job, tmp_path / "out")
    with pytest.raises(OutputClashError, match="already has 'id', which"):
        run(job, tmp_path / "out", keep=("id",), output_column="id")
    run(job, tmp_path / "out", keep=("id", "text"))
    with pytest.raises(ConfigError, match="is the name of another added column"):
        run(job, tmp_path / "out2", keep=("id",), output_column="error")
    with pytest.raises(ConfigError, match="names 'id' twice"):
        run(job, tmp_path / "out2", keep=("id", "id"))
    with pytest.raises(MissingColumnError):
        run(job, tmp_path / "out2", keep=("nope",))
    assert not (tmp_path / "out2").exists()


def test_settings_that_contradict_each_other(job: Path, tmp_path: Path) -> None:
    retry: dict[str, Any] = {"retry_failed": True}
    for asked in (RESUME, retry):
        with pytest.raises(ConfigError, match="overwrite=True starts again"):
            run(job, tmp_path / "out", overwrite=True, **asked)
    with pytest.raises(ConfigError, match="output_type="):
        run(job, tmp_path / "out", output_type="text")


def test_places_that_are_neither_folder_nor_file(job: Path, tmp_path: Path) -> None:
    for name in ("out.txt", "out.jsonl.gz", "out.v2"):
        with pytest.raises(OutputError, match=r"cannot tell what to write; end the name in \.jsonl"):
            run(job, tmp_path / name)
    with pytest.raises(OutputError, match="local or mounted paths"):
        Checkpoint.open("s3://bucket/out", source=open_source(job), fingerprint={}, now=0.0)
    with Checkpoint.open(f"{tmp_path}/out.v2/", source=open_source(job), fingerprint={}, now=0.0):
        assert (tmp_path / "out.v2").is_dir()


def test_a_type_that_parquet_cannot_hold_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": pd.Series([pd.DateOffset(days=1)], dtype=object), "b": [1]})
    source = open_source(frame)
    import pyarrow as pa

    source.schema = lambda keep: pa.schema([("a", pa.month_day_nano_interval())])  # type: ignore[method-assign]
    with pytest.raises(OutputError, match=r"column 'a' \(month_day_nano_interval\) cannot be written"):
        opened(tmp_path / "out", source, keep=("a",))

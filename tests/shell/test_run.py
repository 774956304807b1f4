"""Whole runs on a cluster: from files and frames to files, interrupted, resumed, and with bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow.parquet as pq
import pytest
from distributed import LocalCluster

from daskinfer.config import BatchPolicy, HealthPolicy, RetryPolicy
from daskinfer.driver import Driver
from daskinfer.errors import (
    ConfigError,
    FingerprintError,
    InputError,
    MissingColumnError,
    OutputClashError,
    OutputError,
    OutputExistsError,
    SourceError,
    TemplateError,
    TooManyFailuresError,
)
from daskinfer.records import Event, RowsCommitted, RowsResolved, RunEnded, RunStarted
from daskinfer.testing import call_counts, echo_spec, loads

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1)


def driver_for(cluster: LocalCluster, **options: Any) -> Driver:
    return Driver(echo_spec(**options), cluster=cluster, health=QUICK, retry=RetryPolicy(backoff_s=0.05))


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text("utf-8").splitlines()]


def test_a_file_of_lines_to_a_folder_of_parquet(cluster: LocalCluster, tmp_path: Path, echo_log: Path) -> None:
    rows = [{"id": f"{i:04}", "text": f"línea {i}", "n": i} for i in range(300)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    with driver_for(cluster, log=echo_log) as driver:
        report = driver.run(source, tmp_path / "out", prompt="Say {text}!")
    assert (report.rows, report.completed, report.failed, report.state) == (300, 300, 0, "done")
    assert report.usage.prompt_tokens == 900
    frame = pd.read_parquet(tmp_path / "out")
    assert list(frame) == [
        "id",
        "text",
        "n",
        "output",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "truncated_tokens",
        "error",
    ]
    assert list(frame["id"]) == [row["id"] for row in rows]
    assert list(frame["output"]) == [f"<Say línea {i}!>" for i in range(300)]
    assert frame["error"].isna().all()
    assert set(call_counts(echo_log).values()) == {1}


def test_a_frame_to_one_file_of_lines(cluster: LocalCluster, tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": ["a", None, "c"], "when": pd.to_datetime(["2026-01-01"] * 3)})
    out = tmp_path / "out.jsonl"
    with driver_for(cluster) as driver:
        report = driver.run(frame, out, columns="text", keep=["text"], output_column="answer")
    assert (report.completed, report.failed) == (2, 1)
    first, second, third = read_lines(out)
    assert first["answer"] == "<a>"
    assert third == {**first, "text": "c", "answer": "<c>"}
    assert second["answer"] is None
    assert second["error"].startswith("missing_prompt: ")
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".jsonl"] == ["out.jsonl"]


def test_every_kind_of_bad_row_is_a_row_of_the_output(cluster: LocalCluster, tmp_path: Path, fault_dir: Path) -> None:
    lines = [
        '{"text": "good 0"}',
        '{"text": ',
        '{"text": null}',
        '{"text": ""}',
        '{"text": "reject"}',
        '{"text": "good 5"}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines) + "\n")
    events: list[Event] = []
    with driver_for(cluster, faults={"reject": "value_error"}, faults_dir=fault_dir) as driver:
        report = driver.run(source, tmp_path / "out", columns="text", observers=[events.append])
    frame = pd.read_parquet(tmp_path / "out")
    assert list(frame["output"].fillna("-")) == ["<good 0>", "-", "-", "-", "-", "<good 5>"]
    kinds = [error.split(":")[0] if isinstance(error, str) else "" for error in frame["error"]]
    assert kinds == ["", "invalid_row", "missing_prompt", "empty_prompt", "error", ""]
    assert "line 2" in frame["error"][1]
    assert (report.completed, report.failed) == (2, 4)
    assert {f.kind: f.rows for f in report.failures} == {
        "invalid_row": 1,
        "missing_prompt": 1,
        "empty_prompt": 1,
        "error": 1,
    }
    resolved = [e for e in events if isinstance(e, RowsResolved)]
    assert sum(e.completed for e in resolved) == 2
    assert sum(e.failed for e in resolved) == 4
    assert sum(e.rows for e in events if isinstance(e, RowsCommitted)) == 6
    assert isinstance(events[0], RunStarted)
    assert events[-1] == RunEnded(events[-1].at, "done")


def test_what_cannot_work_is_refused_before_any_load(cluster: LocalCluster, tmp_path: Path, echo_log: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a", "error": "x", "other": 1}])
    driver = driver_for(cluster, log=echo_log)
    for wrong, kind, said in (
        ({"prompt": "{txt}"}, MissingColumnError, "txt"),
        ({"prompt": "{text"}, TemplateError, "text"),
        ({"columns": "missing"}, MissingColumnError, "missing"),
        ({"columns": "text"}, OutputClashError, "error"),
        ({"columns": "text", "keep": ["nope"]}, MissingColumnError, "nope"),
        ({}, InputError, "text"),
        ({"columns": "text", "keep": [], "max_failures": "many"}, ConfigError, "max_failures"),
        ({"columns": "text", "keep": [], "limit": -1}, ConfigError, "limit"),
        ({"columns": "text", "keep": [], "overwrite": True, "resume": True}, ConfigError, "contradict"),
    ):
        with pytest.raises(kind, match=said):
            driver.run(source, tmp_path / "out", **wrong)
    with pytest.raises(SourceError, match=r"absent\.jsonl"):
        driver.run(tmp_path / "absent.jsonl", tmp_path / "out")
    with pytest.raises(Exception, match=r"in\.jsonl"):
        driver.run(source, source, columns="text", keep=["text"])
    assert driver.client is None
    assert loads(echo_log) == []
    assert not (tmp_path / "out").exists()


def test_a_finished_run_is_not_run_again(cluster: LocalCluster, tmp_path: Path, echo_log: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": f"row {i}"} for i in range(20)])
    with driver_for(cluster, log=echo_log) as driver:
        driver.run(source, tmp_path / "out")
    driver = driver_for(cluster, log=echo_log)
    with pytest.raises(OutputExistsError, match="resume"):
        driver.run(source, tmp_path / "out")
    report = driver.run(source, tmp_path / "out", resume=True)
    assert (report.state, report.skipped, report.rows) == ("nothing to do", 20, 20)
    assert driver.client is None  # no cluster was started for it
    assert set(call_counts(echo_log).values()) == {1}


def test_c38_resume_refuses_another_configuration(cluster: LocalCluster, tmp_path: Path, echo_log: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": f"row {i}"} for i in range(50)])
    out = tmp_path / "out"
    with driver_for(cluster, log=echo_log) as driver:
        assert driver.run(source, out, limit=25).completed == 25
        with pytest.raises(FingerprintError, match="max_new_tokens"):
            driver.run(source, out, resume=True, params={"max_new_tokens": 7})
        with pytest.raises(FingerprintError, match="prompt"):
            driver.run(source, out, resume=True, prompt="again {text}")
    with Driver(
        driver.spec, cluster=cluster, health=QUICK, batch=BatchPolicy(rows=2, slots=3)
    ) as other:  # batch size and workers do not count
        report = other.run(source, out, resume=True)
    assert (report.completed, report.skipped, report.rows) == (25, 25, 50)
    assert set(call_counts(echo_log).values()) == {1}
    assert list(pd.read_parquet(out)["text"]) == [f"row {i}" for i in range(50)]
    with driver_for(cluster, log=echo_log) as driver:
        report = driver.run(source, out, resume=True, force=True, params={"max_new_tokens": 7})
        assert report.state == "nothing to do"
        assert driver.run(source, out, overwrite=True, params={"max_new_tokens": 7}).completed == 50


def test_retry_failed_runs_only_the_failed_rows(
    cluster: LocalCluster, tmp_path: Path, echo_log: Path, fault_dir: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": f"row {i}."} for i in range(30)])
    faults = {"row 7.": ["value_error", "ok"], "row 21.": "value_error"}
    with driver_for(cluster, log=echo_log, faults=faults, faults_dir=fault_dir) as driver:
        assert driver.run(source, tmp_path / "out").failed == 2
        report = driver.run(source, tmp_path / "out", retry_failed=True)
        assert (report.completed, report.failed) == (1, 1)
    frame = pd.read_parquet(tmp_path / "out")
    assert list(frame["text"]) == [f"row {i}." for i in range(30)]
    assert frame["output"][7] == "<row 7.>"
    assert list(frame.index[frame["error"].notna()]) == [21]
    assert set(call_counts(echo_log).values()) == {1}


def test_c47_transient_errors_are_retried_and_others_are_not(
    cluster: LocalCluster, tmp_path: Path, fault_dir: Path, echo_log: Path
) -> None:
    from daskinfer.testing import attempts

    rows = [{"text": "A"}, {"text": "B"}, {"text": "C"}, *({"text": f"good {i}"} for i in range(5))]
    faults = {
        "A": ["connection_error", "connection_error", "ok"],
        "B": "value_error",
        "C": "timeout",
    }
    with driver_for(cluster, faults=faults, faults_dir=fault_dir, log=echo_log) as driver:
        report = driver.run(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out")
    assert (report.completed, report.failed) == (6, 2)
    assert attempts(fault_dir) == {0: 3, 1: 1, 2: 4}
    assert {row: n for row, n in call_counts(echo_log).items() if row > 2} == {3: 1, 4: 1, 5: 1, 6: 1, 7: 1}
    error = pd.read_parquet(tmp_path / "out")["error"][2]
    assert "tried 4 times" in error


def test_c34_a_job_whose_rows_all_fail_alike_stops(cluster: LocalCluster, tmp_path: Path, fault_dir: Path) -> None:
    rows = [{"text": f"bad {i}"} for i in range(5_000)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    options: dict[str, Any] = {"faults": {"bad": "value_error"}, "faults_dir": fault_dir, "step_s": 0.02}
    with driver_for(cluster, **options) as driver:
        with pytest.raises(TooManyFailuresError, match="ValueError"):
            driver.run(source, tmp_path / "out")
        done = len(pd.read_parquet(tmp_path / "out"))
        assert 100 <= done < 5_000
        report = driver.run(source, tmp_path / "out", resume=True, limit=done + 50, max_failures=100)
        assert report.failed == 50
        with pytest.raises(TooManyFailuresError, match="max_failures=10"):
            driver.run(source, tmp_path / "out", resume=True, max_failures=10)


@pytest.mark.parametrize("suffix", ["", ".jsonl"])
def test_c27_an_empty_job_is_done_at_once(cluster: LocalCluster, tmp_path: Path, suffix: str, echo_log: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n \n")
    out = tmp_path / f"out{suffix}"
    report = driver_for(cluster, log=echo_log).run(source, out)
    assert (report.rows, report.failed) == (0, 0)
    if suffix:
        assert out.read_text() == ""
    else:
        assert pd.read_parquet(out).empty
    assert loads(echo_log) == []


def test_parquet_types_are_kept(cluster: LocalCluster, tmp_path: Path) -> None:
    from decimal import Decimal

    import pyarrow as pa

    table = pa.table(
        {
            "text": pa.array(["a", "b"], pa.large_string()),
            "price": pa.array([Decimal("1.10"), Decimal("2.20")]),
            "tags": pa.array([["x"], []], pa.list_(pa.string())),
            "when": pa.array([1, 2], pa.timestamp("us", "Europe/Paris")),
            "kind": pa.array(["u", "v"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    with driver_for(cluster) as driver:
        driver.run(tmp_path / "in.parquet", tmp_path / "out", columns="text")
    written = pq.read_table(tmp_path / "out")
    assert written.select(table.column_names).schema.equals(table.schema)
    assert written.select(table.column_names).to_pylist() == table.to_pylist()


def test_c17_a_seed_that_was_drawn_is_kept_when_the_run_is_resumed(cluster: LocalCluster, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": f"row {i}"} for i in range(10)])
    engine = "tests.shell.engines:SeedEngine"
    with Driver("seed", engine=engine, cluster=cluster, health=QUICK) as driver:
        driver.run(source, tmp_path / "out", limit=5)
        driver.run(source, tmp_path / "out", resume=True)
        driver.run(source, tmp_path / "other")
        driver.run(source, tmp_path / "given", params={"seed": 7})
    [seed] = set(pd.read_parquet(tmp_path / "out")["output"])
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["record"] == {"seed": int(seed)}
    assert set(pd.read_parquet(tmp_path / "other")["output"]) != {seed}
    assert set(pd.read_parquet(tmp_path / "given")["output"]) == {"7"}


def test_c35_a_full_disk_is_said_and_a_rerun_resumes(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from daskinfer.checkpoint import Checkpoint

    source = write_lines(tmp_path / "in.jsonl", [{"text": f"row {i}"} for i in range(200)])
    real, calls = Checkpoint.add, 0

    def full(self: Checkpoint, results: Any, now: float) -> int:
        nonlocal calls
        calls += bool(results)
        if calls == 3:
            raise OSError(28, "No space left on device")
        return real(self, results, now)

    with driver_for(cluster, step_s=0.01, capacity=4) as driver:
        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "add", full)
            with pytest.raises(OutputError, match=r"No space left.*--resume"):
                driver.run(source, tmp_path / "out")
        report = driver.run(source, tmp_path / "out", resume=True)
    assert report.rows == 200
    assert report.skipped > 0
    assert list(pd.read_parquet(tmp_path / "out")["output"]) == [f"<row {i}>" for i in range(200)]


def test_c36_a_torn_chunk_of_a_finished_run_is_redone(cluster: LocalCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with driver_for(cluster) as driver:
        driver.run([f"row {i}" for i in range(50)], out)
        [chunk] = out.glob("data*")
        chunk.write_bytes(chunk.read_bytes()[:200])
        report = driver.run([f"row {i}" for i in range(50)], out, resume=True)
        assert (report.completed, report.rows) == (50, 50)
        assert list(pd.read_parquet(out)["output"]) == [f"<row {i}>" for i in range(50)]
        single = tmp_path / "out.jsonl"
        driver.run(["a", "b"], single)
        single.write_bytes(single.read_bytes()[:-30])
        with pytest.raises(OutputError, match="is not as this run left it"):
            driver.run(["a", "b"], single, resume=True)


def test_a_carriage_return_survives_a_csv_file(cluster: LocalCluster, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    with driver_for(cluster) as driver:
        assert driver.run(["a\rb", "ok", "", "c\r\nd"], out).failed == 1
        frame = pd.read_csv(out, keep_default_na=False)
        assert list(frame["prompt"]) == ["a\rb", "ok", "", "c\r\nd"]
        assert driver.run(["a\rb", "ok", "", "c\r\nd"], out, retry_failed=True, resume=True).rows == 4


def test_settings_of_a_wrong_type_are_named(cluster: LocalCluster, tmp_path: Path) -> None:
    driver = driver_for(cluster)
    for wrong, said in (({"limit": "3"}, "limit"), ({"limit": 1.5}, "limit"), ({"output_column": ""}, "output_column")):
        with pytest.raises(ConfigError, match=said):
            driver.run(["a"], tmp_path / "out", **wrong)
    with pytest.raises(TemplateError, match="more than"):
        driver.run([{"a": "x"}], tmp_path / "out", prompt="{a:1000000000}")
    with pytest.raises(InputError, match="not valid text"):
        driver.run([{"prompt": "b", "\ud800": 1}], tmp_path / "out", columns="prompt")


def test_an_output_at_a_url(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKINFER_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    url = "memory://bucket/answers/"
    with driver_for(cluster) as driver:
        report = driver.run([f"row {i}" for i in range(50)], url)
        assert (report.completed, report.path) == (50, url)
        with pytest.raises(OutputExistsError, match=r"memory://bucket/answers/ holds output already \(50 rows done\)"):
            driver.run([f"row {i}" for i in range(50)], url)
        again = driver.run([f"row {i}" for i in range(50)], url, resume=True)
    assert again.state == "nothing to do"
    with fs.open(fs.glob("/bucket/answers/data-*.parquet")[0]) as file:
        assert list(pd.read_parquet(file)["output"]) == [f"<row {i}>" for i in range(50)]

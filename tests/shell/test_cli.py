"""The command line in its own process: exit codes, what a person sees, signals and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from daskinfer.cli import main
from daskinfer.testing import call_counts, wait_until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "daskinfer", *arguments]


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=90, check=False, cwd=ROOT)


def run_arguments(source: Path, out: Path, **options: Any) -> list[str]:
    return [
        "run",
        str(source),
        str(out),
        "--model",
        "echo",
        "--engine",
        "echo",
        "--engine-options",
        json.dumps(options),
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {i}."}) + "\n" for i in range(400)))
    return source


def test_a_run_prints_a_report_and_exits_0(rows: Path, tmp_path: Path) -> None:
    done = cli(*run_arguments(rows, tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "400" in done.stdout
    again = cli(*run_arguments(rows, tmp_path / "out"), "--resume", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["state"] == "nothing to do"


@pytest.mark.parametrize("given", ["own", "max_new_tokens=n"])
def test_c22_rows_have_parameters_of_their_own(given: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"text": "a b c", "n": n, "own": {"max_new_tokens": n}} for n in (1, 2, 3)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    done = cli(*run_arguments(source, out, lengths="params"), "--column", "text", "--row-params", given, "--quiet")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["completion_tokens"] for line in out.read_text().splitlines()] == [1, 2, 3]


def test_failed_rows_exit_4(rows: Path, tmp_path: Path, fault_dir: Path) -> None:
    options = {"faults": {"row 7.": "value_error"}, "faults_dir": str(fault_dir)}
    done = cli(*run_arguments(rows, tmp_path / "out", **options), "--quiet")
    assert done.returncode == 4, done.stderr
    assert "value_error" in done.stdout or "ValueError" in done.stdout
    assert done.stderr == ""


def test_wrong_settings_exit_2_and_wrong_input_exits_1(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for arguments, code, said in (
        ([*run_arguments(rows, out), "--temperature", "-1"], 2, "temperature=-1.0"),
        ([*run_arguments(rows, out), "--no-such-option"], 2, "no-such-option"),
        ([*run_arguments(rows, out), "--engine-options", "{"], 2, "is not JSON"),
        ([*run_arguments(rows, out), "--engine", "nothing"], 2, "nothing"),
        ([*run_arguments(rows, out), "--row-params", "temperature="], 2, "must be NAME=COLUMN"),
        ([*run_arguments(rows, out), "--row-params", "warmth=text"], 2, "warmth"),
        ([*run_arguments(rows, out), "--prompt", "{missing}"], 1, "missing"),
        ([*run_arguments(tmp_path / "absent.jsonl", out)], 1, "absent.jsonl"),
    ):
        monkeypatch.setattr(sys, "argv", ["daskinfer", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == code, arguments
        assert said in capsys.readouterr().err
    assert not out.exists()


@contextmanager
def running(arguments: list[str], log: Path, least: int) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own, once it has finished so many rows."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        wait_until(lambda: sum(call_counts(log).values()) >= least or process.poll() is not None, 60)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT,), 130),
        pytest.param((signal.SIGTERM,), 143, marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGINT), 130, marks=pytest.mark.slow),
        pytest.param((signal.SIGKILL,), -9, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(180)
def test_c35_c57_interrupted_killed_and_resumed(
    signals: tuple[signal.Signals, ...], code: int, rows: Path, tmp_path: Path, echo_log: Path
) -> None:
    """Rows that are on disk are never run again, at most those in flight are, and no process is left."""
    out = tmp_path / "out"
    arguments = run_arguments(rows, out, log=str(echo_log), lengths=4, step_s=0.02, capacity=4)
    with running(arguments, echo_log, 150) as process:
        whole = family(process)
        group = signals[0] is not signal.SIGKILL
        for number in signals:
            os.killpg(process.pid, number) if group else os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    _, alive = psutil.wait_procs(whole, timeout=30)
    assert not alive
    if code > 0:
        assert "--resume" in stderr
        saved = len(pd.read_parquet(out))
        assert saved >= 150 - 16 * 2
    ran_before = dict(call_counts(echo_log))
    done = cli(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(out)
    assert list(frame["text"]) == [f"row {i}." for i in range(400)]
    assert list(frame["output"]) == [f"<row {i}.>" for i in range(400)]
    counts = call_counts(echo_log)
    twice = [row for row, n in counts.items() if n > 1]
    assert max(counts.values()) <= 2
    in_flight = 4 * 4 + 16  # 4 times the capacity in flight, and what was finished and not yet on disk
    limit = in_flight if code > 0 else in_flight + len(ran_before) // 2
    assert len(twice) <= limit


def test_c60_output_to_a_file_is_a_few_plain_lines(rows: Path, tmp_path: Path) -> None:
    done = cli(*run_arguments(rows, tmp_path / "out", step_s=0.002), "--workers", "2")
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) <= 60
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    assert "400" in done.stderr


def test_help_says_what_there_is() -> None:
    done = cli("run", "--help")
    assert done.returncode == 0
    for option in (
        *("--model", "--prompt", "--column", "--messages", "--system", "--raw", "--max-new-tokens", "--temperature"),
        *("--top-p", "--seed", "--stop", "--dtype", "--device", "--revision", "--trust-remote-code", "--engine"),
        *("--engine-options", "--workers", "--scheduler", "--limit", "--keep", "--output-column", "--truncate"),
        *(
            "--max-failures",
            "--resume",
            "--overwrite",
            "--force",
            "--retry-failed",
            "--step-timeout",
            "--quiet",
            "--json",
        ),
    ):
        assert option in done.stdout

"""A second Ctrl-C wherever it comes, and what is said on how to go on; without a cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import daskinfer.cli
from daskinfer.checkpoint import Checkpoint
from daskinfer.cli import _resume_command, main
from daskinfer.driver import Driver
from daskinfer.driver.interrupts import Interrupt
from daskinfer.driver.run import RunOptions, _rows_left
from daskinfer.errors import ClusterError, JobInterruptedError, OutputError


def twice() -> None:
    """Be interrupted twice; the second one counts at once."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def driver() -> Driver:
    return Driver("echo", engine="echo")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(5)))
    return source


def test_c35_a_second_interrupt_ends_a_start_that_takes_long(
    driver: Driver, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "open_stream", lambda **_: twice())
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(JobInterruptedError) as stopped:
        driver.run(rows, tmp_path / "out", columns="text")
    assert (stopped.value.done, stopped.value.signum) == (0, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_c35_a_second_interrupt_ends_the_wait_for_a_slow_source(driver: Driver, tmp_path: Path) -> None:
    def slow() -> Iterator[dict[str, str]]:
        while not isinstance(signal.getsignal(signal.SIGINT), Interrupt):  # the first rows are read beforehand
            yield {"text": "a"}
        twice()
        pytest.fail("the source was read on")

    with pytest.raises(JobInterruptedError):
        driver.run(slow(), tmp_path / "out", columns="text")


def test_c35_a_second_interrupt_ends_the_last_writing(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    monkeypatch.setattr(Checkpoint, "finish", lambda *_, **__: twice())
    with pytest.raises(JobInterruptedError):
        driver.run(source, tmp_path / "out")


def test_an_interrupt_of_a_sources_own_is_not_taken_for_one_of_ours(driver: Driver, tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.run(broken(), tmp_path / "out", columns="text")


def test_what_is_held_is_not_broken_off() -> None:
    stop, done = Interrupt(), []
    stop(signal.SIGTERM)

    def commit() -> None:
        with stop.held():
            stop(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        commit()
    assert (done, stop.signum) == ([1], signal.SIGTERM)
    with stop.held():
        done.append(2)
    stop.patient = True
    with stop.held():
        stop(signal.SIGINT)
    assert stop.insisted


# ---------------------------------------------------------------- errors that look like a full disk


def test_a_worker_lost_while_starting_is_not_a_disk_that_fails(
    driver: Driver, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise TimeoutError("timed out")

    connection = SimpleNamespace(client=SimpleNamespace(run_on_scheduler=lost), close=lambda: None)
    monkeypatch.setattr("daskinfer.driver.driver.connect", lambda *_, **__: connection)
    with pytest.raises(ClusterError, match=r"looking at the workers: .* was lost") as said:
        driver.run(rows, tmp_path / "out", columns="text")
    assert not isinstance(said.value, OutputError)


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("run a b", "run a b --resume"),
        ("run a b --overwrite", "run a b --resume"),
        ("run a b --resume --limit 5", "run a b --limit 5 --resume"),
        ("run a b --retry-failed --limit 5", "run a b --retry-failed --limit 5"),
        ("run a b --resume --retry-failed", "run a b --resume --retry-failed"),
        ("demo --limit 3", "demo --limit 3"),
    ],
)
def test_the_command_to_go_on_with(given: str, then: str) -> None:
    assert _resume_command(given.split()) == f"daskinfer {then}"


def test_the_limit_counts_unless_only_failed_rows_are_run() -> None:
    checkpoint: Any = SimpleNamespace(rows_done=4)
    assert _rows_left(RunOptions(limit=6), checkpoint) == 2
    assert _rows_left(RunOptions(limit=6, retry_failed=True), checkpoint) is None
    assert _rows_left(RunOptions(limit=6, retry_failed=True, resume=True), checkpoint) == 2
    assert _rows_left(RunOptions(), checkpoint) is None


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def interrupted_while_closing(*_: Any) -> None:
    try:
        raise JobInterruptedError(7, "out", signal.SIGTERM)
    finally:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "ends", "begun", "code", "said"),
    [
        ("run", interrupted, True, 130, ["interrupted", "--resume"]),
        ("run", interrupted, False, 130, ["interrupted\n"]),
        ("demo", interrupted, True, 130, ["interrupted", "daskinfer demo --output"]),
        ("run", interrupted_while_closing, True, 143, ["7 rows are done", "--resume"]),
    ],
)
def test_c35_an_interrupt_exits_130_and_says_how_to_go_on(  # noqa: PLR0917 - a column of the table each
    command: str,
    ends: Callable[..., None],
    begun: bool,
    code: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    if begun:
        out.mkdir()
        (out / "_manifest.json").write_text("{}")
    monkeypatch.setattr(daskinfer.cli, "_run", ends)
    monkeypatch.setattr("daskinfer.demo.generation_model", lambda: "model")
    arguments = ["run", "in.jsonl", str(out), "--model", "m"] if command == "run" else ["demo", "--output", str(out)]
    monkeypatch.setattr(sys, "argv", ["daskinfer", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    stderr = capsys.readouterr().err
    assert all(text in stderr for text in said)
    assert ("To continue" in stderr) is begun

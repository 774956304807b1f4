import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskinfer import progress
from daskinfer.metrics import Snapshot
from daskinfer.progress import (
    NotebookProgress,
    PlainProgress,
    QuietProgress,
    TerminalProgress,
    watcher,
)
from daskinfer.rates import Rates
from daskinfer.records import (
    BatchReturned,
    BatchSubmitted,
    Event,
    Failed,
    Noted,
    RowsResolved,
    RowsRetried,
    RunEnded,
    RunStarted,
    Timings,
    Usage,
    WorkersSeen,
    WorkerView,
)
from daskinfer.wording import duration, one_line, status, summary, time_left

FINAL = "7,000 rows completed, 1,000 failed (1,000 too_long)"


def run_of(batches: int, gap_s: float = 0.5, total: int | None = None) -> Iterator[Event]:
    """A run of 4 workers: 8 rows a batch, one of them fails, and every batch has rows that were tried again."""
    total = 8 * batches if total is None else total
    yield RunStarted(0.0, total)
    yield WorkersSeen(0.1, tuple(WorkerView(f"w-{i}", "ready" if i < 3 else "loading") for i in range(4)))
    for n in range(batches):
        at = 1 + n * gap_s
        yield BatchSubmitted(at, f"k-{n}", 8, 0)
        yield BatchReturned(at, f"k-{n}", 8, f"w-{n % 4}", Usage(80, 40), Timings(0.0, 0.5))
        yield RowsRetried(at, 3, "transient", "connection reset")
        yield RowsResolved(at, 7, 1, Usage(80, 40), (Failed(n, "too_long", "the prompt is too long"),))
    yield RunEnded(1 + batches * gap_s, "done")


# ---------------------------------------------------------------- plain lines


def test_c60_a_file_gets_at_most_60_lines_with_final_counts(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        watch = watcher(stream=stream)
        assert isinstance(watch, PlainProgress)
        for event in run_of(1_000):
            watch(event)
    lines = (tmp_path / "log").read_text().splitlines()
    assert 5 <= len(lines) <= 60
    assert lines[-1] == f"daskinfer: done in 8 min 21 s: {FINAL}"
    assert "\r" not in "".join(lines)
    assert "tokens/s in" in lines[3]
    assert " rows/s, " in lines[3]
    assert "min left" in lines[3]
    assert "3/4 workers ready" in lines[3]


@pytest.mark.parametrize("gap_s", [0.001, 1.0, 60.0, 3_600.0, 86_400.0])
def test_c60_the_bound_holds_whatever_the_length_of_the_run(gap_s: float) -> None:
    stream = io.StringIO()
    watch = PlainProgress(stream)
    for event in run_of(2_000, gap_s):
        watch(event)
        for n in range(2):
            watch(Noted(event.at, f"note {event.at} {n}"))
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 60
    assert lines[-3].startswith("daskinfer: done in") or lines[-1].startswith("daskinfer: done in")


def test_counts_that_are_shown_equal_the_rows_done() -> None:
    stream = io.StringIO()
    watch = PlainProgress(stream)
    done = 0
    for event in run_of(300):
        watch(event)
        done += event.completed + event.failed if isinstance(event, RowsResolved) else 0
        last = stream.getvalue().splitlines()[-1:]
        if last and isinstance(event, RowsResolved) and f"{watch.snapshot.done:,}/" in last[0]:
            assert watch.snapshot.done == done
    assert watch.snapshot.done == done == 2_400
    assert "2,100 rows completed, 300 failed" in stream.getvalue()


def test_a_note_is_written_once_and_notes_are_bounded() -> None:
    stream = io.StringIO()
    watch = PlainProgress(stream)
    for n in range(100):
        watch(Noted(1.0, f"note {n // 2}\nsecond line"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "daskinfer: note 0 second line"
    assert len(lines) == 13
    assert lines[-1] == "daskinfer: further notes are not shown"


def test_a_second_run_starts_afresh() -> None:
    stream = io.StringIO()
    watch = PlainProgress(stream)
    for _ in range(2):
        for event in run_of(10):
            watch(event)
    first, second = (line for line in stream.getvalue().splitlines() if "done in" in line)
    assert first == second


def test_text_that_the_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    PlainProgress(stream)(Noted(0.0, "grün"))
    assert raw.getvalue() == b"daskinfer: gr\\xfcn\n"


def test_a_stream_that_breaks_does_not_stop_the_run() -> None:
    stream = io.StringIO()
    watch = PlainProgress(stream)
    stream.close()
    for event in run_of(100):
        watch(event)
    assert watch.snapshot.done == 800


# ---------------------------------------------------------------- choosing


def test_c60_quiet_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with watcher(quiet=True) as watch:
        for event in run_of(1_000):
            watch(event)
        watch(Noted(1.0, "look"))
    assert capfd.readouterr() == ("", "")
    assert watch.snapshot.done == 8_000


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_display_fits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(watcher(stream=FakeTerminal()), TerminalProgress)
    assert isinstance(watcher(stream=io.StringIO()), PlainProgress)
    closed = io.StringIO()
    closed.close()
    assert isinstance(watcher(stream=closed), QuietProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(watcher(stream=FakeTerminal()), PlainProgress)


def test_a_kernel_gets_the_notebook_display(monkeypatch: pytest.MonkeyPatch) -> None:
    shells = [None, type("TerminalInteractiveShell", (), {})(), type("ZMQInteractiveShell", (), {})()]
    kinds = []
    for shell in shells:
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        kinds.append(type(watcher()) is NotebookProgress)
    assert kinds == [False, False, True]
    assert isinstance(watcher(stream=io.StringIO()), PlainProgress)


# ---------------------------------------------------------------- a terminal

CHILD = """
    import sys
    sys.path.insert(0, {folder!r})
    from test_progress import Noted, run_of, watcher
    with watcher() as watch:
        for event in run_of(1_000):
            if event.at == 251.0 and type(event).__name__ == "RowsRetried":
                watch(Noted(event.at, "look [here]"))
                print("printed")
            watch(event)
"""


def on_a_terminal(columns: int, stdout: Any = None) -> str:
    """Run the child with stderr on a pseudo-terminal and return all that came out there."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {
        **{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")},
        "TERM": "xterm-256color",
    }
    code = textwrap.dedent(CHILD).format(folder=str(Path(__file__).parent))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=stdout or theirs, stderr=theirs, env=env, close_fds=True
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and select.select([ours], [], [], 60)[0]:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the child has closed its end
                break
            if not part:
                break
            seen += part
        assert child.wait(10) == 0, seen.decode()
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    return seen.decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("columns", [120, 30])
def test_c60_a_terminal_gets_one_live_line(columns: int) -> None:
    out = on_a_terminal(columns)
    rows = plain(out).split("\r\n")
    assert [row.rpartition("\r")[2] for row in rows[:2]] == ["look [here]", "printed"]
    assert len(rows) == 4  # the note, what was printed, the line itself, and nothing after it
    assert rows[3] == ""
    last = rows[2].rpartition("\r")[2]
    assert "8,000/8,000 rows" in last
    assert len(last) <= columns
    if columns == 120:
        assert "1,000 failed, done in 8 min 21 s" in last
        assert re.search(r"\x1b\[1;31m[^\x1b]* failed", out)  # bold red
    assert out.rstrip("\r\n").endswith("\x1b[?25h")  # the cursor is back


def test_what_a_script_prints_to_a_file_goes_there(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stdout:
        out = on_a_terminal(100, stdout)
    assert (tmp_path / "out").read_text() == "printed\n"
    assert "printed" not in out


def test_closing_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    stdout = sys.stdout
    watch = TerminalProgress(stderr)
    watch(Noted(0.0, "before the run"))
    watch(RunStarted(0.0, None))
    assert sys.stderr is not stderr
    watch(Noted(0.0, "twice"))
    watch(Noted(0.0, "twice"))
    watch(RunStarted(0.0, 5))
    watch.close()
    watch.close()
    assert sys.stderr is stderr
    assert sys.stdout is stdout
    watch(RowsResolved(10.0, 5, 0, Usage()))
    assert stderr.getvalue().count("twice") == 1


def test_the_line_is_refreshed_and_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", stderr := FakeTerminal())
    watch = TerminalProgress()
    for event in run_of(20):
        watch(event)
    assert sys.stderr is stderr
    shown = plain(stderr.getvalue())
    assert 10 <= shown.count("rows") <= 60
    assert "160/160 rows, 20 failed, done in 11 s" in shown.splitlines()[-1]


def test_a_terminal_that_goes_away_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := FakeTerminal())
    watch = TerminalProgress(stderr)
    watch(RunStarted(0.0, 800))
    stderr.close()
    for event in list(run_of(100))[1:]:
        watch(event)
    assert watch.snapshot.done == 800
    assert sys.stderr is stderr


# ---------------------------------------------------------------- a notebook


class FakeDisplay:
    def __init__(self) -> None:
        self.outputs: list[list[dict[str, str]]] = []

    def __call__(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        output = [content]
        self.outputs.append(output)
        return SimpleNamespace(update=lambda content, raw: output.append(content))


def test_c60_a_notebook_has_one_output_per_run() -> None:
    display = FakeDisplay()
    watch = NotebookProgress(display)
    for _ in range(2):
        for event in run_of(1_000, gap_s=0.05):
            watch(event)
    first, second = display.outputs
    assert len(first) == len(second) <= 105
    assert FINAL in first[-1]["text/plain"]
    assert "width:87.50%;background:#0072B2" in first[-1]["text/html"]
    assert "width:12.50%;background:#D55E00" in first[-1]["text/html"]


def test_a_notebook_escapes_notes() -> None:
    display = FakeDisplay()
    watch = NotebookProgress(display)
    for event in (RunStarted(0.0, None), Noted(0.0, "<b>")):
        watch(event)
    content = display.outputs[0][-1]
    assert content["text/plain"].endswith("\n<b>")
    assert content["text/html"].endswith("<div>&lt;b&gt;</div></div>")
    assert "width:" not in content["text/html"]


def test_a_notebook_uses_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    display = FakeDisplay()
    monkeypatch.setattr(
        progress, "import_module", lambda name: {"IPython.display": SimpleNamespace(display=display)}[name]
    )
    NotebookProgress()(RunStarted(0.0, 1))
    assert len(display.outputs) == 1


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.24, "4.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (250, "4 min 10 s"),
        (7_500, "2 h 5 min"),
        (7_200, "2 h"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("eta_s", "text"),
    [
        ((0, 0), "about 0 s left"),
        ((40, 60), "40-60 s left"),
        ((190, 290), "3-5 min left"),
        ((100, 130), "about 2 min left"),
        ((3_600, 10_800), "1-3 h left"),
        ((200_000, 400_000), "2-5 d left"),
    ],
)
def test_time_left(eta_s: tuple[float, float], text: str) -> None:
    assert time_left(eta_s) == text


def test_status_before_anything_is_known() -> None:
    assert status(Snapshot(state="running")) == "0 rows, 0 failed, 0/0 workers ready"
    assert status(Snapshot(state="running", total=5, skipped=2)) == "2/5 rows, 0 failed, 0/0 workers ready"


def test_status_without_tokens_gives_rows_per_second() -> None:
    snapshot = Snapshot(state="running", recent=Rates(0, 0, 0), average=Rates(2.5, 0, 0))
    assert "2.5 rows/s" in status(snapshot)


def test_a_summary_names_what_was_done_before() -> None:
    assert summary(Snapshot(state="interrupted", completed=3, skipped=2)) == (
        "interrupted in 0.0 s: 3 rows completed, 0 failed, 2 done before"
    )


def test_long_messages_are_cut() -> None:
    assert len(one_line("x" * 10_000)) == 404

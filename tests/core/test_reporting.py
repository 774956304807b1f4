"""The files beside an output, and the page that opens without a network."""

import errno
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daskinfer.metrics import Metrics
from daskinfer.records import (
    BatchReturned,
    BatchSubmitted,
    Failed,
    RowsResolved,
    RunEnded,
    RunStarted,
    Timings,
    Usage,
    WorkersSeen,
    WorkerView,
)
from daskinfer.report import RunReport, report_from
from daskinfer.reporting import page, paths, write
from daskinfer.storage.files import find_files
from daskinfer.timeline import Recorder


def whole_run(path: str, seconds: float = 20.0) -> RunReport:
    metrics, recorder = Metrics(), Recorder()
    figures = {"full_steps": 0, "full_row_steps": 0, "step_bins": [10, 0]}
    later = {"full_steps": 10, "full_row_steps": 20, "step_bins": [10, 10], "ram_bytes": 3_000_000}
    failed = Failed(7, "too_long", "<script>alert(1)</script>", worker="tcp://a")
    events: list[Any] = [
        RunStarted(0.0, 10),
        WorkersSeen(0.5, (WorkerView("tcp://a", "ready", 4, 8, "", figures),)),
        BatchSubmitted(1.0, "k", 10, 0),
        BatchReturned(2.0, "k", 10, "tcp://a", Usage(5, 5), Timings(0.1, 1.0, last=3), answered=10),
        RowsResolved(2.0, 9, 1, Usage(50, 90), (failed,)),
        WorkersSeen(seconds, (WorkerView("tcp://a", "ready", 4, 8, "", later),)),
        RunEnded(seconds, "done"),
    ]
    for event in events:
        metrics.apply(event)
        recorder(event)
    about = {"model": "m", "engine": "e", "seed": 1, "began": 0.0, "settings": {"model": "m", "prompt": "Say {x}"}}
    return report_from(
        metrics.snapshot(), path=path, versions={"daskinfer": "1"}, about=about, timeline=recorder.timeline
    )


def test_where_the_files_are(tmp_path: Path) -> None:
    assert paths(str(tmp_path)) == (tmp_path / "_report.html", tmp_path / "_report.json")
    assert paths("out/answers.jsonl") == (Path("out/_answers.report.html"), Path("out/_answers.report.json"))
    assert paths("s3://bucket/out/") is None


def test_a_long_run_gets_a_page_and_a_short_one_only_when_asked_for(tmp_path: Path) -> None:
    assert write(whole_run(str(tmp_path))) == tmp_path / "_report.html"
    assert write(whole_run(str(tmp_path / "a.csv"), seconds=3.0)) is None
    assert {path.name for path in tmp_path.iterdir()} == {"_report.html", "_report.json", "_a.report.json"}
    assert write(whole_run(str(tmp_path / "a.csv"), seconds=3.0), html=True) == tmp_path / "_a.report.html"
    assert write(whole_run("s3://bucket/out/")) is None
    told = json.loads((tmp_path / "_report.json").read_text())
    assert (told["rows"], told["completed"], told["failed"], told["occupancy"]) == (10, 9, 1, 0.5)
    assert told["slowest"] == [{"row": 3, "seconds": 1.0, "worker": "tcp://a"}]
    assert told["timeline"]["workers"]["tcp://a"][0]["state"] == "ready"
    assert told["about"]["settings"] == {"model": "m", "prompt": "Say {x}"}


def test_the_page_needs_nothing_else_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    text = page(whole_run(str(tmp_path)))
    markup = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
    assert not re.search(r"<link|<script[^>]*src=|url\(|https?://", markup)
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text
    for part in ("Say {x}", "row 7", "Engines were 50 % full", "row 3"):
        assert part in text


def test_without_bokeh_or_a_place_to_write_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    assert write(whole_run(str(tmp_path)), html=True) is None
    assert {path.name for path in tmp_path.iterdir()} == {"_report.json"}
    assert write(whole_run(str(tmp_path / "gone" / "answers.jsonl"))) is None
    assert "the report could not be written" in caplog.text


def test_a_report_that_cannot_be_made_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = replace(whole_run(str(tmp_path)), about={"settings": {"prompt": "half a pair: \ud800"}})
    assert write(report, html=True) == tmp_path / "_report.html"
    assert "half a pair: \\ud800" in (tmp_path / "_report.json").read_text()
    monkeypatch.setattr("daskinfer.reporting.page", lambda _: 1 / 0)
    assert write(report, html=True) is None
    assert "the report could not be written" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_report_on_a_full_disk_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert write(whole_run(str(tmp_path))) is None
    assert not list(tmp_path.iterdir())


def test_the_reports_beside_an_output_are_no_input(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"text": "a"}\n')
    assert write(whole_run(str(tmp_path / "answers.jsonl")), html=True)
    for asked in (tmp_path, tmp_path / "*", tmp_path / "*.json*"):
        assert [Path(file.path).name for file in find_files(str(asked)).files] == ["answers.jsonl"]


def test_a_report_of_nothing_can_be_shown() -> None:
    assert "No row has failed." in page(report_from(Metrics().snapshot(), versions={}))

import json
import pickle
import re

import pytest

from daskinfer import report
from daskinfer.metrics import FailureCount, Metrics, Snapshot
from daskinfer.records import (
    BatchSubmitted,
    Event,
    Failed,
    RowsResolved,
    RowsRetried,
    RunEnded,
    RunStarted,
    Usage,
)
from daskinfer.report import RunReport, installed_versions, report_from
from daskinfer.wording import bytes_text, row_name


def report_of(*events: Event, path: str | None = "answers/", resumed: bool = False) -> RunReport:
    metrics = Metrics()
    for event in events:
        metrics.apply(event)
    return report_from(metrics.snapshot(), path=path, resumed=resumed, versions={"daskinfer": "1.0"})


def whole_run(state: str = "done") -> RunReport:
    failures = (Failed((1 << 40) + 3, "too_long", "5,003 tokens\nare too many"), Failed(4, "too_long", "x"))
    return report_of(
        RunStarted(0.0, 10_000, done=2_000),
        BatchSubmitted(12.0, "k", 5, 0),
        RowsRetried(13.0, 40, "transient", "reset"),
        RowsResolved(250.0, 7_998, 2, Usage(1_204_332, 402_113, 96), failures),
        RunEnded(250.0, state),
        resumed=True,
    )


def test_a_report_adds_up() -> None:
    made = whole_run()
    assert made.state == "done"
    assert made.rows == made.completed + made.failed + made.skipped == made.total == 10_000
    assert (made.completed, made.failed, made.skipped, made.retried) == (7_998, 2, 2_000, 40)
    assert (made.seconds, made.startup_s) == (250.0, 12.0)
    assert made.rows_per_s == 8_000 / 250
    assert made.tokens_per_s == (1_204_332 + 402_113) / 250
    assert made.failures == (FailureCount("too_long", 2, (1 << 40) + 3, "5,003 tokens\nare too many"),)
    assert (made.path, made.resumed, made.versions) == ("answers/", True, {"daskinfer": "1.0"})
    assert pickle.loads(pickle.dumps(made)) == made


def test_the_text_is_for_people() -> None:
    assert str(whole_run()).splitlines() == [
        "Done: 10,000 rows in 4 min 10 s, output in answers/",
        "  completed   7,998",
        "  failed      2",
        "  done before 2,000",
        "  tried again 40",
        "  tokens      1,204,332 read, 402,113 written, 96 cut off prompts that were too long",
        "  speed       32.0 rows/s, 6,426 tokens/s (start-up of 12 s included)",
        "failures:",
        "  2 too_long, such as row 3 of file 1: 5,003 tokens are too many",
        "To try the failed rows again, run with resume=True, retry_failed=True (--resume --retry-failed).",
    ]


def test_a_clean_run_says_little() -> None:
    made = report_of(RunStarted(0.0, 8), RowsResolved(4.0, 8, 0, Usage()), RunEnded(4.0, "done"), path=None)
    assert str(made).splitlines() == [
        "Done: 8 rows in 4.0 s",
        "  completed   8",
        "  failed      0",
        "  speed       2.0 rows/s",
    ]


@pytest.mark.parametrize("state", ["interrupted", "error"])
def test_a_stopped_run_says_how_to_continue(state: str) -> None:
    events = RunStarted(0.0, 100), RowsResolved(4.0, 8, 0, Usage()), RunEnded(4.0, state)
    lines = str(report_of(*events)).splitlines()
    assert lines[0] == f"{state.capitalize()}: 8 of 100 rows in 4.0 s, output in answers/"
    assert lines[-1] == "To continue, run again with resume=True (--resume)."
    assert "--resume" not in str(report_of(*events, path=None))


@pytest.mark.parametrize(
    ("total", "done", "why"), [(50, 50, "all 50 rows had been done before"), (0, 0, "the input has no rows")]
)
def test_nothing_to_do(total: int, done: int, why: str) -> None:
    made = report_of(RunStarted(0.0, total, done), RunEnded(0.0, "done"), resumed=True)
    assert (made.state, made.rows, made.rows_per_s) == ("nothing to do", total, 0.0)
    assert str(made) == f"Nothing to do: {why}, output in answers/"


def test_many_kinds_of_failure_are_cut() -> None:
    failures = tuple(Failed(i, f"kind-{i}", "x" * 1_000) for i in range(15))
    text = str(report_of(RunStarted(0.0, 15), RowsResolved(1.0, 0, 16, Usage(), failures), RunEnded(1.0, "done")))
    assert len(re.findall(r"^  1 kind-\d+, such as row \d+: x", text, re.MULTILINE)) == 10
    assert "  and 6 more kinds" in text
    assert max(map(len, text.splitlines())) < 600


def test_a_run_shorter_than_the_clock_has_no_speed() -> None:
    made = report_of(RunStarted(0.0, 1), RowsResolved(0.0, 1, 0, Usage(1, 1)), RunEnded(0.0, "done"))
    assert (made.rows_per_s, made.tokens_per_s) == (0.0, 0.0)
    assert "speed" not in str(made)


def test_failures_without_an_example() -> None:
    text = str(report_of(RunStarted(0.0, 1), RowsResolved(1.0, 0, 1, Usage()), RunEnded(1.0, "done")))
    assert "\n  1 other\n" in text


def test_c21_a_report_is_strict_json() -> None:
    read = json.loads(json.dumps(whole_run().to_dict(), allow_nan=False))
    assert read["failures"] == [
        {"kind": "too_long", "rows": 2, "row": (1 << 40) + 3, "message": "5,003 tokens\nare too many"}
    ]
    assert read["usage"] == {"prompt_tokens": 1_204_332, "completion_tokens": 402_113, "truncated_tokens": 96}
    assert read["versions"] == {"daskinfer": "1.0"}


def test_the_html_is_escaped() -> None:
    failures = (Failed(0, "error", "<script>"),)
    html = report_of(
        RunStarted(0.0, 1), RowsResolved(1.0, 0, 1, Usage(), failures), RunEnded(1.0, "done"), path="<dir>"
    )._repr_html_()
    assert "&lt;script&gt;" in html
    assert "&lt;dir&gt;" in html
    assert "<script>" not in html
    assert "<th>completed</th><td>0</td>" in html


def test_versions_are_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = report_from(Snapshot()).versions
    assert {"python", "daskinfer", "dask", "distributed"} <= set(versions)
    monkeypatch.setattr(report, "_PACKAGES", ("daskinfer", "no-such-package"))
    assert set(installed_versions()) == {"python", "daskinfer"}


def test_row_names() -> None:
    assert row_name(17) == "row 17"
    assert row_name((2 << 40) + 17) == "row 17 of file 2"


@pytest.mark.parametrize(
    ("size", "text"), [(None, "-"), (0, "-"), (312e6, "312 MB"), (4.2e9, "4.2 GB"), (1.5e12, "1.5 TB")]
)
def test_bytes_for_people(size: float | None, text: str) -> None:
    assert bytes_text(size) == text

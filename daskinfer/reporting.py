"""Writes a run's report beside its output: ``report.json`` for programs, ``report.html`` for people.

The page needs nothing but itself: Bokeh's scripts are inside, so it opens without a network.

Runs on: client.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from daskinfer.errors import describe
from daskinfer.report import RunReport
from daskinfer.storage.fileops import FileOps
from daskinfer.timeline import Span
from daskinfer.wording import bytes_text, duration, one_line, row_name, share

__all__ = ["LONG_S", "page", "paths", "write"]

logger = logging.getLogger("daskinfer.reporting")

LONG_S = 10.0
"""A page is written without being asked for when the run took longer (seconds); to make it takes one or two."""
_STATES = {
    "ready": "green",
    "loading": "blue",
    "starting": "blue",
    "lost": "red",
    "failed": "red",
    "restarting": "orange",
}
_TILES = "grid-template-columns:repeat(auto-fit,minmax(min(120px,30%),1fr))"
_PAGE = """{% from macros import embed %}<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title|e }}</title>
{{ bokeh_css }}{{ bokeh_js }}
<style>{{ style }}</style></head><body>
<div class="di">
<div class="di-6">{{ head }}</div>
{% if advice %}<div class="di-6"><h2>What would make it faster</h2>{{ advice }}</div>{% endif %}
<div class="di-3"><h2>Throughput</h2><div class="di-chart">{{ embed(roots.throughput) }}</div></div>
<div class="di-3"><h2>Rows</h2><div class="di-chart">{{ embed(roots.rows) }}</div></div>
<div class="di-3"><h2>How full the engines were</h2><div class="di-chart">{{ embed(roots.use) }}</div></div>
<div class="di-3"><h2>How long a step took</h2><div class="di-chart">{{ embed(roots.steps) }}</div></div>
<div class="di-6"><h2>Workers</h2><div class="di-chart" style="height:{{ height }}px">{{ embed(roots.workers) }}</div>
<small>Blue loading, green ready, orange restarting, red lost or failed, grey other.</small></div>
<div class="di-3"><h2>Failures by cause</h2>{{ failures }}</div>
<div class="di-3"><h2>Slowest rows</h2>{{ slowest }}</div>
<div class="di-3"><h2>What came out</h2>{{ counts }}</div>
<div class="di-3"><h2>What ran</h2>{{ about }}</div>
</div>{{ plot_script }}</body></html>"""


def paths(sink: str) -> tuple[Path, Path] | None:
    """Return where the page and the JSON of an output are; None for one at a URL.

    In a folder they are ``_report.html`` and ``_report.json``; beside a file ``answers.jsonl`` they are
    ``_answers.report.html`` and ``_answers.report.json``. Readers of a folder or a pattern pass over such names.
    """
    if "://" in sink:
        return None
    path = Path(sink)
    if path.is_dir():
        return path / "_report.html", path / "_report.json"
    return path.with_name(f"_{path.stem}.report.html"), path.with_name(f"_{path.stem}.report.json")


def write(report: RunReport, *, html: bool | None = None) -> Path | None:
    """Write the report beside the output; never raises: a report that cannot be made or written is logged.

    Parameters
    ----------
    report : RunReport
        One with a path.
    html : bool or None
        Whether to write the page, too; None: when the run took more than 10 seconds. Without Bokeh it is left out.

    Returns
    -------
    Path or None
        Of the page, where one was written.
    """
    try:
        where = paths(report.path or "://")
        if where is None:
            return None
        page_path, json_path = where
        _put(json_path, json.dumps(report.to_dict(), ensure_ascii=False, indent=1))
        if not (report.seconds > LONG_S if html is None else html):
            return None
        _put(page_path, page(report))
    except ImportError:
        logger.info("without Bokeh there is no %s", page_path)
        return None
    except Exception as error:  # noqa: BLE001 - it must neither fail a run that is done nor hide why another one stopped
        logger.warning("the report could not be written: %s", describe(error))
        return None
    return page_path


def _put(path: Path, text: str) -> None:
    """Replace a file in one go."""
    with FileOps().writing(path, path.with_name(f".{path.name}.tmp")) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


# ---------------------------------------------------------------- the page


def page(report: RunReport) -> str:
    """Return the report as one HTML page.

    Raises
    ------
    ImportError
        Bokeh is not installed.
    """
    from bokeh.core.templates import get_env
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.resources import INLINE
    from jinja2 import Environment

    from daskinfer.dashboard import charts, theme

    columns = report.timeline.columns if report.timeline else {}
    spans = report.timeline.workers if report.timeline else {}
    shown = [charts.throughput(), charts.row_rate(), charts.use(padding=False), charts.steps()]
    for chart in shown[:3]:
        if columns:
            chart.show(columns)
    shown[3].show(charts.step_data(report.steps_s))
    names = _names(report, spans)
    shown.append(charts.spans(_span_data(spans, names), list(names.values())))
    document = Document()
    for chart in shown:
        document.add_root(chart.plot)
    document.js_on_event("document_ready", charts.adapting(shown))
    environment: Environment = get_env()
    return file_html(
        document,
        INLINE,
        report.headline,
        template=environment.from_string(_PAGE),
        template_variables={
            "style": theme.PAGE + theme.CSS.replace(":host", ".di-root"),
            "height": 70 + 26 * max(1, min(len(names), 60)),
            **_texts(report),
        },
    )


def _names(report: RunReport, spans: Mapping[str, Sequence[Span]]) -> dict[str, str]:
    """Return a short name for each worker: its address without the protocol."""
    return {address: address.removeprefix("tcp://") for address in spans}


def _span_data(spans: Mapping[str, Sequence[Span]], names: Mapping[str, str]) -> dict[str, list[Any]]:
    flat = [(names[address], span) for address, each in spans.items() for span in each]
    return {
        "worker": [name for name, _ in flat],
        "state": [span.state for _, span in flat],
        "begin": [span.begin for _, span in flat],
        "end": [max(span.end, span.begin + 0.05) for _, span in flat],
        "kind": [_STATES.get(span.state, "grey") for _, span in flat],
    }


def _texts(report: RunReport) -> dict[str, str]:
    from daskinfer.dashboard import html

    lines = "".join(f"<li>{escape(line)}</li>" for line in report.advice)
    failures = [
        [f"{f.rows:,}", escape(f.kind), row_name(f.row) if f.row is not None else "-", escape(one_line(f.message))]
        for f in report.failures
    ]
    slowest = [
        [row_name(slow.row), duration(slow.seconds), escape(slow.worker.removeprefix("tcp://"))]
        for slow in report.slowest
    ]
    return {
        "head": _head(report),
        "advice": f'<ul style="margin:0;padding-left:20px">{lines}</ul>' if lines else "",
        "failures": html.table(("#rows", "cause", "example", "what was said"), failures, "No row has failed."),
        "slowest": html.table(("row", "#seconds", "worker"), slowest, "Nothing is known.")
        + "<small>The last row of its batch; its wait inside the engine counts.</small>",
        "counts": _pairs(_counts(report)),
        "about": _pairs(_about(report)),
    }


def _head(report: RunReport) -> str:
    from daskinfer.dashboard import html

    total = max(1, report.rows)
    parts = (("grey", report.skipped), ("blue", report.completed), ("red", report.failed))
    tiles = [
        ("rows", f"{report.rows:,}"),
        ("failed", f"{report.failed:,}"),
        ("rows/s", f"{report.rows_per_s:,.1f}"),
        ("tokens/s", f"{report.tokens_per_s:,.0f}"),
        ("places used", share(report.occupancy)),
        ("padding", share(report.padding)),
        ("time", duration(report.seconds)),
        ("start-up", duration(report.startup_s)),
    ]
    shown = "".join(
        f'<div class="di-tile"><small>{escape(name)}</small><b>{escape(text)}</b></div>' for name, text in tiles
    )
    return (
        f'<div class="di-root"><div class="di-head"><h1>{escape(report.headline)}</h1>{html.chip(report.state)}</div>'
        f"{html.bar((colour, rows / total) for colour, rows in parts)}"
        f'<div class="di-tiles" style="{_TILES}">{shown}</div></div>'
    )


def _counts(report: RunReport) -> Iterable[tuple[str, str]]:
    yield from report.figures
    yield "quarantined", f"{report.quarantined:,} of the failed rows"
    yield "sent to workers", f"{report.sent:,} rows, repeats included (work)"
    yield (
        "computed",
        (
            f"{report.work.prompt_tokens:,} tokens read, {report.work.completion_tokens:,} written, "
            f"{report.work.padded_tokens:,} padding, repeats included (work)"
        ),
    )
    yield "engine restarts", f"{report.work.restarts:,}"
    for name, value in (("queue", report.queue_s), ("batch", report.batch_s), ("step", report.step_s)):
        if value:
            yield f"{name}, median and 95 %", f"{value[0]:.3g} s, {value[1]:.3g} s"
    if report.timeline and report.timeline.columns.get("ram_bytes"):
        yield "engines' memory", f"{bytes_text(max(report.timeline.columns['ram_bytes']))} at most"


def _about(report: RunReport) -> Iterable[tuple[str, str]]:
    for name, value in report.about.items():
        if name == "began":
            yield "began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(value)))
        elif name == "settings" and isinstance(value, Mapping):
            yield from ((key, _value(each)) for key, each in value.items() if key not in report.about)
        else:
            yield name, _value(value)
    yield from report.versions.items()


def _value(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    from daskinfer.dashboard import html

    return html.table(("", ""), ([escape(name), escape(text)] for name, text in pairs), "")

"""The Bokeh documents: the page ``/daskinfer``, and each of its parts as ``/individual-daskinfer-…``.

A document looks at the board once a second, and draws only when something has changed.

Runs on: scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bokeh.models import InlineStyleSheet
from bokeh.models.widgets import Div, Select
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from daskinfer.dashboard import charts, html
from daskinfer.dashboard.board import Board, Job, Model
from daskinfer.dashboard.theme import CSS, PAGE

__all__ = ["DOCUMENTS", "PERIOD_MS"]

PERIOD_MS = 1_000
LATEST = ""

_BODY = """{% extends "base.html" %}
{% block extra_resources %}<style>__PAGE__</style>{% endblock %}
{% block content %}{% from macros import embed %}
<div class="di" id="daskinfer">
<div class="di-6">{{ embed(roots.choice) }}{{ embed(roots.summary) }}</div>
<div class="di-4"><h2>Throughput</h2><div class="di-chart">{{ embed(roots.throughput) }}</div></div>
<div class="di-2"><h2>Workers</h2><div class="di-tall">{{ embed(roots.workers) }}</div></div>
<div class="di-2"><h2>How full the engines are</h2><div class="di-chart">{{ embed(roots.use) }}</div></div>
<div class="di-2"><h2>How long a step takes</h2><div class="di-chart">{{ embed(roots.steps) }}</div></div>
<div class="di-2"><h2>Memory</h2><div class="di-chart">{{ embed(roots.memory) }}</div></div>
<div class="di-3"><h2>Failed rows</h2><div class="di-tall">{{ embed(roots.failures) }}</div></div>
<div class="di-3"><h2>Jobs</h2><div class="di-tall">{{ embed(roots.jobs) }}</div></div>
</div>
{{ plot_script }}
{% endblock %}"""
_ALONE = """{% extends "base.html" %}
{% block extra_resources %}<style>__PAGE__.navbar{display:none}.di-one{padding:8px;height:100vh}</style>{% endblock %}
{% block content %}{% from macros import embed %}<div class="di-one">{{ embed(doc.roots[0]) }}</div>{{ plot_script }}
{% endblock %}"""


class Picture:
    """What one open document shows: the chosen job, else the running one that began last.

    Parameters
    ----------
    board : callable
        Returns the board, or None before a driver has come.
    """

    def __init__(self, board: Callable[[], Board | None]) -> None:
        self._board = board
        self.chosen = LATEST
        self.drawn = -1
        self.model: Model | None = None
        self.job: Job | None = None

    def look(self) -> Board | None:
        """Choose what to show; return None when nothing has changed since :meth:`look` was called last."""
        board = self._board()
        if board is None or board.changes == self.drawn:
            return None
        self.drawn = board.changes
        pairs = board.jobs(time.time())
        asked = [pair for pair in pairs if pair[1].id == self.chosen]
        latest = asked or pairs
        self.model, self.job = latest[0] if latest else (next(reversed(board.models.values()), None), None)
        return board


Part = tuple[Any, Callable[[Picture, Board], None]]


def _div(name: str) -> Any:
    sheets: list[Any] = [InlineStyleSheet(css=CSS)]
    # names of jobs and models may hold dollar signs, which are no formulas
    return Div(name=name, text="", margin=0, sizing_mode="stretch_width", stylesheets=sheets, disable_math=True)


def _summary() -> Part:
    div = _div("summary")

    def draw(picture: Picture, _: Board) -> None:
        model, job = picture.model, picture.job
        name = model.about.get("model", "") if model else ""
        if model is None or job is None:
            div.text = html.summary(name, None, None, "")
        else:
            now = time.time()
            snapshot = {**job.snapshot, "worker_states": _states(model)}
            div.text = html.summary(name, {"name": job.name, "kind": job.kind}, snapshot, job.state(now))

    return div, draw


def _states(model: Model) -> dict[str, int]:
    states: dict[str, int] = {}
    for worker in model.workers.values():
        if not worker.gone:
            states[worker.state] = states.get(worker.state, 0) + 1
    return states


def _workers() -> Part:
    div = _div("workers")

    def draw(picture: Picture, _: Board) -> None:
        model = picture.model
        now = time.time()
        rows = sorted(model.workers.values(), key=lambda w: (w.gone, len(w.name), w.name)) if model else []
        div.text = html.worker_table(
            {
                "address": w.address,
                "name": w.name,
                "state": w.state,
                "for_s": now - w.since,
                "occupancy": w.occupancy,
                **{name: w.figures.get(name) for name in ("running", "waiting", "ram_bytes")},
            }
            for w in rows
        )

    return div, draw


def _failures() -> Part:
    div = _div("failures")

    def draw(picture: Picture, _: Board) -> None:
        div.text = html.failure_table(picture.job.snapshot if picture.job else None)

    return div, draw


def _jobs() -> Part:
    div = _div("jobs")

    def draw(_: Picture, board: Board) -> None:
        now = time.time()
        div.text = html.job_table(
            ({"name": job.name}, job.snapshot, job.state(now), model.about.get("model", model.key))
            for model, job in board.jobs(now)
        )

    return div, draw


def _choice(picture: Picture) -> Part:
    select = Select(
        name="choice", title="", value=LATEST, visible=False, width=320, stylesheets=[InlineStyleSheet(css=CSS)]
    )

    def changed(_attribute: str, _old: str, new: str) -> None:
        picture.chosen, picture.drawn = new, -1

    def draw(_: Picture, board: Board) -> None:
        options: list[Any] = [(LATEST, "the latest job")]
        pairs = board.jobs(time.time())
        options += [(job.id, f"{job.name} on {model.about.get('model', '')}") for model, job in pairs]
        if options != select.options:
            select.options = options
            select.visible = len(options) > 2

    select.on_change("value", changed)
    return select, draw


def _series(chart: charts.Chart) -> Part:
    def draw(picture: Picture, _: Board) -> None:
        if picture.model is not None:
            chart.show(picture.model.series.columns)

    return chart, draw


def _steps() -> Part:
    chart = charts.steps()

    def draw(picture: Picture, _: Board) -> None:
        if picture.model is not None and picture.model.steps.counts():
            chart.show(charts.step_data(picture.model.steps.counts()))

    return chart, draw


PARTS: Mapping[str, Callable[[], Part]] = {
    "summary": _summary,
    "throughput": lambda: _series(charts.throughput()),
    "workers": _workers,
    "use": lambda: _series(charts.use()),
    "steps": _steps,
    "memory": lambda: _series(charts.memory()),
    "failures": _failures,
    "jobs": _jobs,
}


def _board_of(scheduler: Any) -> Board | None:
    board = getattr(scheduler.plugins.get("daskinfer"), "board", None)
    return board if isinstance(board, Board) else None


def _fill(doc: Any, extra: Mapping[str, Any], picture: Picture, parts: Sequence[Part], template: str) -> None:
    """Put the parts on a document and keep them up to date."""
    shown = [part for part, _ in parts if isinstance(part, charts.Chart)]
    for part, _ in parts:
        doc.add_root(part.plot if isinstance(part, charts.Chart) else part)
    if shown:
        doc.js_on_event("document_ready", charts.adapting(shown))

    def update() -> None:
        board = picture.look()
        if board is not None:
            for _, draw in parts:
                draw(picture, board)

    update()
    if picture.drawn < 0:
        empty = Board()
        for _, draw in parts:
            draw(picture, empty)
    doc.add_periodic_callback(update, PERIOD_MS)
    doc.template = env.from_string(template.replace("__PAGE__", PAGE))
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


def whole(scheduler: Any, extra: Mapping[str, Any], doc: Any) -> None:
    """Make the document of the page."""
    doc.title = "daskinfer"
    picture = Picture(lambda: _board_of(scheduler))
    parts = [make() for make in PARTS.values()]
    _fill(doc, extra, picture, [_choice(picture), *parts], _BODY)


def _single(name: str) -> Callable[[Any, Mapping[str, Any], Any], None]:
    def document(scheduler: Any, extra: Mapping[str, Any], doc: Any) -> None:
        doc.title = f"daskinfer: {name}"
        _fill(doc, extra, Picture(lambda: _board_of(scheduler)), [PARTS[name]()], _ALONE)

    return document


DOCUMENTS: dict[str, Callable[[Any, Mapping[str, Any], Any], None]] = {
    "/daskinfer": whole,
    **{f"/individual-daskinfer-{name}": _single(name) for name in PARTS},
}
"""Path to what makes the document, as Dask's own."""

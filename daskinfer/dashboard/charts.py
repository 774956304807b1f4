"""Bokeh charts: what they are drawn with and of is kept apart, so that a page can renew the latter.

Runs on: scheduler, client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import (
    CDSView,
    ColumnDataSource,
    CustomJS,
    FactorRange,
    GroupFilter,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure

from daskinfer.dashboard.theme import ADAPT, COLOURS, GRID, TEXT

__all__ = ["Chart", "adapting", "lines", "memory", "row_rate", "spans", "step_data", "steps", "throughput", "use"]


_PLAIN: dict[str, Any] = {
    "sizing_mode": "stretch_both",
    "min_height": 90,
    "toolbar_location": None,
    "tools": "",
    "background_fill_color": None,
    "border_fill_color": None,
    "outline_line_color": None,
    "min_border": 2,
}


class Chart:
    """A figure and the source that it shows."""

    def __init__(self, plot: Any, source: ColumnDataSource) -> None:
        self.plot = plot
        self.source = source

    def show(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Show these columns; others are ignored."""
        self.source.data = {name: list(columns[name]) for name in self.source.column_names}


def lines(name: str, shown: Mapping[str, tuple[str, str, str]], *, y_format: str, top: float | None = None) -> Chart:
    """Return a chart of columns over the time since the start.

    Parameters
    ----------
    name : str
    shown : dict of column to (label, colour, dash)
    y_format : str
        Of numeral.js.
    top : float or None
        End of the y axis; None: as far as the data go.
    """
    source = ColumnDataSource({"t": [], **{column: [] for column in shown}})
    plot: Any = figure(name=name, **_PLAIN)
    plot.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    plot.xaxis.ticker.desired_num_ticks = 4
    plot.yaxis.formatter = NumeralTickFormatter(format=y_format)
    plot.y_range.start = 0
    if top is not None:
        plot.y_range = Range1d(start=0, end=top)
    for column, (label, colour, dash) in shown.items():
        drawn = plot.line(
            "t", column, source=source, line_width=2, line_dash=dash, color=COLOURS[colour][0], legend_label=label
        )
        drawn.tags = [colour]
    _quiet(plot)
    tips = [
        ("time", "@t{00:00:00}"),
        *((label, f"@{{{column}}}{{{y_format}}}") for column, (label, _, _) in shown.items()),
    ]
    plot.add_tools(HoverTool(tooltips=tips, mode="vline", renderers=plot.renderers[:1]))
    return Chart(plot, source)


def _quiet(plot: Any) -> None:
    """Thin lines, a legend above the plot, small text."""
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = GRID[0]
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = GRID[0]
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = TEXT[0]
        axis.major_label_text_font_size = "11px"
    if plot.legend:
        legend = plot.legend[0]
        plot.add_layout(legend, "above")
        legend.orientation = "horizontal"
        legend.label_text_font_size = "11px"
        legend.label_text_color = TEXT[0]
        legend.background_fill_color = legend.border_line_color = None
        legend.padding = legend.margin = legend.spacing = 2
        legend.glyph_height = 10


def throughput() -> Chart:
    """Return tokens per second of rows that got their result."""
    shown = {"tokens_in": ("tokens/s in", "blue", "solid"), "tokens_out": ("tokens/s out", "orange", "solid")}
    return lines("throughput", shown, y_format="0,0.[0]a")


def row_rate() -> Chart:
    """Return rows per second."""
    return lines("rows", {"rows": ("rows/s", "green", "solid")}, y_format="0,0.[00]a")


def use(*, padding: bool = True) -> Chart:
    """Return how full the engines are, and the share of padding."""
    shown = {"occupancy": ("places in use", "green", "solid")}
    if padding:
        shown["padding"] = ("padding", "red", "dashed")
    return lines("use", shown, y_format="0%", top=1.05)


def memory() -> Chart:
    """Return the memory of engines and GPUs."""
    shown = {"ram_bytes": ("engines' memory", "purple", "solid"), "gpu_bytes": ("GPU memory", "orange", "dashed")}
    return lines("memory", shown, y_format="0 b")


def steps() -> Chart:
    """Return a histogram of the engines' steps by duration; its data are those of :func:`step_data`."""
    source = ColumnDataSource({"left": [], "right": [], "share": [], "count": [], "ms": []})
    plot: Any = figure(name="steps", x_axis_type="log", **_PLAIN)
    plot.y_range.start = 0
    plot.xaxis.axis_label = "ms"
    plot.xaxis.axis_label_text_font_size = "11px"
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.yaxis.formatter = NumeralTickFormatter(format="0%")
    bars = plot.quad(left="left", right="right", top="share", bottom=0, source=source, color=COLOURS["blue"][0])
    bars.tags = ["blue"]
    plot.add_tools(HoverTool(tooltips=[("about", "@ms{0,0.[0]} ms"), ("steps", "@count{0,0}")], renderers=[bars]))
    _quiet(plot)
    return Chart(plot, source)


def step_data(counts: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return the columns of :func:`steps` from pairs of seconds (a bin's middle) and number."""
    total = sum(count for _, count in counts) or 1
    half = 1.2**0.46
    return {
        "left": [1e3 * middle / half for middle, _ in counts],
        "right": [1e3 * middle * half for middle, _ in counts],
        "share": [count / total for _, count in counts],
        "count": [count for _, count in counts],
        "ms": [1e3 * middle for middle, _ in counts],
    }


def spans(columns: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Chart:
    """Return each worker's states over time, as bars.

    Parameters
    ----------
    columns : dict
        ``worker, state, begin, end, kind``; the kind is the name of a colour.
    names : sequence of str
        The workers, from top to bottom.
    """
    source = ColumnDataSource({name: list(values) for name, values in columns.items()})
    plot: Any = figure(name="workers", y_range=FactorRange(factors=list(reversed(names))), **_PLAIN)
    plot.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    for colour, pair in COLOURS.items():
        bars = plot.hbar(
            y="worker",
            left="begin",
            right="end",
            height=0.6,
            source=source,
            view=CDSView(filter=GroupFilter(column_name="kind", group=colour)),
            fill_color=pair[0],
            line_color=None,
        )
        bars.tags = [colour]
        tips = [("worker", "@worker"), ("state", "@state"), ("from", "@begin{00:00:00}"), ("to", "@end{00:00:00}")]
        plot.add_tools(HoverTool(tooltips=tips, renderers=[bars]))
    _quiet(plot)
    return Chart(plot, source)


def adapting(charts: Sequence[Chart]) -> CustomJS:
    """Return what makes charts light or dark, as the browser is set."""
    plots = [chart.plot for chart in charts]
    return CustomJS(args={"figures": plots, "colours": COLOURS, "text": TEXT, "grid": GRID}, code=ADAPT)

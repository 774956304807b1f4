"""Colours and styles: the palette of Okabe and Ito, which colour-blind people can tell apart, in light and dark.

A canvas knows no style sheets, so :data:`ADAPT` sets the charts' colours in the browser, also when its setting changes.

Runs on: scheduler, client.
"""

from __future__ import annotations

__all__ = ["ADAPT", "COLOURS", "CSS", "GRID", "PAGE", "STATES", "TEXT"]

COLOURS = {
    "blue": ("#0072B2", "#56B4E9"),
    "orange": ("#B87A00", "#E69F00"),
    "green": ("#00805C", "#00B888"),
    "red": ("#D55E00", "#F07B2E"),
    "purple": ("#A8548A", "#CC79A7"),
    "grey": ("#6B7280", "#9AA3AF"),
}
"""For light and for dark; on white the lighter ones of the palette are darkened until they can be read."""

TEXT = ("#374151", "#C9D1D9")
GRID = ("#E5E7EB", "#2A313C")

STATES = {
    "ready": "green",
    "loading": "blue",
    "starting": "blue",
    "restarting": "orange",
    "draining": "orange",
    "paused": "orange",
    "closing": "orange",
    "closing_gracefully": "orange",
    "failed": "red",
    "dead": "red",
    "lost": "red",
    "error": "red",
    "interrupted": "orange",
    "running": "blue",
    "done": "green",
}
"""Colours of states of workers and jobs; grey for all others."""


def _variables(at: int) -> str:
    named = "".join(f"--di-{name}:{pair[at]};" for name, pair in COLOURS.items())
    return f"{named}--di-text:{TEXT[at]};--di-grid:{GRID[at]};"


_LIGHT = _variables(0) + "--di-page:#F6F7F9;--di-card:#FFFFFF;--di-strong:#111827;"
_DARK = _variables(1) + "--di-page:#0D1117;--di-card:#161B22;--di-strong:#F0F3F6;"

PAGE = (
    f":root{{{_LIGHT}color-scheme:light dark}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
body{background:var(--di-page);color:var(--di-text);margin:0}
.di{box-sizing:border-box;display:grid;gap:10px;padding:10px;grid-template-columns:repeat(6,minmax(0,1fr));
 font:14px/1.4 system-ui,sans-serif}
.di>div{background:var(--di-card);border:1px solid var(--di-grid);border-radius:8px;padding:8px 10px;min-width:0;
 box-sizing:border-box;display:flex;flex-direction:column;position:relative}
.di h2{font:600 13px system-ui,sans-serif;margin:0 0 4px;color:var(--di-strong)}
.di-6{grid-column:span 6}.di-4{grid-column:span 4}.di-3{grid-column:span 3}.di-2{grid-column:span 2}
.di .di-chart{height:230px;position:relative;flex:none}.di-tall{max-height:266px;overflow:auto}
@media (max-width:1000px){.di-4,.di-3,.di-2{grid-column:span 6}}
@media (max-width:640px){.di{gap:8px;padding:6px}.di .di-chart{height:200px}}
"""
)

CSS = """
:host{width:100%}
.bk-clearfix{display:block;width:100%}
*{box-sizing:border-box}
.di-root{font:14px/1.4 system-ui,sans-serif;color:var(--di-text);width:100%}
.di-tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(150px,30%),1fr));gap:6px 8px;margin-top:8px}
.di-tile small{display:block;font-size:11.5px;color:var(--di-text);white-space:nowrap}
.di-tile b{display:block;font-size:18px;line-height:1.25;color:var(--di-strong);font-variant-numeric:tabular-nums;
 white-space:nowrap}
.di-tile i{font-style:normal;font-size:11.5px;white-space:nowrap}
.di-head{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline}
.di-head h1{font-size:16px;margin:0;color:var(--di-strong);overflow-wrap:anywhere}
.di-head .di-eta{margin-left:auto;font-weight:600;color:var(--di-strong)}
.di-bar{display:flex;height:12px;border-radius:6px;background:var(--di-grid);overflow:hidden;margin-top:6px}
.di-bar>span{height:100%;min-width:0}
.di-chip{display:inline-block;border-radius:9px;padding:0 8px;font-size:12px;line-height:18px;border:1px solid;
 white-space:nowrap}
table{border-collapse:collapse;width:100%;font-size:12.5px}
th{text-align:left;font-weight:600;color:var(--di-text);position:sticky;top:0;background:var(--di-card)}
td,th{padding:2px 8px 2px 0;vertical-align:middle}
td{border-top:1px solid var(--di-grid);font-variant-numeric:tabular-nums}
.di-n{text-align:right;white-space:nowrap}
.di-wide{width:30%;min-width:60px}.di-wide .di-bar{height:9px;margin:0}
.di-bad{color:var(--di-red);font-weight:600}
.di-cut{max-width:320px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
"""

ADAPT = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const set = (model, values) => model.setv(values, {sync: false});
const paint = () => {
  const at = dark.matches ? 1 : 0;
  for (const fig of figures) {
    for (const axis of [...fig.left, ...fig.below, ...fig.right]) {
      set(axis, {major_label_text_color: text[at], axis_label_text_color: text[at],
                 axis_line_color: grid[at], major_tick_line_color: grid[at]});
    }
    for (const part of [...fig.center, ...fig.above]) {
      if ("grid_line_color" in part) set(part, {grid_line_color: grid[at]});
      if ("label_text_color" in part) set(part, {label_text_color: text[at]});
    }
    for (const renderer of fig.renderers) {
      const colour = colours[renderer.tags[0]];
      if (colour === undefined) continue;
      for (const name of ["line_color", "fill_color"]) {
        if (name in renderer.glyph) set(renderer.glyph, {[name]: colour[at]});
      }
    }
  }
};
paint();
dark.addEventListener("change", paint);
"""

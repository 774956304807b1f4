"""The parts of the page that are text: plain HTML, styled by :mod:`daskinfer.dashboard.theme`.

Whatever comes from a model, a row or a user is escaped.

Runs on: scheduler, client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from daskinfer.dashboard.theme import STATES
from daskinfer.wording import bytes_text, duration, one_line, row_name, share, time_left

__all__ = ["chip", "failure_table", "job_table", "progress_bar", "summary", "table", "tiles", "worker_table"]

Figures = Mapping[str, Any]


def chip(state: str) -> str:
    """Return a state as a coloured label; the word is there as well."""
    colour = f"var(--di-{STATES.get(state, 'grey')})"
    return f'<span class="di-chip" style="color:{colour};border-color:{colour}">{escape(state)}</span>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    """Return a table of cells that are HTML; heads that begin with "#" are of numbers."""
    body = "".join("<tr>" + "".join(map(_cell, heads, row)) + "</tr>" for row in rows)
    if not body:
        return f'<div class="di-root">{escape(empty)}</div>'
    top = "".join(f"<th{_number(head)}>{escape(head.lstrip('#'))}</th>" for head in heads)
    return f'<div class="di-root"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(head: str) -> str:
    return ' class="di-n"' if head.startswith("#") else ""


def _cell(head: str, content: str) -> str:
    kind = ' class="di-wide"' if content.startswith('<div class="di-bar"') else _number(head)
    return f"<td{kind}>{content}</td>"


def bar(parts: Iterable[tuple[str, float]], title: str = "") -> str:
    """Return a bar of coloured shares."""
    spans = "".join(
        f'<span style="width:{100 * part:.2f}%;background:var(--di-{colour})"></span>' for colour, part in parts
    )
    return f'<div class="di-bar" title="{escape(title)}">{spans}</div>'


def progress_bar(snapshot: Figures) -> str:
    """Return how much of a job is done: before this run, completed, failed."""
    total = snapshot.get("total") or (snapshot["skipped"] + snapshot["done"]) or 1
    parts = (("grey", "skipped"), ("blue", "completed"), ("red", "failed"))
    return bar(((colour, snapshot[name] / total) for colour, name in parts), "done before, completed, failed")


def eta(snapshot: Figures, state: str) -> str:
    """Return the time left, or how the job ended."""
    if state != "running":
        return f"{state} after {duration(snapshot['elapsed_s'])}"
    left = snapshot.get("eta_s")
    return time_left((left[0], left[1])) if left and snapshot.get("remaining") else "time left not known yet"


def summary(model: str, job: Figures | None, snapshot: Figures | None, state: str) -> str:
    """Return the head of the page: which job, how far, how fast, how full."""
    if job is None or snapshot is None:
        text = "No job yet." if not model else f"{model}: no job yet."
        return f'<div class="di-root"><div class="di-head"><h1>daskinfer</h1>{escape(text)}</div></div>'
    total = snapshot.get("total")
    finished = snapshot["skipped"] + snapshot["done"]
    part = f"{100 * finished / total:.0f} %, " if total else ""
    head = (
        f'<div class="di-head"><h1>{escape(job["name"])}</h1><span>{escape(job["kind"])} on {escape(model)}</span>'
        f'{chip(state)}<span class="di-eta" data-figure="eta">{part}{escape(eta(snapshot, state))}</span></div>'
    )
    return f'<div class="di-root">{head}{progress_bar(snapshot)}<div class="di-tiles">{tiles(snapshot)}</div></div>'


def tiles(snapshot: Figures) -> str:
    """Return the figures of a job."""
    rates = snapshot.get("recent") or snapshot.get("average") or {}
    average = snapshot.get("average") or {}
    total, work, engines = snapshot.get("total"), snapshot["work"], snapshot["engines"]
    finished = snapshot["skipped"] + snapshot["done"]
    states = snapshot["worker_states"]
    shown = [
        ("rows", _count(finished), "" if total is None else f"of {_count(total)}", "finished"),
        ("rows/s", _rate(rates, "rows_per_s"), f"{_rate(average, 'rows_per_s')} on average", "rows_per_s"),
        (
            "tokens/s in",
            _rate(rates, "prompt_tokens_per_s"),
            f"{_rate(average, 'prompt_tokens_per_s')} on average",
            "in",
        ),
        (
            "tokens/s out",
            _rate(rates, "completion_tokens_per_s"),
            f"{_rate(average, 'completion_tokens_per_s')} on average",
            "out",
        ),
        ("failed rows", _count(snapshot["failed"]), f"{_count(snapshot['quarantined'])} quarantined", "failed"),
        ("tried again", _count(snapshot["retried"]), f"{_count(snapshot['sent'])} sent in all", "retried"),
        ("workers ready", _count(states.get("ready", 0)), f"of {sum(states.values())}", "ready"),
        ("running rows", _count(engines["running"]), f"{_count(engines['waiting'])} wait", "running"),
        ("places used", share(snapshot["occupancy"]), "while rows waited", "occupancy"),
        ("padding", share(snapshot["padding"]), "of the tokens", "padding"),
        ("step", *_pair(snapshot["step_s"]), "step"),
        ("queue", *_pair(snapshot["queue_s"]), "queue"),
        ("engine restarts", _count(work["restarts"]), f"{_count(work['steps'])} steps", "restarts"),
        ("engine memory", bytes_text(engines["ram_bytes"]), _gpu(engines), "ram"),
    ]
    if snapshot["kv_use"] is not None:
        shown.append(("KV cache", share(snapshot["kv_use"]), f"{_count(work['prefix_hits'])} prefix hits", "kv"))
    if snapshot["prefill"] is not None:
        shown.append(("prefill", share(snapshot["prefill"]), "of the tokens", "prefill"))
    return "".join(
        f'<div class="di-tile"><small>{escape(label)}</small><b data-figure="{figure}">{escape(value)}</b>'
        f"<i>{escape(note) or '&nbsp;'}</i></div>"
        for label, value, note, figure in shown
    )


def _count(value: Any) -> str:
    return f"{int(value or 0):,}"


def _rate(rates: Figures, name: str) -> str:
    value = rates.get(name)
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _pair(percentiles: Any) -> tuple[str, str]:
    if not percentiles:
        return "-", "median"
    return _short(percentiles[0]), f"{_short(percentiles[1])} at 95 %"


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else duration(seconds)


def _gpu(engines: Figures) -> str:
    return f"GPUs {bytes_text(engines['gpu_memory_bytes'])}" if engines["gpu_memory_bytes"] else "resident"


# ---------------------------------------------------------------- tables


def worker_table(workers: Iterable[Figures]) -> str:
    """Return all workers: state, how full, what they hold."""
    heads = ("worker", "state", "places used", "#rows", "#memory")
    return table(heads, map(_worker, workers), "No worker has been asked to load this model.")


def _worker(worker: Figures) -> list[str]:
    gone = worker["state"] in ("dead", "left", "replaced")
    name = f'<span title="{escape(worker["address"])}">{escape(str(worker["name"]) or worker["address"])}</span>'
    if gone:
        return [name, chip(worker["state"]), f"{escape(duration(worker['for_s']))} ago", "", ""]
    full = min(1.0, worker["occupancy"])
    return [
        name,
        chip(worker["state"]),
        bar([("green", full)], f"{100 * full:.0f} %"),
        f"{_count(worker.get('running'))} + {_count(worker.get('waiting'))}",
        bytes_text(worker.get("ram_bytes")),
    ]


def failure_table(snapshot: Figures | None) -> str:
    """Return the kinds of failures with their numbers, then the last failed rows."""
    if snapshot is None or not snapshot["failed"]:
        return table((), (), "No row has failed.")
    counts = ", ".join(f"{each['rows']:,} {escape(each['kind'])}" for each in snapshot["failures"])
    rows = [
        [
            row_name(each["id"]),
            f'<span class="di-bad">{escape(each["kind"])}</span>',
            escape(each["worker"].removeprefix("tcp://")) or "-",
            f'<div class="di-cut" title="{escape(each["message"])}">{escape(one_line(each["message"]))}</div>',
        ]
        for each in reversed(snapshot["errors"])
    ]
    return f'<div class="di-root">{counts}</div>' + table(("row", "kind", "worker", ""), rows, "")


def job_table(jobs: Iterable[tuple[Figures, Figures, str, str]]) -> str:
    """Return all jobs, of all models: (job, snapshot, state, model)."""
    heads = ("job", "state", "progress", "#rows", "#rows/s", "time")
    return table(heads, (_job(*each) for each in jobs), "No job yet.")


def _job(job: Figures, snapshot: Figures, state: str, model: str) -> list[str]:
    rates = snapshot.get("recent") or snapshot.get("average") or {}
    return [
        f"{escape(job['name'])} on {escape(model)}",
        chip(state),
        progress_bar(snapshot),
        _count(snapshot["skipped"] + snapshot["done"]),
        _rate(rates, "rows_per_s"),
        escape(eta(snapshot, state)),
    ]

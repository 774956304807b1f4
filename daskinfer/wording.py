"""How figures are said to people: durations, intervals, and one line about a run.

Runs on: anywhere.
"""

from __future__ import annotations

from daskinfer.snapshot import Snapshot

__all__ = [
    "bytes_text",
    "details",
    "duration",
    "one_line",
    "row_name",
    "rows_text",
    "share",
    "status",
    "summary",
    "time_left",
]

MAX_TEXT = 400
FILE_BITS = 40


def duration(seconds: float) -> str:
    """Return a duration for people: "4.2 s", "38 s", "4 min 10 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, smaller, size, part in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def time_left(eta_s: tuple[float, float]) -> str:
    """Return an interval for people: "40-60 s left", "3-5 min left"."""
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    unit, size = next((unit, size) for unit, size in units if eta_s[1] >= 2 * size or size == 1)
    first, last = (f"{seconds / size:.0f}" for seconds in eta_s)
    return f"{first}-{last} {unit} left" if first != last else f"about {last} {unit} left"


def rows_text(snapshot: Snapshot) -> str:
    """Return "1,200/10,000 rows"; rows of earlier runs count as done."""
    finished = snapshot.skipped + snapshot.done
    return f"{finished:,} rows" if snapshot.total is None else f"{finished:,}/{snapshot.total:,} rows"


def status(snapshot: Snapshot) -> str:
    """Return one line about a run that goes on; plain ASCII."""
    failed = f"{snapshot.failed:,} failed"
    return ", ".join([rows_text(snapshot), failed, *details(snapshot)])


def details(snapshot: Snapshot) -> list[str]:
    """Return the other figures, those that a person looks for first in front."""
    rates = snapshot.recent if snapshot.recent and snapshot.recent.rows_per_s else snapshot.average
    parts = []
    if snapshot.state not in ("waiting", "running"):
        parts.append(f"{snapshot.state} in {duration(snapshot.elapsed_s)}")
    elif snapshot.eta_s and snapshot.remaining:
        parts.append(time_left(snapshot.eta_s))
    if rates:
        parts.append(f"{rates.rows_per_s:,.1f} rows/s")
    if rates and (rates.prompt_tokens_per_s or rates.completion_tokens_per_s):
        parts.append(f"{rates.prompt_tokens_per_s:,.0f} tokens/s in, {rates.completion_tokens_per_s:,.0f} out")
    parts.append(f"{snapshot.worker_states.get('ready', 0)}/{len(snapshot.workers)} workers ready")
    return parts


def summary(snapshot: Snapshot) -> str:
    """Return one line about a run that has ended; plain ASCII, except for the kinds of failures."""
    kinds = ", ".join(f"{failure.rows:,} {failure.kind}" for failure in snapshot.failures[:5])
    failed = f"{snapshot.failed:,} failed" + (f" ({kinds})" if kinds else "")
    parts = [f"{snapshot.completed:,} rows completed", failed]
    if snapshot.skipped:
        parts.append(f"{snapshot.skipped:,} done before")
    return f"{snapshot.state} in {duration(snapshot.elapsed_s)}: {', '.join(parts)}"


def one_line(message: str) -> str:
    """Return a message as one line of bounded length."""
    text = " ".join(message.split())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."


def share(value: float | None) -> str:
    """Return a share as a percentage, "-" where it is not known."""
    return "-" if value is None else f"{100 * value:.0f} %"


def bytes_text(size: float | None) -> str:
    """Return a number of bytes for people: "312 MB", "4.2 GB"; "-" where it is not known."""
    if not size:
        return "-"
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e6:.0f} MB"


def row_name(row: int) -> str:
    """Return what people call a row id: "row 17", or "row 17 of file 2"; both count from 0, as the ids do."""
    file, position = row >> FILE_BITS, row & ((1 << FILE_BITS) - 1)
    return f"row {position}" if not file else f"row {position} of file {file}"

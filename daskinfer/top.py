"""``daskinfer top``: what the scheduler's page shows, in a terminal.

It reads ``daskinfer.json`` from the scheduler's web server, and is no client of the cluster.

Runs on: client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from daskinfer.errors import ClusterError, ConfigError
from daskinfer.wording import bytes_text, duration, share, time_left

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["address_of", "fetch", "picture", "watch"]

TIMEOUT_S = 5.0
STATES = {"ready": "green", "running": "cyan", "done": "green", "loading": "blue", "starting": "blue"}
BAD = ("dead", "lost", "failed", "error")


def address_of(given: str) -> str:
    """Return the URL of ``daskinfer.json`` for a dashboard's address or any of its pages.

    Raises
    ------
    ConfigError
        A scheduler's own address was given.

    Examples
    --------
    >>> address_of("localhost:8787")
    'http://localhost:8787/daskinfer.json'
    >>> address_of("https://hub.example/user/me/proxy/8787/status")
    'https://hub.example/user/me/proxy/8787/daskinfer.json'
    """
    if given.partition("://")[0] in ("tcp", "tls", "ws", "wss", "ucx", "inproc"):
        raise ConfigError(
            f"{given}: is a scheduler's address; give that of its dashboard, such as http://localhost:8787"
        )
    parts = urlsplit(given if "://" in given else f"http://{given}")
    head, _, last = parts.path.rpartition("/")
    folder = head if last in ("", "status", "daskinfer", "daskinfer.json") else parts.path
    return f"{parts.scheme}://{parts.netloc}{folder}/daskinfer.json"


def fetch(url: str) -> dict[str, Any]:
    """Return what the scheduler shows.

    Raises
    ------
    ClusterError
        Nothing answers there, or it is no scheduler that daskinfer has been on.
    """
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the user's own address
            return dict(json.load(answer))
    except URLError as error:
        reason = getattr(error, "code", None) or error.reason
        hint = "no driver has been on this scheduler yet" if reason == 404 else "is the dashboard's address right?"
        raise ClusterError(f"{url}: {reason}; {hint}") from None
    except (OSError, ValueError) as error:
        raise ClusterError(f"{url}: {error}; is the dashboard's address right?") from None


def watch(url: str, console: Console, *, once: bool = False, every_s: float = 1.0) -> None:
    """Show the scheduler's figures until interrupted.

    Parameters
    ----------
    url : str
        Of ``daskinfer.json``.
    console : rich.console.Console
    once : bool
        Print them once.
    every_s : float
        Pause between two looks.

    Raises
    ------
    ClusterError
        See :func:`fetch`; while watching, an answer that is missing is said and waited for.
    """
    shown = picture(fetch(url))
    if once:
        console.print(shown)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(shown, console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                shown = picture(fetch(url))
            except ClusterError as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)


def picture(told: Mapping[str, Any]) -> RenderableType:
    """Return all jobs and workers as tables."""
    from rich.console import Group
    from rich.text import Text

    models = told["models"]
    if not models:
        return Text("no model yet")
    return Group(*(part for model in models for part in (_jobs(model), _workers(model), Text(""))))


def _jobs(model: Mapping[str, Any]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    loaded = "" if model["loaded"] else ", unloaded"
    title = Text(f"{model.get('model', model['key'])} ({model.get('engine', '?')}{loaded})")  # as text: it is no markup
    table = Table(title=title, title_justify="left")
    for head in ("job", "state", "progress"):
        table.add_column(head)
    for head in ("rows", "rows/s", "tokens/s in", "out", "failed", "again", "full", "padding", "left"):
        table.add_column(head, justify="right")
    for job in reversed(model["jobs"]):
        now = job["snapshot"]
        finished, rates = now["skipped"] + now["done"], now["recent"] or now["average"] or {}
        total = f"/{now['total']:,}" if now["total"] is not None else ""
        table.add_row(
            Text(job["name"]),
            Text(job["state"], style=_style(job["state"])),
            ProgressBar(now["total"] or max(1, finished), finished, width=16),
            f"{finished:,}{total}",
            *(_number(rates.get(name)) for name in ("rows_per_s", "prompt_tokens_per_s", "completion_tokens_per_s")),
            Text(f"{now['failed']:,}", style="bold red" if now["failed"] else ""),
            f"{now['retried']:,}",
            share(now["occupancy"]),
            share(now["padding"]),
            _left(job["state"], now),
        )
    return table


def _left(state: str, snapshot: Mapping[str, Any]) -> str:
    eta = snapshot["eta_s"]
    if state == "running" and eta and snapshot["remaining"]:
        return time_left((eta[0], eta[1])).removesuffix(" left")
    return duration(snapshot["elapsed_s"]) if state != "running" else "-"


def _workers(model: Mapping[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    for head in ("worker", "state"):
        table.add_column(head)
    for head in ("full", "running", "waiting", "restarts", "memory", "for"):
        table.add_column(head, justify="right")
    for worker in model["workers"]:
        table.add_row(
            Text(f"{worker['name']} {worker['address'].removeprefix('tcp://')}"),
            Text(worker["state"], style=_style(worker["state"])),
            share(worker["occupancy"]),
            *(f"{worker.get(name) or 0:,}" for name in ("running", "waiting", "restarts")),
            bytes_text(worker.get("ram_bytes")),
            duration(worker["for_s"]),
        )
    return table


def _style(state: str) -> str:
    return "bold red" if state in BAD else STATES.get(state, "yellow")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"

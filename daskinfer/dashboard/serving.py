"""Puts the page and ``daskinfer.json`` on the web server of a scheduler that runs.

Runs on: scheduler.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.http.utils import RequestHandler

from daskinfer.dashboard.board import Board

__all__ = ["NO_BOKEH", "serve", "show"]

logger = logging.getLogger("daskinfer.dashboard")

NO_BOKEH = "the scheduler has no Bokeh, so there is no dashboard page /daskinfer; daskinfer.json is there"
PAGE = "daskinfer"


class Json(RequestHandler):
    """``daskinfer.json``: what the page shows, as data."""

    def get(self) -> None:
        """Answer."""
        board = getattr(self.server.plugins.get("daskinfer"), "board", None) or Board()
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(board.to_dict(time.time())))


def show(
    board: Board,
    key: str,
    told: Mapping[str, Any] | None,
    workers: Iterable[Mapping[str, Any]] | None = None,
    scheduler: Any = None,
) -> None:
    """Put what a driver told of its jobs, and the workers as they are, on the board."""
    now = time.time()
    if told is not None:
        board.told(key, told["about"], told["jobs"], now, told.get("running", ()))
    if workers is not None:
        board.see(key, workers, now, lambda address: _meant(scheduler, address))


def _meant(scheduler: Any, address: str) -> bool:
    """Whether the scheduler let a worker go on purpose."""
    for _, event in reversed(scheduler.get_events(address) or ()):
        if isinstance(event, Mapping) and event.get("action") == "remove-worker":
            return bool(event.get("expected"))
    return False


def serve(scheduler: Any) -> str:
    """Add what is not there yet; return what a person should know, or "".

    Parameters
    ----------
    scheduler : Scheduler
        One without a web server is left as it is.
    """
    application = getattr(scheduler, "http_application", None)
    if application is None:
        return ""
    prefix = _prefix(application)
    application.add_handlers(".*", [(rf"{prefix}/daskinfer\.json", Json, {"dask_server": scheduler})])
    try:
        import bokeh.server  # noqa: F401
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        logger.info(NO_BOKEH)
        return NO_BOKEH
    if not _paths(application):
        return ""  # the cluster was made without a dashboard
    variables = template_variables(scheduler)
    if PAGE not in variables["pages"]:
        variables["pages"].append(PAGE)
    if not any(f"/{PAGE}" in paths for paths in _paths(application)):
        _add(application, scheduler, prefix, variables)
    return ""


def _paths(application: Any) -> list[set[str]]:
    return [set(app.app_paths) for app in application.applications if hasattr(app, "app_paths")]


def _prefix(application: Any) -> str:
    """Return the path below which Dask's dashboard is, without a slash at its end."""
    for app in application.applications:
        if hasattr(app, "prefix"):
            return str(app.prefix).rstrip("/")
    return ""


def _add(application: Any, scheduler: Any, prefix: str, variables: dict[str, Any]) -> None:
    from distributed.dashboard.core import BokehApplication
    from tornado.ioloop import IOLoop

    from daskinfer.dashboard.page import DOCUMENTS

    app = BokehApplication(DOCUMENTS, scheduler, prefix=prefix, template_variables=variables)
    application.add_application(app)
    app.initialize(IOLoop.current())
    app.start()

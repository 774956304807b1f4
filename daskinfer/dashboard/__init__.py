"""The page ``/daskinfer`` of a scheduler's dashboard, the same as JSON, and figures for Prometheus.

:class:`~daskinfer.dashboard.board.Board` is what is shown; it is fed by the scheduler's plugin. ``charts``, ``html`` and
``theme`` make pictures of it, ``page`` puts them on Bokeh documents, ``serving`` puts those on a scheduler's web server, and
``preload`` does so before a scheduler starts. Only ``board`` and ``serving`` are imported where Bokeh may be missing.

Runs on: scheduler; ``charts``, ``html`` and ``theme`` also on the client, for the report of a run.
"""

from daskinfer.dashboard.board import Board

__all__ = ["Board"]

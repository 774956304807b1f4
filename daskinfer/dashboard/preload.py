"""Adds the pages to those that a scheduler of this process will serve.

To be imported before the scheduler is made, since Dask lists the plots that other tools (dask-labextension) find only then:
the clusters that daskinfer makes do so; for others::

    dask scheduler --preload daskinfer.dashboard.preload

A scheduler that runs already gets the pages with the first driver, but not into that list.

Runs on: scheduler.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> bool:
    """Add the pages; return False without Bokeh. Does nothing when it has been done."""
    try:
        from distributed.dashboard.scheduler import applications

        from daskinfer.dashboard.page import DOCUMENTS
    except ImportError:
        return False
    for path, document in DOCUMENTS.items():
        applications.setdefault(path, document)
    return True


register()

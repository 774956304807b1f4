"""Where files of our own are kept.

Runs on: anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the folder for converted models and for doubles of remote outputs.

    ``$DASKINFER_CACHE``, or ``~/.cache/daskinfer``.
    """
    given = os.environ.get("DASKINFER_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "daskinfer"

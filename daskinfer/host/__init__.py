"""Runs an engine's loop in a child process or a thread: batches in, reports out.

Runs on: worker.
"""

from __future__ import annotations

from daskinfer.host.host import Host, HostSettings

__all__ = ["Host", "HostSettings"]

"""Exactly-once output: chunks, parts, the manifest, the lock. See :class:`Checkpoint`.

Runs on: client.
"""

from __future__ import annotations

from daskinfer.checkpoint.committer import Checkpoint
from daskinfer.checkpoint.policy import CheckpointPolicy
from daskinfer.checkpoint.published import Counts

__all__ = ["Checkpoint", "CheckpointPolicy", "Counts"]

"""Exactly-once output: chunks, parts, the manifest, the lock. See :class:`Checkpoint`.

Runs on: client.
"""

from __future__ import annotations

from daskinfer.checkpoint.committer import Checkpoint
from daskinfer.checkpoint.policy import CheckpointPolicy
from daskinfer.checkpoint.published import Counts
from daskinfer.checkpoint.remote import Place, output_at

__all__ = ["Checkpoint", "CheckpointPolicy", "Counts", "Place", "output_at"]

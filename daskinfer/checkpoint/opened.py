"""An output that is locked and understood, and how to clear it.

Runs on: client.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from daskinfer.checkpoint.layout import EMPTY_DATA, Layout, data_span
from daskinfer.checkpoint.lock import Lock
from daskinfer.checkpoint.manifest import Manifest, versions
from daskinfer.checkpoint.parts import Parts
from daskinfer.checkpoint.policy import CheckpointPolicy
from daskinfer.checkpoint.published import Published
from daskinfer.storage.base import Source
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.outputs import OutputColumns

logger = logging.getLogger(__name__)

__all__ = ["Opened", "sweep", "wipe", "wipe_chunks"]


@dataclass
class Opened:
    """An output that is locked and understood.

    Attributes
    ----------
    kept_schema, added, stored : pyarrow.Schema
        Of the kept columns as the source gives them, of the added columns, and of all as Parquet stores them.
    done : Intervals
        What the source skips.
    rows_done : int
    remaining : int or None
    ahead : list of (int, int, bool)
        Runs of rows that are known, in order: published, or else in parts.
    retrying : bool
        Rows of published chunks are tried again.
    only_failed : bool
        Nothing but failed rows is run.
    is_settled : bool
        A finished single file with nothing left to do; its chunks are gone.
    """

    layout: Layout
    ops: FileOps
    policy: CheckpointPolicy
    lock: Lock
    manifest: Manifest
    source: Source
    output: OutputColumns
    kept_schema: pa.Schema
    added: pa.Schema
    stored: pa.Schema
    published: Published
    parts: Parts
    retries: Parts
    now: float
    done: Intervals
    rows_done: int = 0
    remaining: int | None = None
    ahead: Sequence[tuple[int, int, bool]] = ()
    retrying: bool = False
    only_failed: bool = False
    is_settled: bool = False

    def save(self) -> None:
        """Write the manifest."""
        self.ops.make_folder(self.layout.parts)
        self.manifest.versions = versions()
        self.manifest.save(self.layout.manifest, self.layout.temporary("manifest"), self.ops)

    def clean(self, *, chunks: bool) -> None:
        """Remove what a complete output does not need: parts, and for a single file its chunks."""
        try:
            if chunks:
                wipe_chunks(self.layout, self.ops)
            sweep(self.layout, self.ops)
            if self.layout.parts.exists():
                shutil.rmtree(self.layout.parts)
        except OSError as error:  # it does no harm, and the next run tries again
            logger.warning("%s: work files could not be deleted (%s)", self.layout.folder, error)

    def close(self) -> None:
        """Give the lock back, and leave no empty folders."""
        with suppress(OSError):
            self.layout.parts.rmdir()
        self.lock.release()


def sweep(layout: Layout, ops: FileOps) -> None:
    """Delete temporary files, which a crash left behind."""
    for path in (*layout.folder.glob("*.tmp"), *layout.parts.rglob("*.tmp")):
        ops.remove(path)


def wipe(layout: Layout, ops: FileOps) -> None:
    """Delete what a run of ours left; the single file itself stays until it is replaced."""
    wipe_chunks(layout, ops)
    for path in (*layout.parts.rglob("*.part"), layout.manifest):
        ops.remove(path)


def wipe_chunks(layout: Layout, ops: FileOps) -> None:
    """Delete the chunks alone."""
    for path in sorted(layout.folder.iterdir()):
        if path.name == EMPTY_DATA or data_span(path.name):
            ops.remove(path)

"""Writing: parts, chunks, new results of published rows, the single file.

Runs on: client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from daskinfer.checkpoint.ledger import Chunk, Fresh, Ledger
from daskinfer.checkpoint.loaded import Loaded
from daskinfer.checkpoint.opened import Opened
from daskinfer.checkpoint.published import Counts
from daskinfer.errors import OutputError
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.singlefile import write_single

__all__ = ["Writer"]


class Writer:
    """Puts chunks on disk. An operation that raises has changed nothing in memory and can be tried again."""

    def __init__(self, opened: Opened, ledger: Ledger) -> None:
        self._opened, self._ledger = opened, ledger
        self._layout, self._ops = opened.layout, opened.ops
        self._published, self._parts, self._retries = opened.published, opened.parts, opened.retries

    def flush(self, chunk: Chunk) -> int:
        """Put what is pending on disk as a part; return how many rows that were."""
        if not chunk.pending:
            return 0
        fresh = self._ledger.gather(chunk)
        parts = self._parts if chunk.target is None else self._retries
        parts.write(chunk.name, fresh.ids, self._table(chunk, fresh))
        return self._ledger.settle(chunk)

    def publish(self, chunk: Chunk) -> int:
        """Publish a chunk whose rows all have results; return how many of them were not on disk before."""
        if chunk.target is not None:
            return self.renew(chunk)
        first, last = chunk.rows.first, chunk.rows.last
        if first in self._published.rows:  # a call that was cut short by an interrupt had come that far
            return self._ledger.settle(chunk)
        loaded = self._parts.load(first, last, self._fresh(chunk))
        self._write(loaded, 0, len(loaded.ids), chunk.rows)
        self._parts.settle(loaded, first, last)
        return self._ledger.settle(chunk)

    def publish_runs(self, chunk: Chunk) -> None:
        """Publish the longest runs of a chunk's rows between those without results; all results are in parts."""
        unresolved = self._ledger.unresolved(chunk)
        runs = [Intervals()]
        for start, stop, is_done in sorted(
            [(*pair, True) for pair in chunk.rows.difference(unresolved)] + [(*pair, False) for pair in unresolved]
        ):
            if is_done:
                runs[-1].add(start, stop)
            elif runs[-1]:
                runs.append(Intervals())
        longest = sorted(filter(None, runs), key=lambda run: -run.count)[: self._opened.policy.interrupt_files]
        if not longest:
            return
        loaded = self._parts.load(chunk.rows.first, chunk.rows.last)
        for run in longest:
            low, high = np.searchsorted(loaded.ids, [run.first, run.last + 1])
            self._write(loaded, low, high, run)
            self._parts.settle(loaded, run.first, run.last)

    def renew(self, chunk: Chunk) -> int:
        """Put the new results of a retried chunk into its published file; return as :meth:`publish` does."""
        assert chunk.target is not None
        first, last = chunk.target.first, chunk.target.last
        loaded = self._retries.load(first, last, self._fresh(chunk))
        if len(loaded.ids):
            self._published.renew(chunk.target, loaded.ids, loaded.table())
        self._retries.settle(loaded, first, last)
        return self._ledger.settle(chunk)

    def complete(self) -> Counts:
        """Make what is published a whole: a file without rows if there are none, the single file if it is to be one."""
        if self._published.files:
            self._published.remove_nothing()
        else:
            self._published.publish_nothing(self._opened.stored)
        if self._layout.is_file:
            self._ops.make_folder(self._layout.parts)
            with self._ops.writing(self._layout.target, self._layout.temporary(self._layout.target.name)) as file:
                write_single(self._layout.kind, file, self._published.tables(), self._opened.stored)
        return self._published.counts()

    # ---------------------------------------------------------------- how

    def _write(self, loaded: Loaded, start: int, stop: int, rows: Intervals) -> None:
        found = stop - start
        if found != rows.count:
            raise OutputError(
                f"{self._layout.target}: rows {rows.first} to {rows.last} cannot be published, for "
                f"{abs(rows.count - found)} of their {rows.count} results are not on disk any more; was something "
                f"removed from {self._layout.parts}? Run again with resume=True (--resume)"
            )
        self._published.publish(self._opened.stored, loaded.tables(start, stop), rows)

    def _fresh(self, chunk: Chunk) -> tuple[Any, pa.Table] | None:
        """Return what is pending: ids and rows; None when there is nothing."""
        fresh = self._ledger.gather(chunk)
        return (fresh.ids, self._table(chunk, fresh)) if fresh.results else None

    def _table(self, chunk: Chunk, fresh: Fresh) -> pa.Table:
        """Return pending rows as they are stored: kept columns, unless they are in the target, and added ones."""
        added = self._opened.output.arrays(fresh.results)
        if chunk.target is not None:
            return pa.Table.from_arrays(added, schema=self._opened.added)
        assert fresh.kept is not None
        return pa.Table.from_arrays([*fresh.kept.columns, *added], names=self._opened.stored.names).cast(
            self._opened.stored
        )

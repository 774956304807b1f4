"""The checkpoint of a run: the only thing that writes its output.

Theory of operation. Rows are registered in input order (``begin``) and get their results in any order (``add``). A
*chunk* is a run of consecutive rows; the one being filled takes the rows that are read, and is closed by size or age.
Results go to disk in *parts* every few seconds. When all rows of a closed chunk have results, the chunk is *published*:
its parts are read, put in order, written as one file under its final name, and only then deleted. So at every moment a
row is published at most once, and a row that is in a part or published is never run again.

After a crash, parts are left over. They are adopted: a new chunk grows over them as the reading passes their ids. A chunk
never spans a published one, so the order of file names stays the order of rows.

Runs on: client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from daskinfer.checkpoint.chunking import Chunking
from daskinfer.checkpoint.ledger import Chunk, Ledger
from daskinfer.checkpoint.opened import Opened
from daskinfer.checkpoint.opening import Opening
from daskinfer.checkpoint.policy import CheckpointPolicy
from daskinfer.checkpoint.published import Counts
from daskinfer.checkpoint.writer import Writer
from daskinfer.errors import OutputError
from daskinfer.records import Result
from daskinfer.storage.base import Block, Source
from daskinfer.storage.fileops import FileOps

__all__ = ["Checkpoint"]

logger = logging.getLogger(__name__)
_SAVE_S = 30.0  # the manifest is written anew at most so often while the run goes on


class Checkpoint:
    """Exactly-once output of one run. Made by :meth:`open`; a context manager that always gives the lock back.

    Attributes
    ----------
    done : Intervals
        Rows that must not be run: give it to ``Source.blocks(skip=…)``. Fixed when the checkpoint is opened.
    rows_done : int
        Rows in the output when it was opened, without those that are tried again.
    remaining : int or None
        Rows left to run then, where that is known; 0: nothing to do.
    committed : int
        Rows this run made safe on disk.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened, self._policy = opened, opened.policy
        self.done, self.rows_done, self.remaining = opened.done, opened.rows_done, opened.remaining
        self.committed = 0
        self._ledger = Ledger()
        self._chunking = Chunking(opened, self._ledger)
        self._writer = Writer(opened, self._ledger)
        self._now = self._saved = opened.now
        self._is_open = True

    @classmethod
    def open(  # noqa: PLR0913 - the one place where a run says all about its output
        cls,
        sink_path: str,
        *,
        source: Source,
        fingerprint: Mapping[str, Any],
        now: float,
        keep: Sequence[str] | None = None,
        output_column: str = "output",
        output_type: str = "string",
        resume: bool = False,
        overwrite: bool = False,
        force: bool = False,
        retry_failed: bool = False,
        policy: CheckpointPolicy | None = None,
        ops: FileOps | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Check that the run may write there, take the lock, and find out what is done.

        ``sink_path`` is a folder, or a ``.jsonl``, ``.parquet``, ``.csv`` or ``.tsv`` file. The keywords are described at
        :class:`~daskinfer.checkpoint.opening.Opening`; so are the errors, all of which leave the output as it was.
        """
        opening = Opening(
            source=source,
            fingerprint=fingerprint,
            now=now,
            keep=keep,
            output_column=output_column,
            output_type=output_type,
            resume=resume,
            overwrite=overwrite,
            force=force,
            retry_failed=retry_failed,
            policy=policy or CheckpointPolicy(),
            ops=ops or FileOps(),
            record=record or {},
        )
        return cls(opening.open(sink_path))

    # ---------------------------------------------------------------- the run

    @property
    def schema(self) -> pa.Schema:
        """The columns of the output: kept ones, then added ones."""
        return self._opened.manifest.schema

    @property
    def record(self) -> dict[str, Any]:
        """What the run that began this output noted."""
        return self._opened.manifest.record

    @property
    def keep(self) -> tuple[str, ...]:
        """The kept columns, to be asked of ``Source.blocks``."""
        return tuple(self._opened.manifest.keep)

    def begin(self, block: Block) -> None:
        """Register rows that were read; blocks come in the order of their ids."""
        if not len(block):
            return
        if self._opened.is_settled:
            raise ValueError(
                f"{self._opened.layout.target} is complete; rows come from Source.blocks(skip=checkpoint.done)"
            )
        if not block.kept.schema.equals(self._opened.kept_schema):
            raise ValueError(f"the block keeps {block.kept.schema.names}, not the columns of this output: {self.keep}")
        self._chunking.register(block, self._now)

    def add(self, results: Sequence[Result], now: float) -> int:
        """Take results, in any order; a second result for a row is ignored.

        Returns
        -------
        int
            Rows that became safe on disk by this call.

        Raises
        ------
        OSError
            The disk is full or gone. Nothing that was safe is lost; what was not stays pending.
        OutputLockedError
            Another driver took the output over, since this one was not heard of for too long.
        """
        self._ledger.resolve(results, now)
        return self.tick(now)

    def tick(self, now: float) -> int:
        """Do what is due: heartbeat, parts, chunks. To be called at least every few seconds; returns as ``add`` does."""
        self._now = now
        self._opened.lock.beat(now)
        before = self.committed
        self._chunking.close(opened_before=now - self._policy.chunk_s)
        for chunk in list(self._chunking.chunks):
            if chunk.closed and not chunk.left and not self._chunking.is_parked(chunk):
                self._publish(chunk)
            elif self._is_due(chunk):
                self._flush(chunk)
        return self.committed - before

    # ---------------------------------------------------------------- its end

    def finish(self, now: float, *, complete: bool = True) -> Counts:
        """Publish everything, and assemble the file if the output is one.

        Parameters
        ----------
        now : float
        complete : bool
            The input was read to its end; False when a limit ended the run.

        Returns
        -------
        Counts
            Of the whole output.

        Raises
        ------
        ValueError
            A registered row has no result.
        OSError
            As in :meth:`add`; a resumed run goes on from there.
        """
        self._now = now
        self._opened.lock.beat(now)
        opened, manifest, chunking = self._opened, self._opened.manifest, self._chunking
        if opened.is_settled:
            return Counts(manifest.rows, manifest.failed)
        left = sum(chunk.left for chunk in chunking.chunks)
        if left:
            raise ValueError(f"{left} registered rows have no result; interrupt() is for runs that stop early")
        is_all = complete and not opened.only_failed
        if is_all:
            chunking.pass_all(now)
        for chunk in list(chunking.chunks):
            if chunking.is_parked(chunk):
                self._flush(chunk)
            else:
                self._publish(chunk)
        counts = self._writer.complete()
        manifest.complete = manifest.complete or is_all
        is_in_file = manifest.complete and opened.layout.is_file
        self._save(counts, in_file=is_in_file)
        opened.is_settled = is_in_file
        if manifest.complete:
            opened.clean(chunks=is_in_file)
        return counts

    def interrupt(self, now: float) -> int:
        """Make everything safe that has a result, and publish the runs of rows that have all of theirs.

        Returns
        -------
        int
            Rows that are safe on disk, those of earlier runs included.
        """
        self._now = now
        self._opened.lock.beat(now)
        for chunk in list(self._chunking.chunks):
            if chunk.left == 0 and not self._chunking.is_parked(chunk):
                self._publish(chunk)
                continue
            self._flush(chunk)
            if chunk.target is not None:
                self._writer.renew(chunk)
            elif not self._opened.only_failed:
                self._writer.publish_runs(chunk)
        if not self._opened.is_settled:
            self._save(self._opened.published.counts())
        return self.rows_done + self.committed

    def close(self) -> None:
        """Give the lock back; what is pending goes to disk first, if it can. Does nothing the second time."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            for chunk in self._chunking.chunks if self._opened.lock.is_ours() else ():
                self._flush(chunk)
        except (OSError, OutputError) as error:
            logger.warning(
                "%s: results that were not on disk yet are lost and will be redone (%s)",
                self._opened.layout.target,
                error,
            )
        finally:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- how

    def _publish(self, chunk: Chunk) -> None:
        self.committed += self._writer.publish(chunk)
        self._chunking.remove(chunk)
        if self._now - self._saved >= _SAVE_S:
            self._save(Counts(self._opened.published.rows.count, self._opened.manifest.failed))

    def _flush(self, chunk: Chunk) -> None:
        self.committed += self._writer.flush(chunk)

    def _is_due(self, chunk: Chunk) -> bool:
        policy, age = self._policy, self._now - chunk.pending_since
        # a young run writes more often, so that a crash never costs more than about a tenth of the time it took
        flush_s = min(policy.flush_s, max(0.2, 0.1 * (self._now - self._opened.now)))
        return bool(chunk.pending) and (
            not 0 <= age < flush_s
            or len(chunk.pending) >= policy.flush_rows
            or chunk.pending_size >= policy.flush_bytes
        )

    def _save(self, counts: Counts, *, in_file: bool = False) -> None:
        opened, manifest = self._opened, self._opened.manifest
        manifest.rows, manifest.failed, manifest.updated = counts.rows, counts.failed, self._now
        manifest.files = list(opened.source.files)
        manifest.done = opened.published.rows if in_file else None
        manifest.bytes = opened.layout.target.stat().st_size if in_file else None
        opened.save()
        self._saved = self._now

"""Which chunk a row belongs to.

Rows come in input order. A chunk takes consecutive rows until it is full or old; it never spans a published chunk. Rows
that are in parts of an earlier run are adopted as the reading passes them. Rows of published chunks that are tried again
form chunks of their own.

Runs on: client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from daskinfer.checkpoint.ledger import Chunk, Ledger
from daskinfer.checkpoint.opened import Opened
from daskinfer.checkpoint.published import DataFile
from daskinfer.storage.base import Block

__all__ = ["Chunking"]


class Chunking:
    """The chunks that are not published.

    Attributes
    ----------
    chunks : list of Chunk
        In the order of their rows.
    """

    def __init__(self, opened: Opened, ledger: Ledger) -> None:
        self._published, self._retrying = opened.published, opened.retrying
        self._only_failed, self._policy = opened.only_failed, opened.policy
        self._ledger = ledger
        self._ahead = iter(opened.ahead)
        self._next = next(self._ahead, None)
        self._filling: Chunk | None = None
        self.chunks: list[Chunk] = []

    def register(self, block: Block, now: float) -> None:
        """Take rows that were read; blocks come in the order of their ids."""
        start, chunk = 0, None
        for low, file in self._pieces(block.ids):
            if file is None:
                self._pass(block.ids[low], now)
            following = self._fill(block.ids[low], file, now)
            if following is not chunk:
                if chunk is not None:
                    self._hold(block, start, low, chunk)
                start, chunk = low, following
        if chunk is not None:
            self._hold(block, start, len(block), chunk)

    def pass_all(self, now: float) -> None:
        """Take note that the input was read to its end."""
        self._pass(math.inf, now)

    def close(self, opened_before: float = math.inf) -> None:
        """Close the chunk that is being filled, if it was opened before that time."""
        if self._filling is not None and self._filling.opened <= opened_before:
            self._filling.closed = True
            self._filling = None

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk that is published."""
        self.chunks.remove(chunk)
        if self._filling is chunk:
            self._filling = None

    def is_parked(self, chunk: Chunk) -> bool:
        """Tell whether a chunk cannot be published: only failed rows are read, so those between are unknown."""
        return self._only_failed and chunk.target is None

    # ---------------------------------------------------------------- how

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[int, DataFile | None]]:
        """Yield where in a block runs of adjacent rows begin, cut at published chunks, and the chunk they retry."""
        at = 0
        while at < len(ids):
            file = self._published.file_of(ids[at])
            yield at, file
            if isinstance(ids, range) and file is None and not self._retrying:
                return
            following = at + 1
            while (
                following < len(ids)
                and ids[following] == ids[following - 1] + 1
                and (not self._retrying or self._published.file_of(ids[following]) is file)
            ):
                following += 1
            at = following

    def _fill(self, row: int, file: DataFile | None, now: float) -> Chunk:
        """Return the chunk that is being filled, or a new one if that is another's."""
        if self._filling is not None and self._filling.target is not file:
            self.close()
        if self._filling is None:
            name = f"{row:019d}" if file is None else f"{file.first:019d}-{file.last:019d}"
            self._filling = Chunk(name, now, file)
            self.chunks.append(self._filling)
        return self._filling

    def _pass(self, row: float, now: float) -> None:
        """Go over what is known before a row: leave published chunks out, adopt rows that are in parts."""
        while self._next is not None and self._next[0] < row:
            start, stop, is_published = self._next
            self._next = next(self._ahead, None)
            if is_published:
                self.close()
                continue
            while start < stop:
                chunk = self._fill(start, None, now)
                end = min(stop, start + self._policy.chunk_rows - chunk.count)
                chunk.extend(start, end)
                start = end
                self._close_if_full(chunk)

    def _hold(self, block: Block, start: int, stop: int, chunk: Chunk) -> None:
        ids = block.ids[start:stop]
        if isinstance(ids, range):
            chunk.extend(ids.start, ids.stop)
        else:
            for row in ids:
                chunk.extend(row, row + 1)
        self._ledger.hold(ids, block.kept.slice(start, stop - start), chunk)
        self._close_if_full(chunk)

    def _close_if_full(self, chunk: Chunk) -> None:
        is_full = chunk.count >= self._policy.chunk_rows or chunk.size >= self._policy.chunk_bytes
        if is_full and chunk is self._filling:
            self.close()

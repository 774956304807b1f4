"""What every input is to a run: columns, files, and blocks of rows with stable ids.

A row's id is ``file index · 2**40 + row in that file`` (for input in memory: its position). Ids never depend on batch
sizes, on what was skipped, or on how far an earlier run came.

Runs on: client | worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from daskinfer.errors import MissingColumnError
from daskinfer.storage.intervals import Intervals

__all__ = ["BLOCK_BYTES", "FILE_ROWS", "SAMPLE_BYTES", "SAMPLE_ROWS", "Block", "FileInfo", "Source", "shown"]

FILE_ROWS = 1 << 40
"""Ids per file."""

SAMPLE_ROWS, SAMPLE_BYTES = 10_000, 8 << 20
"""How much of a text file is looked at to find its columns and their types."""

BLOCK_BYTES = 8 << 20
"""A block of a text file is closed after so many bytes, however few its rows."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """An input file, as it was when it was looked at.

    Attributes
    ----------
    path : str
        Absolute path, or URL.
    size : int
        Bytes.
    mtime : float or None
        Unix time of the last change, where the file system tells.
    rows : int or None
        Number of rows, once known (from Parquet's footer, or after the file was read to its end).
    """

    path: str
    size: int
    mtime: float | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Block:
    """Rows read together from one file.

    Attributes
    ----------
    ids : sequence of int
        Ascending; with gaps where rows were skipped.
    values : dict of str to list
        The needed columns as Python values; None for a bad row.
    kept : pyarrow.Table
        The kept columns, with exactly the schema that :meth:`Source.schema` gave.
    bad : dict of int to str
        Position in this block → why that row cannot be used, and what to do.
    """

    ids: Sequence[int]
    values: dict[str, list[Any]]
    kept: pa.Table
    bad: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        span = f"{self.ids[0]}…{self.ids[-1]}" if len(self.ids) else "empty"
        return f"<Block {span}: {len(self.ids)} rows, {len(self.bad)} bad>"


class Source(ABC):
    """The input of a run.

    Attributes
    ----------
    name : str
        What messages call it: a path, a pattern, or "the DataFrame" and the like.
    """

    name: str

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns' names; found by looking at the first rows."""

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """The files, in the order of their ids; empty for input in memory. ``rows`` fills in as files are read."""
        return ()

    @property
    @abstractmethod
    def total(self) -> int | None:
        """The number of rows where that is known without reading them, else None."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there are no rows at all; such an input may have no columns either."""

    @property
    def digest(self) -> str:
        """Changes when input in memory is another one (its first rows are looked at); "" for files."""
        return ""

    @abstractmethod
    def schema(self, keep: Sequence[str]) -> pa.Schema:
        """Return the Arrow schema of the kept columns.

        Raises
        ------
        MissingColumnError
            A column that the input lacks.
        SourceError
            Files that disagree about a column's type, or a type that Arrow has no word for.
        """

    @abstractmethod
    def blocks(self, needed: Sequence[str], keep: Sequence[str], *, skip: Intervals, rows: int) -> Iterator[Block]:
        """Yield the rows in order, reading as they are asked for.

        Parameters
        ----------
        needed : sequence of str
            Columns wanted as Python values.
        keep : sequence of str
            Columns wanted as Arrow data.
        skip : Intervals
            Ids that are not yielded; whole row groups and files of them are not even read.
        rows : int
            Most rows per block.

        Raises
        ------
        MissingColumnError
            A column that the input lacks.
        SourceError
            A file that cannot be read on. A row that cannot be read is in :attr:`Block.bad` instead.
        """

    def arrange(self, known: Sequence[FileInfo]) -> None:
        """Put the files in the order of an earlier run, which numbered them; files it did not know come last.

        Row counts that it found are taken over. Files that are no longer there are left out: the caller compares.
        """

    def claims(self, path: Path) -> bool:
        """Tell whether writing to this local path would write into the input, or make more input."""
        return False

    def require(self, names: Sequence[str], needed_by: str) -> None:
        """Check that the columns exist; an input without any row has all of them.

        Raises
        ------
        MissingColumnError
        """
        if self.is_empty:
            return
        for name in names:
            if name not in self.columns:
                raise MissingColumnError(name, self.columns, needed_by)


def shown(value: object) -> str:
    """Return a value as messages show it: short."""
    text = repr(value)
    return text if len(text) <= 40 else text[:38] + "…"

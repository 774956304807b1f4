"""Names: where the pieces of an output are, and what their names say.

::

    answers/                                 a folder of chunks
      data-<first id>-<last id>.parquet      published chunks; the order of their names is the order of the rows
      _manifest.json                         what this output is, see daskinfer.checkpoint.manifest
      _lock                                  who is writing it
      _parts/<chunk>/<n>-<first>-<last>-<count>.parquet.part
                                             finished rows of chunks that are not complete
      _parts/retry-<first>-<last>/…          new results for rows of a published chunk
      _report.json, _report.html             how the last run went, see daskinfer.reporting
    answers.jsonl                            a single file: the same in .answers.jsonl.daskinfer/ until the end

Readers of the folder (pandas, pyarrow, dask) pass over names that start with ``_``.

Runs on: client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from daskinfer.errors import OutputError
from daskinfer.storage.files import kind_of, located

__all__ = ["Layout", "PartName", "data_name", "data_span", "locate"]

_DATA = re.compile(r"data-(\d{19})-(\d{19})\.parquet")
_PART = re.compile(r"(\d{9})-(\d{19})-(\d{19})-(\d+)\.parquet\.part")
EMPTY_DATA = "data-empty.parquet"


@dataclass(frozen=True)
class Layout:
    """Where the pieces of one output are.

    Attributes
    ----------
    target : Path
        What the user asked for: a folder, or a file.
    kind : {"folder", "jsonl", "csv", "tsv", "parquet"}
        A folder of chunks, or the kind of the single file.
    folder : Path
        Where the chunks are: the target, or the work folder beside it.
    """

    target: Path
    kind: str
    folder: Path

    @property
    def is_file(self) -> bool:
        """Whether the output is a single file."""
        return self.kind != "folder"

    @property
    def manifest(self) -> Path:
        """The manifest."""
        return self.folder / "_manifest.json"

    @property
    def lock(self) -> Path:
        """The lock."""
        return self.folder / "_lock"

    @property
    def parts(self) -> Path:
        """The folder of in-progress parts and of temporary files."""
        return self.folder / "_parts"

    def data(self, first: int, last: int) -> Path:
        """Return the path of the published chunk with these first and last ids."""
        return self.folder / data_name(first, last)

    def temporary(self, name: str) -> Path:
        """Where a file is written before it gets its name."""
        return self.parts / f"{name}.tmp"


def locate(sink: str | Path) -> Layout:
    """Return the layout of an output; touches nothing.

    Raises
    ------
    OutputError
        The name says neither a folder nor a file of a known kind, or is a URL.
    """
    text = str(sink)
    if "://" in text:
        raise OutputError(f"{text}: rows are committed on local or mounted paths")
    path = located(Path(text))
    if text.endswith("/") or path.is_dir() or not path.suffix:
        return Layout(path, "folder", path)
    kind = kind_of(path.name)
    if kind is None or path.suffix in (".gz", ".zst"):
        raise OutputError(
            f"{text}: cannot tell what to write; end the name in .jsonl, .parquet, .csv or .tsv for one file, "
            "or in a slash for a folder of Parquet files"
        )
    return Layout(path, kind, path.with_name(f".{path.name}.daskinfer"))


def data_name(first: int, last: int) -> str:
    """Return the name of a published chunk."""
    return f"data-{first:019d}-{last:019d}.parquet"


def data_span(name: str) -> tuple[int, int] | None:
    """Return the first and last id that a published chunk's name says, or None for other names."""
    match = _DATA.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says.

    Attributes
    ----------
    number : int
        Grows with every part of an output; of two results for a row the one in the later part counts.
    first, last, count : int
        Ids of its first and last row, and its number of rows.
    """

    number: int
    first: int
    last: int
    count: int

    def __str__(self) -> str:
        return f"{self.number:09d}-{self.first:019d}-{self.last:019d}-{self.count}.parquet.part"

    @property
    def is_contiguous(self) -> bool:
        """Whether it holds every row from the first to the last, so that it need not be opened to know which."""
        return self.last - self.first + 1 == self.count

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """Read a file name; None when it is not a part's."""
        match = _PART.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None

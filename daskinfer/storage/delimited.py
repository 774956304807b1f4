"""Reading CSV and TSV: every column is text, exactly as it stands.

"NA" stays "NA", "007" stays "007" and an empty field stays "". The first row names the columns; quoted fields may hold
line breaks; blank lines are not rows. Quotes that do not follow the rules make a bad row rather than lose characters.

Runs on: client | worker.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from daskinfer.errors import SourceError
from daskinfer.storage.kinds import Kind
from daskinfer.storage.text import Records

__all__ = ["Delimited"]

_FIELD_LIMIT = 16 << 20  # a quote that is never closed swallows this much, not the rest of the file


class Delimited:
    """An open ``.csv`` (comma) or ``.tsv`` (tab) file.

    Raises
    ------
    SourceError
        Its first row cannot name the columns, or it is not UTF-8.
    """

    names: tuple[str, ...]

    def __init__(self, stream: BinaryIO, path: str, delimiter: str = ",") -> None:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self._reader = csv.reader(text, delimiter=delimiter, strict=True)
        self._rows = self._cut()
        line, header = next(self._rows, (1, []))
        if isinstance(header, str):
            raise SourceError(path, f"the header is {header}", line)
        for name in header:
            if not _is_text(name):
                raise SourceError(path, f"the header is {_NOT_UTF8}", line)
            if header.count(name) > 1:
                raise SourceError(path, f"two columns are called {name!r}; give each its own name", line)
        self.names = tuple(header)

    def __iter__(self) -> Records:
        """Cut out the rows; one that breaks the quoting rules comes as the text of its problem."""
        for line, fields in self._rows:
            yield line, fields, sum(map(len, fields))

    def columns(
        self, records: Sequence[Any], names: Sequence[str] | None
    ) -> tuple[dict[str, list[Any]], dict[int, str]]:
        """Put the fields under their columns."""
        width, bad = len(self.names), dict[int, str]()
        nothing = [None] * width
        rows = []
        for position, fields in enumerate(records):
            problem = fields if isinstance(fields, str) else self._problem(fields, width)
            if problem is not None:
                bad[position] = problem
            rows.append(nothing if problem is not None else fields)
        columns = dict(zip(self.names, map(list, zip(*rows, strict=True)), strict=True))
        lacking = [name for name in names or () if name not in columns]
        if lacking:
            problem = f"the file has no column {lacking[0]!r}; its header is {', '.join(map(repr, self.names))}"
            return {name: [None] * len(rows) for name in names or ()}, dict.fromkeys(range(len(rows)), problem)
        for name in self.names if names is None else names:
            self._check_text(columns[name], bad)
        return columns, bad

    def kind(self, values: Sequence[Any]) -> Kind:
        """Return text, whatever it looks like."""
        return Kind.STRING

    # ---------------------------------------------------------------- how

    def _cut(self) -> Iterator[tuple[int, list[str] | str]]:
        while True:
            line = self._reader.line_num + 1
            usual = csv.field_size_limit(_FIELD_LIMIT)  # the limit is the process's, so it is lent for one row
            try:
                fields: list[str] | str = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                fields = f"not valid CSV ({error}); check the quotes in this row and the one before"
            finally:
                csv.field_size_limit(usual)
            if fields:
                yield line, fields

    @staticmethod
    def _problem(fields: list[str], width: int) -> str | None:
        if len(fields) != width:
            return (
                f"{len(fields)} fields where the header has {width}; quote fields that hold separators or line breaks"
            )
        if not fields[0].strip("\0") and fields[0]:
            return "NUL bytes, as a crash leaves them; remove them"
        return None

    @staticmethod
    def _check_text(column: list[Any], bad: dict[int, str]) -> None:
        """Find the values that were not UTF-8: reading has marked their bytes with lone surrogates."""
        if _is_text("".join(value for value in column if value is not None)):
            return
        for position, value in enumerate(column):
            if value is not None and not _is_text(value):
                bad.setdefault(position, _NOT_UTF8)
                column[position] = None


_NOT_UTF8 = "not valid UTF-8; convert the file to UTF-8, or correct the row"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

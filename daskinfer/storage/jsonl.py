"""Reading JSON Lines: one object per line; blank lines are not rows.

Columns and their kinds come from the first rows; a key that first appears later is not a column. A key that a row lacks
is null there.

Runs on: client | worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, BinaryIO

from daskinfer.errors import SourceError
from daskinfer.storage.base import shown
from daskinfer.storage.kinds import Kind, infer
from daskinfer.storage.text import Records

__all__ = ["JsonLines"]

_BOM = b"\xef\xbb\xbf"
_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
_NO_ROW: dict[str, Any] = {}


class JsonLines:
    """An open ``.jsonl`` or ``.ndjson`` file, or a ``.json`` file with one object per line.

    Raises
    ------
    SourceError
        It is one JSON document over several lines, or not UTF-8.
    """

    names: tuple[str, ...] = ()

    def __init__(self, stream: BinaryIO, path: str) -> None:
        first = stream.readline()
        if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise SourceError(path, "is UTF-16 text; convert it to UTF-8")
        first = first.removeprefix(_BOM)
        if _is_document(first.strip()):
            raise SourceError(
                path,
                "is one JSON document; write one object per line, for example with: jq -c '.[]' in.json > out.jsonl",
            )
        self._lines = chain([first], stream)

    def __iter__(self) -> Records:
        """Cut out the lines that are not blank."""
        for number, line in enumerate(self._lines, 1):
            if line and not line.isspace():
                yield number, line, len(line)

    def columns(
        self, records: Sequence[Any], names: Sequence[str] | None
    ) -> tuple[dict[str, list[Any]], dict[int, str]]:
        """Parse the lines."""
        objects: list[dict[str, Any]] = []
        bad: dict[int, str] = {}
        for position, line in enumerate(records):
            try:
                value = json.loads(line.decode())
            except UnicodeDecodeError as error:
                bad[position] = f"not valid UTF-8 (byte {error.start + 1}); convert the file, or correct the line"
            except (ValueError, RecursionError) as error:
                bad[position] = f"not valid JSON ({error}); correct the line or remove it"
            else:
                if type(value) is dict:
                    objects.append(value)
                    continue
                bad[position] = (
                    f"a JSON {_NAMES[type(value)]} ({shown(value)}), not an object; write {{…}} on each line"
                )
            objects.append(_NO_ROW)
        if names is None:
            names = tuple(dict.fromkeys(key for value in objects for key in value))
        return {name: [value.get(name) for value in objects] for name in names}, bad

    def kind(self, values: Sequence[Any]) -> Kind:
        """Return the narrowest kind that holds the values."""
        return infer(values)


def _is_document(start: bytes) -> bool:
    """Tell whether a first line opens something that goes on over the next lines, or is an array of all rows."""
    return start in (b"{", b"[") or start[:2] == b"[{"

"""Inputs made of several columns, for engines of your own: a mapping of column to value.

Runs on: worker, client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from daskinfer.errors import ConfigError, RowError
from daskinfer.inputs import as_python
from daskinfer.prompts import Prompter
from daskinfer.records import FailureKind, Input
from daskinfer.storage.kinds import is_missing, plain

__all__ = ["fields_of"]


def fields_of(names: Sequence[str]) -> Prompter:
    """Return what makes a mapping of several columns' values in plain Python types; a missing value is None.

    A row without any value has no input.

    Raises
    ------
    ConfigError
        Not a list of names.
    """
    listed = tuple(names) if isinstance(names, list | tuple) else ()
    if not listed or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"{names!r} is no input: give a column's name, a template, or a list of columns")
    return _Fields(listed)


@dataclass(frozen=True)
class _Fields(Prompter):
    columns: tuple[str, ...]

    def fingerprint(self) -> dict[str, str]:
        return dict.fromkeys(self.columns, "field")

    def _row(self, row: Sequence[Any]) -> Input:
        values = [None if is_missing(value) else plain(as_python(value)) for value in row]
        if all(value is None for value in values):
            raise RowError(f"columns {', '.join(map(repr, self.columns))} are missing", FailureKind.MISSING_PROMPT)
        return cast("Input", dict(zip(self.columns, values, strict=True)))

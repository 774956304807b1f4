"""What a run may be given to do with its rows on the client: make prompts, choose parameters, change outputs.

The callables run here, on blocks of rows, and are never sent anywhere; so they may hold whatever they like.

Runs on: client.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from daskinfer.errors import ConfigError, MissingColumnError, RowError, UnknownOptionError, describe
from daskinfer.inputs import as_python, check_of
from daskinfer.prompts import Problem, Prompter
from daskinfer.records import Completed, Failed, FailureKind, Input, Result, SamplingParams

__all__ = ["Postprocess", "Preprocess", "RowParams", "called", "finished", "preprocessor", "row_params"]

WHOLE = ("max_new_tokens", "min_new_tokens", "top_k", "seed")

Preprocess: TypeAlias = Callable[[list[dict[str, Any]]], Sequence[Any]]
Postprocess: TypeAlias = Callable[[list[Any]], Sequence[Any]]


# ---------------------------------------------------------------- prompts


def preprocessor(function: Preprocess, available: tuple[str, ...], task: str = "generate") -> Prompter:
    """Return what makes a task's prompts with a callable: rows (dicts of all columns) in, one prompt for each out.

    Where it raises, or returns an exception for a row, that row fails; rows are tried one by one to find out which.

    Raises
    ------
    ConfigError
        Not callable.
    """
    if not callable(function):
        raise ConfigError(f"preprocess={function!r}: must be a callable from a list of rows to a list of prompts")
    return _Preprocessed(available, function, task)


@dataclass(frozen=True)
class _Preprocessed(Prompter):
    columns: tuple[str, ...]
    function: Preprocess
    task: str = "generate"

    def render(self, values: Mapping[str, Any], n: int) -> list[Input | Problem]:
        columns = [as_python(values[name]) for name in self.columns]
        rows = [dict(zip(self.columns, row, strict=True)) for _, *row in zip(range(n), *columns, strict=True)]
        return [self._checked(made) for made in called(self.function, rows, "preprocess")]

    def fingerprint(self) -> dict[str, str]:
        return {"preprocess": digest(self.function)}

    def _checked(self, made: Any) -> Input | Problem:
        if isinstance(made, BaseException):
            return Problem(FailureKind.ERROR, f"preprocess: {describe(made)}")
        try:
            return check_of(self.task)(made, "what preprocess returned")
        except RowError as error:
            return Problem(error.row_kind, error.message)

    def _row(self, row: Sequence[Any]) -> Input:  # pragma: no cover - render does it all
        raise NotImplementedError


def called(function: Callable[[list[Any]], Sequence[Any]], rows: list[Any], name: str) -> list[Any]:
    """Return what a callable gives for rows, with an exception in the place of each row that it cannot take.

    Raises
    ------
    ConfigError
        It returned more or fewer values than rows.
    """
    if not rows:
        return []
    try:
        made = list(function(rows))
    except Exception as error:  # noqa: BLE001 - the user's code; the rows at fault fail
        if len(rows) == 1:
            return [error]
        return [value for row in rows for value in called(function, [row], name)]
    if len(made) != len(rows):
        raise ConfigError(f"{name} returned {len(made)} values for {len(rows)} rows; it must return one for each")
    return made


def digest(function: Any) -> str:
    """Return a callable's name and the hash of its source, so that a resumed run notices another one."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return name
    return f"{name}@{hashlib.sha256(source.encode()).hexdigest()[:12]}"


# ---------------------------------------------------------------- parameters


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters from columns.

    Attributes
    ----------
    by_name : dict of str to str
        Parameter to column.
    whole : str or None
        A column of mappings, or their JSON text.
    """

    by_name: Mapping[str, str]
    whole: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        return tuple(self.by_name.values()) if self.whole is None else (self.whole,)

    def of(self, values: Mapping[str, Sequence[Any]], at: int, common: SamplingParams) -> SamplingParams:
        """Return a row's parameters; a missing value stands for the common one.

        Raises
        ------
        ConfigError
            A value out of range; the row fails with it.
        """
        if self.whole is None:
            changes: Mapping[str, Any] = {name: values[column][at] for name, column in self.by_name.items()}
        else:
            changes = self._mapping(values[self.whole][at])
        present = {name: _plain(name, value) for name, value in changes.items() if not _missing(value)}
        return common.updated(**present) if present else common

    def fingerprint(self) -> Any:
        """Return what a resumed run must not change."""
        return dict(self.by_name) if self.whole is None else self.whole

    def _mapping(self, value: Any) -> Mapping[str, Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ConfigError(f"column {self.whole!r} holds text that is not JSON") from None
        if _missing(value):
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"column {self.whole!r} holds {type(value).__name__}, not a mapping of parameters")
        return value


def row_params(given: str | Mapping[str, str] | None, available: tuple[str, ...]) -> RowParams | None:
    """Check where the parameters of each row come from.

    Raises
    ------
    ConfigError, UnknownOptionError, MissingColumnError
        Not a column or a mapping of parameter to column; no such parameter; no such column.
    """
    if given is None:
        return None
    if isinstance(given, str):
        found = RowParams({}, given)
    elif isinstance(given, Mapping):
        known = tuple(f.name for f in fields(SamplingParams))
        for name in given:
            if name not in known:
                raise UnknownOptionError(name, "row_params", known)
        found = RowParams(dict(given))
    else:
        raise ConfigError(f"row_params={given!r}: must be a column, or a mapping of parameter to column")
    for column in found.columns:
        if available and column not in available:
            raise MissingColumnError(column, available, "row_params")
    return found


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124 - NaN is not itself


def _plain(name: str, value: Any) -> Any:
    """Return the value; a column of whole numbers with gaps holds floats."""
    return int(value) if name in WHOLE and isinstance(value, float) and value.is_integer() else value


# ---------------------------------------------------------------- outputs


def finished(function: Postprocess, results: Sequence[Result], *, text: bool) -> list[Result]:
    """Return results with the outputs that a callable makes of them; rows it cannot take fail.

    Parameters
    ----------
    function : callable
        Outputs of some completed rows in, one for each out.
    results : sequence of Result
    text : bool
        The output column holds text, so anything else fails the row.
    """
    done = [result for result in results if isinstance(result, Completed)]
    changed = iter(called(function, [result.output for result in done], "postprocess"))
    return [_finished(r, next(changed), text=text) if isinstance(r, Completed) else r for r in results]


def _finished(result: Completed, output: Any, *, text: bool) -> Result:
    if isinstance(output, BaseException):
        return Failed(result.id, FailureKind.ERROR, f"postprocess: {describe(output)}")
    if text and output is not None and not isinstance(output, str):
        message = f"postprocess returned {type(output).__name__}, and the output column holds text"
        return Failed(result.id, FailureKind.WRONG_TYPE, message)
    return replace(result, output=output)

"""The columns a run adds, and how results become Arrow data.

The type of the output column comes from a description: ``string``, ``float32[384]`` (vectors), ``float32[]`` (lists of
any length), ``struct<a: string, b: int64>``, or ``json`` for anything that has a JSON form.

Runs on: client | worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from daskinfer.errors import ConfigError
from daskinfer.records import Completed, Failed, FailureKind, Result
from daskinfer.storage.base import shown
from daskinfer.storage.kinds import Kind, encode, json_field, plain

__all__ = ["FIXED_COLUMNS", "OutputColumns", "arrow_type"]

FIXED_COLUMNS = ("finish_reason", "prompt_tokens", "completion_tokens", "truncated_tokens", "error")
"""What stands after the output column: string, int64, int64, string."""

_SCALARS = {
    "string": pa.string(),
    "json": pa.string(),
    "bool": pa.bool_(),
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(pa, f"float{bits}")() for bits in (16, 32, 64)},
}
_TOKEN = re.compile(r"\s*([A-Za-z_][\w.-]*|\d+|[<>,:\[\]])")


def arrow_type(description: str) -> pa.DataType:
    """Return the Arrow type that a description names.

    Examples
    --------
    >>> print(arrow_type("struct<label: string, scores: float32[3]>"))
    struct<label: string, scores: fixed_size_list<item: float>[3]>

    Raises
    ------
    ConfigError
        It is not a description of a type.
    """
    try:
        found, left = _parsed(_tokens(description))
    except (KeyError, ValueError) as error:
        raise _unknown(description) from error
    if left:
        raise _unknown(description)
    return found


def _unknown(description: str) -> ConfigError:
    return ConfigError(
        f"output_type={description!r}: must be one of {', '.join(_SCALARS)}, or made of them: "
        "'float32[384]', 'float32[]', 'struct<label: string, score: float64>'"
    )


def _tokens(description: str) -> Iterator[str]:
    at = 0
    while at < len(description.rstrip()):
        match = _TOKEN.match(description, at)
        if match is None:
            raise _unknown(description)
        yield match[1]
        at = match.end()
    while True:
        yield ""


def _parsed(tokens: Iterator[str]) -> tuple[pa.DataType, str]:
    """Return a type and the token after it."""
    name = next(tokens)
    found = _struct(tokens) if name == "struct" else _SCALARS[name]
    after = next(tokens)
    while after == "[":
        size = next(tokens)
        found = pa.list_(found) if size == "]" else pa.list_(found, int(size))
        if size != "]" and next(tokens) != "]":
            raise ValueError(size)
        after = next(tokens)
    return found, after


def _struct(tokens: Iterator[str]) -> pa.DataType:
    fields, after = [], next(tokens)
    if after != "<":
        raise ValueError(after)
    while after != ">":
        name = next(tokens)
        if not name or next(tokens) != ":":
            raise ValueError(name)
        kind, after = _parsed(tokens)
        fields.append(pa.field(name, kind))
        if after not in (",", ">"):
            raise ValueError(after)
    return pa.struct(fields)


@dataclass(frozen=True)
class OutputColumns:
    """The columns that results become.

    Parameters
    ----------
    column : str
        Name of the output column.
    description : str
        Its type.
    """

    column: str = "output"
    description: str = "string"

    @property
    def names(self) -> tuple[str, ...]:
        """All added columns."""
        return (self.column, *FIXED_COLUMNS)

    @cached_property
    def fields(self) -> list[pa.Field]:
        """Their Arrow fields."""
        kind = arrow_type(self.description)
        output = json_field(self.column) if self.description.strip() == "json" else pa.field(self.column, kind)
        types = (pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.string())
        return [output, *map(pa.field, FIXED_COLUMNS, types)]

    def arrays(self, results: Sequence[Result]) -> list[pa.Array]:
        """Return one array per added column; a failed row has nulls and its error.

        An output that its column cannot hold makes its row a failed one; it does not stop the run.
        """
        done = [result if isinstance(result, Completed) else None for result in results]
        errors = [None if isinstance(result, Completed) else result.error for result in results]
        made, misfits = self._outputs([result and result.output for result in done])
        for at, reason in misfits.items():
            done[at], errors[at] = None, Failed(results[at].id, FailureKind.WRONG_TYPE, reason).error
        reasons = [None if r is None or r.finish_reason is None else str(r.finish_reason) for r in done]
        return [
            made,
            _texts(reasons),
            pa.array([result and result.usage.prompt_tokens for result in done], pa.int64()),
            pa.array([result and result.usage.completion_tokens for result in done], pa.int64()),
            pa.array([result and result.usage.truncated_tokens for result in done], pa.int64()),
            _texts(errors),
        ]

    # ---------------------------------------------------------------- how

    def _outputs(self, outputs: list[Any]) -> tuple[pa.Array, dict[int, str]]:
        kind = self.fields[0].type
        if self.description.strip() == "json":
            return encode(Kind.JSON, outputs)
        made = _quickly(kind, outputs)
        if made is not None:
            return made, {}
        kept: list[Any] = []
        misfits: dict[int, str] = {}
        for at, value in enumerate(outputs):
            output = plain(value)
            try:
                pa.array([output if _suits(kind, output) else _UNSUITABLE], kind)
                kept.append(output)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                kept.append(None)
                misfits[at] = (
                    f"the output is a {type(value).__name__} ({shown(value)}), which column {self.column!r} of type "
                    f"{self.description!r} cannot hold; declare the type that the engine or postprocess returns"
                )
        return pa.array(kept, kind), misfits


_UNSUITABLE = object()


def _texts(values: list[str | None]) -> pa.Array:
    """Return text as Arrow data; half characters, which foreign messages may hold, are replaced."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([v and v.encode(errors="replace").decode() for v in values], pa.string())


def _quickly(kind: pa.DataType, outputs: list[Any]) -> pa.Array | None:
    """Convert all outputs at once if they are all of the right type."""
    vectors = _vectors(kind, outputs)
    if vectors is not None:
        return vectors
    try:
        if pa.types.is_string(kind) and set(map(type, outputs)) <= {str, type(None)}:
            return pa.array(outputs, kind)
        values = [plain(output) for output in outputs]
        return pa.array(values, kind) if all(_suits(kind, value) for value in values) else None
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _suits(kind: pa.DataType, value: Any) -> bool:
    """Tell whether a value is of the Python type that a column is for; Arrow alone would cast some others."""
    if value is None:
        return True
    if pa.types.is_string(kind):
        return type(value) is str
    if pa.types.is_integer(kind):
        return type(value) is int
    if pa.types.is_floating(kind):
        return type(value) in (float, int)
    if pa.types.is_struct(kind):
        names = {part.name for part in kind}
        return (
            type(value) is dict
            and value.keys() <= names
            and all(_suits(kind.field(k).type, v) for k, v in value.items())
        )
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return type(value) is list and all(_suits(kind.value_type, item) for item in value)
    return True


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _vectors(kind: pa.DataType, outputs: list[Any]) -> pa.Array | None:
    """Return vectors of one length without a Python object per number; None when they are something else."""
    if not pa.types.is_fixed_size_list(kind) or not _is_number(kind.value_type):
        return None
    import numpy as np

    size, dtype = kind.list_size, kind.value_type.to_pandas_dtype()
    if not all(o is None or (isinstance(o, np.ndarray) and o.shape == (size,) and o.dtype == dtype) for o in outputs):
        return None
    missing = [output is None for output in outputs]
    nothing = np.zeros(size, dtype)
    flat = np.concatenate([nothing if output is None else output for output in outputs]) if outputs else nothing[:0]
    return pa.FixedSizeListArray.from_arrays(
        pa.array(flat), type=kind, mask=pa.array(missing) if any(missing) else None
    )

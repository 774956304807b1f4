"""Types for columns that bring none: those of JSON Lines, and Python objects.

The first rows decide a column's *kind*: text, whole numbers (64 bit), numbers, booleans, or JSON text for everything
else (nested, mixed, larger than 64 bit, or null so far). A later value that does not fit makes its row a bad one; it is
never cast and never stops the job. JSON text is flagged in the field's metadata, so that a JSON Lines output can write
the original value back.

Runs on: client | worker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pyarrow as pa

from daskinfer.errors import InputError
from daskinfer.inputs import bad_character
from daskinfer.storage.base import shown

__all__ = [
    "JSON_FLAG",
    "Kind",
    "encode",
    "field_of",
    "infer",
    "infer_objects",
    "is_json",
    "is_missing",
    "json_field",
    "json_text",
    "plain",
]

JSON_FLAG = {b"daskinfer.kind": b"json"}
_TYPED = (date, time, bytes)  # (a datetime is a date)
_LOW, _HIGH = -(2**63), 2**63 - 1
_EXACT = 2**53


class Kind(StrEnum):
    """What a column holds."""

    STRING = "string"
    INT64 = "int64"
    FLOAT64 = "float64"
    BOOL = "bool"
    JSON = "json"

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type that holds it."""
        return _ARROW[self]


_ARROW = {
    Kind.STRING: pa.string(),
    Kind.INT64: pa.int64(),
    Kind.FLOAT64: pa.float64(),
    Kind.BOOL: pa.bool_(),
    Kind.JSON: pa.string(),
}
_NONE = type(None)
_FITTING: dict[Kind, frozenset[type]] = {
    Kind.STRING: frozenset((str, _NONE)),
    Kind.INT64: frozenset((int, _NONE)),
    Kind.FLOAT64: frozenset((float, int, _NONE)),
    Kind.BOOL: frozenset((bool, _NONE)),
}


def field_of(kind: Kind | pa.DataType, name: str) -> pa.Field:
    """Return the Arrow field of a column.

    Raises
    ------
    InputError
        Its name is not valid text.
    """
    if bad_character(name) is not None:
        raise InputError(
            f"the column name {name!r} is not valid text (half of a surrogate pair); rename that column, or leave it out "
            "(keep=, --keep)"
        )
    if kind is Kind.JSON:
        return json_field(name)
    return pa.field(name, kind.arrow if isinstance(kind, Kind) else kind)


def json_field(name: str) -> pa.Field:
    """Return the Arrow field of a column that holds JSON text."""
    return pa.field(name, pa.string(), metadata=JSON_FLAG)


def is_json(field: pa.Field) -> bool:
    """Tell whether a column holds JSON text in place of the original values."""
    return bool(field.metadata) and field.metadata.get(b"daskinfer.kind") == b"json"


def is_missing(value: Any) -> bool:
    """Tell None, pandas' NA and NaT, and NaN from values."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def plain(value: Any) -> Any:
    """Return a value with numpy's scalars and arrays, and subclasses of text, as built-in types."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return plain(value.tolist()) if getattr(value, "ndim", 0) else value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def infer(values: Sequence[Any]) -> Kind:
    """Return the narrowest kind that all values fit; missing ones fit any."""
    found = set(map(type, values))
    for kind in (Kind.STRING, Kind.BOOL, Kind.INT64, Kind.FLOAT64):
        if found != {_NONE} and found <= _FITTING[kind] and _holds(kind, values):
            return kind
    present = [plain(value) for value in values if not is_missing(value)]
    if not present:
        return Kind.FLOAT64 if float in found else Kind.JSON
    for kind in (Kind.STRING, Kind.BOOL, Kind.INT64, Kind.FLOAT64):
        if all(_fits(kind, value) for value in present):  # (text that is not Unicode fails its own row, later)
            return Kind.FLOAT64 if kind is Kind.INT64 and float in found else kind
    return Kind.JSON


def infer_objects(values: Sequence[Any]) -> Kind | pa.DataType:
    """Return the kind of values; or an Arrow type when all are dates, times or bytes, for which JSON has no word."""
    kind = infer(values)
    present = [value for value in values if not is_missing(value)] if kind is Kind.JSON else []
    classes = {type(value) for value in present}
    if len(classes) != 1 or not issubclass(classes.pop(), _TYPED) or len({_zone(value) for value in present}) > 1:
        return kind
    try:
        return pa.array(present).type
    except (pa.ArrowException, ValueError, OverflowError):
        return kind


def encode(kind: Kind | pa.DataType, values: Sequence[Any]) -> tuple[pa.Array, dict[int, str]]:
    """Turn values into Arrow data of a kind, or of a type that :func:`infer_objects` found.

    Returns
    -------
    array : pyarrow.Array
        Null where the value is missing or does not fit.
    misfits : dict of int to str
        Position → what is there and what is expected.
    """
    if not isinstance(kind, Kind):
        return _encode_typed(kind, values)
    if kind is not Kind.JSON and set(map(type, values)) <= _FITTING[kind]:
        made = _array(kind, values)
        if made is not None:
            return made, {}
    found: list[Any] = []
    misfits: dict[int, str] = {}
    for position, value in enumerate(values):
        try:
            found.append(_fit(kind, value))
        except _MisfitError as misfit:
            found.append(None)
            misfits[position] = str(misfit)
    return pa.array(found, kind.arrow), misfits


def json_text(value: Any) -> str:
    """Return a value as strict JSON text; characters stay readable.

    NaN and infinities become null, dates and times ISO text, decimals text.

    Raises
    ------
    TypeError, ValueError
        Something in it has no JSON form.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_strict(plain(value)), ensure_ascii=False, allow_nan=False)


def _encode_typed(kind: pa.DataType, values: Sequence[Any]) -> tuple[pa.Array, dict[int, str]]:
    found: list[Any] = []
    misfits: dict[int, str] = {}
    for position, value in enumerate(values):
        if is_missing(value):
            found.append(None)
        elif _is_typed(kind, value):
            found.append(value)
        else:
            found.append(None)
            misfits[position] = f"holds {shown(value)} ({type(value).__name__}), but the first rows hold {kind}"
    return pa.array(found, kind), misfits


def _is_typed(kind: pa.DataType, value: Any) -> bool:
    if not isinstance(value, _TYPED):
        return False
    if pa.types.is_timestamp(kind) and (kind.tz is None) != (_zone(value) == ""):
        return False
    try:
        return bool(pa.scalar(value).type.id == kind.id and pa.scalar(value, kind).is_valid)
    except (pa.ArrowException, ValueError, OverflowError):
        return False


def _zone(value: Any) -> str:
    return str(getattr(value, "tzinfo", None) or "")


class _MisfitError(Exception):
    """A value that its column cannot hold."""


def _array(kind: Kind, values: Sequence[Any]) -> pa.Array | None:
    try:
        return pa.array(values, kind.arrow)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None


def _holds(kind: Kind, values: Sequence[Any]) -> bool:
    return _array(kind, values) is not None


def _fits(kind: Kind, value: Any) -> bool:
    if kind is Kind.STRING:
        return isinstance(value, str)
    if kind is Kind.BOOL:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind is Kind.INT64:
        return isinstance(value, int) and _LOW <= value <= _HIGH
    return isinstance(value, float) or (isinstance(value, int) and -_EXACT <= value <= _EXACT)


def _fit(kind: Kind, value: Any) -> Any:
    if is_missing(value):
        return value if kind is Kind.FLOAT64 and isinstance(value, float) else None
    if kind is Kind.JSON:
        try:
            text = json_text(value)
            return text if _encodable(text) else json.dumps(_strict(plain(value)))
        except (TypeError, ValueError, RecursionError):
            raise _MisfitError(f"holds a {type(value).__name__}, which has no JSON form") from None
    value = plain(value)
    if kind is Kind.STRING and isinstance(value, str) and not _encodable(value):
        raise _MisfitError(f"holds {shown(value)}, which is not valid Unicode text")
    if _fits(kind, value):
        return float(value) if kind is Kind.FLOAT64 else value
    raise _MisfitError(f"holds {shown(value)} ({type(value).__name__}), but the first rows hold {kind.value}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return None if is_missing(value) else value

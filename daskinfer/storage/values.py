"""How Arrow data is written as text: strict JSON, and the fields of CSV.

NaN and infinities are null in JSON. Dates and times are ISO text, decimals keep their digits, bytes are base64, and a
column that holds JSON text gives its original values back.

Runs on: client.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from daskinfer.storage.kinds import is_json, is_missing, plain

__all__ = ["as_json", "as_text"]

_quoted = json.encoder.encode_basestring  # text with its quotes, non-ASCII as it is


def as_json(column: pa.ChunkedArray, field: pa.Field) -> list[str]:
    """Return the JSON text of each value."""
    texts, is_text = _texts(column, field)
    if is_text:
        return ["null" if text is None else _quoted(text) for text in texts]
    return ["null" if text is None else text for text in texts]


def as_text(column: pa.ChunkedArray, field: pa.Field) -> list[str]:
    """Return the CSV field of each value; a null is empty."""
    return [text or "" for text in _texts(column, field)[0]]


def _texts(column: pa.ChunkedArray, field: pa.Field) -> tuple[Sequence[str | None], bool]:
    """Return each value as text (None for null), and whether JSON puts quotes around it."""
    kind = field.type
    if is_json(field):
        return column.to_pylist(), False
    if pa.types.is_dictionary(kind):
        return _texts(column.cast(kind.value_type), pa.field(field.name, kind.value_type))
    for is_of, convert, is_text in _CONVERSIONS:
        if any(test(kind) for test in is_of):
            return convert(column), is_text
    return [
        None if value is None else json.dumps(_strict(value), ensure_ascii=False) for value in column.to_pylist()
    ], False


def _is_vector(kind: pa.DataType) -> bool:
    """Whether values are lists of numbers, which are written without a Python object per number."""
    if not _is_list(kind):
        return False
    return bool(pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _as_they_are(column: pa.ChunkedArray) -> list[str | None]:
    return list(column.to_pylist())


def _cast(column: pa.ChunkedArray) -> list[str | None]:
    return list(column.cast(pa.string()).to_pylist())


def _numbers(column: pa.ChunkedArray) -> list[str | None]:
    finite = pc.if_else(pc.is_finite(column), column, None)
    if column.type == pa.float64():
        return [None if value is None else repr(value) for value in finite.to_pylist()]
    # the shortest text that gives the same float32, not the digits of its double
    texts = finite.cast(pa.float32()).cast(pa.string()).to_pylist()
    return [f"{text}.0" if text is not None and text.lstrip("-").isdigit() else text for text in texts]


def _times(column: pa.ChunkedArray) -> list[str | None]:
    return [None if text is None else text.replace(" ", "T", 1) for text in _cast(column)]


def _bytes(column: pa.ChunkedArray) -> list[str | None]:
    return [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]


def _vectors(column: pa.ChunkedArray) -> list[str | None]:
    found: list[str | None] = []
    for chunk in column.chunks:
        lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_pylist()
        flat = pa.chunked_array([chunk.flatten()])
        texts = _numbers(flat) if pa.types.is_floating(flat.type) else _cast(flat)
        numbers = [number or "null" for number in texts]
        start = 0
        for length, is_null in zip(lengths, pc.is_null(chunk).to_pylist(), strict=True):
            found.append(None if is_null else f"[{', '.join(numbers[start : start + length])}]")
            start += length
    return found


def _strict(value: Any) -> Any:
    """Return a nested value with only what JSON has."""
    value = plain(value)
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | datetime | time):
        return None if is_missing(value) else value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if value is None or is_missing(value):
        return None
    return value if isinstance(value, str | int | float) else str(value)


_Test: TypeAlias = Callable[[pa.DataType], bool]
_CONVERSIONS: tuple[tuple[tuple[_Test, ...], Callable[[pa.ChunkedArray], list[str | None]], bool], ...] = (
    ((pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view), _as_they_are, True),
    ((pa.types.is_boolean, pa.types.is_integer, pa.types.is_null, pa.types.is_decimal), _cast, False),
    ((pa.types.is_floating,), _numbers, False),
    ((pa.types.is_timestamp, pa.types.is_date, pa.types.is_time), _times, True),
    ((_is_vector,), _vectors, False),
    ((pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary), _bytes, True),
)

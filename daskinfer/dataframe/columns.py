"""The columns an inference adds, with dtypes that are known before anything runs.

A description such as ``string``, ``float32[384]`` or ``struct<label: string, score: float32>`` decides the dtype: text is
``string[pyarrow]``, numbers and truth values are pandas' nullable dtypes, everything else is its Arrow type. All of them
hold nulls, which is what a failed row has.

Runs on: worker, client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow as pa

from daskinfer.records import Completed, Result
from daskinfer.storage.outputs import FIXED_COLUMNS, OutputColumns

__all__ = ["AddedColumns", "as_dtype", "as_extension_array"]

_FLOATS = {pa.float32(): pd.Float32Dtype(), pa.float64(): pd.Float64Dtype()}
_WHOLE = {
    getattr(pa, kind.lower())(): getattr(pd, f"{kind}Dtype")()
    for kind in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
}
_DTYPES: dict[Any, Any] = {pa.string(): pd.StringDtype("pyarrow"), pa.bool_(): pd.BooleanDtype(), **_FLOATS, **_WHOLE}


def as_dtype(kind: pa.DataType) -> Any:
    """Return the pandas dtype of an output column.

    Examples
    --------
    >>> as_dtype(pa.list_(pa.float32(), 384))
    fixed_size_list<item: float>[384][pyarrow]
    """
    return _DTYPES.get(kind) or pd.ArrowDtype(kind)


def as_extension_array(values: pa.Array) -> Any:
    """Return Arrow data as the pandas array of its dtype."""
    return as_dtype(values.type).__from_arrow__(values)


@dataclass(frozen=True)
class AddedColumns:
    """What stands behind the input's columns.

    Parameters
    ----------
    output : str
        Name of the output column; the others begin with it.
    description : str
        Type of the output.
    errors : bool
        Add ``<output>_error``: null, or the kind and reason of a failed row.
    side : {None, "left", "right"}
        Add ``<output>_truncated_tokens`` and ``<output>_truncated_side`` (null where nothing was cut).
    details : bool
        Add ``<output>_finish_reason``, ``<output>_prompt_tokens`` and ``<output>_completion_tokens``.
    """

    output: str
    description: str
    errors: bool = True
    side: str | None = None
    details: bool = False

    @cached_property
    def dtypes(self) -> dict[str, Any]:
        """Column to dtype, in order."""
        return {name: values.dtype for name, values in self.empty().items()}

    @property
    def names(self) -> list[str]:
        """The columns, in order."""
        return list(self.dtypes)

    def empty(self) -> dict[str, Any]:
        """Return the columns without rows."""
        return self.of([])[0]

    def of(self, results: Sequence[Result]) -> tuple[dict[str, Any], list[str | None]]:
        """Return the columns of rows, and the error of each row or None.

        An output that its column cannot hold makes its row a failed one.
        """
        made, *fixed = OutputColumns(self.output, self.description).arrays(results)
        about = dict(zip(FIXED_COLUMNS, fixed, strict=True))
        listed: list[str | None] = about["error"].to_pylist()
        found = {self.output: made}
        if self.errors:
            found[f"{self.output}_error"] = about["error"]
        if self.side is not None:
            cut = [
                result.usage.truncated_tokens if isinstance(result, Completed) and error is None else None
                for result, error in zip(results, listed, strict=True)
            ]
            found[f"{self.output}_truncated_tokens"] = pa.array(cut, pa.int64())
            found[f"{self.output}_truncated_side"] = pa.array(
                [self.side if tokens else None for tokens in cut], pa.string()
            )
        if self.details:
            for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
                found[f"{self.output}_{name}"] = about[name]
        return {name: as_extension_array(values) for name, values in found.items()}, listed

    def on(self, frame: Any, columns: dict[str, Any]) -> Any:
        """Return a frame with columns added; the given one stays as it is."""
        made = frame.copy(deep=False)
        for name, values in columns.items():
            made[name] = values
        return made

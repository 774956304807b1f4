"""How columns are encoded in Parquet: vectors neither as a dictionary, which they never fit, nor byte by byte.

Runs on: client.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["encodings"]


def encodings(schema: pa.Schema) -> dict[str, Any]:
    """Return the arguments of ``pyarrow.parquet.write_table`` for the vectors of a schema; none where it has none.

    A dictionary of floats is built and thrown away. With the bytes of the same weight side by side, floats are a tenth
    smaller and quicker to read.
    """
    return dict(_encodings(schema.remove_metadata()))


@lru_cache(maxsize=16)
def _encodings(schema: pa.Schema) -> dict[str, Any]:
    vectors = {field.name: field.type.value_type for field in schema if pa.types.is_fixed_size_list(field.type)}
    if not vectors:
        return {}
    file = io.BytesIO()
    pq.write_table(schema.empty_table(), file)
    columns = pq.ParquetFile(file).schema
    leaves = [columns.column(at).path for at in range(len(columns))]
    of_vectors = {leaf: kind for leaf in leaves for name, kind in vectors.items() if leaf.startswith(f"{name}.list.")}
    split = {leaf: "BYTE_STREAM_SPLIT" for leaf, kind in of_vectors.items() if kind in (pa.float32(), pa.float64())}
    return {"use_dictionary": [leaf for leaf in leaves if leaf not in of_vectors], "column_encoding": split or None}

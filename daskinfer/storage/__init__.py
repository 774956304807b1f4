"""Reading rows from files and memory, and the shapes they are written in.

Runs on: client | worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from daskinfer.errors import SourceError
from daskinfer.storage.base import Block, FileInfo, Source
from daskinfer.storage.intervals import Intervals

__all__ = ["Block", "FileInfo", "Intervals", "Source", "open_source"]


def open_source(obj: Any, *, name: str | None = None) -> Source:
    """Open the input of a run. Nothing but first rows is read.

    Parameters
    ----------
    obj : path, DataFrame or iterable
        - A path, a folder of files of one kind, a glob pattern, or an fsspec URL. Kinds: JSON Lines (``.jsonl``,
          ``.ndjson``, ``.json``), ``.parquet``, ``.csv``, ``.tsv``; text may be compressed (``.gz``, ``.zst``). In
          folders, names that start with ``_`` or ``.`` are passed over.
        - A pandas or dask DataFrame.
        - Texts, conversations (lists of messages) or mappings of column to value, in a sequence or an iterator. The
          iterator is read once, lazily.
    name : str
        What messages call input that is in memory.

    Raises
    ------
    SourceError
        It does not exist, cannot be read, or is of no known kind.
    """
    if isinstance(obj, str | os.PathLike):
        return _open_files(os.fspath(obj))
    if isinstance(obj, Source):
        return obj
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if hasattr(obj, "iloc") and hasattr(obj, "columns") and not kind.startswith("dask"):
        from daskinfer.storage.frame import FrameSource

        return FrameSource(obj, name or "the DataFrame")
    if kind.startswith("dask.dataframe") and getattr(obj, "ndim", 0) == 2:
        from daskinfer.storage.partitions import PartitionsSource

        return PartitionsSource(obj, name or "the dask DataFrame")
    other = isinstance(obj, bytes | Mapping | AbstractSet) or kind.startswith("dask") or hasattr(obj, "iter_rows")
    if other or not isinstance(obj, Iterable):
        raise SourceError(
            name or "the input",
            f"a {kind} is not rows; give a path, a pandas DataFrame (many kinds of tables have to_pandas()), "
            "or an iterable of texts, conversations or mappings in a fixed order",
        )
    from daskinfer.storage.memory import RowsSource

    return RowsSource(obj, name or "the rows")


def _open_files(path: str | bytes) -> Source:
    from daskinfer.storage.delimited import Delimited
    from daskinfer.storage.files import find_files
    from daskinfer.storage.jsonl import JsonLines
    from daskinfer.storage.parquet import ParquetSource
    from daskinfer.storage.text import TextSource

    found = find_files(os.fsdecode(path))
    if found.kind == "parquet":
        return ParquetSource(found)
    if found.kind == "jsonl":
        return TextSource(found, JsonLines)
    return TextSource(found, partial(Delimited, delimiter="\t" if found.kind == "tsv" else ","))

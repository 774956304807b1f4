"""One file out of many chunks, and back: JSON Lines, CSV and Parquet.

Reading back is for runs that go on with a finished file. What text cannot say about kept columns is not needed for that:
they come back as text that is written again character by character.

Runs on: client.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import add
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from daskinfer.errors import OutputError, SourceError
from daskinfer.storage.delimited import Delimited
from daskinfer.storage.encodings import encodings
from daskinfer.storage.kinds import is_json, json_field
from daskinfer.storage.outputs import OutputColumns
from daskinfer.storage.values import as_json, as_text

__all__ = ["COMPRESSION", "read_single", "write_single"]

COMPRESSION = "zstd"
_ROWS = 10_000


def write_single(kind: str, file: IO[bytes], tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Write tables one after the other into one file.

    Parameters
    ----------
    kind : {"jsonl", "csv", "tsv", "parquet"}
    file : binary file
    tables : iterable of pyarrow.Table
        With the columns of ``schema``; for text their types may differ from it, and from one another.
    schema : pyarrow.Schema
    """
    if kind == "parquet":
        with pq.ParquetWriter(file, schema, compression=COMPRESSION, **encodings(schema)) as writer:
            for table in tables:
                writer.write_table(table.cast(schema))
        return
    if kind == "jsonl":
        for table in tables:
            _write_json(file, table)
        return
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    rows = csv.writer(text, delimiter=_mark(kind), lineterminator="\n")
    # The writer quotes only what its own line end needs, and readers take a carriage return alone for a line end, too.
    careful = csv.writer(text, delimiter=_mark(kind), lineterminator="\n", quoting=csv.QUOTE_ALL)
    rows.writerow(schema.names)
    for table in tables:
        columns = [as_text(table.column(at), table.schema.field(at)) for at in range(table.num_columns)]
        if any("\r" in value for column in columns for value in column if value):
            careful.writerows(zip(*columns, strict=True))
        else:
            rows.writerows(zip(*columns, strict=True))
    text.detach()


def _write_json(file: IO[bytes], table: pa.Table) -> None:
    keys = [json.dumps(name, ensure_ascii=False) + ": " for name in table.schema.names]
    columns = [as_json(table.column(at), table.schema.field(at)) for at in range(table.num_columns)]
    lines = ["{" + ", ".join(map(add, keys, row)) + "}\n" for row in zip(*columns, strict=True)]
    file.write("".join(lines).encode())


def read_single(kind: str, path: Path, schema: pa.Schema, output: OutputColumns) -> Iterator[pa.Table]:
    """Yield the rows of a finished file as tables that :func:`write_single` turns into the same file.

    Raises
    ------
    OutputError
        The file is damaged, or not the one that was written.
    """
    try:
        if kind == "parquet":
            with pq.ParquetFile(path) as file:
                if file.schema_arrow.names != schema.names:
                    raise _changed(path, f"its columns are {', '.join(file.schema_arrow.names)}")
                for batch in file.iter_batches(_ROWS):
                    yield pa.Table.from_batches([batch]).cast(schema)
            return
        rows = _json_rows(path, schema.names) if kind == "jsonl" else _csv_rows(path, schema.names, _mark(kind))
        while batch := list(islice(rows, _ROWS)):
            yield _table(batch, kind, schema, output)
    except (SourceError, pa.ArrowException, ValueError, TypeError) as error:
        if isinstance(error, OutputError):
            raise
        raise _changed(path, str(error)) from error


def _mark(kind: str) -> str:
    return "\t" if kind == "tsv" else ","


def _changed(path: Path, reason: str) -> OutputError:
    return OutputError(
        f"{path} is not as this run left it ({reason}), so it cannot be continued; restore it, "
        "or start again with overwrite=True (--overwrite)"
    )


def _json_rows(path: Path, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield each value's JSON text, as it stands in the lines that :func:`write_single` wrote."""
    before = [("{" if at == 0 else ", ") + json.dumps(name, ensure_ascii=False) + ": " for at, name in enumerate(names)]
    decode = json.JSONDecoder().raw_decode
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text, at, row = line.decode(), 0, []
            for start in before:
                if not text.startswith(start, at):
                    raise _changed(path, f"line {number}: there is no {start.strip(', ')!r} where it was written")
                end = decode(text, at + len(start))[1]
                row.append(text[at + len(start) : end])
                at = end
            if text[at:] != "}\n":
                raise _changed(path, f"line {number} does not end as it was written")
            yield row


def _csv_rows(path: Path, names: Sequence[str], delimiter: str) -> Iterator[list[str]]:
    with path.open("rb") as stream:
        reader = Delimited(stream, str(path), delimiter)
        if reader.names != tuple(names):
            raise _changed(path, f"its columns are {', '.join(reader.names)}")
        for line, record, _ in reader:
            _, bad = reader.columns([record], names)
            if bad:
                raise _changed(path, f"line {line}: {bad[0]}")
            yield record


def _table(rows: list[list[str]], kind: str, schema: pa.Schema, output: OutputColumns) -> pa.Table:
    columns = dict(zip(schema.names, map(list, zip(*rows, strict=True)), strict=True))
    is_json_text = kind == "jsonl"
    fields = [(json_field if is_json_text else _text_field)(name) for name in schema.names[: -len(output.fields)]]
    arrays = [pa.array(_nulled(columns[f.name]) if is_json_text else columns[f.name], pa.string()) for f in fields]
    failed = [error not in ("", "null") for error in columns["error"]]
    for field in output.fields:
        values: list[Any] = columns[field.name]
        if not is_json_text:
            values = [_parsed(text, field, is_null) for text, is_null in zip(values, failed, strict=True)]
        elif is_json(field):
            values = _nulled(values)
        else:
            values = [json.loads(text) for text in values]
        fields.append(field)
        arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _text_field(name: str) -> pa.Field:
    return pa.field(name, pa.string())


def _nulled(texts: list[str]) -> list[str | None]:
    return [None if text == "null" else text for text in texts]


def _parsed(text: str, field: pa.Field, is_failed: bool) -> Any:
    """Read a CSV field of an added column; an empty one is null, unless it is the empty answer of a completed row."""
    if text == "":
        is_answer = pa.types.is_string(field.type) and field.name not in ("finish_reason", "error") and not is_failed
        return "" if is_answer and not is_json(field) else None
    if pa.types.is_string(field.type):
        return text
    return json.loads(text)

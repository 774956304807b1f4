"""The manifest: what an output is, so that a later run can tell whether it may go on with it.

Which rows are done is read from the names of the chunks and parts, not from here; only for a single file that is
complete, whose chunks are gone, the manifest says which rows it holds.

Runs on: client.
"""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from daskinfer.errors import FingerprintError, OutputError, SourceChangedError
from daskinfer.storage.base import FileInfo, Source
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals

__all__ = ["Manifest", "differences", "plain_values", "versions"]

_FORMAT = 1


@dataclass
class Manifest:
    """What stands in ``_manifest.json``.

    Attributes
    ----------
    source : str
        Name of the input.
    files : list of FileInfo
        In the order of their ids.
    digest : str
        Of input in memory.
    keep : list of str
    output_column, output_type : str
    schema : pyarrow.Schema
        Kept columns, then added ones.
    fingerprints : list of dict
        ``{"at": Unix time, "values": …}``, oldest first; more than one after a forced mix.
    created, updated : float
        Unix time.
    complete : bool
        Every row of the input is in the output.
    rows, failed : int
        In the output, when this was written.
    done : Intervals or None
        The rows in a single file that is finished.
    versions : dict of str to str
        Of what wrote it last.
    bytes : int or None
        Size of a single file that is finished.
    record : dict
        What the first run noted for those that resume it, such as the seed it drew.
    """

    source: str
    files: list[FileInfo]
    digest: str
    keep: list[str]
    output_column: str
    output_type: str
    schema: pa.Schema
    fingerprints: list[dict[str, Any]]
    created: float
    updated: float
    complete: bool = False
    rows: int = 0
    failed: int = 0
    done: Intervals | None = None
    versions: dict[str, str] = field(default_factory=dict)
    bytes: int | None = None
    record: dict[str, Any] = field(default_factory=dict)

    # ---------------------------------------------------------------- on disk

    def save(self, path: Path, temporary: Path, ops: FileOps) -> None:
        """Write it, atomically."""
        values = {"format": _FORMAT, **{k: v for k, v in vars(self).items() if k not in ("schema", "files", "done")}}
        values["files"] = [asdict(file) for file in self.files]
        values["columns"] = {part.name: str(part.type) for part in self.schema}
        values["schema"] = base64.b64encode(self.schema.serialize()).decode()
        values["done"] = None if self.done is None else [list(pair) for pair in self.done]
        with ops.writing(path, temporary) as file:
            file.write(json.dumps(values, indent=1, ensure_ascii=False).encode())

    @classmethod
    def load(cls, path: Path) -> Manifest | None:
        """Read it; None when there is none.

        Raises
        ------
        OutputError
            It cannot be read, or a newer version wrote it.
        """
        try:
            values = json.loads(path.read_bytes())
            if values.pop("format") != _FORMAT:
                raise OutputError(f"{path} was written by another version of daskinfer; use that, or overwrite=True")
            values.pop("columns")
            values["files"] = [FileInfo(**file) for file in values["files"]]
            values["schema"] = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["schema"])))
            values["done"] = None if values["done"] is None else Intervals(map(tuple, values["done"]))
            return cls(**values)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"{path} is damaged ({error}), so it is unknown what this output holds; "
                "start again with overwrite=True (--overwrite), or choose another output"
            ) from error

    # ---------------------------------------------------------------- may a run go on with it

    def check_source(self, source: Source) -> None:
        """Compare the input with the one the output was made from; then number its files in the same way.

        Raises
        ------
        SourceChangedError
            A file is missing or another one, or the rows in memory are others.
        """
        now = {file.path: file for file in source.files}
        for old in self.files:
            new = now.get(old.path)
            if new is None:
                raise SourceChangedError(old.path, "has disappeared from the input")
            if new.size != old.size:
                raise SourceChangedError(old.path, f"has changed (it had {old.size} bytes and now has {new.size})")
            if new.mtime != old.mtime:
                raise SourceChangedError(old.path, "was modified")
        if bool(self.files) != bool(now) or self.digest != source.digest:
            raise SourceChangedError(source.name, "has become another input (its first rows differ)")
        source.arrange(self.files)

    def check_columns(self, path: Path, keep: Sequence[str], output: tuple[str, str], schema: pa.Schema) -> None:
        """Compare the columns; they cannot be mixed, not even by force.

        Raises
        ------
        OutputError
        """
        old = {"keep": self.keep, "output column": self.output_column, "output type": self.output_type}
        new = {"keep": list(keep), "output column": output[0], "output type": output[1]}
        found = list(differences(old, new))
        if not found and not self.schema.equals(schema):
            types = [{field.name: str(field.type) for field in fields} for fields in (self.schema, schema)]
            pairs = {name: [kinds.get(name, "none") for kinds in types] for name in types[0] | types[1]}
            found = [f"column {name!r}: {a} → {b}" for name, (a, b) in pairs.items() if a != b]
            found = found or ["the columns have another order, or other properties"]
        if found:
            listed = "\n  ".join(found)
            raise OutputError(
                f"{path} was begun with other columns:\n  {listed}\n"
                "use the same columns, another output, or overwrite=True (--overwrite) to start again"
            )

    def check_fingerprint(self, path: Path, fingerprint: Mapping[str, Any], now: float, *, force: bool) -> None:
        """Compare the configuration with the last one; a forced mix is recorded.

        Raises
        ------
        FingerprintError
            It is another one, and ``force`` is not set.
        """
        values = plain_values(fingerprint)
        found = differences(self.fingerprints[-1]["values"], values)
        if found and not force:
            raise FingerprintError(str(path), found)
        if found:
            self.fingerprints.append({"at": now, "values": values})


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line per value that differs, nested ones by their dotted names."""
    one, other = _flat(old), _flat(new)
    return tuple(
        f"{key}: {_said(one, key)} → {_said(other, key)}"
        for key in sorted(one.keys() | other.keys())
        if key not in one or key not in other or one[key] != other[key]
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _said(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "(not set)"
    text = repr(values[key])
    return text if len(text) <= 120 else text[:118] + "…"


def versions() -> dict[str, str]:
    """Return the versions of what writes the output."""
    from importlib.metadata import version

    return {"daskinfer": version("daskinfer"), "pyarrow": pa.__version__, "python": platform.python_version()}


def plain_values(values: Mapping[str, Any]) -> Any:
    """Return values as they come back from JSON."""
    return json.loads(json.dumps(values, default=str))

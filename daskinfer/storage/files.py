"""Finding and opening input files: paths, folders, patterns, URLs, compression.

Runs on: client | worker.
"""

from __future__ import annotations

import gzip
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import pyarrow as pa

from daskinfer.errors import SourceError, describe
from daskinfer.storage.base import FileInfo

__all__ = ["KINDS", "FileSet", "find_files", "kind_of", "located", "without_secrets"]

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
_COMPRESSED = (".gz", ".zst")
_USER, _QUERY = re.compile(r"(?<=://)[^/@\s]*@"), re.compile(r"(://[^\s'\"?]*)\?[^\s'\"=]*=[^\s'\"]*")
_READABLE = "give .jsonl, .ndjson, .json (one object per line), .parquet, .csv or .tsv; text may end in .gz or .zst"


@dataclass(frozen=True)
class FileSet:
    """Files of one kind that are read as one input.

    Attributes
    ----------
    name : str
        The path, folder, pattern or URL that was asked for.
    kind : {"jsonl", "parquet", "csv", "tsv"}
    files : tuple of FileInfo
        Sorted by path.
    fs : fsspec file system or None
        None for local files.
    shape : {"file", "folder", "pattern"}
        How they were asked for, which says what else would become input.
    real : mapping of str to str
        URL without secrets → URL, where they differ.
    """

    name: str
    kind: str
    files: tuple[FileInfo, ...]
    fs: Any
    shape: str
    real: Mapping[str, str] = field(default_factory=dict, repr=False)

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Open a file for reading its uncompressed bytes.

        Raises
        ------
        SourceError
            It cannot be opened.
        """
        with ExitStack() as stack:
            try:
                place = self.real.get(path, path)
                opened = Path(path).open("rb") if self.fs is None else self.fs.open(place, "rb")  # noqa: SIM115 - next line
                raw = stack.enter_context(opened)
            except OSError as error:
                said = without_secrets(describe(error))
                reason = f"cannot be opened ({said}); check that it exists and is readable"
                raise SourceError(path, reason) from None
            if path.endswith(".gz"):
                raw = stack.enter_context(gzip.GzipFile(fileobj=raw))
            elif path.endswith(".zst"):
                packed = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
                raw = stack.enter_context(io.BufferedReader(packed))
            yield raw

    def claims(self, path: Path) -> bool:
        """Tell whether a file written at this local path would be one of these, or become one."""
        if self.fs is not None:
            return False
        real = path.resolve()
        if any(real == Path(file.path).resolve() or _same(path, Path(file.path)) for file in self.files):
            return True
        if self.shape == "folder":
            return real.is_relative_to(Path(self.name).resolve())
        return self.shape == "pattern" and _matches(located(path), Path(self.name))


def kind_of(path: str) -> str | None:
    """Return what kind of file a name stands for, or None."""
    name = PurePath(path.lower())
    packed = name.suffix in _COMPRESSED
    kind = KINDS.get(name.with_suffix("").suffix if packed else name.suffix)
    return None if packed and kind == "parquet" else kind


def located(path: Path) -> Path:
    """Return an absolute path without links in its folders; a link at its end stays, for its name says the kind."""
    path = path.expanduser()
    return path.parent.resolve() / path.name if path.name else path.resolve()


def find_files(path: str) -> FileSet:
    """Find the files that a path, folder, glob pattern or fsspec URL stands for.

    Raises
    ------
    SourceError
        There are none, or they cannot be read together.
    """
    path = path.removeprefix("file://")
    if "://" in path:
        return _find_remote(path)
    if _is_pattern(path) and not Path(path).exists():
        pattern = str(located(Path(path)))
        listed = glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        return _found(pattern, sorted(p for p in listed if _wanted(p) and not Path(p).is_dir()), None, "pattern")
    place = located(Path(path))
    if place.is_dir():
        return _found(str(place), _folder(str(place), [(e.name, e.is_dir()) for e in place.iterdir()]), None, "folder")
    return _found(str(place), [str(place)] if place.is_symlink() or place.exists() else [], None, "file")


def _find_remote(url: str) -> FileSet:
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
        if _is_pattern(path):
            listed = [fs.unstrip_protocol(p) for p in sorted(fs.glob(path)) if _wanted(p) and not fs.isdir(p)]
            return _found(url, listed, fs, "pattern")
        if fs.isdir(path):
            entries = [(PurePath(e["name"]).name, e["type"] == "directory") for e in fs.ls(path, detail=True)]
            return _found(url, _folder(fs.unstrip_protocol(path), entries), fs, "folder")
        return _found(url, [fs.unstrip_protocol(path)] if fs.exists(path) else [], fs, "file")
    except (ImportError, ValueError, OSError) as error:
        if isinstance(error, SourceError):
            raise
        said = without_secrets(describe(error))
        raise SourceError(
            without_secrets(url), f"cannot be reached ({said}); check the address and install what its protocol needs"
        ) from None


def without_secrets(text: str) -> str:
    """Return a URL, or a text with some, without users, passwords and query parameters such as signatures.

    Examples
    --------
    >>> without_secrets("sftp://me:secret@host/a.csv and https://host/b.csv?sig=secret")
    'sftp://host/a.csv and https://host/b.csv'
    """
    return _QUERY.sub(r"\1", _USER.sub("", text))


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _wanted(path: str) -> bool:
    return not PurePath(path).name.startswith(("_", "."))


def _folder(folder: str, entries: Sequence[tuple[str, bool]]) -> list[str]:
    visible = [(name, is_dir) for name, is_dir in entries if _wanted(name)]
    nested = sorted(name for name, is_dir in visible if is_dir)
    if nested:
        raise SourceError(
            folder,
            f"holds folders ({', '.join(nested[:3])}), whose files would be left out; "
            "name the files with a pattern, such as 'folder/**/*.parquet'",
        )
    return [f"{folder.rstrip('/')}/{name}" for name in sorted(name for name, _ in visible)]


def _found(name: str, addresses: list[str], fs: Any, shape: str) -> FileSet:
    plain = {address: address if fs is None else without_secrets(address) for address in addresses}
    name, paths = name if fs is None else without_secrets(name), list(plain.values())
    if not paths:
        what = {"file": "does not exist", "folder": "holds no input files", "pattern": "matches no files"}[shape]
        raise SourceError(name, f"{what}; {_READABLE}")
    kinds: dict[str, str] = {}
    for path in paths:
        kind = kind_of(path)
        if kind is None:
            raise SourceError(path, f"is of no known kind; {_READABLE}")
        kinds.setdefault(kind, path)
    if len(kinds) > 1:
        listed = " and ".join(PurePath(path).name for path in kinds.values())
        raise SourceError(
            name, f"holds files of different kinds ({listed}); give each kind its own folder, or a pattern"
        )
    real = {path: address for address, path in plain.items() if path != address}
    return FileSet(
        name, next(iter(kinds)), tuple(_look(path, address, fs) for address, path in plain.items()), fs, shape, real
    )


def _look(path: str, address: str, fs: Any) -> FileInfo:
    if fs is not None:
        info = fs.info(address)
        found = (info[k] for k in ("mtime", "LastModified", "last_modified", "updated", "created") if info.get(k))
        changed = next(found, None)
        mtime = changed.timestamp() if isinstance(changed, datetime) else changed
        return FileInfo(path, int(info.get("size") or 0), float(mtime) if isinstance(mtime, int | float) else None)
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise SourceError(path, f"cannot be read ({describe(error)}); check the path and its rights") from None
    if not os.access(path, os.R_OK):
        raise SourceError(path, "cannot be read: permission denied; change its rights, or run as its owner")
    return FileInfo(path, stat.st_size, stat.st_mtime)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _matches(path: Path, pattern: Path) -> bool:
    if "**" in pattern.parts:
        return fnmatchcase(str(path), str(pattern))
    return len(path.parts) == len(pattern.parts) and all(map(fnmatchcase, path.parts, pattern.parts))

"""In-progress parts: finished rows of chunks that are not complete, safe on disk a few seconds after they came.

A part holds row ids and the output's columns. Its name says which rows it can hold, and for contiguous ones exactly which;
the footer of the others does.
A row may be in two parts, when it was tried again; the later part counts.

Runs on: client.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from daskinfer.checkpoint.layout import Layout, PartName
from daskinfer.checkpoint.loaded import Loaded, Part, PartFile
from daskinfer.checkpoint.parquetio import (
    FOOTER_BYTES,
    ends_of,
    footer_says,
    is_damage,
    is_whole,
    merged,
    read_table,
    runs_of,
    runs_said,
    write_part,
)
from daskinfer.errors import OutputError, describe
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals

__all__ = ["Parts"]

logger = logging.getLogger(__name__)
_ID = pa.field("daskinfer.row", pa.int64())
_MANY_RUNS = 1 << 17  # so many more are held before they are merged: 2 MB
_SPURT = 256  # parts whose runs are worked out at once
_Listed: TypeAlias = tuple[Path, PartName, str, bytes, int]  # folder, name, path, end and size of a part's file


class Parts:
    """The parts of one kind: of unfinished chunks, or (``retry``) new results for published rows.

    Parameters
    ----------
    layout : Layout
    ops : FileOps
    schema : pyarrow.Schema
        Of the parts, without the ids.
    retry : bool
    """

    def __init__(self, layout: Layout, ops: FileOps, schema: pa.Schema, *, retry: bool = False) -> None:
        self._layout, self._ops, self._schema = layout, ops, schema
        self._prefix = "retry-" if retry else ""
        self._parts: list[Part] = []
        self._number = 0

    def scan(self, published: Intervals) -> Intervals:
        """Find what is there and return its rows without those that are published.

        Of a contiguous part the name is enough, of others the footer. Torn ones are deleted, to be redone; so are those with
        nothing unpublished.
        """
        self._parts = []
        held: list[Any] = []
        waiting = 0
        listed, named = tee(self._listed())
        ends = ends_of((f"{folder}/{name}" for folder, name in named), FOOTER_BYTES)
        both = zip(listed, ends, strict=True)
        while spurt := [(*at, *end) for at, end in islice(both, _SPURT)]:
            fresh: list[Any] = []
            for (folder, name, path, _, _), runs in zip(spurt, _runs_of_all(spurt), strict=True):
                self._number = max(self._number, name.number + 1)
                if runs is None:
                    logger.warning("%s is torn; it is deleted and its rows will be redone", path)
                    self._ops.remove(Path(path))
                    continue
                left, kept = name.count, runs
                if published.overlaps(name.first, name.last + 1):
                    kept = np.array(list(Intervals(runs.tolist()).difference(published)), np.int64).reshape(-1, 2)
                    left = int((kept[:, 1] - kept[:, 0]).sum())
                if not left:
                    self._ops.remove(Path(path))
                    continue
                self._parts.append(Part(folder, name.number, name.first, name.last, name.count, left))
                fresh.append(kept)
            held.append(merged(fresh))  # at once: of neighbours, which is quick, and few are left
            waiting += len(held[-1])
            if waiting > max(_MANY_RUNS, len(held[0])):
                held, waiting = [merged(held)], 0
        self._parts.sort(key=lambda part: part.first)
        return Intervals.from_runs(*merged(held).T)

    def write(self, chunk: str, ids: Any, table: pa.Table) -> None:
        """Put finished rows, sorted by id, on disk."""
        name = PartName(self._number, int(ids[0]), int(ids[-1]), len(ids))
        folder = self._layout.parts / f"{self._prefix}{chunk}"
        self._ops.make_folder(folder)
        columns = [pa.array(ids, pa.int64()), *table.columns]
        whole = pa.Table.from_arrays(columns, schema=pa.schema([_ID, *self._schema]))
        write_part(folder / str(name), folder / f"{name}.tmp", whole, self._ops, ids)
        self._number += 1
        part = Part(folder, name.number, name.first, name.last, name.count, name.count)
        insort(self._parts, part, key=lambda part: part.first)

    def load(self, first: int, last: int, fresh: tuple[Any, pa.Table] | None = None) -> Loaded:
        """Find the rows with ids from ``first`` to ``last``, in order; they are read as they are asked for.

        Parameters
        ----------
        first, last : int
        fresh : tuple of numpy array and pyarrow.Table, or None
            Further rows, later than those in parts: their ids, and the table.

        Raises
        ------
        OutputError
            A part is damaged; it is set aside, and a resumed run redoes its rows.
        """
        wanted = [part for part in self._upto(last) if part.last >= first]
        wanted.sort(key=lambda part: part.number)
        files = [PartFile(part, self._schema, partial(self._reading, part)) for part in wanted]
        return Loaded(files, self._schema, first, last, fresh)

    def settle(self, loaded: Loaded, first: int, last: int) -> None:
        """Take note that the loaded rows with ids from ``first`` to ``last`` are published.

        Parts with nothing else are deleted.
        """
        gone = set()
        for part, count in loaded.counts(first, last):
            part.left -= count
            if part.left <= 0:
                gone.add(part)
        self._parts = [part for part in self._parts if part not in gone]
        self._delete(gone)

    def errors(self) -> Intervals:
        """Return the rows whose latest result is an error."""
        failed: set[int] = set()
        for part in sorted(self._parts, key=lambda part: part.number):
            with self._reading(part):
                table = read_table(part.path, [_ID.name, "error"])
            ids = table.column(_ID.name).to_numpy()
            is_failed = np.asarray(table.column("error").is_valid())
            failed.difference_update(ids[~is_failed].tolist())
            failed.update(ids[is_failed].tolist())
        return Intervals.from_ids(sorted(failed))

    def remove_all(self) -> None:
        """Delete all parts."""
        self._parts, gone = [], self._parts
        self._delete(gone)

    # ---------------------------------------------------------------- how

    def _delete(self, parts: Collection[Part]) -> None:
        try:
            for part in parts:
                self._ops.remove(part.path)
            for folder in {part.folder for part in parts}:
                self._ops.remove_folder(folder)
        except OSError as error:  # it does no harm: their rows are published, so the next run passes over them
            logger.warning("%s: parts could not be deleted (%s)", self._layout.parts, error)

    def _listed(self) -> Iterator[tuple[Path, PartName]]:
        if not self._layout.parts.is_dir():
            return
        for folder in sorted(self._layout.parts.iterdir()):
            if folder.is_dir() and folder.name.startswith("retry-") == bool(self._prefix):
                for entry in sorted(os.listdir(folder)):  # noqa: PTH208 - there may be very many, and no paths are wanted
                    name = PartName.parse(entry)
                    if name is not None:
                        yield folder, name

    def _upto(self, last: int) -> list[Part]:
        return self._parts[: bisect_right(self._parts, last, key=lambda part: part.first)]

    @contextmanager
    def _reading(self, part: Part) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise OutputError(
                f"{part.path} is gone; was something removed from {self._layout.parts}? Run again with resume=True "
                f"(--resume): its {part.count} rows will be redone"
            ) from error
        except (OSError, ValueError, pa.ArrowException) as error:
            if not is_damage(error):
                raise
            with suppress(OSError):
                self._ops.replace(part.path, part.path.with_name(f"damaged-{part.path.name}"))
            raise OutputError(
                f"{part.path} is damaged ({describe(error)}) and was set aside; run again with resume=True (--resume): "
                f"its {part.count} rows will be redone"
            ) from error


def _runs_of_all(listed: Sequence[_Listed]) -> list[Any]:
    """Return the runs of ids in each part, or None for a torn one."""
    found: list[Any] = [None] * len(listed)
    opened: list[tuple[int, tuple[int, Any]]] = []
    for at, (_, name, path, end, size) in enumerate(listed):
        if name.is_contiguous:
            if is_whole(end, size):
                found[at] = np.array([[name.first, name.last + 1]], np.int64)
        elif (said := footer_says(path, end, size)) is not None:
            opened.append((at, said))
        else:
            found[at] = _runs_inside(path)
    if opened:
        runs, bounds = runs_said([said for _, said in opened])
        names = [listed[at][1] for at, _ in opened]
        promised = np.array([(name.first, name.last + 1, name.count) for name in names])
        counts = np.add.reduceat(runs[:, 1] - runs[:, 0], bounds[:-1])
        fits = (np.stack((runs[bounds[:-1], 0], runs[bounds[1:] - 1, 1], counts), axis=1) == promised).all(axis=1)
        for (at, _), part, fit in zip(opened, np.split(runs, bounds[1:-1]), fits.tolist(), strict=True):
            found[at] = part if fit else _runs_inside(listed[at][2])
    return found


def _runs_inside(path: str) -> Any:
    """Return the runs of ids in a part whose footer does not say, as in those of earlier versions; None if it is torn."""
    try:
        return runs_of(read_table(Path(path), [_ID.name]).column(0).to_numpy())
    except (OSError, ValueError, pa.ArrowException) as error:
        if not is_damage(error):
            raise
        return None

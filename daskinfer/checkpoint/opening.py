"""Opening an output: may this run write there, and what is done already?

Everything here happens before a model is loaded. When it refuses, the output is as it was.

Runs on: client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from daskinfer.checkpoint.layout import EMPTY_DATA, Layout, data_span, locate
from daskinfer.checkpoint.lock import Lock
from daskinfer.checkpoint.manifest import Manifest, plain_values
from daskinfer.checkpoint.opened import Opened, sweep, wipe
from daskinfer.checkpoint.parquetio import as_stored
from daskinfer.checkpoint.parts import Parts
from daskinfer.checkpoint.policy import CheckpointPolicy
from daskinfer.checkpoint.published import Published
from daskinfer.checkpoint.recovery import recover
from daskinfer.errors import ConfigError, OutputClashError, OutputError, OutputExistsError, describe
from daskinfer.storage.base import FILE_ROWS, Source
from daskinfer.storage.fileops import FileOps
from daskinfer.storage.intervals import Intervals
from daskinfer.storage.outputs import OutputColumns

__all__ = ["Opening"]


@dataclass(frozen=True)
class Opening:
    """What a run asks of an output.

    Parameters
    ----------
    source : Source
        Its files get the order of the earlier run, if there was one.
    fingerprint : mapping
        What decides the output of a row; JSON-able.
    now : float
        Unix time, as for all ``now`` here.
    keep : sequence of str or None
        Input columns in the output; None: all of them.
    output_column, output_type : str
        Name and type of the output, see :func:`daskinfer.storage.outputs.arrow_type`.
    resume : bool
        Go on with what is there; start if there is nothing.
    overwrite : bool
        Delete what a run of ours left there.
    force : bool
        Resume with another fingerprint; both are recorded.
    retry_failed : bool
        Run the failed rows again; only them, unless ``resume`` is set too.
    policy : CheckpointPolicy
    ops : FileOps
        How files are written.
    record : mapping
        JSON-able; the first run's is kept, and given to all that resume it as ``Checkpoint.record``.
    """

    source: Source
    fingerprint: Mapping[str, Any]
    now: float
    keep: Sequence[str] | None
    output_column: str
    output_type: str
    resume: bool
    overwrite: bool
    force: bool
    retry_failed: bool
    policy: CheckpointPolicy
    ops: FileOps
    record: Mapping[str, Any] = field(default_factory=dict)

    def open(self, sink: str) -> Opened:
        """Take the output.

        Raises
        ------
        ConfigError
            Settings that contradict each other.
        MissingColumnError, SourceError
            A kept column that the input does not have, or input that cannot be read.
        OutputError
            Its subclasses say why not: OutputClashError, OutputExistsError, OutputLockedError, FingerprintError,
            SourceChangedError. The output is left as it was.
        """
        if self.overwrite and (self.resume or self.retry_failed):
            raise ConfigError("overwrite=True starts again, resume=True and retry_failed=True go on; give one of them")
        layout = locate(sink)
        output = OutputColumns(self.output_column, self.output_type)
        self._check_names(output)
        self._check_apart(layout)
        above = next(folder for folder in (layout.folder, *layout.folder.parents) if folder.exists())
        lock = None
        try:
            lock = self._lock(layout)
            return self._inside(layout, lock, output)
        except BaseException:
            if lock is not None:
                lock.release()
            _remove_empty(layout, above)
            raise

    # ---------------------------------------------------------------- checks

    def _check_names(self, output: OutputColumns) -> None:
        kept = self.source.columns if self.keep is None else self.keep
        clashing = tuple(name for name in kept if name in output.names)
        if clashing:
            raise OutputClashError(clashing)
        doubled = next((name for name in kept if list(kept).count(name) > 1), None)
        if doubled is not None:
            raise ConfigError(f"keep={list(kept)!r}: names {doubled!r} twice")
        if output.column in output.names[1:]:
            raise ConfigError(
                f"output_column={output.column!r}: is the name of another added column; choose another one"
            )
        self.source.require(kept, "keep")
        _ = output.fields

    def _check_apart(self, layout: Layout) -> None:
        target = layout.target
        places = (target,) if layout.is_file else (target, layout.data(0, 0))
        inside = None if layout.is_file else target.resolve()
        for file in self.source.files:
            if inside is not None and "://" not in file.path and Path(file.path).resolve().is_relative_to(inside):
                raise OutputError(f"{target} holds the input file {file.path}; write to a folder of its own")
        if any(self.source.claims(place) for place in places):
            raise OutputError(
                f"{target} is, or would become, part of the input {self.source.name}; write to another place"
            )

    def _lock(self, layout: Layout) -> Lock:
        policy = self.policy
        try:
            self.ops.make_folder(layout.folder)
            return Lock(layout.lock, layout.target, now=self.now, beat_s=policy.beat_s, stale_s=policy.stale_s)
        except OSError as error:
            raise _unwritable(layout, error) from error

    def _goes_on(self, layout: Layout, manifest: Manifest | None) -> bool:
        """Tell whether to go on with what is there (else to start); refuse where the run did not say what to do with it."""
        if not layout.is_file:
            strange = sorted(p.name for p in layout.folder.iterdir() if not _is_ours(p.name))
            if strange:
                raise OutputError(
                    f"{layout.target} holds files that are not daskinfer's ({', '.join(strange[:3])}); choose another folder"
                )
        has_file = layout.is_file and layout.target.exists()
        has_rows = _has_chunks(layout) or (has_file and manifest is not None and bool(manifest.done))
        if self.overwrite or not (has_rows or has_file):
            return False
        if not (self.resume or self.retry_failed):
            raise OutputExistsError(str(layout.target), _rows_there(layout, manifest))
        if manifest is None or (not has_rows and manifest.rows):
            raise OutputError(
                f"{layout.target} was not written by daskinfer, or its manifest {layout.manifest} is gone, so it cannot be "
                "continued; choose another output, or replace it with overwrite=True (--overwrite)"
            )
        return has_rows

    # ---------------------------------------------------------------- the way in

    def _inside(self, layout: Layout, lock: Lock, output: OutputColumns) -> Opened:
        found = self._manifest(layout)
        goes_on = self._goes_on(layout, found)
        if goes_on and found is not None:
            found.check_source(self.source)
        keep = list(self.source.columns if self.keep is None else self.keep)
        kept = self.source.schema(keep)
        schema = pa.schema([*kept, *output.fields])
        stored = as_stored(schema)
        if goes_on and found is not None:
            found.check_columns(layout.target, keep, (output.column, output.description), schema)
            found.check_fingerprint(layout.target, self.fingerprint, self.now, force=self.force)
        added = pa.schema(list(stored)[len(keep) :])
        opened = Opened(
            layout=layout,
            ops=self.ops,
            policy=self.policy,
            lock=lock,
            manifest=found if goes_on and found is not None else self._new_manifest(output, keep, schema),
            source=self.source,
            output=output,
            kept_schema=kept,
            added=added,
            stored=stored,
            published=Published(layout, self.ops),
            parts=Parts(layout, self.ops, stored),
            retries=Parts(layout, self.ops, added, retry=True),
            now=self.now,
            done=Intervals(),
        )
        self._settle_in(opened, goes_on=goes_on)
        return opened

    def _settle_in(self, opened: Opened, *, goes_on: bool) -> None:
        """Clear what is not wanted, find out what is done, and write the manifest: after this the output is ours."""
        try:
            sweep(opened.layout, self.ops)
            if goes_on:
                recover(opened, resume=self.resume, retry_failed=self.retry_failed)
            else:
                wipe(opened.layout, self.ops)
                opened.remaining = self.source.total
            opened.save()
        except OSError as error:
            raise _unwritable(opened.layout, error) from error

    def _manifest(self, layout: Layout) -> Manifest | None:
        try:
            return Manifest.load(layout.manifest)
        except OutputError:
            if self.overwrite:
                return None
            raise

    def _new_manifest(self, output: OutputColumns, keep: list[str], schema: pa.Schema) -> Manifest:
        return Manifest(
            source=self.source.name,
            files=list(self.source.files),
            digest=self.source.digest,
            keep=keep,
            output_column=output.column,
            output_type=output.description,
            schema=schema,
            fingerprints=[{"at": self.now, "values": plain_values(self.fingerprint)}],
            created=self.now,
            updated=self.now,
            record=dict(self.record),
        )


def _unwritable(layout: Layout, error: OSError) -> OutputError:
    return OutputError(
        f"{layout.target} cannot be written ({describe(error)}); make room, change its rights, or choose another place"
    )


def _is_ours(name: str) -> bool:
    return name.startswith(("_", ".")) or name == EMPTY_DATA or data_span(name) is not None


def _has_chunks(layout: Layout) -> bool:
    return any(data_span(path.name) for path in layout.folder.iterdir()) or any(layout.parts.glob("*/*.part"))


def _rows_there(layout: Layout, manifest: Manifest | None) -> int:
    """Return how many rows are done, roughly: for a message."""
    if manifest is not None and manifest.done is not None:
        return manifest.done.count
    spans = (data_span(path.name) for path in layout.folder.iterdir())
    return max(manifest.rows if manifest else 0, sum(s[1] - s[0] + 1 for s in spans if s and s[1] - s[0] < FILE_ROWS))


def _remove_empty(layout: Layout, above: Path) -> None:
    """Remove the folders that were made for nothing."""
    for folder in (layout.parts, layout.folder, *layout.folder.parents):
        if folder == above:
            break
        with suppress(OSError):
            folder.rmdir()

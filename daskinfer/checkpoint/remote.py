"""Output at an fsspec URL: written on this machine as always, and mirrored.

Object stores have no renames and no locks to build on, but a file that is put there appears at once and whole. So the run
writes to a folder of this machine, and each published chunk is copied when it is complete. What is at the URL is the
truth: where it and the local folder disagree, the local folder is made again from it. Finished rows of chunks that are not
published yet are on this machine only, until the run ends or is interrupted.

Runs on: client.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from daskinfer.checkpoint.layout import EMPTY_DATA, data_span
from daskinfer.checkpoint.lock import UNDELETED, Owner, is_stale, parse_owner, this_process
from daskinfer.checkpoint.policy import CheckpointPolicy
from daskinfer.errors import OutputError, OutputExistsError, OutputLockedError, describe
from daskinfer.folders import cache_folder
from daskinfer.storage.base import Source
from daskinfer.storage.files import kind_of, without_secrets

__all__ = ["Place", "Remote", "output_at"]

logger = logging.getLogger(__name__)

MANIFEST, LOCK, PUSHED = "_manifest.json", "_lock", ".pushed.json"


class Place:
    """Where a run writes: the folder or file itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def push(self, now: float) -> None:
        """Copy what is new to where it belongs; nothing for a local path."""


class Remote(Place):
    """A folder at a URL and its local double, held under a lock.

    Parameters
    ----------
    url : str
        A folder, in the syntax of fsspec. Messages leave out users, passwords and signatures.
    now : float
        Unix time, as for all ``now`` here.
    overwrite : bool
        What is there is not wanted.

    Raises
    ------
    OutputError
        The URL cannot be reached, names a single file, or holds files that are not ours.
    OutputLockedError
        Another driver writes there.
    """

    def __init__(self, url: str, now: float, *, overwrite: bool = False) -> None:
        if kind_of(url.rstrip("/").rsplit("/", 1)[-1]) is not None and not url.endswith("/"):
            raise OutputError(
                f"{without_secrets(url)}: output at a URL is a folder of Parquet files, since one file there could not be "
                "resumed; end the URL in a slash, or write the file to a local path and copy it"
            )
        self._fs, self._root = _file_system(url)
        self.url = without_secrets(url.rstrip("/") + "/")
        super().__init__(str(_double(self.url)))
        self._policy = CheckpointPolicy()
        self._me = this_process(now)
        self._ahead = now - time.time()  # of the caller's clock
        self._pushed_at = self._beaten = now
        self._mirror = ThreadPoolExecutor(1, "daskinfer-mirror")
        self._copying: Future[None] | None = None
        with self._reached():
            there = self._there()
            self._lock(now)
        try:
            with self._reached():
                self._agree(there, overwrite=overwrite)
        except BaseException:
            self._unlock()
            raise

    # ---------------------------------------------------------------- while the run goes on

    def push(self, now: float) -> None:
        """Copy what is new, in a thread of its own; raises what the last copy raised.

        Everything is safe in the local double meanwhile, so a store that fails is tried again; only :meth:`finish` insists.

        Raises
        ------
        OutputLockedError
            Another driver took the output over.
        """
        if self._copying is None:
            if now - self._pushed_at >= self._policy.beat_s or now < self._pushed_at:
                self._pushed_at = now
                self._copying = self._mirror.submit(self._copy)
        elif self._copying.done():
            error = self._copying.exception()
            self._copying = None
            if isinstance(error, OutputLockedError):
                raise error
            if error is not None:
                logger.warning("%s: not copied yet, and tried again (%s)", self.url, without_secrets(describe(error)))

    def finish(self, *, complete: bool) -> None:
        """Copy the rest and give the lock back; the local double goes when nothing is left that is only there.

        Raises
        ------
        OutputError
            The store cannot be written, or another driver took the output over; the local double stays.
        """
        self._mirror.shutdown(wait=True)  # from here on nobody else copies
        try:
            with self._reached():
                self._copy()
        finally:
            self._unlock()
        if complete and not any((Path(self.path) / "_parts").rglob("*.part")):
            shutil.rmtree(self.path, ignore_errors=True)

    def _copy(self) -> None:
        """Make the URL equal to the local folder: what is gone first, then chunks, then the manifest."""
        folder = Path(self.path)
        if not (folder / MANIFEST).exists():  # the run was refused before it began: what is at the URL stays
            return
        self._beat(at_once=True)
        names = sorted(filter(_mirrored, (p.name for p in folder.iterdir())), key=lambda name: (name == MANIFEST, name))
        for name in set(self._pushed) - set(names):
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")
            del self._pushed[name]
        for name in names:
            self._beat()
            with suppress(FileNotFoundError):  # an empty output's file goes when there are rows
                state = (folder / name).stat()
                mark = [state.st_size, state.st_mtime_ns]
                if self._pushed.get(name) != mark:
                    self._fs.put_file(str(folder / name), f"{self._root}/{name}")
                    self._pushed[name] = mark
        (folder / PUSHED).write_text(json.dumps(self._pushed))

    # ---------------------------------------------------------------- the way in

    def _there(self) -> dict[str, int]:
        """Return the files at the URL and their sizes; refuse those that are not ours."""
        self._fs.invalidate_cache()
        try:
            listed = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            listed = []
        found = {Path(entry["name"]).name: int(entry.get("size") or 0) for entry in listed if entry["type"] == "file"}
        strange = sorted(name for name in found if not (_mirrored(name) or name == LOCK or name.startswith(("_", "."))))
        if strange:
            raise OutputError(
                f"{self.url} holds files that are not daskinfer's ({', '.join(strange[:3])}); choose another folder"
            )
        return {name: size for name, size in found.items() if _mirrored(name)}

    def _agree(self, there: dict[str, int], *, overwrite: bool) -> None:
        """Make the local folder say what the URL says."""
        folder = Path(self.path)
        self._pushed: dict[str, list[int]] = {}
        with suppress(OSError, ValueError):
            self._pushed = json.loads((folder / PUSHED).read_text())
        if overwrite or not self._agrees(there):
            if folder.exists():
                logger.info("%s: its local double %s is made again", self.url, folder)
                shutil.rmtree(folder)
            self._pushed = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in there.items():
            self._beat()
            path = folder / name
            if overwrite:
                self._pushed[name] = [size, 0]  # goes at the first copy
            elif not path.exists():
                self._fs.get_file(f"{self._root}/{name}", f"{path}.tmp")
                path.with_name(f"{name}.tmp").replace(path)
                state = path.stat()
                self._pushed[name] = [state.st_size, state.st_mtime_ns]

    def _agrees(self, there: dict[str, int]) -> bool:
        folder = Path(self.path)
        if not folder.exists():
            return True
        if any(name not in there for name in self._pushed):
            return False
        if MANIFEST in there and _created(self._fs.cat_file(f"{self._root}/{MANIFEST}")) != _created_in(folder):
            return False
        sizes = {name: (folder / name).stat().st_size for name in there if (folder / name).exists()}
        return all(name == MANIFEST or sizes.get(name) == size for name, size in there.items())

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OutputError:
            raise
        except Exception as error:  # noqa: BLE001 - every store has exceptions of its own
            raise OutputError(
                f"{self.url} cannot be reached or written ({without_secrets(describe(error))}); check the address, the "
                "rights, and the credentials that this protocol takes from its environment"
            ) from None  # the cause may hold the whole URL

    # ---------------------------------------------------------------- the lock

    def _lock(self, now: float) -> None:
        owner, at = self._owner()
        if owner is not None:
            age = max(now - at, 0.0)
            if owner.token not in UNDELETED and not is_stale(owner, age, self._policy.stale_s, self._me):
                raise OutputLockedError(self.url, str(owner), age)
            logger.warning("%s: taking over from %s, which is gone", self.url, owner)
            self._fs.rm_file(f"{self._root}/{LOCK}")
        try:
            self._put_lock(now, mode="create")
        except FileExistsError:
            raise OutputLockedError(self.url, str(self._owner()[0] or "another driver"), 0.0) from None

    def _put_lock(self, now: float, mode: str = "overwrite") -> None:
        value = json.dumps({**asdict(self._me), "at": now}).encode()
        self._fs.pipe_file(f"{self._root}/{LOCK}", value, mode=mode)

    def _beat(self, *, at_once: bool = False) -> None:
        """Show that this driver lives; cheap when called often.

        Raises
        ------
        OutputLockedError
            Another driver took the output over, since this one had not been heard of for too long.
        """
        now = time.time() + self._ahead
        if not at_once and 0 <= now - self._beaten < self._policy.beat_s:
            return
        owner, at = self._owner()
        if owner is None or owner.token != self._me.token:
            raise OutputLockedError(self.url, str(owner or "another driver, which has ended since"), max(now - at, 0.0))
        self._put_lock(now)
        self._beaten = now

    def _owner(self) -> tuple[Owner | None, float]:
        try:
            found: dict[str, Any] = json.loads(self._fs.cat_file(f"{self._root}/{LOCK}"))
            at = float(found.pop("at"))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, 0.0
        return parse_owner(json.dumps(found).encode()), at

    def _unlock(self) -> None:
        try:
            owner, _ = self._owner()
            if owner is not None and owner.token == self._me.token:
                self._fs.rm_file(f"{self._root}/{LOCK}")
        except Exception as error:  # noqa: BLE001 - every store has its own; others wait until the lock is old, we need not
            UNDELETED.add(self._me.token)
            logger.warning("%s: the lock stays for a while (%s)", self.url, without_secrets(describe(error)))


@contextmanager
def output_at(sink: str, source: Source, *, now: float, overwrite: bool) -> Iterator[Place]:
    """Give the place to write to, and see to it that what was written ends up where it was asked for.

    Raises
    ------
    OutputError
        See :class:`Remote`. Messages about the local double name the URL.
    """
    if "://" not in sink:
        yield Place(sink)
        return
    fs, root = _file_system(sink)
    inside = str(fs.unstrip_protocol(root)) + "/"
    if any(file.path.startswith(inside) for file in source.files):
        raise OutputError(
            f"{without_secrets(sink)} is, or would become, part of the input {source.name}; write to another place"
        )
    place = Remote(sink, now, overwrite=overwrite)
    try:
        yield place
    except BaseException as error:
        try:
            place.finish(complete=False)
        except Exception as other:  # noqa: BLE001 - why the run stops matters more
            error.add_note(
                f"and {place.url} is behind its local double {place.path}: {without_secrets(describe(other))}"
            )
        if isinstance(error, OutputError):
            raise _renamed(error, place) from error.__cause__
        raise
    place.finish(complete=True)


def _renamed(error: OutputError, place: Remote) -> OutputError:
    """Return an error about the local double as one about the URL."""
    if isinstance(error, OutputExistsError):
        return OutputExistsError(place.url, error.done)
    if isinstance(error, OutputLockedError):
        return OutputLockedError(place.url, error.owner, error.age_s)
    if type(error) is OutputError:
        return OutputError(str(error).replace(place.path, place.url.rstrip("/")))
    return error


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise OutputError(
            f"{without_secrets(url)} cannot be reached ({without_secrets(describe(error))}); check the address and install "
            "what its protocol needs"
        ) from None
    return fs, str(root).rstrip("/")


def _double(url: str) -> Path:
    name = url.rstrip("/").rsplit("/", 1)[-1]
    return cache_folder() / "outputs" / f"{name}-{sha256(url.encode()).hexdigest()[:16]}"


def _mirrored(name: str) -> bool:
    return name in (MANIFEST, EMPTY_DATA) or data_span(name) is not None


def _created(text: bytes) -> Any:
    try:
        return json.loads(text).get("created")
    except (ValueError, AttributeError):
        return None


def _created_in(folder: Path) -> Any:
    try:
        return _created((folder / MANIFEST).read_bytes())
    except OSError:
        return None

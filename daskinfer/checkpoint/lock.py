"""One driver per output: a lock file with its owner, kept fresh by a heartbeat.

On the same host a lock is stale when its process is gone. On another host, whose processes cannot be seen, it is stale
when its heartbeat (the file's modification time) is too old. A driver whose lock was taken over in this way notices at
its next heartbeat and stops.

Runs on: client.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import psutil

from daskinfer.errors import OutputLockedError

__all__ = ["UNDELETED", "Lock", "Owner", "is_stale", "parse_owner", "this_process"]

logger = logging.getLogger(__name__)

UNDELETED: set[str] = set()
"""Tokens of this process's locks that were given back, and whose file could not be deleted."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    user: str
    host: str
    space: str  # process ids mean something within one of these only: containers may share a host name
    pid: int
    started: float
    since: str
    token: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid}, since {self.since})"


class Lock:
    """The right to write one output.

    Parameters
    ----------
    path : Path
        The lock file; its folder exists.
    target : Path
        What messages name.
    now : float
        Unix time, as for all ``now`` here.
    beat_s : float
        Seconds between heartbeats.
    stale_s : float
        Age at which the lock of another host may be taken over.

    Raises
    ------
    OutputLockedError
        Another driver holds it.
    OSError
        The file cannot be written.
    """

    def __init__(self, path: Path, target: Path, *, now: float, beat_s: float, stale_s: float) -> None:
        self._path, self._target = path, target
        self._beat_s = beat_s
        self._beaten = now
        self._me = this_process(now)
        with _guarded(path) as file:
            other, age = _read(file), now - path.stat().st_mtime
            if other is not None:
                if other.token not in UNDELETED and not is_stale(other, age, stale_s, self._me):
                    raise OutputLockedError(str(target), str(other), max(age, 0.0))
                logger.warning("%s: taking over from %s, which is gone", target, other)
            self._sign(file, now)

    def beat(self, now: float) -> None:
        """Show that this driver lives; cheap when called often.

        Raises
        ------
        OutputLockedError
            Another driver took the lock, because this one was not heard of for too long.
        """
        if 0 <= now - self._beaten < self._beat_s:
            return
        try:
            self._check(parse_owner(self._path.read_bytes()), now)
            os.utime(self._path, (now, now))
        except FileNotFoundError:
            self._take_again(now)
        self._beaten = now

    def _take_again(self, now: float) -> None:
        """Make the lock file anew that somebody removed, unless another driver was quicker."""
        # the whole folder may be gone: writing will tell
        with suppress(FileNotFoundError), _guarded(self._path) as file:
            self._check(_read(file), now)
            logger.warning("%s: the lock %s was removed; taking it again", self._target, self._path)
            self._sign(file, now)

    def _check(self, owner: Owner | None, now: float) -> None:
        if owner is not None and owner.token != self._me.token:
            raise OutputLockedError(str(self._target), str(owner), max(now - self._path.stat().st_mtime, 0.0))

    def _sign(self, file: IO[bytes], now: float) -> None:
        file.seek(0)
        file.truncate()
        file.write(json.dumps(asdict(self._me)).encode())
        file.flush()
        os.fsync(file.fileno())
        os.utime(self._path, (now, now))

    def is_ours(self) -> bool:
        """Tell whether this driver still holds the lock."""
        try:
            owner = parse_owner(self._path.read_bytes())
        except OSError:
            return False
        return owner is not None and owner.token == self._me.token

    def release(self) -> None:
        """Give the lock back, if it is still ours; never raises."""
        if self.is_ours():
            try:
                self._path.unlink()
            except FileNotFoundError:
                pass
            except OSError:  # the disk is read-only now, say; this process may come back when it is mended
                UNDELETED.add(self._me.token)


@contextmanager
def _guarded(path: Path) -> Iterator[IO[bytes]]:
    """Open the lock file so that no other driver is between its reading and its writing."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            with suppress(
                ImportError, OSError
            ):  # some network file systems have no such locks; then it is a small race
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                yield file
                return


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Tell whether the open file is still the one of that name, rather than one that was just released."""
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _read(file: IO[bytes]) -> Owner | None:
    return parse_owner(file.read())


def parse_owner(text: bytes) -> Owner | None:
    """Return the owner; None for a file that a crash left empty or torn."""
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def this_process(now: float) -> Owner:
    """Return this process as an owner, with a token of its own; ``now`` is Unix time."""
    since = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    return Owner(
        _user(), socket.gethostname(), _space(), os.getpid(), psutil.Process().create_time(), since, uuid.uuid4().hex
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no entry for this user id, as in some containers
        return "someone"


def _space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def is_stale(other: Owner, age: float, stale_s: float, me: Owner) -> bool:
    """Tell whether a lock whose last sign of life is ``age`` seconds old may be taken over by ``me``."""
    if (other.host, other.space) != (me.host, me.space):
        return age > stale_s
    try:
        process = psutil.Process(other.pid)
        same = abs(process.create_time() - other.started) < 2
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False

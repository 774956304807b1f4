"""What turns an engine into a test instrument: faults on cue, and a log that several processes write.

Both count across processes with the same means: a file opened for appending, one ``write`` per entry. The system puts
each write at the end of the file in one piece, and the position after it tells how many came before, so there is no lock
and a process killed at any moment leaves whole entries.

Runs on: worker.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from daskinfer.errors import ConfigError, OutOfMemoryError, RowError

__all__ = ["EVENTS", "Action", "EventLog", "FaultScript"]

EVENTS = ("load", "step", "finish", "fail", "abort", "close")
_HOUR_S = 3600.0

_ROW_ERRORS: dict[str, Callable[[str], Exception]] = {
    "value_error": ValueError,
    "row_error": RowError,
    "connection_error": ConnectionError,
    "timeout": TimeoutError,
    "oom": OutOfMemoryError,
}
_PLAIN = ("ok", *_ROW_ERRORS, "exit", "sigkill", "sigstop", "segv", "system_exit", "hang")
_WITH_ARGUMENT = ("sleep:SECONDS", "raise:pkg.Class", "fail:pkg.Class")


class Action(NamedTuple):
    """One cue of a script, already checked: its name and what stood after the colon.

    ``value_error``, ``row_error``, ``connection_error``, ``timeout``, ``oom`` and ``fail:pkg.Class`` fail one row. The
    others happen to the process in the middle of a step: ``exit`` (``os._exit(1)``), ``sigkill``, ``sigstop``, ``segv`` (a
    real one), ``system_exit``, ``hang`` (an hour), ``sleep:SECONDS``, ``raise:pkg.Class``. ``pkg.Class`` is anything that
    returns an exception when it is called with a text.
    """

    name: str
    argument: str = ""

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text names.

        Raises
        ------
        ConfigError
            There is no such action.
        """
        name, _, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not argument and text in _PLAIN:
            return cls(name)
        if name in ("raise", "fail") and "." in argument:
            return cls(name, argument)
        if name == "sleep":
            try:
                float(argument)
            except ValueError:
                pass
            else:
                return cls(name, argument)
        raise ConfigError(f"faults: there is no action {text!r}; there are {', '.join((*_PLAIN, *_WITH_ARGUMENT))}")

    def row_error(self, row: int) -> BaseException | None:
        """Return the exception that fails this row, or None where the action is not about one row."""
        text = f"scripted fault of row {row}"
        if self.name == "fail":
            return _exception(self.argument, text)
        return _ROW_ERRORS[self.name](text) if self.name in _ROW_ERRORS else None

    def perform(self, row: int) -> None:
        """Do to this process what the action says; most actions do not return."""
        match self.name:
            case "exit":
                os._exit(1)
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigstop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "segv":
                ctypes.string_at(0)
            case "system_exit":
                raise SystemExit(1)
            case "hang":
                time.sleep(_HOUR_S)
            case "sleep":
                time.sleep(float(self.argument))
            case "raise":
                raise _exception(self.argument, f"scripted fault of row {row}")


def _exception(path: str, text: str) -> BaseException:
    module, _, name = path.rpartition(".")
    made = getattr(importlib.import_module(module), name)(text)
    if not isinstance(made, BaseException):
        raise ConfigError(f"faults: {path} returned {made!r} when called with a text; it must return an exception")
    return made


class FaultScript:
    """What happens to a row on each of its attempts, whichever process makes them.

    Parameters
    ----------
    script : mapping of str to str or sequence of str
        Marker to actions. The first marker that is part of a row's text decides; its n-th action happens on the row's
        n-th attempt, and the last one on all further attempts.
    folder : str
        Where the attempts are counted, one small file per row; made when it is missing.

    Raises
    ------
    ConfigError
        An action that does not exist, or a marker without actions.
    """

    def __init__(self, script: Mapping[str, str | Sequence[str]], folder: str) -> None:
        self._folder = Path(folder)
        self._actions: dict[str, tuple[Action, ...]] = {}
        for marker, actions in script.items():
            listed = (actions,) if isinstance(actions, str) else tuple(actions)
            if not listed:
                raise ConfigError(f"faults[{marker!r}]={actions!r}: must name at least one action")
            self._actions[marker] = tuple(map(Action.parse, listed))

    def next_action(self, row: int, text: str) -> Action | None:
        """Count an attempt of this row and return what happens on it; None, uncounted, without a marker in the text."""
        for marker, actions in self._actions.items():
            if marker in text:
                self._folder.mkdir(parents=True, exist_ok=True)
                name = f"{row}-{zlib.crc32(marker.encode()):08x}"
                attempt = _append(self._folder / name, b".")
                return actions[min(attempt, len(actions)) - 1]
        return None


class EventLog:
    """Appends one JSON line per event: ``{"pid": …, "event": …, "ids": […]}``.

    Parameters
    ----------
    path : str or None
        None writes nothing.
    events : sequence of str
        Those of :data:`EVENTS` to write; "load" always is, since loads are counted by it.
    """

    def __init__(self, path: str | None, events: Sequence[str] = EVENTS) -> None:
        self._path = None if path is None else Path(path)
        self._events = frozenset(("load", *events)) if path else frozenset()

    def wants(self, event: str) -> bool:
        """Whether this event is written."""
        return event in self._events

    def write(self, event: str, ids: Sequence[int] = ()) -> int:
        """Append one event and return the length of the log up to and with it, in bytes; 0 when nothing is written."""
        if self._path is None or event not in self._events:
            return 0
        line = json.dumps({"pid": os.getpid(), "event": event, "ids": list(ids)}, separators=(",", ":")) + "\n"
        return _append(self._path, line.encode())

    def count(self, event: str, length: int) -> int:
        """Return how many events of this name stand in the first ``length`` bytes."""
        if self._path is None:
            return 0
        with self._path.open("rb") as file:
            return file.read(length).count(f'"event":"{event}"'.encode())


def _append(path: Path, data: bytes) -> int:
    """Append in one write; return the size of the file up to and with it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(handle, data)
        if written != len(data):
            raise OSError(f"{path}: only {written} of {len(data)} bytes could be appended; is the disk full?")
        return os.lseek(handle, 0, os.SEEK_CUR)
    finally:
        os.close(handle)

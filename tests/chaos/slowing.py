"""A process that runs a third of the time."""

from __future__ import annotations

import contextlib
import signal
import threading

import psutil

__all__ = ["Slowed"]


class Slowed:
    """Stops a process and lets it go on, by turns, from its making until :meth:`stop`."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let it go on for good; does nothing the second time."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(psutil.Error):
            try:
                while not self._ended.wait(0.05):
                    self._process.send_signal(signal.SIGSTOP)
                    self._ended.wait(0.1)
                    self._process.send_signal(signal.SIGCONT)
            finally:
                self._process.send_signal(signal.SIGCONT)

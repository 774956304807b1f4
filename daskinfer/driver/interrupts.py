"""Ctrl-C and SIGTERM as a request to stop, without losing what is done.

Runs on: client.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupt", "interrupts"]


class Interrupt:
    """Whether a signal asked to stop.

    The first one is looked at between turns. One that comes again raises KeyboardInterrupt where it finds the program, which
    may be waiting for a source or a worker.

    Attributes
    ----------
    asked, insisted : bool
        It came once; it came again.
    patient : bool
        One that comes again is only noted.
    signum : int
        The first one's number.
    """

    def __init__(self) -> None:
        self.asked = self.insisted = self.patient = False
        self.signum = int(signal.SIGINT)

    def __call__(self, signum: int, frame: FrameType | None = None) -> None:
        """Take a signal, as a handler of Python's."""
        if not self.asked:
            self.signum = signum
        self.insisted, self.asked = self.asked, True
        if self.insisted and not self.patient:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Break nothing off in here; what came again meanwhile is raised at the end."""
        before, self.patient = self.patient, True
        noted = self.insisted
        try:
            yield
        finally:
            self.patient = before
        if self.insisted and not (noted or self.patient):
            raise KeyboardInterrupt


@contextmanager
def interrupts(stop: Interrupt) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a request to stop; only in the main thread, where Python can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Mapping[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

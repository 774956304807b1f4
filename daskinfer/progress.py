"""What a person watches while a run goes on: an observer of the run's events that writes to stderr.

On a terminal there is one live line; in a notebook one output that is replaced; anywhere else a few plain lines, at most 60
whatever the length of the run. All show the same counts, those of :class:`~daskinfer.metrics.Metrics`: rows with a final
result, so a retry is not counted twice. Time is taken from the events.

Runs on: client.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from daskinfer.metrics import Metrics, Snapshot
from daskinfer.records import Event, Noted, RunEnded, RunStarted
from daskinfer.wording import details, one_line, rows_text, status, summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

__all__ = ["NotebookProgress", "PlainProgress", "Progress", "QuietProgress", "TerminalProgress", "watcher"]

_MAX_STATUS = 40
_MAX_NOTES = 12
_REFRESH_S = 0.2
_BAR = 12
_NOTEBOOK_REFRESH_S = 0.5


def watcher(*, quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """Return the progress display that fits: none, a terminal's, a notebook's, or plain lines.

    Parameters
    ----------
    quiet : bool
        Show nothing.
    stream : text file, optional
        Where to write; by default ``sys.stderr``.
    """
    if quiet:
        return QuietProgress()
    if stream is None and _in_notebook():
        return NotebookProgress()
    stream = stream or sys.stderr
    try:
        terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # the stream is closed
        return QuietProgress()
    return TerminalProgress(stream) if terminal else PlainProgress(stream)


class Progress(ABC):
    """An observer of events; also a context manager that ends the display. One run at a time; a new run starts afresh."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._broken = False

    def __call__(self, event: Event) -> None:
        """Take an event. A display that cannot be written to (a closed terminal, a full disk) goes silent."""
        if isinstance(event, RunStarted):
            self._metrics = Metrics()
        self._metrics.apply(event)
        if self._broken:
            return
        try:
            self._take(event)
        except (OSError, ValueError):
            self._broken = True
            self.close()

    @property
    def snapshot(self) -> Snapshot:
        """What is shown."""
        return self._metrics.snapshot()

    def close(self) -> None:
        """End the display, if it has not ended with the run; safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _take(self, event: Event) -> None:
        """Show the event, or what it changed."""


class QuietProgress(Progress):
    """Shows nothing."""

    def _take(self, event: Event) -> None:
        pass


# ---------------------------------------------------------------- plain lines


class PlainProgress(Progress):
    """Writes a few plain lines: the first after 5 seconds, each later one after a longer pause than the one before.

    The pauses grow from a fifth of the elapsed time to three fifths, so that 40 lines last for more than a month; then
    only the final line is written. At most 12 notes are written, each once.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._restart()

    def _restart(self) -> None:
        self._lines = 0
        self._next_s = 5.0
        self._notes: set[str] = set()

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._restart()
        elif isinstance(event, Noted):
            self._note(event.message)
        elif isinstance(event, RunEnded):
            self._write(summary(self.snapshot))
        elif self._lines < _MAX_STATUS and self._metrics.elapsed_s >= self._next_s:
            self._write(status(self.snapshot))
            while self._next_s <= self._metrics.elapsed_s:
                self._lines += 1
                self._next_s *= 1.2 + 0.01 * self._lines

    def _note(self, message: str) -> None:
        if len(self._notes) < _MAX_NOTES and message not in self._notes:
            self._notes.add(message)
            self._write(one_line(message))
            if len(self._notes) == _MAX_NOTES:
                self._write("further notes are not shown")

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(f"daskinfer: {text}\n".encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


# ---------------------------------------------------------------- a terminal


class TerminalProgress(Progress):
    """Keeps one live line at the bottom of the terminal; notes are written above it, and so is what else is printed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._live: Live | None = None
        self._shown_s = 0.0
        self._notes: set[str] = set()

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.close()
            self._start()
        elif isinstance(event, Noted) and event.message not in self._notes and len(self._notes) < _MAX_NOTES:
            self._notes.add(event.message)
            self._console.print(one_line(event.message), markup=False, highlight=False)
        elif isinstance(event, RunEnded):
            self._refresh()
            self.close()
        elif self._metrics.elapsed_s >= self._shown_s + _REFRESH_S:
            self._refresh()

    @property
    def _console(self) -> Console:
        from rich.console import Console

        return self._live.console if self._live else Console(file=self._stream)

    def _start(self) -> None:
        from rich.live import Live

        self._notes.clear()
        self._live = Live(
            live_line(self.snapshot),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe must not end up on the terminal
            redirect_stderr=True,
        )
        self._shown_s = 0.0
        self._live.start(refresh=True)

    def _refresh(self) -> None:
        if self._live:
            self._live.update(live_line(self.snapshot), refresh=True)
            self._shown_s = self._metrics.elapsed_s

    def close(self) -> None:
        """Leave the line as it is and give the terminal back."""
        live, self._live = self._live, None
        if live:
            with suppress(OSError, ValueError):  # the terminal may be gone
                live.stop()


def live_line(snapshot: Snapshot) -> RenderableType:
    """Return the one line of a terminal: a bar and the figures, cut at the terminal's width."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    text = Text(rows_text(snapshot))
    if snapshot.failed:
        text.append(f", {snapshot.failed:,} failed", style="bold red")
    for part in details(snapshot):
        text.append(f", {part}")
    finished = snapshot.skipped + snapshot.done
    row = Table.grid(padding=(0, 1))
    row.add_column(width=_BAR)
    row.add_column(no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(
        snapshot.total,
        finished,
        width=_BAR,
        pulse=snapshot.total is None,
        style="bright_black",
        complete_style="cyan",
        finished_style="green",
        pulse_style="cyan",
    )
    row.add_row(bar, text)
    return row


# ---------------------------------------------------------------- a notebook


class NotebookProgress(Progress):
    """Keeps one output of the running cell up to date, twice a second at most.

    Parameters
    ----------
    display : callable, optional
        ``IPython.display.display``, or what stands for it.
    """

    def __init__(self, display: Any = None) -> None:
        super().__init__()
        self._display = display
        self._handle: Any = None
        self._shown_s = 0.0

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._handle = None
        due = self._metrics.elapsed_s >= self._shown_s + _NOTEBOOK_REFRESH_S
        if isinstance(event, RunStarted | RunEnded | Noted) or due:
            self._shown_s = self._metrics.elapsed_s
            self._show(self.snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        from html import escape

        text = status(snapshot) if snapshot.state in ("waiting", "running") else summary(snapshot)
        notes = [*map(one_line, snapshot.notes[-_MAX_NOTES:])]
        shown = "".join(f"<div>{escape(note)}</div>" for note in notes)
        content = {
            "text/plain": "\n".join([text, *notes]),
            "text/html": f'<div style="font-family:sans-serif;font-size:13px">{_bar(snapshot)}{escape(text)}{shown}</div>',
        }
        if self._handle is None:
            self._handle = self._displayed(content)
        else:
            self._handle.update(content, raw=True)

    def _displayed(self, content: dict[str, str]) -> Any:
        if self._display is None:
            self._display = import_module("IPython.display").display
        return self._display(content, raw=True, display_id=True)


def _bar(snapshot: Snapshot) -> str:
    """Return a bar: done before, completed, failed; nothing where the total is not known."""
    if not snapshot.total:
        return ""
    parts = ((snapshot.skipped, "#9AA3AF"), (snapshot.completed, "#0072B2"), (snapshot.failed, "#D55E00"))
    spans = "".join(
        f'<span style="width:{100 * rows / snapshot.total:.2f}%;background:{colour}"></span>' for rows, colour in parts
    )
    box = "display:flex;height:8px;max-width:640px;border-radius:4px;overflow:hidden;background:rgba(128,128,128,.25)"
    return f'<div style="{box};margin-bottom:3px">{spans}</div>'


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel; IPython is not imported to find out."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"

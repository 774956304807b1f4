"""``daskinfer run`` with a journal: how many rows are in flight, and how many are not safe yet, after every event.

    python -m tests.chaos.journal JOURNAL run IN OUT …

A line holds rows submitted and not returned, and rows returned and not on disk.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from daskinfer.records import BatchReturned, BatchSubmitted, Event, RowsCommitted, RowsResolved


class Journal:
    """An observer of a run."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._flying = self._unsafe = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case BatchSubmitted():
                self._flying += event.rows
            case BatchReturned():
                self._flying -= event.rows
            case RowsResolved():
                self._unsafe += event.completed + event.failed
            case RowsCommitted():
                self._unsafe -= event.rows
            case _:
                return
        self._file.write(f"{self._flying} {self._unsafe}\n")
        self._file.flush()


def peak(path: Path, start: int) -> tuple[int, int]:
    """Return the most rows that were in flight or not safe at a time, from a position in the journal on, and its end."""
    if not path.exists():
        return 0, start
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    sums = [sum(map(int, line.split())) for line in whole.splitlines()]
    return max(sums, default=0), start + len(whole)


def main() -> None:
    """Run the command line with a journal in the place of its progress display."""
    import daskinfer.progress
    from daskinfer.cli import main as cli

    path = sys.argv.pop(1)
    with open(path, "a") as file:  # noqa: PTH123 - a text file to append to

        def watcher(**_: Any) -> AbstractContextManager[Journal]:
            return nullcontext(Journal(file))

        daskinfer.progress.watcher = watcher  # type: ignore[assignment]
        cli()


if __name__ == "__main__":
    main()

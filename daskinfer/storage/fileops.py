"""What is done to the local disk when output is written, in one place: crashes are tested by failing at each of them.

Runs on: client.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["FileOps"]


class FileOps:
    """Operations on local files. All raise ``OSError``."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and those above it, where they do not exist."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> IO[bytes]:
        """Open a new file for writing."""
        return path.open("wb")

    def close(self, file: IO[bytes]) -> None:
        """Close a written file once its bytes are on the disk."""
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def replace(self, source: Path, target: Path) -> None:
        """Give a file its final name, in place of a file of that name; then make the name durable."""
        source.replace(target)
        self.sync_folder(target.parent)

    def remove(self, path: Path) -> None:
        """Delete a file, if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder if it is empty."""
        with suppress(OSError):
            path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable, where the system can."""
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextmanager
    def writing(self, target: Path, temporary: Path) -> Iterator[IO[bytes]]:
        """Write a file that appears under its name complete or not at all.

        On an error the temporary file is removed. Both paths must be on one file system.
        """
        file = self.create(temporary)
        try:
            yield file
            self.close(file)
            self.replace(temporary, target)
        except BaseException:
            with suppress(Exception):
                file.close()
            with suppress(OSError):
                self.remove(temporary)
            raise

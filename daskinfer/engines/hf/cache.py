"""Our own cache folder: made once per host by whoever comes first, while the others wait.

Runs on: worker.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["locked", "made_once"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is made; blocks until nobody else holds it.

    The kernel releases it with the process that holds it, however that ends, so that a dead process leaves no lock behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``, first filling it with ``make`` when it is not there.

    ``make`` gets an empty folder, which takes the final name when it returns: a folder of that name is always complete.
    Leftovers of a process that was killed are removed by the next one.
    """
    if folder.is_dir():
        return folder
    with locked(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            partial = folder.parent / f".{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder

"""How far partitions are, and letting go of engines that wait for more.

Runs on: client.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from daskinfer.dataframe.home import NAME, local_home, released

__all__ = ["progress", "release"]

COLUMNS = ("worker", "partition", "model", "rows", "done", "failed", "seconds")


def progress(client: Any = None) -> pd.DataFrame:
    """Return the partitions that are being inferred at the moment, one row each.

    Parameters
    ----------
    client : Client or None
        Whose workers to look at, as of their last heartbeats. None: this process, for Dask's local schedulers.

    Returns
    -------
    pandas.DataFrame
        ``worker, partition, model, rows, done, failed, seconds``.
    """
    if client is None:
        home = local_home()
        found = [{"worker": home.lodging.engines.where, **figures} for figures in home.lodging.figures()]
    else:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        found = [
            {"worker": address, **figures}
            for address, known in workers.items()
            for figures in known["metrics"].get(NAME, ())
        ]
    return pd.DataFrame(found, columns=list(COLUMNS))


def release(client: Any = None) -> None:
    """Close engines that no partition uses at the moment; they would be closed after ``daskinfer.dataframe.idle-s`` anyway.

    Parameters
    ----------
    client : Client or None
        Whose workers to ask. None: this process.
    """
    if client is None:
        local_home().release()
    else:
        client.run(released)

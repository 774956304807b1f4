"""Partitions of a dask.dataframe on the workers that have a driver's model, and nowhere else.

Annotations made while a graph is built are dropped by dask.dataframe. So this one is made when it is computed, and decides
by the tasks' keys.

Runs on: client; the scheduler asks it about keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from dask.base import annotate
from dask.typing import Key

__all__ = ["PREFIX", "placed"]

PREFIX = "infer-"
"""How the keys of inference tasks begin."""


@contextmanager
def placed(resource: str) -> Iterator[None]:
    """Let inference tasks that are submitted in here run only where there are slots of a model."""
    with warnings.catch_warnings(), annotate(resources=partial(_asked_of, resource)):
        # said of frames that are built in here, for which it is true: what counts is where they are computed
        warnings.filterwarnings("ignore", message="Dask annotations")
        yield


def _asked_of(resource: str, key: Key) -> dict[str, float]:
    name = key[0] if isinstance(key, tuple) else key
    return {resource: 1} if str(name).startswith(PREFIX) else {}

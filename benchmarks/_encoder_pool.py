"""Two workers with one thread each: the driver, and sentence-transformers' pool of processes.

Runs on: anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from daskinfer import Driver
from daskinfer.engines.hf import quiet

Vectors = npt.NDArray[np.float32]
System = Callable[[Sequence[str]], Vectors]
WORKERS = 2


@contextmanager
def driver_system(model: str) -> Iterator[System]:
    """A driver on a cluster of this machine, its engines in processes of their own."""
    given = {"task": "embed", "device": "cpu", "threads": 1, "params": {"truncate": "right"}}
    with Driver(model, workers=WORKERS, **given) as driver:  # type: ignore[arg-type]
        driver.wait_until_ready()
        yield lambda texts: driver.embed(list(texts)).to_numpy()


@contextmanager
def pool_system(model: str, batch: int) -> Iterator[System]:
    """sentence-transformers' own pool of processes."""
    from sentence_transformers import SentenceTransformer

    with quiet():
        theirs: Any = SentenceTransformer(model, device="cpu")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that it starts
    pool = theirs.start_multi_process_pool(["cpu"] * WORKERS)

    def encode(texts: Sequence[str]) -> Vectors:
        found: Vectors = theirs.encode(list(texts), pool=pool, batch_size=batch, show_progress_bar=False)
        return found

    try:
        yield encode
    finally:
        theirs.stop_multi_process_pool(pool)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def pool_systems(model: str, batches: Sequence[int]) -> Iterator[dict[str, System]]:
    """All of them; the driver is called "engine"."""
    with ExitStack() as stack:
        systems = {"engine": stack.enter_context(driver_system(model))}
        for batch in batches:
            systems[f"pool {batch}"] = stack.enter_context(pool_system(model, batch))
        yield systems

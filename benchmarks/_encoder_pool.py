"""Two workers with one thread each: the driver, and sentence-transformers' pool of processes.

Runs on: anywhere.
"""

from __future__ import annotations

import os
import time
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


def ray_data(model: str, texts: Sequence[str], batch: int) -> dict[str, float]:
    """Seconds that Ray Data takes, with two actors that encode with sentence-transformers on one thread each.

    Every run of a data set starts its actors anew. Therefore two figures: all seconds, and the seconds for all texts at the
    rate at which batches came after the first one.
    """
    import ray
    import ray.data

    class Encoder:
        def __init__(self) -> None:
            import torch
            from sentence_transformers import SentenceTransformer

            torch.set_num_threads(1)
            self.model: Any = SentenceTransformer(model, device="cpu")

        def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
            found = self.model.encode(list(rows["text"]), batch_size=batch, show_progress_bar=False)
            return {"row": rows["row"], "vector": found}

    begun = time.perf_counter()
    items = [{"row": row, "text": text} for row, text in enumerate(texts)]
    rows = ray.data.from_items(items, override_num_blocks=max(len(items) // batch, WORKERS))
    mapped = rows.map_batches(Encoder, concurrency=WORKERS, num_cpus=1, batch_size=batch)
    parts = mapped.iter_batches(batch_size=None, prefetch_batches=0)
    arrived = [(time.perf_counter() - begun, len(part["row"])) for part in parts]
    (first, begin), (last, _) = arrived[0], arrived[-1]
    done = sum(n for _, n in arrived)
    if done != len(texts):
        raise RuntimeError(f"Ray Data gave back {done} of {len(texts)} texts")
    return {"seconds": last, "seconds_at_steady_rate": (last - first) / max(done - begin, 1) * done}


@contextmanager
def pool_systems(model: str, batches: Sequence[int]) -> Iterator[dict[str, System]]:
    """All of them; the driver is called "engine"."""
    with ExitStack() as stack:
        systems = {"engine": stack.enter_context(driver_system(model))}
        for batch in batches:
            systems[f"pool {batch}"] = stack.enter_context(pool_system(model, batch))
        yield systems

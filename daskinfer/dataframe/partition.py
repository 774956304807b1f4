"""What is done with one partition, on any of Dask's schedulers; a pandas frame is one partition.

Runs on: worker, client.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from daskinfer.dataframe.asked import Inference
from daskinfer.dataframe.home import here
from daskinfer.dataframe.rows import PartitionRows
from daskinfer.errors import RowFailedError
from daskinfer.prompts import Problem
from daskinfer.records import Failed, Request, Result
from daskinfer.storage.base import FILE_ROWS

if TYPE_CHECKING:
    from daskinfer.driver import Driver

__all__ = ["infer_partition", "infer_through"]

logger = logging.getLogger("daskinfer.dataframe")


def infer_partition(frame: Any, inference: Inference, number: int) -> Any:
    """Return a partition with the inferred columns; its index and order stay.

    No engine is loaded for a partition without a usable row. Runs in a thread of the worker and waits there.

    Parameters
    ----------
    frame : pandas.DataFrame
    inference : Inference
    number : int
        Of the partition: with a row's place in it, it is the row's id, from which sampling is seeded.

    Raises
    ------
    RowFailedError
        A row failed, and the inference is to raise.
    ModelLoadError
        The model cannot be loaded here.
    """
    requests, results = _requests(frame, inference, number)
    if requests:
        rows = PartitionRows(
            f"{inference.added.output}, partition {number}", requests, inference.batch, inference.retry
        )
        results += here().run(rows, inference.spec, inference.health, inference.idle_s)
    return _finished(frame, inference, number, results)


def infer_through(driver: Driver, frame: Any, inference: Inference) -> Any:
    """Return a frame with the inferred columns, its rows sent through a driver's workers."""
    requests, results = _requests(frame, inference, 0)
    if requests:
        stream = driver.open_stream(ordered=False, seed=0)
        try:
            offer = requests
            while True:
                turn = driver.turn(stream, offer, exhausted=True)
                results += turn.results
                if turn.done:
                    break
                offer = []
        finally:
            driver.close_stream(stream)
    return _finished(frame, inference, 0, results)


def _requests(frame: Any, inference: Inference, number: int) -> tuple[list[Request], list[Result]]:
    """Return the rows for the engine, and the results of those that are not."""
    asks = inference.prompter
    prompts = asks.render({name: frame[name] for name in asks.columns}, len(frame))
    requests: list[Request] = []
    failed: list[Result] = []
    for row, prompt in enumerate(prompts, number * FILE_ROWS):
        if isinstance(prompt, Problem):
            failed.append(Failed(row, prompt.kind, prompt.message))
        else:
            requests.append(Request(row, prompt, inference.params, inference.raw, inference.system))
    return requests, failed


def _finished(frame: Any, inference: Inference, number: int, results: Sequence[Result]) -> Any:
    by_row = {result.id: result for result in results}
    ordered = [by_row[row] for row in range(number * FILE_ROWS, number * FILE_ROWS + len(frame))]
    columns, errors = inference.added.of(ordered)
    if not inference.added.errors:
        for at, error in enumerate(errors):
            if error is not None:
                kind, _, message = error.partition(": ")
                raise RowFailedError(at, kind, f"{message} (partition {number}; errors='column' keeps such rows)")
    return inference.added.on(frame, columns)

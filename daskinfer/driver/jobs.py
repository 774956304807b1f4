"""Jobs: rows that are answered in the background while the caller does something else.

A job reads its rows in a thread of its own, so several jobs, and a run, go on at once. It keeps its results until it is
dropped, so that they can be read as often as wanted; for input without end use ``stream``, for large files ``run``.

Runs on: client.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from daskinfer.driver.aio import awaitable, stepped
from daskinfer.driver.answers import answers
from daskinfer.driver.results import Results
from daskinfer.driver.stream import Stream
from daskinfer.errors import JobCancelledError
from daskinfer.records import Request, Result

if TYPE_CHECKING:
    from daskinfer.driver.service import Service

__all__ = ["Job", "JobStatus"]

_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is.

    Attributes
    ----------
    state : {"running", "done", "cancelled", "error"}
    completed, failed : int
        Rows with a result.
    total : int or None
        Rows in all, where that is known.
    """

    state: str
    completed: int
    failed: int
    total: int | None


class Job:
    """Rows on their way through the model; made by :meth:`Driver.submit`.

    Iterating gives the results in the order of the rows, each as soon as it is its turn, and may be done any number of
    times and from any thread.

    Attributes
    ----------
    name : str
    priority : int
    """

    def __init__(
        self,
        driver: Service,
        prompts: Iterator[Any],
        make: Callable[[int, Any], Request],
        *,
        priority: int,
        total: int | None,
    ) -> None:
        self.name = f"job-{next(_NUMBERS)}"
        self.priority = priority
        self._driver = driver
        self._total = total
        self._results: list[Result] = []
        self._state = "running"
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stream = driver.open_stream(ordered=True, seed=0)
        self._thread = threading.Thread(
            target=self._work, args=(self._stream, prompts, make), name=f"daskinfer-{self.name}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        status = self.status()
        return f"<Job {self.name}: {status.state}, {status.completed + status.failed} rows>"

    def __iter__(self) -> Iterator[Result]:
        taken = 0
        while True:
            with self._changed:
                while taken == len(self._results) and self._state == "running":
                    self._changed.wait()
                ready = self._results[taken:]
                if not ready:
                    self._raise()
                    return
            yield from ready
            taken += len(ready)

    def __aiter__(self) -> AsyncIterator[Result]:
        return stepped(self.__iter__)

    @property
    def asynchronous(self) -> bool:
        """Whether methods are to be awaited."""
        return self._driver.asynchronous

    def status(self) -> JobStatus:
        """Return how far the job is; does not wait."""
        with self._changed:
            completed = sum(result.ok for result in self._results)
            return JobStatus(self._state, completed, len(self._results) - completed, self._total)

    @awaitable
    def result(self, timeout: float | None = None) -> Results:
        """Wait for the end and return all results in the order of the rows.

        Parameters
        ----------
        timeout : float or None
            Seconds; None: as long as it takes.

        Raises
        ------
        TimeoutError
            Not done in time; the job goes on.
        JobCancelledError
            The job was cancelled; iterating gives the results that came before.
        DaskinferError
            What ended the job.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "running", timeout):
                raise TimeoutError(f"{self.name} was not done within timeout={timeout:g} s; it goes on")
            self._raise()
            return Results(self._results)

    @awaitable
    def cancel(self) -> bool:
        """Let go of the rows that have no result; return False when the job had ended already."""
        with self._changed:
            if self._state != "running":
                return False
            self._state = "cancelled"
            self._changed.notify_all()
        self._driver.close_stream(self._stream)
        return True

    # ---------------------------------------------------------------- how

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._state == "cancelled":
            raise JobCancelledError(f"{self.name} was cancelled after {len(self._results)} results")

    def _work(self, stream: Stream, prompts: Iterator[Any], make: Callable[[int, Any], Request]) -> None:
        state, error = "done", None
        try:
            for result in answers(
                self._driver, prompts, make, ordered=True, priority=self.priority, stream=stream, name=self.name
            ):
                with self._changed:
                    if self._state != "running":
                        return
                    self._results.append(result)
                    self._changed.notify_all()
        except BaseException as raised:  # noqa: BLE001 - whatever ended the job is raised where its result is asked for
            state, error = "error", raised
        finally:
            with self._changed:
                if self._state == "running":
                    self._state, self._error = state, error
                self._changed.notify_all()

"""What a driver offers besides rows in and rows out: jobs, single tasks by id, and its workers.

Runs on: client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from daskinfer.cluster import Connection, scale
from daskinfer.driver.aio import awaitable
from daskinfer.driver.dispatch import Dispatcher
from daskinfer.driver.jobs import Job
from daskinfer.driver.placement import placed
from daskinfer.driver.stream import Stream, Turn
from daskinfer.driver.tasks import Tasks, read_task
from daskinfer.driver.telling import JobEvents
from daskinfer.errors import NotRunningError
from daskinfer.records import Event, Request, SamplingParams, WorkerView

if TYPE_CHECKING:
    from daskinfer.driver.manager import WorkerManager

__all__ = ["Service"]

NOT_RUNNING = "the driver is not running: call start(), or use it in a with statement"


class Service(ABC):
    """The part of :class:`~daskinfer.Driver` that serves callers one by one; every method may be used from any thread."""

    params: SamplingParams
    _connection: Connection | None
    _dispatcher: Dispatcher | None
    _tasks: Tasks | None

    @property
    @abstractmethod
    def asynchronous(self) -> bool:
        """Whether methods are to be awaited."""

    @abstractmethod
    def start(self) -> Self:
        """Start the driver."""

    def _sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        connection = self._connection
        if connection is None:
            raise NotRunningError(NOT_RUNNING)
        return connection.client.sync(function, *args, asynchronous=False, **kwargs)

    @property
    def _running(self) -> Dispatcher:
        if self._dispatcher is None:
            raise NotRunningError(NOT_RUNNING)
        return self._dispatcher

    @abstractmethod
    def _maker(
        self, prompts: Iterable[Any], params: Mapping[str, Any], *, raw: bool, system: str | None
    ) -> Callable[[int, Any], Request]:
        """Return what makes requests of prompts."""

    # ---------------------------------------------------------------- jobs

    @awaitable
    def submit(
        self,
        rows: Iterable[Any],
        *,
        priority: int = 0,
        raw: bool = False,
        system: str | None = None,
        **params: Any,
    ) -> Job:
        """Answer prompts in the background.

        Several jobs, a ``run`` and streams share the model: within a priority evenly, higher priorities first. The rows
        are read in a thread of the job's own.

        Parameters
        ----------
        rows : iterable
            Prompts, as for :meth:`Driver.generate`.
        priority : int
            Higher is sooner.
        raw, system, **params
            As for :meth:`Driver.generate`.

        Returns
        -------
        Job
            Iterable, with ``status()``, ``result()`` and ``cancel()``.
        """
        make = self._maker(rows, params, raw=raw, system=system)
        total = len(rows) if isinstance(rows, Sized) else None
        return Job(self, iter(rows), make, priority=priority, total=total)

    # ---------------------------------------------------------------- single tasks

    @awaitable
    def submit_task(self, task: Mapping[str, Any]) -> str:
        """Hand over one prompt and return at once; it never waits to fill a batch.

        Parameters
        ----------
        task : mapping
            ``prompt`` (text or chat messages) or ``input_ids`` (a list of token ids, or one such list in a list);
            ``max_new_tokens`` (100), ``temperature`` (0.7), ``top_p`` (0.95), ``priority`` (0, higher is sooner).

        Returns
        -------
        str
            The task's id, for :meth:`get_result` and :meth:`add_done_callback`.

        Raises
        ------
        NotRunningError
            The driver is not running; it is a RuntimeError.
        ConfigError, RowError
            The task cannot be run as it is; both are ValueErrors.
        """
        content, params, priority = read_task(task, self.params)
        return self._board.submit(content, params, priority)

    @awaitable
    def get_result(self, task_id: str, timeout: float | None = None) -> dict[str, Any]:
        """Wait for a task's result. The last 10,000 finished results are kept and can be asked for again.

        Parameters
        ----------
        task_id : str
        timeout : float or None
            Seconds; None: as long as it takes.

        Returns
        -------
        dict
            ``generated_text`` and ``output_ids``, of the new tokens only; ``input_ids``, the prompt as the model read
            it; ``worker_id``, the worker's address. Token ids are None with engines that know none.

        Raises
        ------
        UnknownTaskError
            No such task; it is a KeyError and a ValueError.
        TimeoutError
            Not finished in time; ask again.
        RowFailedError
            The task failed.
        NotRunningError
            The driver is not running, or was stopped before the task was finished; it is a RuntimeError.
        """
        return self._board.result(task_id, timeout)

    def add_done_callback(self, task_id: str, callback: Callable[[str], object]) -> None:
        """Call ``callback(task_id)`` once the task is finished or failed; at once when it is already.

        Callbacks run one after another in a thread for them; :meth:`get_result` does not wait there. What one raises is
        logged.

        Raises
        ------
        UnknownTaskError
            No such task.
        """
        self._board.when_done(task_id, callback)

    @property
    def _board(self) -> Tasks:
        dispatcher = self._running
        tasks = self._tasks
        if tasks is None:
            tasks = self._tasks = Tasks(dispatcher)
        return tasks

    # ---------------------------------------------------------------- workers

    @property
    def client(self) -> Any:
        """The Dask client; None before ``start``."""
        return self._connection.client if self._connection else None

    @property
    def dashboard_link(self) -> str:
        """Where Dask's dashboard is; "" before ``start``."""
        return str(self.client.dashboard_link) if self.client else ""

    def workers(self) -> tuple[WorkerView, ...]:
        """Return what is known of each worker."""
        return self._running.views if self._dispatcher else ()

    @awaitable
    def scale(self, n: int) -> None:
        """Change the number of workers of the cluster; new ones load the model and join in.

        Raises
        ------
        ConfigError
            The driver knows only the scheduler's address, and cannot start or stop workers through it.
        """
        dispatcher = self._running
        assert self._connection is not None
        scale(self._connection.cluster, n)
        dispatcher.expected = n

    @awaitable
    def scale_workers(self, n: int) -> None:
        """Change the number of workers; the same as :meth:`scale`."""
        self.scale(n)

    def placement(self) -> AbstractContextManager[None]:
        """Run inference tasks of a dask.dataframe that is computed in here only on workers that have this driver's model.

        Examples
        --------
        >>> with driver.placement():  # doctest: +SKIP
        ...     ddf.infer.generate("Summarise: {text}", model=driver).to_parquet("answers/")
        """
        return placed(self._running.spec.resource)

    @property
    def worker_manager(self) -> WorkerManager:
        """Adds, removes and describes this driver's workers one by one."""
        from daskinfer.driver.manager import WorkerManager

        return WorkerManager(self)

    # ---------------------------------------------------------------- for run(), the accessors and the command line

    def events(self, name: str, kind: str, observers: Sequence[Callable[[Event], None]] = ()) -> JobEvents:
        """Return the event stream of a new job; the scheduler's page is told of it once the driver has been started."""

        def tell(job: str, told: dict[str, Any]) -> None:
            if self._dispatcher is not None:
                self._dispatcher.telling.tell(job, told)

        return JobEvents(name, kind, tell, observers)

    def open_stream(self, *, ordered: bool, seed: int) -> Stream:
        """Begin a stream, starting the driver when that has not been done."""
        self.start()
        dispatcher = self._running

        async def opened() -> Stream:
            return dispatcher.open(ordered=ordered, seed=seed)

        return self._sync(opened)  # type: ignore[no-any-return]

    def turn(self, stream: Stream, offer: list[Request], **kwargs: Any) -> Turn:
        """Take a turn on a stream; see :meth:`Stream.turn`."""
        return self._sync(stream.turn, offer, **kwargs)  # type: ignore[no-any-return]

    def cancel_stream(self, stream: Stream, *, release: bool) -> None:
        """Submit no more of a stream; with ``release`` also let go of what is in flight."""

        async def cancelled() -> None:
            stream.cancel(release=release)

        self._sync(cancelled)

    def close_stream(self, stream: Stream) -> None:
        """Let go of a stream; does nothing when the driver has been stopped."""

        async def closed() -> None:
            stream.close()

        if self._dispatcher is not None:
            self._sync(closed)

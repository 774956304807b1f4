"""Single tasks: a prompt in, an id back, its result later.

All tasks of a driver share one stream that never ends. A task is offered to it at once and goes out as soon as there is a
slot; it never waits for others. The results of the last tasks are kept, so that they can be asked for again.

Runs on: client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

from daskinfer.driver.dispatch import Dispatcher
from daskinfer.driver.stream import Stream
from daskinfer.errors import (
    ConfigError,
    DaskinferError,
    NotRunningError,
    RowFailedError,
    UnknownOptionError,
    UnknownTaskError,
)
from daskinfer.inputs import as_input
from daskinfer.records import Event, Failed, Report, Request, Result, SamplingParams
from daskinfer.window import Offered

__all__ = ["RETAINED", "Tasks", "read_task"]

logger = logging.getLogger("daskinfer.driver")

RETAINED = 10_000
"""Finished tasks whose results are kept."""

DEFAULTS = {"max_new_tokens": 100, "temperature": 0.7, "top_p": 0.95}
KNOWN = ("input_ids", "prompt", "priority", *DEFAULTS)


def read_task(task: Mapping[str, Any], params: SamplingParams) -> tuple[Any, SamplingParams, int]:
    """Return a task's prompt or token ids, its sampling parameters, and its priority.

    Parameters
    ----------
    task : mapping
        See :meth:`~daskinfer.driver.service.Service.submit_task`.
    params : SamplingParams
        What the task does not say.

    Raises
    ------
    ConfigError
        Neither or both of ``input_ids`` and ``prompt``, or a value of the wrong type or out of range.
    UnknownOptionError
        A key that tasks do not have.
    RowError
        A prompt that cannot be used.
    """
    if not isinstance(task, Mapping):
        raise ConfigError(f"a task is a mapping with 'prompt' or 'input_ids', not {type(task).__name__}")
    for key in task:
        if key not in KNOWN:
            raise UnknownOptionError(str(key), "a task", KNOWN)
    given = [name for name in ("input_ids", "prompt") if task.get(name) is not None]
    if len(given) != 1:
        raise ConfigError(f"a task has either 'input_ids' or 'prompt', not {' and '.join(given) or 'none of them'}")
    content = task[given[0]]
    if given == ["input_ids"]:
        content = _flat(content)
    priority = task.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ConfigError(f"priority={priority!r}: must be a whole number; higher is sooner")
    changes = {name: task.get(name, default) for name, default in DEFAULTS.items()}
    return as_input(content), params.updated(**changes, token_ids=True), priority


def _flat(ids: Any) -> Any:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, Sequence) and not isinstance(ids, str) and ids and isinstance(ids[0], Sequence):
        if len(ids) != 1:
            raise ConfigError(f"input_ids holds {len(ids)} lists; a task is one prompt: submit one task for each")
        return list(ids[0])
    return ids


class TaskStream(Stream):
    """The stream of all tasks; hands results over at once, with the worker they came from.

    Parameters
    ----------
    dispatcher : Dispatcher
    deliver : callable
        Called on the client's event loop with results and the worker's address.
    failed : callable
        Called there when the stream cannot go on.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        deliver: Callable[[Sequence[Result], str], None],
        failed: Callable[[DaskinferError], None],
    ) -> None:
        super().__init__(dispatcher, ordered=False, seed=0)
        self._deliver = deliver
        self._failed = failed
        self._worker = ""

    def offer(self, request: Request, priority: int) -> None:
        """Take a row; it goes out at once when there is a slot."""
        self._handle(Offered((request,), priority))

    def fail(self, error: DaskinferError) -> None:
        """Fail the tasks that wait; later ones are tried again."""
        self._failed(error)

    def publish(self, event: Event) -> None:
        """Nobody observes tasks."""

    def _note(self, event: Event) -> None:
        """Nobody observes tasks."""

    def _reported(self, report: Report) -> None:
        self._worker = report.worker
        super()._reported(report)

    def _emit(self, results: Sequence[Result]) -> None:
        self._deliver(results, self._worker)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    id: str
    future: Future[dict[str, Any]]
    input_ids: list[int] | None


class Tasks:
    """The tasks of a running driver; every method may be called from any thread.

    Parameters
    ----------
    dispatcher : Dispatcher
    retained : int or None
        Finished tasks whose results are kept; None: :data:`RETAINED`.
    """

    def __init__(self, dispatcher: Dispatcher, retained: int | None = None) -> None:
        self._dispatcher = dispatcher
        self._retained = RETAINED if retained is None else retained
        self._numbers = count()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Task] = {}
        self._known: dict[str, _Task] = {}
        self._finished: dict[str, None] = {}
        self._called: list[_Task] = []
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="daskinfer-callbacks")
        self._stream: TaskStream | None = None
        self._closed = False

    def submit(self, content: Any, params: SamplingParams, priority: int) -> str:
        """Hand a row over and return its id; does not wait."""
        number = next(self._numbers)
        ids = None if isinstance(content, str) else [i for i in content if isinstance(i, int)] or None
        task = _Task(f"task-{number}", Future(), ids)
        with self._lock:
            if self._closed:
                raise NotRunningError("the driver was stopped: call start()")
            self._waiting[number] = self._known[task.id] = task
        request = Request(number, content, params)
        loop: Any = self._dispatcher.client.loop
        loop.add_callback(self._offer, request, priority)
        return task.id

    def result(self, task_id: str, timeout_s: float | None) -> dict[str, Any]:
        """Wait for a task's result; see :meth:`~daskinfer.driver.service.Service.get_result`."""
        try:
            return dict(self._task(task_id).future.result(timeout_s))
        except TimeoutError:
            raise TimeoutError(f"task {task_id} was not finished within timeout={timeout_s:g} s; ask again") from None

    def when_done(self, task_id: str, callback: Callable[[str], object]) -> None:
        """Call back with the task's id, in a thread for callbacks, once it is finished or failed."""
        task = self._task(task_id)

        def finished(_: Future[Any]) -> None:
            if not self._closed:
                with self._lock:
                    self._called.append(task)  # its result is not dropped before the callback had it
                self._callbacks.submit(self._call, callback, task)

        task.future.add_done_callback(finished)

    def close(self) -> None:
        """Fail what is not finished, after the dispatcher was stopped."""
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._closed = True
        for task in waiting:
            task.future.set_exception(NotRunningError(f"the driver was stopped before task {task.id} was finished"))
        self._callbacks.shutdown(wait=False, cancel_futures=True)

    def _call(self, callback: Callable[[str], object], task: _Task) -> None:
        try:
            callback(task.id)
        except Exception:
            logger.exception("a callback of %s raised", task.id)
        finally:
            with self._lock:
                self._called.remove(task)

    @property
    def counts(self) -> tuple[int, int]:
        """Tasks that wait or run, and finished ones that are kept."""
        with self._lock:
            return len(self._waiting), len(self._finished)

    def _task(self, task_id: str) -> _Task:
        with self._lock:
            task = self._known.get(task_id) or next((t for t in self._called if t.id == task_id), None)
        if task is None:
            raise UnknownTaskError(str(task_id), self._retained)
        return task

    # ---------------------------------------------------------------- on the client's event loop

    def _offer(self, request: Request, priority: int) -> None:
        if self._closed:
            return
        if self._stream is None:
            try:
                self._stream = self._dispatcher.adopt(TaskStream(self._dispatcher, self._deliver, self._fail_all))
            except DaskinferError as error:  # nobody would ever answer
                self._fail_all(error)
                return
        self._stream.offer(request, priority)

    def _deliver(self, results: Sequence[Result], worker: str) -> None:
        for result in results:
            task = self._finish(result.id)
            if task is None:
                continue
            if isinstance(result, Failed):
                task.future.set_exception(RowFailedError(result.id, result.kind, result.message))
            else:
                task.future.set_result(_answer(result.output, task.input_ids, worker))

    def _fail_all(self, error: DaskinferError) -> None:
        for number in list(self._waiting):
            task = self._finish(number)
            if task is not None:
                task.future.set_exception(error)
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _finish(self, number: int) -> _Task | None:
        with self._lock:
            task = self._waiting.pop(number, None)
            if task is not None:
                self._finished[task.id] = None
                while len(self._finished) > self._retained:
                    oldest = next(iter(self._finished))
                    del self._finished[oldest], self._known[oldest]
        return task


def _answer(output: Any, input_ids: list[int] | None, worker: str) -> dict[str, Any]:
    """Return what get_result gives; an engine that knows no token ids gives the text alone."""
    found = output if isinstance(output, Mapping) else {"text": output}
    return {
        "generated_text": found.get("text"),
        "input_ids": found.get("input_ids", input_ids),
        "output_ids": found.get("output_ids"),
        "worker_id": worker,
    }

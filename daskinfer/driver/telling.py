"""The events of a job, and who hears them: its metrics first, then the scheduler's page, then the caller's observers.

The page is told with the driver's next question for the workers' states, so that it costs no message of its own.

Runs on: client.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from pathlib import Path
from typing import Any

from daskinfer.config import ModelSpec, ShowPolicy
from daskinfer.driver.settings import configured
from daskinfer.metrics import Metrics
from daskinfer.records import (
    Completed,
    Event,
    Failed,
    Result,
    RowsRead,
    RowsResolved,
    RunEnded,
    RunStarted,
    Usage,
)

__all__ = ["JobEvents", "Telling", "name_of"]

EVERY_S = 0.5
RUNNING = ("waiting", "running")


class Telling:
    """What the scheduler is to be told next of a driver's jobs; may be used from any thread.

    Parameters
    ----------
    spec : ModelSpec
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._about = {"model": spec.model, "engine": str(spec.engine), "task": spec.task}
        self._jobs: dict[str, dict[str, Any]] = {}
        self._running: dict[str, None] = {}

    def tell(self, job: str, told: dict[str, Any]) -> None:
        """Replace what is said of a job."""
        self._jobs[job] = told
        if told["snapshot"]["state"] in RUNNING:
            self._running[job] = None
        else:
            self._running.pop(job, None)

    def pending(self) -> dict[str, Any]:
        """Return what to send: the jobs of which there is something new, and the ids of all that have not ended."""
        return {"about": self._about, "jobs": dict(self._jobs), "running": list(self._running)}

    def sent(self, told: Mapping[str, Any]) -> None:
        """Forget what was sent, but not what came meanwhile."""
        for job, snapshot in told["jobs"].items():
            if self._jobs.get(job) is snapshot:
                self._jobs.pop(job, None)


class JobEvents:
    """The event stream of one job; call it with each event, in one thread.

    Parameters
    ----------
    name : str
        For people.
    kind : {"run", "stream", "job"}
    tell : callable
        Takes the job's id and what to say of it, see :meth:`Telling.tell`.
    observers : sequence of callable
        Called with every event.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        tell: Callable[[str, dict[str, Any]], None],
        observers: Sequence[Callable[[Event], None]] = (),
    ) -> None:
        self.metrics = Metrics()
        self.id = uuid.uuid4().hex[:12]
        self._name, self._kind, self._tell = name, kind, tell
        self._observers = observers
        self._told = float("-inf")

    def __call__(self, event: Event) -> None:
        """Take an event."""
        self.metrics.apply(event)
        if event.at - self._told >= EVERY_S or isinstance(event, RunStarted | RunEnded):
            self._told = event.at
            self._tell(self.id, {"name": self._name, "kind": self._kind, "snapshot": self._snapshot()})
        for observer in self._observers:
            observer(event)

    def _snapshot(self) -> dict[str, Any]:
        shown = self.metrics.snapshot().to_dict(workers=False)
        if not configured(ShowPolicy).messages:
            for named in (*shown["failures"], *shown["errors"]):
                named["message"] = ""
            shown["notes"] = []
        return shown

    # ---------------------------------------------------------------- of streams, which have no source and no sink

    @contextmanager
    def of(self, prompts: Any) -> Iterator[None]:
        """Say that rows will come from this iterable, and at the end how it ended."""
        self(RunStarted(time.monotonic(), length_hint(prompts) or None))
        state = "error"
        try:
            yield
            state = "done"
        except GeneratorExit:
            state = "interrupted"
            raise
        finally:
            self(RunEnded(time.monotonic(), state))

    def read(self, rows: int, *, exhausted: bool) -> None:
        """Say that prompts were taken."""
        self(RowsRead(time.monotonic(), rows, exhausted=exhausted))

    def resolved(self, results: Sequence[Result]) -> None:
        """Say that rows have their final result."""
        if results:
            failures = tuple(result for result in results if isinstance(result, Failed))
            usage = sum((result.usage for result in results if isinstance(result, Completed)), Usage())
            self(RowsResolved(time.monotonic(), len(results) - len(failures), len(failures), usage, failures))


def name_of(sink: str) -> str:
    """Return what to call a run: the last part of its output's path."""
    return Path(sink).name or sink

"""What the scheduler shows: models, their jobs, their workers, and how all that went over time.

Fed with what is sent anyway: drivers tell of their jobs when they ask for the workers' states, and the workers' figures
are in their heartbeats. Memory does not grow: of each model the last jobs and lost workers are kept, and a few hundred
samples, whose distance doubles whenever there would be more. Pure; time (seconds since the epoch) is an argument.

Runs on: scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskinfer.counters import STEPS, figure
from daskinfer.rates import Durations
from daskinfer.snapshot import to_json

__all__ = ["Board", "Job", "Model", "Series", "WorkerRow"]

MAX_JOBS = 20
MAX_LOST = 20
MAX_MODELS = 10
SILENT_S = 30.0
"""A running job whose driver has not named it for longer is shown as lost."""
_GONE = ("dead", "left", "replaced")


class Series:
    """Samples over time, at most 480; when there would be more, every second one is dropped."""

    NAMES = (
        "t",
        "rows",
        "tokens_in",
        "tokens_out",
        "occupancy",
        "padding",
        "waiting",
        "ready",
        "ram_bytes",
        "gpu_bytes",
    )
    LIMIT = 480

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {name: [] for name in self.NAMES}
        self.every_s = 1.0
        self.began: float | None = None
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time for a sample."""
        return self.began is None or now >= self._next

    def add(self, now: float, **values: float) -> None:
        """Add a sample."""
        if self.began is None:
            self.began = now
        values["t"] = now - self.began
        for name, column in self.columns.items():
            column.append(round(values.get(name, 0.0), 4))
        if len(self.columns["t"]) >= self.LIMIT:
            self.columns = {name: column[1::2] for name, column in self.columns.items()}
            self.every_s *= 2
        self._next = now + self.every_s * 0.9


@dataclass(slots=True)
class Job:
    """A job as its driver last told of it: ``snapshot`` is a :class:`~daskinfer.snapshot.Snapshot` as a dict.

    ``told`` is when the driver last named it, with something new or without.
    """

    id: str
    name: str
    kind: str
    began: float
    told: float
    snapshot: Mapping[str, Any]

    def state(self, now: float) -> str:
        """Return the run's state, "lost" when it was running and its driver is silent."""
        state = str(self.snapshot.get("state", "waiting"))
        return "lost" if state in ("waiting", "running") and now - self.told > SILENT_S else state


@dataclass(slots=True)
class WorkerRow:
    """One worker of a model: its state since when, and the last figures of it."""

    address: str
    name: str
    state: str
    since: float
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        """Whether it is no more."""
        return self.state in _GONE

    @property
    def occupancy(self) -> float:
        """Share of the engine's places that are taken now."""
        return figure(self.figures, "running") / max(1, figure(self.figures, "capacity"))


class Model:
    """One model on the cluster."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.about: dict[str, str] = {}
        self.loaded = True
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, WorkerRow] = {}
        self.series = Series()
        self.touched = 0.0
        self._tokens: tuple[int, int] | None = None

    @property
    def steps(self) -> Durations:
        """The steps of the engines that are there, by duration."""
        steps = Durations()
        for worker in self.workers.values():
            bins = worker.figures.get(STEPS) or []
            if not worker.gone and len(bins) % 2 == 0:
                steps.merge(bins)
        return steps

    def see(self, rows: Iterable[Mapping[str, Any]], now: float, left: Callable[[str], bool]) -> None:
        """Take the workers as the scheduler knows them now."""
        seen = set()
        for row in rows:
            address, figures = row["address"], row["metrics"]
            if row["state"] == "excluded":
                continue
            seen.add(address)
            known = self.workers.get(address)
            if known is None:
                known = self.workers[address] = WorkerRow(address, str(figures.get("name", "")), "", now)
                self._replace(known)
            state = row["state"] if row["status"] == "running" else row["status"]
            if state != known.state:
                known.state, known.since = state, now
            known.figures = figures
        for worker in self.workers.values():
            if worker.address not in seen and not worker.gone:
                worker.state, worker.since = "left" if left(worker.address) else "dead", now
        gone = [worker.address for worker in self.workers.values() if worker.gone]
        for address in gone[: max(0, len(gone) - MAX_LOST)]:
            del self.workers[address]
        self.loaded, self.touched = True, now
        if self.series.due(now):
            self._sample(now)

    def _replace(self, new: WorkerRow) -> None:
        """Mark the dead worker that this one, started under the same name, stands for."""
        for worker in self.workers.values():
            if worker is not new and worker.state == "dead" and worker.name == new.name:
                worker.state = "replaced"

    def _sample(self, now: float) -> None:
        there = [worker for worker in self.workers.values() if not worker.gone]
        ready = [worker for worker in there if worker.state == "ready"]
        rates = [job.snapshot.get("recent") or {} for job in self.jobs.values() if job.state(now) == "running"]

        def rate(name: str) -> float:
            return float(sum(each.get(name, 0.0) for each in rates))

        def total(workers: Sequence[WorkerRow], name: str) -> int:
            return sum(figure(worker.figures, name) for worker in workers)

        capacity = total(ready, "capacity")
        self.series.add(
            now,
            rows=rate("rows_per_s"),
            tokens_in=rate("prompt_tokens_per_s"),
            tokens_out=rate("completion_tokens_per_s"),
            occupancy=total(ready, "running") / capacity if capacity else 0.0,
            padding=self._padding(there),
            waiting=total(there, "waiting"),
            ready=len(ready),
            ram_bytes=total(there, "ram_bytes"),
            gpu_bytes=total(there, "gpu_memory_bytes"),
        )

    def _padding(self, workers: Sequence[WorkerRow]) -> float:
        """Return the share of padding in what was computed since the last sample."""
        padded = sum(figure(worker.figures, "padded_tokens") for worker in workers)
        names = ("prompt_tokens", "completion_tokens", "padded_tokens")
        computed = sum(figure(worker.figures, name) for worker in workers for name in names)
        before, self._tokens = self._tokens or (padded, computed), (padded, computed)
        grown = computed - before[1]
        return max(0, padded - before[0]) / grown if grown > 0 else 0.0

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return everything but the samples as plain JSON types."""
        percentiles = self.steps.percentiles(0.5, 0.95)
        return {
            "key": self.key,
            **self.about,
            "loaded": self.loaded,
            "jobs": [
                {"id": j.id, "name": j.name, "kind": j.kind, "state": j.state(now), "snapshot": j.snapshot}
                for j in self.jobs.values()
            ],
            "workers": [
                {
                    "address": w.address,
                    "name": w.name,
                    "state": w.state,
                    "for_s": round(now - w.since, 1),
                    "occupancy": round(w.occupancy, 3),
                    **{
                        name: value
                        for name, value in to_json(w.figures).items()
                        if name not in ("state", STEPS, "name")
                    },
                }
                for w in self.workers.values()
            ],
            "step_s": percentiles,
        }


class Board:
    """All models; :attr:`changes` grows with every change, so that a page knows whether there is something to draw."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.changes = 0

    def told(
        self,
        key: str,
        about: Mapping[str, str],
        jobs: Mapping[str, Mapping[str, Any]],
        now: float,
        running: Iterable[str] = (),
    ) -> None:
        """Take what a driver tells of its jobs.

        Parameters
        ----------
        key : str
        about : mapping
            What is known of the model.
        jobs : mapping of str to mapping
            Those of which there is something new, by their ids.
        now : float
        running : iterable of str
            Ids of all that have not ended.
        """
        model = self._model(key)
        model.about.update(about)
        for name in running:
            if name in model.jobs:
                model.jobs[name].told = now
        for name, job in jobs.items():
            known = model.jobs.pop(name, None)
            began = known.began if known else now - float(job["snapshot"].get("elapsed_s") or 0.0)
            model.jobs[name] = Job(name, str(job["name"]), str(job["kind"]), began, now, job["snapshot"])
        for name in list(model.jobs)[: max(0, len(model.jobs) - MAX_JOBS)]:
            del model.jobs[name]
        model.touched = now
        self.changes += 1

    def see(
        self, key: str, rows: Iterable[Mapping[str, Any]], now: float, left: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Take the workers of a model as the scheduler knows them now.

        Parameters
        ----------
        key : str
        rows : iterable of mapping
            ``address, state, status, metrics`` each.
        now : float
        left : callable
            Told the address of a worker that is gone: whether that was meant.
        """
        self._model(key).see(rows, now, left)
        self.changes += 1

    def unloaded(self, key: str) -> None:
        """Note that nobody wants a model any more; what is known of it stays."""
        model = self.models.get(key)
        if model is not None:
            model.loaded = False
            for worker in model.workers.values():
                if not worker.gone:
                    worker.state = "unloaded"
            self.changes += 1

    def jobs(self, now: float) -> list[tuple[Model, Job]]:
        """Return all jobs, the one that began last first; running ones before all others."""
        pairs = [(model, job) for model in self.models.values() for job in model.jobs.values()]
        return sorted(pairs, key=lambda pair: (pair[1].state(now) == "running", pair[1].began), reverse=True)

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return what ``daskinfer.json`` says."""
        return {"time": round(now, 3), "models": [model.to_dict(now) for model in self.models.values()]}

    def _model(self, key: str) -> Model:
        model = self.models.get(key)
        if model is None:
            model = self.models[key] = Model(key)
            idle = sorted((m for m in self.models.values() if not m.loaded), key=lambda m: m.touched)
            for old in idle[: max(0, len(self.models) - MAX_MODELS)]:
                del self.models[old.key]
        return model

"""What a run came to: returned by ``driver.run`` and shown to a person at the end of ``daskinfer run``.

Runs on: client.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from daskinfer.rates import Rates
from daskinfer.records import Failed, Usage
from daskinfer.snapshot import FailureCount, SlowRow, Snapshot, Work, to_json
from daskinfer.timeline import Timeline, advice
from daskinfer.wording import duration, one_line, row_name, share

__all__ = ["RunReport", "installed_versions", "report_from"]

_PACKAGES = ("daskinfer", "dask", "distributed", "torch", "transformers", "pyarrow")
_SHOWN_KINDS = 10
_AS_THEY_ARE = (
    *("quarantined", "committed", "sent", "answered", "work", "average"),
    *("queue_s", "batch_s", "step_s", "steps_s", "slowest", "errors"),
)


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of a run; ``str()`` is a short text for people, :meth:`to_dict` is for programs.

    Attributes
    ----------
    state : str
        "done", "interrupted", "nothing to do" (all rows had been done before, or there were none), or "error".
    rows : int
        Rows that have their final result now: ``completed + failed + skipped``.
    completed, failed : int
        Rows that this run answered, and rows that it failed.
    skipped : int
        Rows that earlier runs had done.
    total : int or None
        Rows of the input, where it was known or read to its end.
    retried : int
        Further attempts made; no part of the sum.
    usage : Usage
        Tokens of this run's rows.
    seconds, startup_s : float
        The whole run, and the part of it before the first batch (starting workers, loading the model).
    rows_per_s, tokens_per_s : float
        This run's rows, and its tokens read and written, by ``seconds``; 0 when there were none.
    failures : tuple of FailureCount
        Kind, number of rows and one example each, the most frequent first.
    path : str or None
        Where the output is.
    resumed : bool
        Whether the run was to continue an earlier one.
    versions : dict of str to str
        Of Python and the packages that matter.
    notes : tuple of str
        What a person should read.
    about : dict
        What ran: ``model, engine, task, seed, began`` (Unix time) and ``settings``, what a resumed run must not change.
    quarantined : int
        Those of the failed rows that killed or hung their engine, or lost their worker.
    committed : int
        Rows that this run put on disk.
    sent, answered : int
        Work, repeats included: rows given to workers, and results that came back.
    work : Work
        What the engines did, repeats included.
    average : Rates or None
        Rows and tokens per second since the first answer.
    queue_s, batch_s, step_s : tuple of float or None
        Median and 95th percentile of the seconds that batches waited on their worker, ran there, and of an engine's step.
    steps_s : tuple of (float, int)
        Steps by duration.
    slowest : tuple of SlowRow
        Slowest first; of each batch only its last row is known.
    errors : tuple of Failed
        The last rows that failed.
    timeline : Timeline or None
        The run over time, and each worker's states.
    advice : tuple of str
        What would make such a run faster.
    """

    state: str
    rows: int
    completed: int
    failed: int
    skipped: int
    total: int | None
    retried: int
    usage: Usage
    seconds: float
    startup_s: float
    rows_per_s: float
    tokens_per_s: float
    failures: tuple[FailureCount, ...] = ()
    path: str | None = None
    resumed: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    quarantined: int = 0
    committed: int = 0
    sent: int = 0
    answered: int = 0
    work: Work = field(default_factory=Work)
    average: Rates | None = None
    queue_s: tuple[float, ...] | None = None
    batch_s: tuple[float, ...] | None = None
    step_s: tuple[float, ...] | None = None
    steps_s: tuple[tuple[float, int], ...] = ()
    slowest: tuple[SlowRow, ...] = ()
    errors: tuple[Failed, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)
    advice: tuple[str, ...] = ()

    @property
    def occupancy(self) -> float | None:
        """Share of the engines' places in use while rows waited."""
        return self.work.occupancy

    @property
    def padding(self) -> float | None:
        """Share of the computed tokens that were only padding."""
        return self.work.padding

    def to_dict(self, *, timeline: bool = True) -> dict[str, Any]:
        """Return everything as plain JSON types.

        Parameters
        ----------
        timeline : bool
            Also the timeline, which is most of it.
        """
        shown = {**to_json(self), "occupancy": self.occupancy, "padding": self.padding}
        return shown if timeline else {name: value for name, value in shown.items() if name != "timeline"}

    def __str__(self) -> str:
        return "\n".join([self._headline(), *_table(self._figures()), *self._failure_lines(), *self._advice()])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self._figures())
        failures = "".join(f"<li>{escape(_failure_text(failure))}</li>" for failure in self.failures[:_SHOWN_KINDS])
        advice = "".join(f"<p>{escape(line)}</p>" for line in self._advice())
        return f"<p><b>{escape(self._headline())}</b></p><table>{rows}</table><ul>{failures}</ul>{advice}"

    @property
    def headline(self) -> str:
        """How it ended, in one line."""
        return self._headline()

    @property
    def figures(self) -> list[tuple[str, str]]:
        """Names and values for people."""
        return self._figures()

    # ---------------------------------------------------------------- the text

    def _headline(self) -> str:
        where = f", output in {self.path}" if self.path else ""
        if self.state == "nothing to do":
            why = f"all {self.skipped:,} rows had been done before" if self.skipped else "the input has no rows"
            return f"Nothing to do: {why}{where}"
        part = f"{self.rows:,}" if self.total in (None, self.rows) else f"{self.rows:,} of {self.total:,}"
        return f"{self.state.capitalize()}: {part} rows in {duration(self.seconds)}{where}"

    def _figures(self) -> list[tuple[str, str]]:
        if self.state == "nothing to do":
            return []
        figures = [("completed", f"{self.completed:,}"), ("failed", f"{self.failed:,}")]
        if self.skipped or self.resumed:
            figures.append(("done before", f"{self.skipped:,}"))
        if self.retried:
            figures.append(("tried again", f"{self.retried:,}"))
        tokens = f"{self.usage.prompt_tokens:,} read, {self.usage.completion_tokens:,} written"
        if self.usage.truncated_tokens:
            tokens += f", {self.usage.truncated_tokens:,} cut off prompts that were too long"
        if self.usage != Usage():
            figures.append(("tokens", tokens))
        if self.rows_per_s:
            by_tokens = f", {self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else ""
            startup = f" (start-up of {duration(self.startup_s)} included)" if self.startup_s >= 1 else ""
            figures.append(("speed", f"{self.rows_per_s:,.1f} rows/s{by_tokens}{startup}"))
        if self.occupancy is not None:
            padding = f", {share(self.padding)} of the tokens were padding" if self.padding else ""
            figures.append(("engines", f"{share(self.occupancy)} full while rows waited{padding}"))
        return figures

    def _failure_lines(self) -> list[str]:
        if not self.failures:
            return []
        more = len(self.failures) - _SHOWN_KINDS
        lines = [f"  {_failure_text(failure)}" for failure in self.failures[:_SHOWN_KINDS]]
        return ["failures:", *lines, *([f"  and {more} more kinds"] if more > 0 else [])]

    def _advice(self) -> list[str]:
        return [*self._next(), *self.advice]

    def _next(self) -> list[str]:
        if self.state in ("interrupted", "error"):
            return ["To continue, run again with resume=True (--resume)."] if self.path else []
        if self.failed and self.path:
            return ["To try the failed rows again, run with resume=True, retry_failed=True (--resume --retry-failed)."]
        return []


def report_from(
    snapshot: Snapshot,
    *,
    path: str | None = None,
    resumed: bool = False,
    versions: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
    timeline: Timeline | None = None,
) -> RunReport:
    """Return the report of a run from the last snapshot of its metrics.

    Parameters
    ----------
    snapshot : Snapshot
        As of the run's end.
    path : str, optional
        Where the output is.
    resumed : bool
        Whether the run was to continue an earlier one.
    versions : mapping, optional
        By default those installed here.
    about : mapping, optional
        What ran.
    timeline : Timeline, optional
    """
    idle = snapshot.state == "done" and not snapshot.done
    seconds, usage = snapshot.elapsed_s, snapshot.usage
    tokens = usage.prompt_tokens + usage.completion_tokens
    return RunReport(
        state="nothing to do" if idle else snapshot.state,
        rows=snapshot.done + snapshot.skipped,
        completed=snapshot.completed,
        failed=snapshot.failed,
        skipped=snapshot.skipped,
        total=snapshot.total,
        retried=snapshot.retried,
        usage=usage,
        seconds=seconds,
        startup_s=snapshot.startup_s or 0.0,
        rows_per_s=snapshot.done / seconds if seconds else 0.0,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        failures=snapshot.failures,
        path=path,
        resumed=resumed,
        versions=installed_versions() if versions is None else dict(versions),
        notes=snapshot.notes,
        about=dict(about or {}),
        **{name: getattr(snapshot, name) for name in _AS_THEY_ARE},
        timeline=timeline,
        advice=advice(snapshot, timeline.starved if timeline else None),
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, read without importing them."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _table(figures: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{value}" for name, value in figures]


def _failure_text(failure: FailureCount) -> str:
    example = f", such as {row_name(failure.row)}: {one_line(failure.message)}" if failure.row is not None else ""
    return f"{failure.rows:,} {failure.kind}{example}"

"""One run: a source through a deployed model into a sink, resumable.

The loop reads as a sentence: pull, offer, take, commit, until nothing more comes. It runs in the caller's thread; the
dispatching goes on beside it on the Dask client's event loop, so reading and writing do not stop the engines.

Runs on: client.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskinfer.checkpoint import Checkpoint, Place, output_at
from daskinfer.driver.hooks import Postprocess, Preprocess, digest, finished, preprocessor, row_params
from daskinfer.driver.interrupts import Interrupt, interrupts
from daskinfer.driver.stream import Stream, Turn
from daskinfer.driver.telling import name_of
from daskinfer.engines import engine_class
from daskinfer.errors import ConfigError, JobInterruptedError, OutputError, describe
from daskinfer.metrics import StopRule
from daskinfer.prompts import Problem, Prompter, prompter
from daskinfer.records import (
    Event,
    Failed,
    FailureKind,
    Request,
    Result,
    RowsCommitted,
    RowsRead,
    RowsResolved,
    RunEnded,
    RunStarted,
    SamplingParams,
    Usage,
)
from daskinfer.report import RunReport, report_from
from daskinfer.reporting import write
from daskinfer.storage import Block, Source, open_source
from daskinfer.storage.files import without_secrets
from daskinfer.timeline import Recorder

if TYPE_CHECKING:
    from daskinfer.driver.driver import Driver

__all__ = ["RunOptions", "execute"]

BLOCK_ROWS = 2_048


@dataclass(frozen=True)
class RunOptions:
    """What :meth:`Driver.run` takes besides source and sink; see there."""

    prompt: str | None = None
    columns: str | Sequence[str] | None = None
    messages: str | None = None
    keep: Sequence[str] | None = None
    output_column: str = "output"
    raw: bool = False
    system: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    resume: bool = False
    overwrite: bool = False
    force: bool = False
    retry_failed: bool = False
    limit: int | None = None
    max_failures: int | str | None = None
    observers: Sequence[Callable[[Event], None]] = ()
    row_params: str | Mapping[str, str] | None = None
    preprocess: Preprocess | None = None
    postprocess: Postprocess | None = None
    report: bool | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and (
            isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0
        ):
            raise ConfigError(f"limit={self.limit!r}: must be None or a number of rows ≥ 0")
        if self.overwrite and (self.resume or self.retry_failed):
            other = "resume" if self.resume else "retry_failed"
            raise ConfigError(f"overwrite and {other} contradict each other: start again, or continue")
        for name in ("token_ids", "logprobs"):
            if getattr(self.params, name):
                raise ConfigError(f"{name}: the output of a run is text; {name} come from generate, stream and submit")
        if self.preprocess is not None and (self.prompt, self.columns, self.messages) != (None, None, None):
            raise ConfigError("preprocess makes the prompts: leave prompt, columns and messages out")
        if not isinstance(self.output_column, str) or not self.output_column:
            raise ConfigError(f"output_column={self.output_column!r}: must be the name of a column")
        StopRule(self.max_failures)


def execute(driver: Driver, source: Any, sink: Any, options: RunOptions) -> RunReport:
    """Run; see :meth:`Driver.run`."""
    opened, task = open_source(source), driver.spec.task
    available = opened.columns
    if opened.is_empty and not available:  # no row, so no column either: nothing to check the settings against
        asked = prompter(columns="prompt", available=("prompt",))
    elif options.preprocess is not None:
        asked = preprocessor(options.preprocess, available, task)
    else:
        ways = options.prompt, options.columns, options.messages
        asked = prompter(prompt=ways[0], columns=ways[1], messages=ways[2], available=available, task=task)
    row_params(options.row_params, available)
    keep = tuple(available if options.keep is None else options.keep)
    spec = driver.spec
    now = time.time()
    with (
        output_at(os.fspath(sink), opened, now=now, overwrite=options.overwrite) as place,
        Checkpoint.open(
            place.path,
            source=opened,
            keep=keep,
            output_column=options.output_column,
            output_type=engine_class(spec).output_type(spec),
            fingerprint=fingerprint(driver, asked, options),
            now=now,
            resume=options.resume,
            overwrite=options.overwrite,
            force=options.force,
            retry_failed=options.retry_failed,
            record={"seed": with_seed(options.params).seed},
        ) as checkpoint,
    ):
        return _Run(driver, opened, asked, (checkpoint, place), os.fspath(sink), options).execute()


def fingerprint(driver: Driver, asked: Prompter, options: RunOptions) -> dict[str, Any]:
    """Return what decides the output of a row, and so must not change when a run is resumed."""
    return {
        **driver.spec.fingerprint(),
        "prompt": dict(asked.fingerprint()),
        "raw": options.raw,
        "system": options.system,
        "params": options.params.to_dict(),
        **({"row_params": options.row_params} if options.row_params is not None else {}),
        **({"postprocess": digest(options.postprocess)} if options.postprocess is not None else {}),
    }


class _Run:
    """The state of one run."""

    def __init__(
        self,
        driver: Driver,
        source: Source,
        asked: Prompter,
        output: tuple[Checkpoint, Place],
        path: str,
        options: RunOptions,
    ) -> None:
        self._driver = driver
        self._source = source
        self._asked = asked
        checkpoint, self._place = output
        self._checkpoint = checkpoint
        self._path = without_secrets(path) if "://" in path else path
        self._options = options
        self._recorder = Recorder()
        self._tell = driver.events(name_of(path), "run", (self._recorder, *options.observers))
        self._metrics = self._tell.metrics
        self._rule = StopRule(options.max_failures)
        drawn = checkpoint.record.get("seed") if options.params.seed is None else options.params.seed
        self._params = with_seed(options.params.updated(seed=drawn))
        self._left = _rows_left(options, checkpoint)
        self._row_params = row_params(options.row_params, source.columns)
        needed = dict.fromkeys((*asked.columns, *(self._row_params.columns if self._row_params else ())))
        blocks = source.blocks(tuple(needed), checkpoint.keep, skip=checkpoint.done, rows=BLOCK_ROWS)
        self._blocks: Iterator[Block] = iter(blocks)
        self._exhausted = checkpoint.remaining == 0
        self._committed = 0
        self._stop = Interrupt()
        self._finishing = False

    # ---------------------------------------------------------------- the loop

    def execute(self) -> RunReport:
        began = time.time()
        self._tell(RunStarted(time.monotonic(), self._total(), self._checkpoint.rows_done))
        state = "error"
        try:
            with interrupts(self._stop):
                self._until_interrupted()
            state = "done"
        except JobInterruptedError:
            state = "interrupted"
            raise
        except OSError as error:
            self._save(error)
            raise OutputError(
                f"{self._path}: reading or writing failed ({without_secrets(describe(error))}); what was done until then is "
                "safe: mend that, and run again with resume=True (--resume)"
            ) from error
        except BaseException as error:
            self._save(error)
            raise
        finally:
            self._tell(RunEnded(time.monotonic(), state))
            report = self._report(began)
        return report

    def _report(self, began: float) -> RunReport:
        driver, options = self._driver, self._options
        spec = driver.spec
        about = {"model": spec.model, "engine": str(spec.engine), "task": spec.task, "seed": self._params.seed}
        report = report_from(
            self._metrics.snapshot(),
            path=self._path,
            resumed=options.resume,
            about={**about, "began": began, "settings": fingerprint(driver, self._asked, options)},
            timeline=self._recorder.timeline,
        )
        if options.report is not False and report.state != "nothing to do":
            write(report, html=options.report)
        return report

    def _until_interrupted(self) -> None:
        try:
            self._loop(self._stop)
        except KeyboardInterrupt as error:
            if not self._stop.asked:
                raise  # it came out of a source or an observer
            with self._stop.held():
                if not self._finishing:
                    self._save(error)
                safe = self._checkpoint.rows_done + self._checkpoint.committed
                raise JobInterruptedError(safe, self._path, self._stop.signum) from error

    def _save(self, reason: BaseException) -> None:
        """Make safe what can be, without hiding why the run stops."""
        try:
            self._checkpoint.interrupt(time.time())
            self._note_committed()
        except (OSError, OutputError) as error:
            reason.add_note(f"and the last results could not be written: {without_secrets(describe(error))}")

    def _loop(self, stop: Interrupt) -> None:
        offer = self._pull(BLOCK_ROWS)
        if offer or self._blocks_left:
            stream = self._driver.open_stream(ordered=False, seed=self._params.seed or 0)
            try:
                while True:
                    turn = self._driver.turn(stream, offer, exhausted=not self._blocks_left)
                    self._take(turn)
                    if turn.done:
                        break
                    if stop.asked:
                        self._drain(stream, stop)
                    offer = self._pull(turn.wanted)
            finally:
                self._driver.close_stream(stream)
        self._judge(ended=True)
        self._finishing = True  # what it leaves when it is broken off is what a killed run leaves
        self._checkpoint.finish(time.time(), complete=self._exhausted)
        self._note_committed()

    def _drain(self, stream: Stream, stop: Interrupt) -> None:
        """Submit nothing more, take what is in flight within the grace period, and stop."""
        stop.patient = True
        self._driver.cancel_stream(stream, release=False)
        deadline = time.monotonic() + self._driver.health.drain_s
        while time.monotonic() < deadline and not stop.insisted:
            turn = self._driver.turn(stream, [], wait_s=0.2)
            self._take(turn, judge=False)
            if turn.done:
                break
        safe = self._checkpoint.interrupt(time.time())
        self._note_committed()
        raise JobInterruptedError(safe, self._path, stop.signum)

    # ---------------------------------------------------------------- rows in

    @property
    def _blocks_left(self) -> bool:
        return not self._exhausted and (self._left is None or self._left > 0)

    def _pull(self, wanted: int) -> list[Request]:
        """Read rows until so many are ready for an engine, or no more are there; note those that cannot be."""
        offer: list[Request] = []
        while len(offer) < wanted and self._blocks_left:
            block = next(self._blocks, None)
            if block is None:
                self._exhausted = True
                self._tell(RowsRead(time.monotonic(), 0, exhausted=True))
                break
            if self._left is not None:
                block = _first_rows(block, self._left)
                self._left -= len(block)
            offer += self._requests(block)
        return offer

    def _requests(self, block: Block) -> list[Request]:
        with self._stop.held():
            self._checkpoint.begin(block)
        self._tell(RowsRead(time.monotonic(), len(block)))
        options, params = self._options, self._params
        offer: list[Request] = []
        failed: list[Result] = []
        for at, (row, prompt) in enumerate(zip(block.ids, self._asked.render(block.values, len(block)), strict=True)):
            if at in block.bad:
                failed.append(Failed(row, FailureKind.INVALID_ROW, block.bad[at]))
            elif isinstance(prompt, Problem):
                failed.append(Failed(row, prompt.kind, prompt.message))
            else:
                try:
                    own = params if self._row_params is None else self._row_params.of(block.values, at, params)
                except ConfigError as error:
                    failed.append(Failed(row, FailureKind.INVALID_ROW, str(error)))
                else:
                    offer.append(Request(row, prompt, own, options.raw, options.system))
        self._resolve(failed)
        return offer

    # ---------------------------------------------------------------- results out

    def _take(self, turn: Turn, *, judge: bool = True) -> None:
        for event in turn.events:
            self._tell(event)
        results: Sequence[Result] = turn.results
        if self._options.postprocess is not None:
            output_type = engine_class(self._driver.spec).output_type(self._driver.spec)
            results = finished(self._options.postprocess, results, text=output_type == "string")
        self._resolve(results)
        if judge and turn.results:
            self._judge(ended=False)

    def _resolve(self, results: Sequence[Result]) -> None:
        with self._stop.held():
            self._checkpoint.add(results, time.time())
        if results:
            failures = tuple(r for r in results if isinstance(r, Failed))
            usage = sum((r.usage for r in results if not isinstance(r, Failed)), Usage())
            done = len(results) - len(failures)
            self._tell(RowsResolved(time.monotonic(), done, len(failures), usage, failures))
        self._note_committed()

    def _judge(self, *, ended: bool) -> None:
        metrics = self._metrics
        error = self._rule.check(metrics.failed, metrics.done, metrics.failures, ended=ended)
        if error is not None:
            raise error

    # ---------------------------------------------------------------- observers

    def _note_committed(self) -> None:
        self._place.push(time.time())
        committed = self._checkpoint.committed
        if committed != self._committed:
            self._tell(RowsCommitted(time.monotonic(), committed - self._committed))
            self._committed = committed

    def _total(self) -> int | None:
        total = self._source.total
        checkpoint = self._checkpoint
        if checkpoint.remaining is not None:
            total = checkpoint.rows_done + checkpoint.remaining
        return total if self._options.limit is None or total is None else min(total, self._options.limit)


def _rows_left(options: RunOptions, checkpoint: Checkpoint) -> int | None:
    """Return how many further rows may be read: ``limit`` counts from the input's beginning.

    Failed rows are run again wherever they are, but not the rows behind the limit along with them.
    """
    if options.limit is None or (options.retry_failed and not options.resume):
        return None
    return max(0, options.limit - checkpoint.rows_done)


def _first_rows(block: Block, rows: int) -> Block:
    if len(block) <= rows:
        return block
    return Block(
        block.ids[:rows],
        {name: values[:rows] for name, values in block.values.items()},
        block.kept.slice(0, rows),
        {at: why for at, why in block.bad.items() if at < rows},
    )


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return parameters with a seed: the given one, or one drawn now."""
    return params if params.seed is not None else params.updated(seed=secrets.randbits(63))

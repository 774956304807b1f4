"""The nouns of a run. The type changes at every hop, so a signature says where you are::

    row → Request → Batch → Report → Result → row

A *Request* is one row ready for an engine; a *Batch* is what one Dask future carries; a *Report* is what comes back, and
may be partly done and faulted at once; a *Result* is the fate of one row, ``Completed`` or ``Failed``.

All are frozen and pickle in columns, since a batch of small objects costs more to pickle than to compute. Their ``repr``
shows no input and no output: Dask logs the ``repr`` of failing tasks, and prompts must not reach its logs.

Runs on: anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeAlias

from daskinfer.errors import ConfigError, UnknownOptionError

__all__ = [
    "Batch",
    "BatchReturned",
    "BatchSubmitted",
    "Completed",
    "EngineStats",
    "Event",
    "Failed",
    "FailureKind",
    "Fault",
    "FaultKind",
    "FinishReason",
    "Input",
    "Noted",
    "Report",
    "Request",
    "Result",
    "RowsCommitted",
    "RowsRead",
    "RowsResolved",
    "RowsRetried",
    "RunEnded",
    "RunStarted",
    "SamplingParams",
    "Timings",
    "Usage",
    "WorkerView",
    "WorkersSeen",
]

Message: TypeAlias = Mapping[str, Any]
Input: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""What an engine is given: text, token ids, chat messages, or a pair of texts (``text`` and ``text_pair``)."""


class FinishReason(StrEnum):
    """Why generation of a row ended."""

    STOP = "stop"
    LENGTH = "length"


class FailureKind(StrEnum):
    """Why a row failed. An engine may use kinds of its own; these are ours."""

    MISSING_PROMPT = "missing_prompt"
    EMPTY_PROMPT = "empty_prompt"
    WRONG_TYPE = "wrong_type"
    INVALID_ROW = "invalid_row"
    TOO_LONG = "too_long"
    REJECTED = "rejected"
    ERROR = "error"
    TRANSIENT = "transient"
    OUT_OF_MEMORY = "out_of_memory"
    ENGINE_DIED = "engine_died"
    ENGINE_HUNG = "engine_hung"
    WORKER_LOST = "worker_lost"


class FaultKind(StrEnum):
    """Why a batch came back with rows undone."""

    ENGINE_NOT_READY = "engine_not_ready"
    ENGINE_DIED = "engine_died"
    ENGINE_HUNG = "engine_hung"
    WORKER_LOST = "worker_lost"
    PREEMPTED = "preempted"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate; neutral between engines.

    Parameters
    ----------
    max_new_tokens : int
        Most tokens generated per row; the prompt does not count. 0 gives an empty answer without a model call.
    temperature : float
        0 means greedy.
    top_p, top_k, min_p : float, int, float
        Limits on the sampled distribution; 1, 0 and 0 switch them off.
    repetition_penalty : float
        1 switches it off.
    min_new_tokens : int
        No end-of-sequence token before so many tokens.
    stop : tuple of str
        Generation ends before the first of these, which is not part of the output.
    stop_token_ids : tuple of int
        Ends generation like an end-of-sequence token.
    ignore_eos : bool
        Go on after an end-of-sequence token (for benchmarks).
    seed : int or None
        Together with the row's id it seeds the row's own generator. None: drawn once per run and recorded.
    truncate : {None, "left", "right"}
        What to do with a prompt that leaves no room to generate: fail the row, or drop tokens from that side.
    token_ids : bool
        The output is a dict of ``text, input_ids, output_ids`` rather than the text alone. The output ids are those that
        the model wrote, also the one that ended the row.
    logprobs : bool
        The output is such a dict with ``logprobs``, a list of floats: the natural logarithm of the probability that the
        model gave to each token it wrote, before temperature, penalties and limits.

    Raises
    ------
    ConfigError
        A value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    truncate: str | None = None
    token_ids: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if getattr(value, "shape", None) == ():  # numpy scalars come from columns of parameters
                object.__setattr__(self, name, value.item())
        object.__setattr__(self, "stop", _listed(self.stop))
        object.__setattr__(self, "stop_token_ids", _listed(self.stop_token_ids))
        for name, ok, needs in (
            ("max_new_tokens", _whole(self.max_new_tokens, 0), "a whole number ≥ 0"),
            ("min_new_tokens", _whole(self.min_new_tokens, 0), "a whole number ≥ 0"),
            ("top_k", _whole(self.top_k, 0), "a whole number ≥ 0 (0 = off)"),
            ("temperature", _number(self.temperature, 0.0), "a number ≥ 0 (0 = greedy)"),
            ("top_p", _number(self.top_p, 0.0, 1.0) and self.top_p > 0, "a number in (0, 1]"),
            ("min_p", _number(self.min_p, 0.0, 1.0), "a number in [0, 1]"),
            (
                "repetition_penalty",
                _number(self.repetition_penalty, 0.0) and self.repetition_penalty > 0,
                "a number > 0",
            ),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(_whole(t, 0) for t in self.stop_token_ids), "token ids ≥ 0"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            ("seed", self.seed is None or _whole(self.seed, 0), "None or a whole number ≥ 0"),
            ("token_ids", isinstance(self.token_ids, bool), "True or False"),
            ("logprobs", isinstance(self.logprobs, bool), "True or False"),
            ("truncate", self.truncate in (None, "left", "right"), "None, 'left' or 'right'"),
        ):
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be {needs}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def updated(self, **changes: Any) -> SamplingParams:
        """Return a copy with some values changed.

        Raises
        ------
        UnknownOptionError
            A name that is not a sampling parameter.
        """
        known = tuple(f.name for f in fields(self))
        for name in changes:
            if name not in known:
                raise UnknownOptionError(name, "SamplingParams", known)
        return replace(self, **changes) if changes else self

    def to_dict(self) -> dict[str, Any]:
        """Return the values as plain types, for manifests."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def _listed(value: Any) -> tuple[Any, ...]:
    """Return a sequence as a tuple, None as an empty one, and any other value, for the checks to judge, as its only item."""
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(value)
    return tuple(value.tolist()) if hasattr(value, "tolist") else (value,)


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _number(value: object, low: float, high: float = math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and value != math.inf


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one row or of many.

    Attributes
    ----------
    prompt_tokens, completion_tokens : int
        Tokens the model read and wrote.
    truncated_tokens : int
        Prompt tokens dropped because ``truncate`` was asked for.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.truncated_tokens + other.truncated_tokens,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """One input row, ready for an engine.

    Attributes
    ----------
    id : int
        File index · 2**40 + row in that file, or the position in the iterable. Stable over retries, restarts and resume.
    input : str, sequence or dict
        The prompt, its token ids, or chat messages; or a pair ``{"text": …, "text_pair": …}``.
    params : SamplingParams
    raw : bool
        Give text to the model as it is, even when the model has a chat template.
    system : str or None
        System message put before a text that becomes a user message.
    origin : int or None
        The row's own id where a host has renumbered the request, since two jobs may use the same ids at once.
    """

    id: int
    input: Any
    params: SamplingParams = SamplingParams()
    raw: bool = False
    system: str | None = None
    origin: int | None = None

    def __repr__(self) -> str:
        return f"<Request {self.id}>"

    @property
    def row(self) -> int:
        """The row's own id: what its random generator is seeded from, together with ``params.seed``."""
        return self.id if self.origin is None else self.origin

    @property
    def size(self) -> int:
        """Rough size of the input in bytes, for budgets; never less than 1."""
        return input_size(self.input)


def input_size(value: Any) -> int:
    """Return a rough number of bytes for an engine's input (text, ids or messages); never less than 1."""
    if isinstance(value, str):
        return (len(value) if value.isascii() else len(value.encode(errors="replace"))) + 1
    if isinstance(value, Mapping):
        return sum(input_size(v) for v in value.values()) + 1
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        if value and isinstance(value[0], int):
            return 4 * len(value) + 1
        return sum(input_size(v) for v in value) + 1
    return 8


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """What one Dask future carries.

    Attributes
    ----------
    key : str
        The future's key; never used twice.
    requests : tuple of Request
    attempt : int
        Highest number of earlier attempts among the rows.
    priority : int
        Passed on to Dask and to the engine's waiting list; higher is sooner.
    probe : bool
        Run alone in the engine, since its rows are suspected of killing it.
    """

    key: str
    requests: tuple[Request, ...]
    attempt: int = 0
    priority: int = 0
    probe: bool = False

    def __repr__(self) -> str:
        return f"<Batch {self.key}: {len(self.requests)} rows, attempt {self.attempt}{', probe' if self.probe else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self.requests
        columns = (
            [r.id for r in rows],
            [r.input for r in rows],
            _shared([r.params for r in rows]),
            _shared([r.raw for r in rows]),
            _shared([r.system for r in rows]),
            _shared([r.origin for r in rows]),
        )
        return _batch, (self.key, columns, self.attempt, self.priority, self.probe)


def _shared(values: list[Any]) -> Any:
    """Return ``(value,)`` for a column that holds one value throughout, else the list."""
    first = values[0] if values else None
    return (first,) if all(v is first or v == first for v in values) else values


def _spread(column: Any, n: int) -> Any:
    return column * n if isinstance(column, tuple) else column


def _batch(key: str, columns: tuple[Any, ...], attempt: int, priority: int, probe: bool) -> Batch:
    ids, inputs, *rest = columns
    spread = [_spread(column, len(ids)) for column in rest]
    return Batch(key, tuple(map(Request, ids, inputs, *spread)), attempt, priority, probe)


@dataclass(frozen=True, slots=True, repr=False)
class Completed:
    """A row that was answered.

    Attributes
    ----------
    id : int
    output : str, dict, or float array
        What the engine's ``output_type`` says.
    finish_reason : str or None
        "stop" or "length" for generated text; None where it has no meaning.
    usage : Usage
    """

    id: int
    output: Any
    finish_reason: str | None = None
    usage: Usage = Usage()

    def __repr__(self) -> str:
        return f"<Completed {self.id}: {self.finish_reason or 'done'}>"

    @property
    def ok(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that could not be answered.

    Attributes
    ----------
    id : int
    kind : str
        One of :class:`FailureKind`, or an engine's own word.
    message : str
        What, which value, what to do; text only.
    worker : str
        Address of the worker that it last ran on, or ""; two that differ only in this are equal.
    """

    id: int
    kind: str
    message: str
    worker: str = field(default="", compare=False)

    def at(self, worker: str) -> Failed:
        """Return this with the worker that it last ran on."""
        return Failed(self.id, self.kind, self.message, worker)

    @property
    def ok(self) -> bool:
        """False."""
        return False

    @property
    def error(self) -> str:
        """What the ``error`` column holds: ``kind: message``."""
        return f"{self.kind}: {self.message}"


Result: TypeAlias = Completed | Failed


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a batch came back with rows undone.

    Attributes
    ----------
    kind : FaultKind
    message : str
    suspects : tuple of int
        Ids of this batch's rows that were inside the engine when it died; the others were only waiting.
    """

    kind: FaultKind
    message: str = ""
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a batch spent on the worker: waiting for the engine's first step, and from there to its last row.

    ``last`` is the id of the row that was finished last, the slowest of the batch; None when none was.
    """

    waited_s: float = 0.0
    ran_s: float = 0.0
    last: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a worker returns for a batch: finished rows, and why the others are not.

    Attributes
    ----------
    key : str
        The batch's key.
    results : tuple of Result
        At most one per row of the batch; rows finished before an engine died are here.
    fault : Fault or None
        None when every row has a result.
    usage : Usage
        Sum over the results.
    timings : Timings
    worker : str
        Address of the worker.
    """

    key: str
    results: tuple[Result, ...]
    fault: Fault | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    worker: str = ""

    def __repr__(self) -> str:
        fault = f", {self.fault.kind}" if self.fault else ""
        return f"<Report {self.key}: {len(self.results)} results{fault}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _report, (self.key, pack_results(self.results), self.fault, self.usage, self.timings, self.worker)


def _report(key: str, packed: Any, fault: Fault | None, usage: Usage, timings: Timings, worker: str) -> Report:
    return Report(key, unpack_results(packed), fault, usage, timings, worker)


def pack_results(results: Sequence[Result]) -> tuple[Any, ...]:
    """Turn results into columns that pickle quickly; :func:`unpack_results` is the inverse.

    Outputs that are arrays of one shape and type travel as one array of shape (rows, …).
    """
    done = [r for r in results if isinstance(r, Completed)]
    lost = [(r.id, r.kind, r.message) for r in results if isinstance(r, Failed)]
    usages = [(r.usage.prompt_tokens, r.usage.completion_tokens, r.usage.truncated_tokens) for r in done]
    outputs: Any = [r.output for r in done]
    if outputs and all(hasattr(o, "dtype") and hasattr(o, "shape") for o in outputs):
        outputs = _block(outputs)
    return [r.id for r in done], outputs, _shared([r.finish_reason for r in done]), _shared(usages), lost


def _block(arrays: list[Any]) -> Any:
    """Return arrays of one shape and type as one array, and others as they are."""
    import numpy as np

    first = arrays[0]
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        return arrays
    if not first.shape:
        return np.stack(arrays)
    return np.concatenate(arrays).reshape(len(arrays), *first.shape)  # a third of the time of np.stack


def unpack_results(packed: tuple[Any, ...]) -> tuple[Result, ...]:
    """Return the results that :func:`pack_results` packed: the completed ones, then the failed ones.

    Vectors are views of the one array that they came in, and rows with the same usage share it.
    """
    ids, outputs, reasons, usages, lost = packed
    n = len(ids)
    known = {usage: Usage(*usage) for usage in set(usages) if usage}
    done = map(Completed, ids, outputs, _spread(reasons, n), map(known.__getitem__, _spread(usages, n)))
    return (*done, *(Failed(*f) for f in lost))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine says of itself; counters only grow.

    Attributes
    ----------
    capacity : int
        Rows it can run at once.
    running, waiting : int
        Rows in the current step, and rows it holds for later ones.
    steps : int
        Steps (forward passes) so far.
    row_steps : int
        Sum over the steps of the rows that ran in them.
    full_steps, full_row_steps : int
        The same over the steps during which rows were waiting: ``full_row_steps / (full_steps · capacity)`` is the
        occupancy that counts.
    prompt_tokens, completion_tokens : int
        Tokens read and written.
    padded_tokens : int
        Tokens computed only because of padding or because a row's batch mates were not finished.
    extra : dict
        Figures of this kind of engine, msgpack-able.
    """

    capacity: int = 1
    running: int = 0
    waiting: int = 0
    steps: int = 0
    row_steps: int = 0
    full_steps: int = 0
    full_row_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    padded_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def occupancy(self) -> float:
        """Share of the capacity used in steps during which rows were waiting; NaN before the first such step."""
        return self.full_row_steps / (self.full_steps * self.capacity) if self.full_steps else math.nan


# ---------------------------------------------------------------- run events: what observers subscribe to


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the scheduler knows it.

    Attributes
    ----------
    address : str
    state : {"loading", "ready", "failed", "restarting", "lost"}
    capacity, slots : int
        Rows the engine runs at once, and batches the worker takes; 0 until it is ready.
    error : str
        Why it failed, or "".
    metrics : dict
        Its last heartbeat's figures: running, waiting, steps, tokens, memory.
    """

    address: str
    state: str
    capacity: int = 0
    slots: int = 0
    error: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run began; ``total`` is the number of rows where it is known, ``done`` those of earlier runs."""

    at: float
    total: int | None
    done: int = 0


@dataclass(frozen=True, slots=True)
class RowsRead:
    """The source gave rows; ``exhausted`` when these were the last."""

    at: float
    rows: int
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class BatchSubmitted:
    """A batch was given to Dask."""

    at: float
    key: str
    rows: int
    attempt: int


@dataclass(frozen=True, slots=True)
class BatchReturned:
    """A batch came back, whole or in part; ``kind`` is its fault's kind or "", ``answered`` the rows with a result."""

    at: float
    key: str
    rows: int
    worker: str
    usage: Usage
    timings: Timings
    kind: str = ""
    message: str = ""
    answered: int = 0


@dataclass(frozen=True, slots=True)
class RowsRetried:
    """Rows will be tried again, why, and how: ``verdict`` is one of the tables of :mod:`daskinfer.faults`."""

    at: float
    rows: int
    kind: str
    message: str
    verdict: str = "retry"


@dataclass(frozen=True, slots=True)
class RowsResolved:
    """Rows got their final result; each row is counted here exactly once."""

    at: float
    completed: int
    failed: int
    usage: Usage
    failures: tuple[Failed, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """The workers as of now."""

    at: float
    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class RowsCommitted:
    """Rows are safe on disk."""

    at: float
    rows: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Something a person should read, once."""

    at: float
    message: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ended: "done", "interrupted" or "error"."""

    at: float
    state: str


Event: TypeAlias = (
    RunStarted
    | RowsRead
    | BatchSubmitted
    | BatchReturned
    | RowsRetried
    | RowsResolved
    | WorkersSeen
    | RowsCommitted
    | Noted
    | RunEnded
)

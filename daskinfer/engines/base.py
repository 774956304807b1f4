"""The engine protocol, and the base class for the many models that are one call per batch.

An engine is passive, single-threaded and deterministic; it owns what runs in each forward pass. Its host is its only
caller: ``load`` once, then ``add`` and ``step`` in turn, ``abort`` for rows nobody wants any more, ``close`` at the end.

Runs on: worker (in the engine's own process, usually).
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from daskinfer.errors import (
    EngineDiedError,
    EngineError,
    OutOfMemoryError,
    RowError,
    TransientError,
    describe,
    safe_str,
)
from daskinfer.records import Completed, EngineStats, Failed, FailureKind, Request, Result, Usage

if TYPE_CHECKING:
    from daskinfer.config import ModelSpec

__all__ = ["BatchEngine", "Budget", "Engine", "failed_with", "translate"]


@runtime_checkable
class Engine(Protocol):
    """What the host calls. The constructor takes the :class:`~daskinfer.config.ModelSpec` and does no heavy work."""

    def __init__(self, spec: ModelSpec) -> None:
        """Keep the specification."""

    def load(self) -> None:
        """Load and warm the model. Any exception is reported as the reason why this worker is not ready."""

    def add(self, requests: Sequence[Request]) -> None:
        """Take rows over. Cheap; never refuses: a row that cannot be served comes back Failed from a later step."""

    def step(self) -> list[Result]:
        """Run one forward pass (or one batch) and return the rows finished by it, in any order.

        Returns an empty list at once when no row is held. Raises only when the engine as a whole is unusable; a row's
        own error is a ``Failed``.
        """

    def abort(self, ids: Sequence[int]) -> None:
        """Forget these rows; they get no result. Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """Return counters and the capacity; valid after ``load``."""

    def close(self) -> None:
        """Free the model. Called once, also after a failed ``load``."""

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        """Return the type of ``Completed.output`` without loading: ``string``, ``float32[384]``, ``struct<…>``."""


def translate(error: BaseException) -> EngineError | None:
    """Return the engine error that a foreign exception means, or None for one that says nothing of the kind.

    By type, not by text, wherever the library has a type for it.
    """
    if isinstance(error, EngineError):
        return error
    if isinstance(error, MemoryError) or _is_named(error, "OutOfMemoryError"):
        return OutOfMemoryError(safe_str(error))
    if type(error) is RuntimeError and "DefaultCPUAllocator" in safe_str(error):  # torch has no type for it on CPUs
        return OutOfMemoryError(safe_str(error))
    if _is_named(error, "AcceleratorError") or (type(error) is RuntimeError and "CUDA error" in safe_str(error)):
        return EngineDiedError(f"the device context is unusable: {safe_str(error)}")
    if isinstance(error, ConnectionError | TimeoutError | InterruptedError):
        return TransientError(describe(error))
    return None


def _is_named(error: BaseException, name: str) -> bool:
    """Whether the exception's class or a base of it has this name (torch is not imported to find out)."""
    return any(kind.__name__ == name for kind in type(error).__mro__)


def failed_with(row: int, error: BaseException) -> Failed:
    """Return the ``Failed`` result of a row whose own processing raised or returned this exception."""
    known = translate(error)
    if isinstance(known, RowError):
        return Failed(row, known.row_kind, known.message)
    if known is not None:
        return Failed(row, known.kind, safe_str(known))
    return Failed(row, FailureKind.ERROR, describe(error))


@dataclass(slots=True)
class Budget:
    """How large a call may be since memory ran out: of rows of one length class, or a step of an engine that never drains.

    It grows back by a sixteenth with each call that made use of it, but past what did not fit only after ``patience`` such
    calls, and that doubles whenever growing went wrong: in n calls memory runs out about log2(n) times, not again and again.
    """

    size: float
    ceiling: float
    patience: int = 16
    calm: int = 0

    def shrink(self, size: float) -> None:
        """Note that a call of this size did not fit."""
        if self.calm >= self.patience:
            self.patience *= 2
        self.size, self.ceiling, self.calm = size / 2, size, 0

    def grow(self, size: float) -> None:
        """Note that a call of this size did fit."""
        if 2 * size < self.size:
            return
        grown = self.size * 17 / 16
        if grown < self.ceiling or self.calm >= self.patience:
            self.size = grown
        else:
            self.calm += 1


class BatchEngine(ABC):
    """Implements ``add`` and ``step`` for a model that is one call per batch.

    The author writes ``load(self)`` and ``infer(self, requests)``. Rows wait here; each step takes the row that has
    waited longest together with those nearest to it in length, as many as fit the budget, so that padding is small and
    nobody starves. When ``infer`` runs out of memory the budget for that length class is halved and remembered, and
    grows back slowly; a row that twice does not fit alone fails. When ``infer`` raises anything else the rows are halved
    until the one at fault is alone.

    Parameters
    ----------
    spec : ModelSpec
        ``spec.options`` may hold ``max_batch_rows`` and ``max_batch_size`` (see the class attributes).

    Attributes
    ----------
    max_batch_rows : int
        Most rows in one call.
    max_batch_size : int
        Most rows times the longest row's length (:meth:`length`, in the engine's own unit: tokens or characters).
    """

    max_batch_rows: ClassVar[int] = 32
    max_batch_size: ClassVar[int] = 1 << 30

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.rows = int(spec.options.get("max_batch_rows", self.max_batch_rows))
        self.size = int(spec.options.get("max_batch_size", self.max_batch_size))
        self._waiting: dict[int, tuple[int, Request]] = {}
        self._refused: list[Result] = []
        self._budgets: dict[int, Budget] = {}
        self._too_large: set[int] = set()
        self._counts: dict[str, int] = dict.fromkeys(
            (
                "steps",
                "row_steps",
                "full_steps",
                "full_row_steps",
                "prompt_tokens",
                "completion_tokens",
                "padded_tokens",
                "out_of_memory",
            ),
            0,
        )

    # ---------------------------------------------------------------- what the author writes

    @abstractmethod
    def load(self) -> None:
        """Load the model; also called again after a restart, in a new process."""

    @abstractmethod
    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        """Return one output per request, in order.

        An output is a str, a dict, a float array, a ``Completed``, or an exception instance, which fails that row alone.
        """

    # ---------------------------------------------------------------- what the author may override

    def prepare(self, request: Request) -> Request:
        """Return the row in the form ``infer`` wants (tokenised, say), with the same id. Called once, when it is added.

        Raises
        ------
        RowError
            The row cannot be served (too long, empty): it comes back Failed and ``infer`` never sees it.
        """
        return request

    def length(self, request: Request) -> int:
        """Return a prepared row's length in the unit of ``max_batch_size``. Called once per row; may raise as well."""
        return request.size

    def release_memory(self) -> None:
        """Give cached device memory back; called after an out-of-memory error, with its traceback already dropped."""
        gc.collect()

    def close(self) -> None:
        """Free the model."""

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        """Return "string"; override for dicts and arrays."""
        return "string"

    # ---------------------------------------------------------------- the engine protocol

    def add(self, requests: Sequence[Request]) -> None:
        """Take rows over."""
        for request in requests:
            try:
                prepared = self.prepare(request)
                self._waiting[request.id] = (self.length(prepared), prepared)
            except Exception as error:  # noqa: BLE001 - the author's code; the row fails, the engine lives
                self._refused.append(failed_with(request.id, error))

    def abort(self, ids: Sequence[int]) -> None:
        """Forget rows that have not run yet."""
        for row in ids:
            self._waiting.pop(row, None)
            self._too_large.discard(row)
        if self._refused:
            forgotten = set(ids)
            self._refused = [result for result in self._refused if result.id not in forgotten]

    def step(self) -> list[Result]:
        """Run one batch."""
        results, self._refused = self._refused, []
        if not self._waiting:
            return results
        chosen = self._choose()
        left = len(self._waiting) - len(chosen)
        self._count(len(chosen), waiting=left > 0)
        results += self._run([request for _, request in chosen], max(length for length, _ in chosen))
        return results

    def stats(self) -> EngineStats:
        """Return the counters."""
        counts = dict(self._counts)
        oom = counts.pop("out_of_memory")
        extra = {"out_of_memory": oom} if oom else {}
        return EngineStats(capacity=self.rows, waiting=len(self._waiting), extra=extra, **counts)

    # ---------------------------------------------------------------- how

    def _count(self, rows: int, *, waiting: bool) -> None:
        self._counts["steps"] += 1
        self._counts["row_steps"] += rows
        if waiting:
            self._counts["full_steps"] += 1
            self._counts["full_row_steps"] += rows

    def _choose(self) -> list[tuple[int, Request]]:
        """Return the oldest waiting row and its nearest neighbours in length, within the budgets."""
        oldest = next(iter(self._waiting))
        order = sorted(self._waiting.values(), key=lambda item: item[0])
        first = last = next(i for i, (_, request) in enumerate(order) if request.id == oldest)
        anchor = order[first][0]
        while last - first + 1 < self.rows:
            below = anchor - order[first - 1][0] if first > 0 else None
            above = order[last + 1][0] - anchor if last + 1 < len(order) else None
            if below is None and above is None:
                break
            take_above = below is None or (above is not None and above < below)
            longest = order[last + 1][0] if take_above else order[last][0]
            if (last - first + 2) * longest > self._budget(longest):
                break
            first, last = (first, last + 1) if take_above else (first - 1, last)
        return order[first : last + 1]

    def _budget(self, longest: int) -> float:
        sizes = (budget.size for kind, budget in self._budgets.items() if kind <= longest.bit_length())
        return min(sizes, default=float(self.size))

    def _run(self, requests: list[Request], longest: int) -> list[Result]:
        error, outputs = self._attempt(requests)
        if error is None:
            for request in requests:
                self._waiting.pop(request.id, None)
                self._too_large.discard(request.id)
            self._grow(len(requests) * longest, longest.bit_length())
            return [self._result(request, output) for request, output in zip(requests, outputs, strict=True)]
        if isinstance(error, OutOfMemoryError):
            self._counts["out_of_memory"] += 1
            self.release_memory()
            if len(requests) > 1:
                size = float(len(requests) * longest)
                self._budgets.setdefault(longest.bit_length(), Budget(size, size)).shrink(size)
                return []  # they stay in the waiting list and are chosen again under the smaller budget
            if requests[0].id not in self._too_large:
                self._too_large.add(requests[0].id)
                return []  # what others have left behind is released by now
        elif len(requests) > 1 and not isinstance(error, TransientError):
            middle = len(requests) // 2
            return self._run(requests[:middle], longest) + self._run(requests[middle:], longest)
        for request in requests:
            self._waiting.pop(request.id, None)
            self._too_large.discard(request.id)
        return [failed_with(request.id, error) for request in requests]

    def _attempt(self, requests: list[Request]) -> tuple[BaseException | None, Sequence[Any]]:
        """Call ``infer``; return its error without its traceback, which would keep the tensors alive, or its outputs."""
        try:
            outputs = self.infer(requests)
            returned = len(outputs)
        except Exception as error:
            known = translate(error)
            if isinstance(known, EngineDiedError):
                raise known from error
            plain: BaseException = known or RowError(describe(error), FailureKind.ERROR)
            plain.__traceback__ = plain.__cause__ = plain.__context__ = None
            return plain, ()
        if returned != len(requests):
            message = f"infer returned {returned} outputs for {len(requests)} requests; it must return one for each"
            return RowError(message, FailureKind.ERROR), ()
        return None, outputs

    def _grow(self, size: int, kind: int) -> None:
        budget = self._budgets.get(kind)
        if budget is not None:
            budget.grow(size)
            if budget.size >= self.size:
                del self._budgets[kind]

    def _result(self, request: Request, output: Any) -> Result:
        if isinstance(output, BaseException):
            return failed_with(request.id, output)
        result = output if isinstance(output, Completed | Failed) else Completed(request.id, output, None, Usage())
        if isinstance(result, Completed):
            self._counts["prompt_tokens"] += result.usage.prompt_tokens
            self._counts["completion_tokens"] += result.usage.completion_tokens
        return result

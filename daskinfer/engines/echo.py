"""An engine without a model: it answers each row with the row's own text, and misbehaves on cue.

It schedules as a continuous-batching engine does: ``capacity`` rows run at once, each writes one token per step, and the
slot of a finished row is given to the next waiting one. So everything around an engine can be tested and measured with
it: dispatch, retries, restarts, occupancy, memory.

Runs on: worker; loads no model library.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from daskinfer.config import ModelSpec, from_mapping
from daskinfer.engines.base import failed_with
from daskinfer.engines.echo_options import EchoOptions
from daskinfer.engines.scripted import Action, EventLog, FaultScript
from daskinfer.errors import OutOfMemoryError, RowError
from daskinfer.records import Completed, EngineStats, FailureKind, FinishReason, Request, Result, Usage

__all__ = ["EchoEngine", "EchoOptions"]


@dataclass(slots=True)
class _Row:
    """A row in a slot: the id it was given under here, and its own."""

    id: int
    row: int
    text: str
    words: int
    length: int
    left: int
    reason: FinishReason
    fault: Action | None
    ids: list[int] | None


class EchoEngine:
    """The engine named "echo".

    Only ``max_new_tokens`` and ``token_ids`` of a row's parameters count: a row that needs more tokens ends with "length",
    and with 0 it is answered "" without a step. Token ids are the bytes of a text, while usage counts whitespace words as
    prompt tokens. Rows scripted to fail do so when they are given a slot and take no part in the step; scripted harm to the
    process comes in the middle of a step, with all slots filled.

    Parameters
    ----------
    spec : ModelSpec
        Its ``options`` are those of :class:`EchoOptions`.

    Raises
    ------
    UnknownOptionError
        An option that does not exist.
    ConfigError
        An option out of range.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.options = options = from_mapping(EchoOptions, spec.options, "the echo engine")
        self._log = EventLog(options.log, options.log_events)
        self._faults = FaultScript(options.faults, options.faults_dir or "") if options.faults else None
        self._length = options.length_rule()
        self._plain = options.plain
        self._writes = options.output == "text"
        self._make = self._answer if self._writes else self._vector
        self._waiting: deque[Request] = deque()
        self._paused: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._results: list[Result] = []
        self._budget: float | None = None
        self._steps = self._row_steps = self._full_steps = self._full_row_steps = 0
        self._prompt_tokens = self._completion_tokens = self._out_of_memory = 0

    # ---------------------------------------------------------------- the engine protocol

    def load(self) -> None:
        """Sleep, then raise if the script says so.

        Raises
        ------
        RuntimeError
            A scripted failure.
        """
        number = self._log.count("load", self._log.write("load"))
        time.sleep(self.options.load_s)
        if self.options.load_error is not None:
            raise RuntimeError(self.options.load_error)
        if self.options.load_fails(number):
            raise RuntimeError(f"scripted failure of load {number}")

    def add(self, requests: Sequence[Request]) -> None:
        """Take rows over, behind those that wait."""
        self._waiting.extend(requests)

    def abort(self, ids: Sequence[int]) -> None:
        """Forget rows, waiting or running; their slots are free from the next step on."""
        gone = set(ids)
        held = [r.row for rows in (self._waiting, self._paused, self._running) for r in rows if r.id in gone]
        if not held:
            return
        self._waiting = deque(r for r in self._waiting if r.id not in gone)
        self._paused = deque(r for r in self._paused if r.id not in gone)
        self._running = [r for r in self._running if r.id not in gone]
        self._log.write("abort", held)

    def step(self) -> list[Result]:
        """Fill the free slots, write one token for each running row, and return the rows that are done."""
        if not (self._plain and self._run_at_once()):
            self._fill()
            if self._running:
                self._run()
        results, self._results = self._results, []
        return results

    def stats(self) -> EngineStats:
        """Return the counters; ``extra`` holds the steps that did not fit the device."""
        return EngineStats(
            capacity=self.options.capacity,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._paused),
            steps=self._steps,
            row_steps=self._row_steps,
            full_steps=self._full_steps,
            full_row_steps=self._full_row_steps,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            extra={"out_of_memory": self._out_of_memory} if self._out_of_memory else {},
        )

    def close(self) -> None:
        """Forget all rows."""
        self._log.write("close")
        self._waiting.clear()
        self._paused.clear()
        self._running.clear()

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        """Return "string", or ``float32[dims]`` for vectors."""
        options = from_mapping(EchoOptions, spec.options, "the echo engine")
        return f"float32[{options.dims}]" if options.output == "vector" else "string"

    # ---------------------------------------------------------------- slots

    def _fill(self) -> None:
        running, waiting, paused = self._running, self._waiting, self._paused
        while len(running) < self.options.capacity and (paused or waiting):
            row = paused.popleft() if paused else self._start(waiting.popleft())
            if row is None:
                continue
            if running and self._budget is not None and self._budget < _working_set([*running, row]):
                paused.appendleft(row)
                break
            running.append(row)

    def _start(self, request: Request) -> _Row | None:
        """Return the row that takes a slot, or None for one whose result is known already."""
        content = request.input
        try:
            text = content if isinstance(content, str) else _text(content)
        except RowError as error:
            self._fail(request, error)
            return None
        action = self._faults.next_action(request.row, text) if self._faults is not None else None
        if action is not None:
            fault = action.row_error(request.row)
            if fault is not None:
                self._fail(request, fault)
                return None
        words = len(text.split())
        length = self._length(request)
        limit = request.params.max_new_tokens
        reason = FinishReason.STOP
        if self._writes and (limit < length or not limit):
            length, reason = limit, FinishReason.LENGTH
        self._prompt_tokens += words
        ids = _token_ids(content) if request.params.token_ids else None
        if length:
            return _Row(request.id, request.row, text, words, length, length, reason, action, ids)
        self._results.append(Completed(request.id, _written("", ids), reason, _usage(words, 0)))
        self._log.write("finish", (request.row,))
        return None

    def _fail(self, failed: Request | _Row, error: BaseException) -> None:
        self._results.append(failed_with(failed.id, error))
        self._log.write("fail", (failed.row,))

    # ---------------------------------------------------------------- a step

    def _run_at_once(self) -> bool:
        """Run a step whose rows all end with it, at half the cost; False when one of them is out of the ordinary."""
        waiting, prefix, suffix = self._waiting, self.options.prefix, self.options.suffix
        requests = list(islice(waiting, self.options.capacity))
        if not requests or not all(map(_is_plain, requests)):
            return False
        for _ in requests:
            waiting.popleft()
        if self.options.step_s:
            time.sleep(self.options.step_s)
        words = [len(r.input.split()) for r in requests]
        self._count(len(requests))
        self._prompt_tokens += sum(words)
        self._results += [
            Completed(request.id, f"{prefix}{request.input}{suffix}", FinishReason.STOP, _usage(read, 1))
            for request, read in zip(requests, words, strict=True)
        ]
        return True

    def _run(self) -> None:
        running = self._running
        if self._log.wants("step"):
            self._log.write("step", [row.row for row in running])
        for row in running if self._faults is not None else ():
            fault, row.fault = row.fault, None
            if fault is not None:
                fault.perform(row.row)
        if self.options.oom_over is not None and not self._fits(self.options.oom_over):
            return
        if self.options.step_s:
            time.sleep(self.options.step_s)
        self._count(len(running))
        for row in running:
            row.left -= 1
        done = [row for row in running if not row.left]
        if done:
            self._running = [row for row in running if row.left] if len(done) < len(running) else []
            self._finish(done)

    def _count(self, rows: int) -> None:
        self._steps += 1
        self._row_steps += rows
        self._completion_tokens += rows if self._writes else 0
        if self._waiting or self._paused:
            self._full_steps += 1
            self._full_row_steps += rows

    def _finish(self, rows: list[_Row]) -> None:
        make, append = self._make, self._results.append
        for row in rows:
            append(make(row))
        if self._log.wants("finish"):
            self._log.write("finish", [row.row for row in rows])

    def _answer(self, row: _Row) -> Completed:
        text = f"{self.options.prefix}{row.text}{self.options.suffix}"
        return Completed(row.id, _written(text, row.ids), row.reason, _usage(row.words, row.length))

    def _vector(self, row: _Row) -> Completed:
        import numpy as np

        noise = hashlib.shake_128(row.text.encode("utf-8", "surrogatepass")).digest(4 * self.options.dims)
        vector = (np.frombuffer(noise, "<u4") / 2.0**31 - 1.0).astype(np.float32)
        return Completed(row.id, vector, None, _usage(row.words, 0))

    def _fits(self, most: int) -> bool:
        """Whether the step fits the device; if not, half its size is remembered and the younger half of the rows waits."""
        running = self._running
        size = _working_set(running)
        if size <= most:
            return True
        self._out_of_memory += 1
        if len(running) == 1:
            self._running = []
            self._fail(running[0], OutOfMemoryError(f"a row of {size} tokens is alone over oom_over={most}"))
            return False
        self._budget = size / 2
        half = len(running) // 2
        self._paused.extendleft(reversed(running[half:]))
        self._running = running[:half]
        return False


def _is_plain(request: Request) -> bool:
    params = request.params
    return type(request.input) is str and params.max_new_tokens > 0 and not params.token_ids


def _written(text: str, ids: list[int] | None) -> Any:
    """Return the output of a row; its token ids are the bytes of the text."""
    return text if ids is None else {"text": text, "input_ids": ids, "output_ids": _token_ids(text)}


def _token_ids(content: Any) -> list[int]:
    if not isinstance(content, str) and isinstance(content[0], int):
        return list(content)
    return list((content if isinstance(content, str) else _text(content)).encode("utf-8", "surrogatepass"))


def _working_set(rows: Sequence[_Row]) -> int:
    return len(rows) * max(row.words + row.length - row.left for row in rows)


@lru_cache(maxsize=4096)
def _usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens)


def _text(content: Any) -> str:
    """Return the text of token ids (joined) or of messages (the last one's content, its text parts joined)."""
    if isinstance(content, Sequence) and not isinstance(content, bytes | bytearray):
        if all(isinstance(part, int) for part in content):
            return " ".join(map(str, content))
        last = content[-1].get("content") if isinstance(content[-1], Mapping) else None
        if isinstance(last, str):
            return last
        if isinstance(last, Sequence) and all(isinstance(part, Mapping) for part in last):
            return "".join(str(part.get("text", "")) for part in last)
    message = f"the echo engine takes a text, token ids or chat messages, not {type(content).__name__}"
    raise RowError(message, FailureKind.WRONG_TYPE)

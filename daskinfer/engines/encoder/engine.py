"""The engine named "encoder": vectors, labels and scores from models that read a text once.

Rows are tokenised by a thread of their own, ahead of the model. Each *lane* computes one batch at a time on its share of
the threads: on a CPU, batches side by side on one thread each are faster than one batch on all threads, which wait for
each other at every layer.

Runs on: worker; ``output_type`` anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from daskinfer.config import ModelSpec
from daskinfer.engines.base import BatchEngine
from daskinfer.engines.encoder.loading import load_parts
from daskinfer.engines.encoder.network import Network
from daskinfer.engines.encoder.options import EncoderOptions
from daskinfer.engines.encoder.preparing import Preparer
from daskinfer.engines.encoder.recipe import folder_of, read_recipe
from daskinfer.engines.encoder.rows import Row, Tokens
from daskinfer.engines.encoder.task import Task
from daskinfer.engines.encoder.tasks import task_of
from daskinfer.engines.hf import pick_device, quiet, release_device_memory, set_threads
from daskinfer.records import EngineStats, Failed, Request, Result

__all__ = ["EncoderEngine"]

_Outcome: TypeAlias = tuple[BaseException | None, Sequence[Any]]
_CHUNK = 128  # rows tokenised in one call
_POOL = 8  # batches' worth of rows among which neighbours in length are looked for
_LEAST_TOKENS = 256  # a batch is not made smaller than this to keep every lane busy
_SAMPLES = ("one", "two words", "the five boxing wizards jump", "a b c d e f g h i j k l m n", "red green")


@dataclass(eq=False)
class _Held:
    """Rows on their way through a thread, and those of them that nobody wants any more."""

    ids: tuple[int, ...]
    gone: set[int] = field(default_factory=set)

    @property
    def wanted(self) -> int:
        return len(self.ids) - len(self.gone)

    def abort(self, ids: Iterable[int]) -> None:
        self.gone.update(set(ids).intersection(self.ids))


@dataclass(eq=False)
class _Chunk(_Held):
    """Rows that are being tokenised."""

    future: Future[list[Row | Failed]] = field(kw_only=True)


@dataclass(eq=False)
class _Batch(_Held):
    """Rows in a lane."""

    longest: int = field(kw_only=True)
    rows: list[Row] = field(kw_only=True)


class EncoderEngine(BatchEngine):
    """Embeds, classifies and scores; see :class:`~daskinfer.engines.encoder.options.EncoderOptions`.

    A row's numbers do not depend on its batch mates beyond float rounding. A vector that is zero everywhere stays zero, and
    its ``finish_reason`` is "zero_vector". A text longer than the model takes fails, unless ``truncate`` says from which
    side to drop tokens.

    Parameters
    ----------
    spec : ModelSpec

    Raises
    ------
    ConfigError
        An option that is unknown, out of range, or of another task.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.options = EncoderOptions.of(spec)
        super().__init__(replace(spec, options={}))  # the sizes are decided at load
        self.spec = spec
        self._most = 0
        self.lanes = 1
        self._network: Network | None = None
        self._preparer: Preparer | None = None
        self._task: Task | None = None
        self._threads_before: int | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._tokenising: ThreadPoolExecutor | None = None
        self._pending: deque[_Chunk] = deque()
        self._running: dict[Future[_Outcome], _Batch] = {}
        self._extra: dict[str, Any] = {}

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        """Return the type of an output, from the model's JSON files and the options.

        A vector is ``float32[384]`` (or of another ``precision``); a label ``struct<label: string, score: float32>``, or a
        list of them; a span of text has ``start``, ``end`` and ``text`` too; a score is ``float32``.

        Raises
        ------
        ConfigError
            The model cannot be found, or does not do this task.
        """
        return task_of(spec, EncoderOptions.of(spec), read_recipe(folder_of(spec), spec.model)).output_type

    # ---------------------------------------------------------------- loading

    def load(self) -> None:
        """Load the model, decide how rows are laid out, and run a few samples."""
        self._threads_before = torch.get_num_threads()
        set_threads(self.spec)
        device = pick_device(self.spec.device)
        with quiet():
            network, task, tokeniser = load_parts(self.spec, self.options, device)
        self._network, self._task, self._preparer = network, task, Preparer(tokeniser, task)
        self._size(device)
        samples = tokeniser.texts([(text, None) for text in _SAMPLES])
        packed = self.options.packing and device.type == "cpu" and network.pack(samples)
        self._extra = {"packed": packed, "lanes": self.lanes, "longest": tokeniser.limit or 0}
        if self.options.int8_weights:
            self._extra["int8_cosine"] = network.quantise(samples)
        network(samples)
        network.padded_tokens = 0

    def _size(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        threads = torch.get_num_threads()
        self.lanes = self.options.max_batch_lanes or (min(threads, 8) if on_cpu else 1)
        self.size = self._most = self.options.max_batch_tokens or (1024 if on_cpu else 32_768)
        self.rows = self.options.max_batch_rows or max(self.size // 8, 1)
        if on_cpu and self.lanes > 1:
            torch.set_num_threads(max(1, threads // self.lanes))
        self._threads = ThreadPoolExecutor(self.lanes, "encoder-lane")
        self._tokenising = ThreadPoolExecutor(1, "encoder-tokeniser")

    # ---------------------------------------------------------------- the engine protocol

    def add(self, requests: Sequence[Request]) -> None:
        """Take rows over; they are tokenised in the background."""
        assert self._tokenising is not None, "load comes first"
        assert self._preparer is not None
        for start in range(0, len(requests), _CHUNK):
            chunk = list(requests[start : start + _CHUNK])
            future = self._tokenising.submit(self._preparer, chunk)
            self._pending.append(_Chunk(tuple(r.id for r in chunk), future=future))

    # ---------------------------------------------------------------- computing, in lanes

    def step(self) -> list[Result]:
        """Give every free lane a batch, and return the rows of the batches that are done; waits for at least one."""
        self._collect()
        results, self._refused = self._refused, []
        while len(self._running) < self.lanes and self._waiting:
            self._start()
        if not self._running:
            return results
        running = sum(len(batch.ids) for batch in self._running.values())
        self._count(running, waiting=bool(self._waiting or self._pending))
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in [future for future in self._running if future in done]:
            results += self._settled(self._running.pop(future), future.result())
        return results

    def _collect(self) -> None:
        """Take over tokenised rows, as many as a good choice of neighbours needs; the rest may still be on their way."""
        while self._pending and len(self._waiting) < _POOL * self.rows * self.lanes:
            chunk = self._pending.popleft()
            for row in chunk.future.result():
                if row.id in chunk.gone:
                    continue
                if isinstance(row, Failed):
                    self._refused.append(row)
                else:
                    self._waiting[row.id] = row.tokens, row

    def _start(self) -> None:
        assert self._threads is not None
        held = sum(tokens for tokens, _ in self._waiting.values())
        inside = sum(row.tokens for batch in self._running.values() for row in batch.rows)
        share = -(-(held + inside // 2) // self.lanes)  # what is inside is half done, on average
        self.size = min(self._most, max(_LEAST_TOKENS, share))  # so the last rows are shared by the lanes
        chosen = self._choose()
        self.size = self._most
        rows = [row for _, row in chosen if isinstance(row, Row)]
        for row in rows:
            del self._waiting[row.id]
        batch = _Batch(tuple(row.id for row in rows), longest=max(tokens for tokens, _ in chosen), rows=rows)
        self._running[self._threads.submit(self._attempt, list(rows))] = batch

    def _settled(self, batch: _Batch, outcome: _Outcome) -> list[Result]:
        """Return the results of a batch; one that failed is tried in parts."""
        error, outputs = outcome
        if error is None:
            self._too_large.difference_update(batch.ids)
            self._grow(len(batch.rows) * batch.longest, batch.longest.bit_length())
            results = [self._result(row, output) for row, output in zip(batch.rows, outputs, strict=True)]
            return [result for result in results if result.id not in batch.gone]
        alive = [row for row in batch.rows if row.id not in batch.gone]
        self._waiting |= {row.id: (row.tokens, row) for row in alive}
        return self._run(list(alive), batch.longest) if alive else []

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        """Run rows through the model, in several passes where a row has many sequences."""
        assert self._network is not None
        assert self._task is not None
        rows = [request for request in requests if isinstance(request, Row)]
        sequences = [sequence for row in rows for sequence in row.sequences]
        made = [self._network(part) for part in _parts(sequences, self._most)]
        with torch.inference_mode():
            return self._task.outputs(rows, torch.cat(made) if len(made) > 1 else made[0])

    # ---------------------------------------------------------------- the rest of the protocol

    def abort(self, ids: Sequence[int]) -> None:
        """Forget rows; those in a lane are computed, and dropped."""
        super().abort(ids)
        for held in (*self._pending, *self._running.values()):
            held.abort(ids)

    def stats(self) -> EngineStats:
        """Return the counters; ``extra`` has the layout, the lanes and the longest row."""
        counted = super().stats()
        pending = sum(chunk.wanted for chunk in self._pending)
        return replace(
            counted,
            capacity=self.rows * self.lanes,
            running=sum(batch.wanted for batch in self._running.values()),
            waiting=counted.waiting + pending + len(self._refused),
            padded_tokens=self._network.padded_tokens if self._network is not None else 0,
            extra={**counted.extra, **self._extra},
        )

    def release_memory(self) -> None:
        """Give cached device memory back."""
        super().release_memory()
        if self._network is not None:
            release_device_memory(self._network.device)

    def close(self) -> None:
        """Free model, threads and memory."""
        for pool in (self._tokenising, self._threads):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        device = self._network.device if self._network is not None else None
        self._network = self._preparer = self._task = self._threads = self._tokenising = None
        self._pending.clear()
        self._running.clear()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if device is not None:
            release_device_memory(device)


def _parts(sequences: Sequence[Tokens], size: int) -> list[list[Tokens]]:
    """Cut sequences into runs of about ``size`` tokens; one row with a hundred labels would not fit otherwise."""
    parts: list[list[Tokens]] = []
    held = 0
    for sequence in sequences:
        if not parts or held + len(sequence.ids) > 2 * size:
            parts.append([])
            held = 0
        parts[-1].append(sequence)
        held += len(sequence.ids)
    return parts

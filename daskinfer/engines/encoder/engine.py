"""The engine named "encoder": vectors, labels and scores from models that read a text once.

Rows are tokenised by a thread of their own, ahead of the model. Each *lane* computes one batch at a time on its share of
the threads: on a CPU, batches side by side on one thread each are faster than one batch on all threads, which wait for
each other at every layer.

Runs on: worker; ``output_type`` anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from daskinfer.config import ModelSpec
from daskinfer.engines.base import BatchEngine
from daskinfer.engines.encoder.int8 import quantised
from daskinfer.engines.encoder.network import Network, load_network
from daskinfer.engines.encoder.options import EncoderOptions
from daskinfer.engines.encoder.preparing import Preparer
from daskinfer.engines.encoder.recipe import Recipe, folder_of, read_recipe
from daskinfer.engines.encoder.rows import Row, Tokeniser, Tokens
from daskinfer.engines.encoder.task import Task
from daskinfer.engines.encoder.tasks import task_of
from daskinfer.engines.hf import find, load_tokenizer, pick_device, quiet, release_device_memory, set_threads
from daskinfer.errors import ConfigError
from daskinfer.records import EngineStats, Failed, Request, Result

__all__ = ["EncoderEngine"]

_Outcome: TypeAlias = tuple[BaseException | None, Sequence[Any]]
_CHUNK = 128  # rows tokenised in one call
_POOL = 8  # batches' worth of rows among which neighbours in length are looked for
_LEAST_TOKENS = 256  # a batch is not made smaller than this to keep every lane busy
_SAMPLES = ("one", "two words", "the five boxing wizards jump", "a b c d e f g h i j k l m n", "red green")


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
        self._pending: deque[tuple[tuple[int, ...], Future[list[Row | Failed]]]] = deque()
        self._running: dict[Future[_Outcome], tuple[int, list[Request]]] = {}
        self._gone: set[int] = set()
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
            folder, recipe = self._folder()
            task = task_of(self.spec, self.options, recipe)
            inner = folder / recipe.path
            tokenizer = load_tokenizer(inner, self.spec)
            network = load_network(inner, self.spec, task.head, tokenizer.pad_token_id, device)
            task.ready(folder, device)
        tokeniser = Tokeniser(
            tokenizer,
            self._longest(network, tokenizer, recipe),
            network.vocab_size,
            prefix=task.prefix,
            pool_prefix=recipe.include_prompt,
            lower_case=recipe.lower_case,
            places=task.head == "token",
        )
        self._network, self._task, self._preparer = network, task, Preparer(tokeniser, task)
        self._size(device)
        samples = tokeniser.texts([(text, None) for text in _SAMPLES])
        if self.options.int8_weights:
            self._extra["int8_cosine"] = quantised(network, samples)
        packed = self.options.packing and device.type == "cpu" and network.pack(samples)
        self._extra |= {"packed": packed, "lanes": self.lanes, "longest": tokeniser.limit or 0}
        network(samples)
        network.padded_tokens = 0

    def _folder(self) -> tuple[Path, Recipe]:
        given = Path(self.spec.model).expanduser()
        if given.is_dir():
            recipe = read_recipe(folder_of(self.spec), self.spec.model)
            find(replace(self.spec, model=str(given / recipe.path)))  # checks it
            return given, recipe
        folder = find(self.spec)
        return folder, read_recipe(folder_of(replace(self.spec, model=str(folder))), self.spec.model)

    def _longest(self, network: Network, tokenizer: Any, recipe: Recipe) -> int | None:
        claimed = tokenizer.model_max_length
        limits = [network.limit, claimed if claimed < 10**9 else None]  # many tokenizers claim 1e30
        most = min((limit for limit in limits if limit), default=None)
        wanted = self.options.max_tokens
        if wanted is not None and network.limit is not None and wanted > network.limit:
            raise ConfigError(
                f"engine_options: max_tokens={wanted} is more than the {network.limit} positions of the model"
            )
        usual = recipe.max_tokens if self.spec.task == "embed" else None
        return wanted or min((limit for limit in (most, usual) if limit), default=None)

    def _size(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        threads = torch.get_num_threads()
        self.lanes = self.options.max_batch_lanes or (min(threads, 8) if on_cpu else 1)
        self.size = self._most = self.options.max_batch_tokens or (1024 if on_cpu else 32_768)
        self.rows = self.options.max_batch_rows or max(self.size // 16, 1)
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
            self._pending.append((tuple(r.id for r in chunk), self._tokenising.submit(self._preparer, chunk)))

    # ---------------------------------------------------------------- computing, in lanes

    def step(self) -> list[Result]:
        """Give every free lane a batch, and return the rows of the batches that are done; waits for at least one."""
        self._collect()
        results, self._refused = self._refused, []
        while len(self._running) < self.lanes and self._waiting:
            self._start()
        if not self._running:
            return results
        self._count(sum(len(rows) for _, rows in self._running.values()), waiting=bool(self._waiting or self._pending))
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=list(self._running).index):
            longest, rows = self._running.pop(future)
            results += self._settled(longest, rows, future.result())
        return results

    def _collect(self) -> None:
        """Take over tokenised rows, as many as a good choice of neighbours needs; the rest may still be on their way."""
        while self._pending and len(self._waiting) < _POOL * self.rows * self.lanes:
            _, future = self._pending.popleft()
            for row in future.result():
                if row.id in self._gone:
                    self._gone.discard(row.id)
                elif isinstance(row, Failed):
                    self._refused.append(row)
                else:
                    self._waiting[row.id] = row.tokens, row

    def _start(self) -> None:
        assert self._threads is not None
        free = self.lanes - len(self._running)
        held = sum(tokens for tokens, _ in self._waiting.values())
        if held < free * self._most:  # the last rows are shared by the lanes
            self.size = min(self._most, max(_LEAST_TOKENS, -(-held // free)))
        chosen = self._choose()
        self.size = self._most
        rows = [row for _, row in chosen]
        for row in rows:
            del self._waiting[row.id]
        self._running[self._threads.submit(self._attempt, rows)] = max(tokens for tokens, _ in chosen), rows

    def _settled(self, longest: int, rows: list[Request], outcome: _Outcome) -> list[Result]:
        """Return the results of a batch; one that failed is tried in parts."""
        error, outputs = outcome
        if error is None:
            self._grow(longest)
            results = [self._result(row, output) for row, output in zip(rows, outputs, strict=True)]
        else:
            alive = [row for row in rows if row.id not in self._gone]
            self._waiting |= {row.id: (row.tokens, row) for row in alive if isinstance(row, Row)}
            results = self._run(alive, longest) if alive else []
        ids = {row.id for row in rows}
        wanted = [result for result in results if result.id not in self._gone]
        self._gone -= ids
        return wanted

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
        held = {row for chunk, _ in self._pending for row in chunk}
        held |= {row.id for _, rows in self._running.values() for row in rows}
        self._gone |= held.intersection(ids)

    def stats(self) -> EngineStats:
        """Return the counters; ``extra`` has the layout, the lanes and the longest row."""
        counted = super().stats()
        pending = sum(len(ids) for ids, _ in self._pending)
        return replace(
            counted,
            capacity=self.rows * self.lanes,
            running=sum(len(rows) for _, rows in self._running.values()),
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

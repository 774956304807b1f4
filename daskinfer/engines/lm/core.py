"""One step after the other: schedule, lay out, run the model, choose tokens.

Runs on: worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from daskinfer.engines.base import Budget, translate
from daskinfer.engines.hf import Answer, LanguageModel, release_device_memory
from daskinfer.engines.hf.answers import NOT_A_NUMBER
from daskinfer.engines.lm.attention import Kernels, Runner, install
from daskinfer.engines.lm.decoder import Decoder
from daskinfer.engines.lm.kv_cache import KVCache, LayerShape
from daskinfer.engines.lm.layout import Layout, slot_sizes
from daskinfer.engines.lm.lookup import Lookup
from daskinfer.engines.lm.plan import StepPlan
from daskinfer.engines.lm.prefixes import Prefixes
from daskinfer.engines.lm.sampling import choose
from daskinfer.engines.lm.scheduler import Scheduler
from daskinfer.engines.lm.sequences import Chunk, Row, Segment
from daskinfer.engines.lm.settings import Settings
from daskinfer.errors import EngineDiedError, OutOfMemoryError

__all__ = ["Core"]

_NO_LIMIT = 1 << 20  # longest row of a model that has no limit


class Core:
    """A loaded model and the rows it works on; tokens in, finished answers out.

    Parameters
    ----------
    loaded : LanguageModel
    shapes : dict of int to LayerShape
        What its layers keep of a token.
    settings : Settings
    kernels : Kernels or None
        Run the attention, if there are any.
    decoder : Decoder or None
        A quicker way through the model than its own, if there is one.

    Attributes
    ----------
    counts : dict of str to int
        Counters for ``stats``.
    """

    def __init__(
        self,
        loaded: LanguageModel,
        shapes: dict[int, LayerShape],
        settings: Settings,
        kernels: Kernels | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.device = loaded.device
        self.slots = settings.rows(loaded.device)
        self._model, self._decoder = loaded.model, decoder
        self._cache = KVCache(shapes, next(loaded.model.parameters()).dtype, loaded.device)
        self._kernels = kernels
        self._runner = Runner(self._cache, kernels)
        install(loaded.model, self._runner)
        self._keep = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        longest = loaded.limit or _NO_LIMIT
        tokens = settings.cache_tokens(loaded.device, self._cache.bytes_per_token)
        most = 2 * self.slots * slot_sizes(settings.slot_tokens, longest)[-1]  # twice: slots grow by copying
        self.layout = Layout(min(tokens, most), settings.slot_tokens, longest)
        self.scheduler = Scheduler(
            self.layout,
            self.slots,
            settings.tokens(loaded.device),
            longest_first=settings.longest_first,
            prefixes=Prefixes() if settings.share_prefixes else None,
        )
        self._full = self.scheduler.budget, self.slots
        self._less: tuple[Budget, Budget] | None = None  # tokens and rows of a step, since memory ran out
        self._answers: dict[int, Answer] = {}
        self.counts = dict.fromkeys(
            (
                "steps",
                "row_steps",
                "full_steps",
                "full_row_steps",
                "prefill_tokens",
                "decode_tokens",
                "guessed",
                "guessed_right",
                "out_of_memory",
            ),
            0,
        )
        self._lookup = settings.lookup_tokens(loaded.device)

    @property
    def own_forward(self) -> bool:
        """Whether the layers run by the quicker way."""
        return self._decoder is not None

    @property
    def compiled_kernels(self) -> bool:
        """Whether the attention is compiled, and what is between multiplications of an own forward pass."""
        return self._kernels is not None

    def fits(self, tokens: int) -> bool:
        """Whether there is memory for a row of so many tokens."""
        return self.layout.fits_alone(tokens)

    def add(self, answer: Answer) -> None:
        """Take a row over; it is not finished."""
        prompt = answer.prompt
        self._answers[prompt.id] = answer
        lookup = Lookup(self._lookup) if self._lookup and answer.is_best_scores else None
        self.scheduler.add(Row.of(prompt.id, list(prompt.input), prompt.params.max_new_tokens, lookup))

    def abort(self, ids: Sequence[int]) -> None:
        """Forget rows."""
        self.scheduler.abort(ids)
        for row in ids:
            self._answers.pop(row, None)

    def step(self) -> list[Answer]:
        """Run one step; return the answers it finished.

        Raises
        ------
        EngineDiedError
            The device is unusable, or has no memory even for the smallest step.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        try:
            self._prepare_memory(chunks)
            plan = StepPlan.of(chunks, self.layout, self.device, self._kernels.few.threads if self._kernels else 0)
            tokens = self._run(plan)
        except Exception as error:
            known = translate(error)
            if not isinstance(known, OutOfMemoryError):
                raise
            error.__traceback__ = None  # it would keep tensors alive
            self._shrink(known)
            return []
        self._count(chunks)
        self._grow(chunks)
        return self._take(plan.rows, tokens)

    # ---------------------------------------------------------------- how

    def _prepare_memory(self, chunks: Sequence[Chunk]) -> None:
        self._cache.drop(self.scheduler.take_dropped())
        self._cache.apply(self.layout.take_operations())
        for chunk in chunks:
            if isinstance(chunk.sequence, Segment) and chunk.start == 0:
                self._cache.begin(chunk.sequence)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> list[int]:
        """Run the model and return the next token of each of the plan's rows."""
        self._runner.plan = plan
        try:
            logits = self._scores(plan)
        finally:
            self._runner.plan = None
        return choose(logits, [self._answers[row.id] for row in plan.rows]) if plan.rows else []

    def _scores(self, plan: StepPlan) -> torch.Tensor:
        """Return the scores of the next token of each of the plan's rows."""
        if self._decoder is not None:
            last = plan.last if plan.rows else plan.last.new_zeros(1)
            return self._decoder(plan.ids, plan.positions, last, self._runner)
        options: dict[str, Any] = {"input_ids": plan.ids, "position_ids": plan.positions, "use_cache": False}
        if self._keep:
            options["logits_to_keep"] = plan.last if plan.rows else 1
        logits: torch.Tensor = self._model(**options).logits[0]
        return logits if self._keep else logits[plan.last]

    def _take(self, rows: Sequence[Row], tokens: Sequence[int]) -> list[Answer]:
        finished, at = [], 0
        while at < len(rows):
            row = rows[at]
            found = tokens[at : at + 1 + len(row.guess)]
            at += len(found)
            if row.guess and NOT_A_NUMBER in found:  # maybe a wrong guess is at fault: once more, without
                row.lookup = None
                self._blank(row)
                self.scheduler.send_back(row)
                continue
            taken = self._push(row, row.verified(found))
            self.counts["guessed_right"] += taken - 1
            self.counts["decode_tokens"] += taken - 1
            if self._answers[row.id].finished:
                self.scheduler.finish(row)
                finished.append(self._answers.pop(row.id))
        return finished

    def _push(self, row: Row, tokens: Sequence[int]) -> int:
        """Add tokens to a row's answer, up to one that finishes it; return how many those were."""
        answer = self._answers[row.id]
        for count, token in enumerate(tokens, 1):
            row.push(token)
            if token == NOT_A_NUMBER:
                self._blank(row)
            if answer.push(token):
                return count
        return len(tokens)

    def _blank(self, row: Row) -> None:
        place = self.layout.places[row]
        self._cache.blank(place.size, place.index)

    def _shrink(self, error: OutOfMemoryError) -> None:
        """Go on with fewer tokens per step and fewer rows after running out of memory."""
        self.counts["out_of_memory"] += 1
        scheduler = self.scheduler
        if scheduler.budget <= 1 and scheduler.slots <= 1:
            raise EngineDiedError(f"no memory for a step of a single token: {error}")
        if self._less is None:
            self._less = Budget(scheduler.budget, scheduler.budget), Budget(scheduler.slots, scheduler.slots)
        tokens, rows = self._less
        tokens.shrink(scheduler.budget)
        rows.shrink(scheduler.slots)
        self._limit(tokens, rows)
        scheduler.reset()
        scheduler.take_dropped()
        self.layout.clear()
        self._cache.free()
        release_device_memory(self.device)

    def _grow(self, chunks: Sequence[Chunk]) -> None:
        """After a step that went well, allow a little more of what memory ran out for."""
        if self._less is not None:
            tokens, rows = self._less
            tokens.grow(sum(chunk.stop - chunk.start for chunk in chunks))
            rows.grow(len(self.scheduler.running))
            self._limit(tokens, rows)

    def _limit(self, tokens: Budget, rows: Budget) -> None:
        most_tokens, most_rows = self._full
        self.scheduler.budget = min(max(int(tokens.size), 1), most_tokens)
        self.scheduler.slots = self.slots = min(max(int(rows.size), 1), most_rows)

    def _count(self, chunks: Sequence[Chunk]) -> None:
        counts, rows = self.counts, len(self.scheduler.running)
        counts["steps"] += 1
        counts["row_steps"] += rows
        if self.scheduler.waiting:
            counts["full_steps"] += 1
            counts["full_row_steps"] += rows
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        answered = [c.sequence for c in chunks if isinstance(c.sequence, Row) and c.sequence.answer and c.samples]
        guessed = sum(len(row.guess) for row in answered)
        counts["guessed"] += guessed
        counts["decode_tokens"] += len(answered)  # and, once they are known, those guessed right
        counts["prefill_tokens"] += tokens - len(answered) - guessed

"""The engine named "lm": continuous batching for causal language models.

Rows join and leave at every step; a step's tokens lie one behind the other without padding; prompts are read in pieces
between the tokens of rows being answered; beginnings that prompts share are computed once.

Runs on: worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class
from daskinfer.engines.base import Engine, failed_with
from daskinfer.engines.hf import (
    Answer,
    LanguageModel,
    Prompt,
    PromptEncoder,
    Rounding,
    load_language_model,
    release_device_memory,
)
from daskinfer.engines.lm.attention import Kernels
from daskinfer.engines.lm.core import Core
from daskinfer.engines.lm.decoder import decoder_of
from daskinfer.engines.lm.linears import pack_linears
from daskinfer.engines.lm.operations import Operations
from daskinfer.engines.lm.settings import Settings
from daskinfer.engines.lm.support import UnsupportedError, probe
from daskinfer.errors import RowError, describe
from daskinfer.records import EngineStats, FailureKind, Request, Result, SamplingParams

__all__ = ["LMEngine"]

_logger = logging.getLogger(__name__)
_FALLBACK = "transformers"
_FALLBACK_OPTIONS = ("max_batch_rows", "allow_pickle")


class LMEngine:
    """Generates text; every row starts and ends by itself, and the engine is full as long as rows wait.

    For a model whose attention it cannot compute, the engine "transformers" takes its place at load; this is logged, and
    stands in ``stats``.

    Parameters
    ----------
    spec : ModelSpec
        ``options`` are those of :class:`~daskinfer.engines.lm.settings.Settings`.

    Raises
    ------
    UnknownOptionError, ConfigError
        An option that does not exist, or one that is out of range.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.settings = Settings.of(spec.options)
        self._core: Core | None = None
        self._loaded: LanguageModel | None = None
        self._encoder: PromptEncoder | None = None
        self._other: Engine | None = None
        self._reason = ""
        self._done: list[Result] = []
        self._prompt_tokens = self._completion_tokens = 0

    def load(self) -> None:
        """Load and check the model, lay out its weights, and generate two tokens.

        Raises
        ------
        ConfigError
            The model cannot be loaded.
        """
        loaded = load_language_model(self.spec)
        try:
            asked = probe(loaded)
        except UnsupportedError as reason:
            device = loaded.device
            del loaded
            release_device_memory(device)
            self._fall_back(str(reason))
            return
        do = _compiled(loaded, self.settings) or _Operators()
        pack_linears(loaded, self.settings, do.rounding)
        self._loaded = loaded
        self._encoder = PromptEncoder(loaded.tokenizer, loaded.limit, loaded.vocab_size)
        decoder = decoder_of(loaded, asked.calls, do.operations)
        self._core = Core(loaded, asked.shapes, self.settings, do.attention, decoder)
        self._warm(loaded)

    def add(self, requests: Sequence[Request]) -> None:
        """Take rows over."""
        if self._other is not None:
            self._other.add(requests)
            return
        for request in requests:
            try:
                self._add(request)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a row fails that row alone
                self._done.append(failed_with(request.id, error))

    def step(self) -> list[Result]:
        """Run one forward pass over all rows that are running and those that can join."""
        if self._other is not None:
            return self._other.step()
        assert self._core is not None, "load comes first"
        results, self._done = self._done, []
        for answer in self._core.step():
            self._prompt_tokens += len(answer.prompt.input)
            self._completion_tokens += len(answer.tokens)
            results.append(answer.result())
        return results

    def abort(self, ids: Sequence[int]) -> None:
        """Forget rows, also running ones."""
        if self._other is not None:
            self._other.abort(ids)
        elif self._core is not None:
            self._core.abort(ids)
            forgotten = set(ids)
            self._done = [result for result in self._done if result.id not in forgotten]

    def stats(self) -> EngineStats:
        """Return counters.

        ``extra`` holds tokens of prompts and of answers computed, whether the model's layers are run by this engine's own
        forward pass and whether kernels are compiled for it, tokens guessed and how many of them were right, the
        cache's size and use in tokens, prompts and tokens that were served from shared prefixes, rows sent back (for lack
        of memory, or since scores behind a wrong guess were no numbers) and their tokens computed again.
        """
        if self._other is not None:
            stats = self._other.stats()
            return replace(stats, extra={**stats.extra, "replaced_by": f"{_FALLBACK}: {self._reason}"})
        assert self._core is not None, "load comes first"
        core, scheduler, layout = self._core, self._core.scheduler, self._core.layout
        counts, prefixes = core.counts, scheduler.prefixes
        return EngineStats(
            capacity=core.slots,
            running=len(scheduler.running),
            waiting=scheduler.waiting + len(self._done),
            steps=counts["steps"],
            row_steps=counts["row_steps"],
            full_steps=counts["full_steps"],
            full_row_steps=counts["full_row_steps"],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            extra={
                "prefill_tokens": counts["prefill_tokens"],
                "decode_tokens": counts["decode_tokens"],
                "own_forward": core.own_forward,
                "compiled_kernels": core.compiled_kernels,
                "guessed_tokens": counts["guessed"],
                "guessed_right_tokens": counts["guessed_right"],
                "kv_tokens": layout.budget,
                "kv_allocated_tokens": layout.allocated,
                "kv_used_tokens": layout.used,
                "prefix_hits": prefixes.hits if prefixes else 0,
                "prefix_tokens": prefixes.hit_tokens if prefixes else 0,
                "preemptions": scheduler.preemptions,
                "recomputed_tokens": scheduler.recomputed,
                "out_of_memory": counts["out_of_memory"],
            },
        )

    def close(self) -> None:
        """Free model and memory."""
        if self._other is not None:
            self._other.close()
        device = self._loaded.device if self._loaded is not None else None
        self._core = self._loaded = self._encoder = self._other = None
        if device is not None:
            release_device_memory(device)

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        """Return "string"."""
        return "string"

    # ---------------------------------------------------------------- how

    def _add(self, request: Request) -> None:
        assert self._encoder is not None, "load comes first"
        assert self._core is not None, "load comes first"
        assert self._loaded is not None, "load comes first"
        prompt = self._encoder.encode(request)
        answer = Answer(prompt, self._loaded.special, self._loaded.tokenizer)
        if answer.finished:
            self._done.append(answer.result())
            return
        if not self._core.fits(prompt.tokens):
            raise RowError(
                f"prompt and answer may have {prompt.tokens} tokens, and there is memory for keys and values of "
                f"{self._core.layout.budget}; lower max_new_tokens, or raise the engine option max_batch_bytes",
                FailureKind.OUT_OF_MEMORY,
            )
        self._core.add(answer)

    def _warm(self, loaded: LanguageModel) -> None:
        """Generate two tokens, and leave no trace of it in the counters."""
        assert self._core is not None, "load comes first"
        prompt = Prompt(-1, [min(loaded.special.eos)], SamplingParams(max_new_tokens=2, ignore_eos=True))
        self._core.add(Answer(prompt, loaded.special, loaded.tokenizer))
        while not self._core.step():
            pass
        self._core.counts = dict.fromkeys(self._core.counts, 0)

    def _fall_back(self, reason: str) -> None:
        """Let another engine do the work, and say so once."""
        _logger.warning("engine 'lm' cannot run %r: %s; using engine '%s'", self.spec.model, reason, _FALLBACK)
        options = {key: value for key, value in self.spec.options.items() if key in _FALLBACK_OPTIONS}
        spec = replace(self.spec, engine=_FALLBACK, options=options)
        self._reason = reason
        self._other = engine_class(spec)(spec)
        self._other.load()


@dataclass(frozen=True, slots=True)
class _Operators:
    """What a processor's compiler may do better; by default tensor operations do it."""

    attention: Kernels | None = None
    operations: Operations = field(default_factory=Operations)
    rounding: Rounding = field(default_factory=Rounding)


def _compiled(loaded: LanguageModel, settings: Settings) -> _Operators | None:
    """Return compiled kernels; None where they are not wanted, not for this model, or Numba cannot be used."""
    if not settings.compiled_kernels or loaded.device.type != "cpu" or loaded.model.dtype != torch.float32:
        return None
    try:
        from daskinfer.engines.lm.compiled import CompiledOperations, CompiledRounding
        from daskinfer.engines.lm.few import FewAttention
        from daskinfer.engines.lm.kernels import gathered
        from daskinfer.engines.lm.pieces import PieceAttention

        team = gathered()
        attention = Kernels(FewAttention(team), PieceAttention(team))
        return _Operators(attention, CompiledOperations(team), CompiledRounding(team))
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way, and tensor operations are always there
        _logger.debug("tensor operations do what Numba would compile: %s", describe(error))
        return None

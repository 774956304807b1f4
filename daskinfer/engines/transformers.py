"""The engine named "transformers": any model that transformers can ``generate`` with, in static batches.

It is the reference for correctness: in float32 its greedy output is that of ``generate`` on one row at a time, up to
near-ties that rounding can turn, whatever the batch.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from daskinfer.config import ModelSpec
from daskinfer.engines.base import BatchEngine
from daskinfer.engines.hf import (
    NOT_A_NUMBER,
    Answer,
    LanguageModel,
    Prompt,
    PromptEncoder,
    load_language_model,
    pick,
    quiet,
    release_device_memory,
)
from daskinfer.errors import UnknownOptionError
from daskinfer.records import Request, Result, SamplingParams

__all__ = ["TransformersEngine"]


class TransformersEngine(BatchEngine):
    """Generates text with ``model.generate``, causal or with an encoder.

    A batch is rows of similar length, padded on the left (on the right for an encoder, whose positions count from the
    left). Every row keeps its own parameters and ends by itself; its mates go on, and what the model computes for ended
    rows and padding is counted in ``padded_tokens``.

    Parameters
    ----------
    spec : ModelSpec
        ``options`` may hold ``max_batch_rows``, ``max_batch_tokens`` (rows times the tokens of the longest prompt and
        answer; decides the memory needed) and ``allow_pickle`` (load pickled weights, weights-only).

    Raises
    ------
    UnknownOptionError
        Another option.
    """

    max_batch_rows = 32
    max_batch_tokens: ClassVar[int] = 32_768
    options: ClassVar[tuple[str, ...]] = ("max_batch_rows", "max_batch_tokens", "allow_pickle")

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        for name in spec.options:
            if name not in self.options:
                raise UnknownOptionError(name, "engine 'transformers'", self.options)
        self.size = int(spec.options.get("max_batch_tokens", self.max_batch_tokens))
        self._loaded: LanguageModel | None = None
        self._encoder: PromptEncoder | None = None

    def load(self) -> None:
        """Load model and tokenizer, and generate two tokens."""
        self._loaded = loaded = load_language_model(self.spec)
        self._encoder = PromptEncoder(
            loaded.tokenizer, loaded.limit, loaded.vocab_size, encoder_decoder=loaded.encoder_decoder
        )
        self.infer([Prompt(-1, [min(loaded.special.eos)], SamplingParams(max_new_tokens=2, ignore_eos=True))])

    def prepare(self, request: Request) -> Prompt:
        """Tokenise a row."""
        assert self._encoder is not None, "load comes first"
        return self._encoder.encode(request)

    def length(self, request: Request) -> int:
        """Return the tokens of prompt and answer."""
        assert isinstance(request, Prompt)
        return request.tokens

    def infer(self, requests: Sequence[Request]) -> list[Result]:
        """Answer one batch."""
        assert self._loaded is not None, "load comes first"
        special, tokenizer = self._loaded.special, self._loaded.tokenizer
        answers = [Answer(request, special, tokenizer) for request in requests if isinstance(request, Prompt)]
        open_answers = [answer for answer in answers if not answer.finished]
        for group in _groups(open_answers, None if self._loaded.encoder_decoder else self._loaded.limit):
            self._generate(self._loaded, group)
        return [answer.result() for answer in answers]

    def release_memory(self) -> None:
        """Give cached device memory back."""
        super().release_memory()
        if self._loaded is not None:
            release_device_memory(self._loaded.device)

    def close(self) -> None:
        """Free model and memory."""
        device = self._loaded.device if self._loaded is not None else None
        self._loaded = self._encoder = None
        if device is not None:
            release_device_memory(device)

    def _generate(self, loaded: LanguageModel, answers: list[Answer]) -> None:
        prompts = [answer.prompt.input for answer in answers]
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), loaded.special.pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            place = slice(0, len(prompt)) if loaded.encoder_decoder else slice(width - len(prompt), width)
            ids[row, place] = torch.tensor(prompt)
            mask[row, place] = 1
        chooser = _Chooser(answers, loaded.special.pad)
        with torch.inference_mode(), quiet():
            # generate counts positions by the mask, which says where the padding is whatever tokens a prompt holds
            loaded.model.generate(
                input_ids=ids.to(loaded.device),
                attention_mask=mask.to(loaded.device),
                generation_config=GenerationConfig(
                    max_new_tokens=max(answer.params.max_new_tokens for answer in answers),
                    do_sample=False,
                    pad_token_id=loaded.special.pad,
                ),
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList([_AllFinished(answers)]),
            )
        wasted = sum(width - len(prompt) for prompt in prompts)
        wasted += sum(chooser.steps - len(answer.tokens) for answer in answers)
        self._counts["padded_tokens"] += wasted


def _groups(answers: Sequence[Answer], limit: int | None) -> list[list[Answer]]:
    """Divide rows so that none, stepping on until its last mate ends, passes the model's last position."""
    groups: list[list[Answer]] = []
    new = 0
    for answer in sorted(
        answers, key=lambda answer: len(answer.prompt.input)
    ):  # so this one's prompt is the longest yet
        new = max(new, answer.params.max_new_tokens)
        if not groups or (limit is not None and len(answer.prompt.input) + new > limit):
            groups.append([])
            new = answer.params.max_new_tokens
        groups[-1].append(answer)
    return groups


class _Chooser(LogitsProcessor):
    """Picks each row's token and leaves ``generate``, which takes the best one, no choice."""

    def __init__(self, answers: Sequence[Answer], pad: int) -> None:
        self._answers, self._pad = answers, pad
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        rows = [row for row, answer in enumerate(self._answers) if not answer.finished]
        tokens = [self._pad] * len(self._answers)
        open_scores = scores if len(rows) == len(tokens) else scores[rows]
        for row, token in zip(rows, pick(open_scores, [self._answers[row] for row in rows]), strict=True):
            self._answers[row].push(token)
            if token != NOT_A_NUMBER:
                tokens[row] = token
        chosen = torch.tensor(tokens, device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _AllFinished(StoppingCriteria):
    """Tells ``generate`` which rows are finished."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.tensor([answer.finished for answer in self._answers], device=input_ids.device)

"""The answer of one row while it grows: what ends it, and what becomes of its tokens.

Runs on: worker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from daskinfer.engines.hf.prompts import Prompt
from daskinfer.engines.hf.special import SpecialTokens
from daskinfer.records import Completed, Failed, FailureKind, FinishReason, Result, Usage

__all__ = ["NOT_A_NUMBER", "Answer"]

NOT_A_NUMBER = -1
"""Stands for a token where the model's scores are not numbers."""

_MARGIN = 4  # tokens looked at beyond a stop string's bytes, for tokens that stand for no text


class Answer:
    """A row being answered. It is finished from the start when no token was asked for.

    ``completion_tokens`` counts every token the model wrote for the row: those that end it too, which are not part of the
    output, and those of a stop string. The output ends before the first stop string, wherever token borders lie.

    Parameters
    ----------
    prompt : Prompt
    special : SpecialTokens
    tokenizer : transformers.PreTrainedTokenizerBase
        Turns the tokens into text, without special tokens.

    Attributes
    ----------
    tokens : list of int
        Written so far.
    logprobs : list of float
        Of the tokens, where the row asked for them.
    finished : bool
    ends : frozenset of int
        Tokens that end this row.
    """

    def __init__(self, prompt: Prompt, special: SpecialTokens, tokenizer: Any) -> None:
        params = prompt.params
        self.prompt, self.params = prompt, params
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        # a stop string that is a special token never shows in the text, so its id has to be looked for
        named = {special.named[stop] for stop in params.stop if stop in special.named}
        self.ends = frozenset(params.stop_token_ids) | named | (frozenset() if params.ignore_eos else special.eos)
        self._before = (special.start,) if special.start is not None else prompt.input
        self._tokenizer = tokenizer
        self._stops = tuple(params.stop)
        self._window = max((len(stop.encode()) for stop in self._stops), default=0) + _MARGIN
        self._reason: FinishReason | None = FinishReason.LENGTH if params.max_new_tokens == 0 else None
        self._broken = False
        self._random: random.Random | None = None

    @property
    def finished(self) -> bool:
        """Whether the row needs no more tokens."""
        return self._reason is not None

    @property
    def context(self) -> Sequence[int]:
        """The tokens before the next one, as the decoder sees them."""
        return [*self._before, *self.tokens]

    @property
    def may_end(self) -> bool:
        """Whether ``min_new_tokens`` allows the next token to be an end."""
        return len(self.tokens) >= self.params.min_new_tokens

    @property
    def is_best_scores(self) -> bool:
        """Whether each token is the one with the model's highest score, and nothing but the tokens is asked for."""
        params = self.params
        return params.greedy and params.repetition_penalty == 1 and not params.min_new_tokens and not params.logprobs

    def draw(self) -> float:
        """Return the row's next random number in [0, 1).

        The numbers depend on the seed and the row's id alone, hence not on batch, worker or device. Without a seed they
        are different each time.
        """
        if self._random is None:
            seed = self.params.seed
            self._random = random.Random(None if seed is None else f"{seed}/{self.prompt.row}")  # noqa: S311
        return self._random.random()

    def push(self, token: int) -> bool:
        """Take the next token over and return whether the row is finished by it."""
        if token == NOT_A_NUMBER:
            self._broken, self._reason = True, FinishReason.STOP
            return True
        self.tokens.append(token)
        if token in self.ends or (self._stops and self._stopped()):
            self._reason = FinishReason.STOP
        elif len(self.tokens) >= self.params.max_new_tokens:
            self._reason = FinishReason.LENGTH
        return self.finished

    def result(self) -> Result:
        """Return what became of the row."""
        if self._broken:
            return Failed(
                self.prompt.id,
                FailureKind.ERROR,
                "the model's scores are not numbers (NaN); a dtype with a wider range may help, such as dtype='float32'",
            )
        ended = bool(self.tokens) and self.tokens[-1] in self.ends
        text = self._text(self.tokens[:-1] if ended else self.tokens)
        cut = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        reason = self._reason if cut is None else FinishReason.STOP
        usage = Usage(len(self.prompt.input), len(self.tokens), self.prompt.truncated)
        output: Any = text[:cut]
        if self.params.token_ids or self.params.logprobs:
            output = {"text": output}
        if self.params.token_ids:
            output |= {"input_ids": list(self.prompt.input), "output_ids": list(self.tokens)}
        if self.params.logprobs:
            output["logprobs"] = list(self.logprobs)
        return Completed(self.prompt.id, output, reason, usage)

    def _stopped(self) -> bool:
        tail = self._text(self.tokens[-self._window :])
        if not any(stop in tail for stop in self._stops):
            return False
        text = self._text(self.tokens)
        return any(stop in text for stop in self._stops)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""

"""From requests to rows in tokens, many in one call of the tokenizer.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from daskinfer.engines.base import failed_with
from daskinfer.engines.encoder.rows import Row, Text, Tokeniser, Tokens
from daskinfer.engines.encoder.task import Task
from daskinfer.records import Failed, FailureKind, Request

__all__ = ["Preparer"]

_Made: TypeAlias = tuple[Text | None, Tokens | BaseException]


class Preparer:
    """Makes rows of requests. Not to be called by two threads at once: tokenizers have a state.

    Parameters
    ----------
    tokeniser : Tokeniser
    task : Task
    """

    def __init__(self, tokeniser: Tokeniser, task: Task) -> None:
        self._tokeniser, self._task = tokeniser, task

    def __call__(self, requests: Sequence[Request]) -> list[Row | Failed]:
        """Return the row of each request, or why it fails, in order."""
        texts: list[Text] = []
        wanted: list[tuple[Request, slice | Tokens | BaseException]] = []
        for request in requests:
            try:
                found = self._task.texts(request.input)
                if isinstance(found, Tokens):
                    wanted.append((request, self._tokeniser.ids(found.ids)))
                    continue
            except Exception as error:  # noqa: BLE001 - the row fails, the engine lives
                wanted.append((request, error))
                continue
            wanted.append((request, slice(len(texts), len(texts) + len(found))))
            texts.extend(found)
        made = self._tokens(texts)
        return [self._row(request, _made(place, texts, made)) for request, place in wanted]

    def _tokens(self, texts: Sequence[Text]) -> list[Tokens | BaseException]:
        """Tokenise; a tokenizer wants texts alone and pairs in different calls."""
        found: list[Any] = [None] * len(texts)
        for pairs in (False, True):
            places = [i for i, (_, second) in enumerate(texts) if (second is not None) == pairs]
            for place, tokens in zip(places, self._try([texts[i] for i in places]), strict=True):
                found[place] = tokens
        return found

    def _try(self, texts: Sequence[Text]) -> list[Tokens | BaseException]:
        """Tokenise; texts that the tokenizer cannot take are found by trying them one by one."""
        try:
            return list(self._tokeniser.texts(texts))
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything at a text
            if len(texts) == 1:
                return [error]
            return [found for text in texts for found in self._try([text])]

    def _row(self, request: Request, made: Sequence[_Made]) -> Row | Failed:
        sequences, truncated = [], 0
        for text, tokens in made:
            if isinstance(tokens, BaseException):
                return failed_with(request.id, tokens)
            try:
                fitted = self._tokeniser.fitted(text, tokens, request.params.truncate)
            except Exception as error:  # noqa: BLE001 - the row fails, the engine lives
                return failed_with(request.id, error)
            if not fitted.ids:
                return Failed(request.id, FailureKind.EMPTY_PROMPT, "the text has no tokens")
            truncated += len(tokens.ids) - len(fitted.ids)
            sequences.append(fitted)
        kept = request.input if self._task.head == "token" else None  # spans are cut out of it
        return Row(request.id, kept, request.params, sequences=tuple(sequences), truncated=truncated)


def _made(
    place: slice | Tokens | BaseException, texts: Sequence[Text], made: Sequence[Tokens | BaseException]
) -> list[_Made]:
    if isinstance(place, slice):
        return list(zip(texts[place], made[place], strict=True))
    return [(None, place)]

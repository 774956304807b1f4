"""Rows, and how they become tokens.

A row of ``embed`` and ``classify`` is a text (or, to embed, its token ids). A row of ``score`` is a pair::

    {"text": "how tall is it?", "text_pair": "It is 8 m tall."}       or ["how tall is it?", "It is 8 m tall."]
    {"text": "how tall is it?", "text_pair": ["8 m", "red"]}          with the option rank

A classifier of pairs is given the same mapping.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from daskinfer.errors import RowError
from daskinfer.records import FailureKind, Request

__all__ = ["Row", "Text", "Tokeniser", "Tokens"]

Text: TypeAlias = tuple[str, str | None]
"""A text, and the second one of a pair or None."""


class Tokens(NamedTuple):
    """One sequence for the model.

    Attributes
    ----------
    ids : list of int
    types : list of int or None
        Which text of a pair each token belongs to, for models that want to know.
    skip : int
        Leading tokens that take no part in pooling.
    spans : list of (int, int) or None
        Where in the text each token stands; (0, 0) for special tokens.
    words : list of int or None
        Number of the word each token belongs to; None for special tokens.
    """

    ids: list[int]
    types: list[int] | None = None
    skip: int = 0
    spans: list[tuple[int, int]] | None = None
    words: list[int | None] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Row(Request):
    """A request in tokens; most have one sequence.

    Attributes
    ----------
    sequences : tuple of Tokens
    truncated : int
        Tokens dropped because ``truncate`` was asked for.
    """

    sequences: tuple[Tokens, ...] = ()
    truncated: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)


# ---------------------------------------------------------------- tokens


class Tokeniser:
    """Turns texts into sequences that fit the model.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    limit : int or None
        Most tokens in a sequence.
    vocab_size : int
        Token ids must be smaller.
    prefix : str
        Put before every text.
    pool_prefix : bool
        Whether the prefix takes part in pooling.
    lower_case : bool
        Turn texts into lower case first.
    places : bool
        Keep where tokens stand in their text.
    """

    def __init__(
        self,
        tokenizer: Any,
        limit: int | None,
        vocab_size: int,
        *,
        prefix: str = "",
        pool_prefix: bool = True,
        lower_case: bool = False,
        places: bool = False,
    ) -> None:
        self.limit = limit
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._prefix, self._lower_case, self._places = prefix, lower_case, places
        self._wants_types = "token_type_ids" in tokenizer.model_input_names
        self._skip = 0 if pool_prefix or not prefix else self._length_of(prefix)

    def texts(self, texts: Sequence[Text]) -> list[Tokens]:
        """Return the sequences of texts, however long they are."""
        return self._call(texts) if texts else []

    def ids(self, ids: Sequence[int]) -> Tokens:
        """Return the sequence of token ids, taken as they are.

        Raises
        ------
        RowError
            An id that the model does not have.
        """
        wrong = next((token for token in ids if token >= self._vocab_size), None)
        if wrong is not None:
            raise RowError(
                f"the text has the token id {wrong}, but the model has {self._vocab_size} tokens",
                FailureKind.INVALID_ROW,
            )
        return Tokens(list(ids), [0] * len(ids) if self._wants_types else None)

    def fitted(self, text: Text | None, tokens: Tokens, side: str | None) -> Tokens:
        """Return a sequence that fits, cut from a side if need be.

        Special tokens stay. The longer text of a pair is cut first.

        Parameters
        ----------
        text : tuple or None
            What the tokens were made of; None: they were given as ids.
        tokens : Tokens
        side : {None, "left", "right"}

        Raises
        ------
        RowError
            It does not fit, and no side was given.
        """
        if self.limit is None or len(tokens.ids) <= self.limit:
            return tokens
        if side is None:
            raise RowError(
                f"the text has {len(tokens.ids)} tokens and the model takes at most {self.limit}; shorten it, "
                "or set truncate='right' (or 'left') to drop the rest",
                FailureKind.TOO_LONG,
            )
        if text is None:
            kept = slice(0, self.limit) if side == "right" else slice(-self.limit, None)
            return Tokens(tokens.ids[kept], tokens.types and tokens.types[kept])
        self._tokenizer.truncation_side = side
        return self._call([text], cut=True)[0]

    def _call(self, texts: Sequence[Text], *, cut: bool = False) -> list[Tokens]:
        firsts = [self._prefix + first for first, _ in texts]
        seconds = [second for _, second in texts if second is not None]
        if self._lower_case:
            firsts, seconds = [text.lower() for text in firsts], [text.lower() for text in seconds]
        made = self._tokenizer(
            firsts,
            seconds or None,
            padding=False,
            truncation="longest_first" if cut else False,
            max_length=self.limit if cut else None,
            return_attention_mask=False,
            return_token_type_ids=self._wants_types,
            return_offsets_mapping=self._places,
            verbose=False,
        )
        types = made["token_type_ids"] if self._wants_types else [None] * len(texts)
        spans = made["offset_mapping"] if self._places else [None] * len(texts)
        words = [made.word_ids(i) for i in range(len(texts))] if self._places else [None] * len(texts)
        return [
            Tokens(ids, kinds, self._skip, places, numbers)
            for ids, kinds, places, numbers in zip(made["input_ids"], types, spans, words, strict=True)
        ]

    def _length_of(self, prefix: str) -> int:
        """Return the leading tokens that the prefix makes, without a special token at its end."""
        ids = self._tokenizer([prefix], verbose=False)["input_ids"][0]
        return len(ids) - (1 if ids and ids[-1] in self._tokenizer.all_special_ids else 0)

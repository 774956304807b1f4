"""From a request to token ids that fit the model, with room for the answer.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from daskinfer.errors import RowError, describe
from daskinfer.inputs import as_input
from daskinfer.records import FailureKind, Request

__all__ = ["Prompt", "PromptEncoder"]

Messages: TypeAlias = list[dict[str, Any]]
_NO_TEMPLATE = "but the model has no chat template"


@dataclass(frozen=True, slots=True, repr=False)
class Prompt(Request):
    """A request whose ``input`` is a list of token ids, and whose ``max_new_tokens`` fits behind them.

    Attributes
    ----------
    truncated : int
        Prompt tokens that were dropped to make room.
    """

    truncated: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and, at most, of the answer."""
        return len(self.input) + self.params.max_new_tokens


class PromptEncoder:
    """Makes prompts of requests.

    Text is a user message where the model has a chat template and the request does not say ``raw``. The template owns all
    special tokens of a templated text. Raw text gets the tokenizer's special tokens, but no second
    beginning-of-sequence token when it has one already. Token ids are taken as they are.

    When prompt and ``max_new_tokens`` together exceed the limit, ``max_new_tokens`` is reduced to what is left. When
    nothing is left, the row fails, unless ``truncate`` says from which side to drop tokens: then the prompt is cut so that
    ``max_new_tokens`` fit, or half the limit if they are more. Of a chat only the last user message is cut.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    limit : int or None
        Most tokens of prompt and answer together; with an encoder, of each.
    vocab_size : int
        Ids must be smaller.
    encoder_decoder : bool
        The prompt goes to an encoder, so that the answer does not share its limit.
    """

    def __init__(self, tokenizer: Any, limit: int | None, vocab_size: int, *, encoder_decoder: bool = False) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._vocab_size = vocab_size
        self._encoder_decoder = encoder_decoder
        self._chat = bool(tokenizer.chat_template)
        self._prefix, self._suffix = self._added()

    def encode(self, request: Request) -> Prompt:
        """Return the prompt of a request.

        Raises
        ------
        RowError
            Of kind "too_long", "empty_prompt", "missing_prompt", "wrong_type" or "invalid_row".
        """
        value: Any = as_input(request.input)
        messages = self._messages(value, request)
        ids = self._render(messages) if messages is not None else self._plain(value)
        if not ids:
            raise RowError("the prompt has no tokens", FailureKind.EMPTY_PROMPT)
        full = len(ids)
        keep = self._keep(full, request)
        if keep < full:
            side = request.params.truncate or "right"
            ids = self._shorter(messages, keep, side) if messages is not None else self._cut(value, ids, keep, side)
        self._check(ids)
        params, room = request.params, self._room(len(ids), request.params.max_new_tokens)
        if room != params.max_new_tokens:
            params = params.updated(max_new_tokens=room)
        return Prompt(request.id, ids, params, origin=request.origin, truncated=full - len(ids))

    # ---------------------------------------------------------------- tokens

    def _messages(self, value: Any, request: Request) -> Messages | None:
        """Return the chat that the request means, or None for raw text and token ids."""
        if isinstance(value, str):
            if self._chat and not request.raw:
                return self._with_system([{"role": "user", "content": value}], request.system)
        elif isinstance(value[0], dict):
            if not self._chat:
                raise RowError(f"the prompt is chat messages, {_NO_TEMPLATE}; give it text", FailureKind.WRONG_TYPE)
            return self._with_system([_text_only(dict(message)) for message in value], request.system)
        if request.system is not None:
            why = _NO_TEMPLATE if not self._chat else "but the prompt is no chat: it is raw text or token ids"
            raise RowError(f"there is a system message (system=), {why}", FailureKind.INVALID_ROW)
        return None

    @staticmethod
    def _with_system(messages: Messages, system: str | None) -> Messages:
        if system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _render(self, messages: Messages) -> list[int]:
        """Return the ids of a chat; one whose last message is the assistant's is continued rather than answered."""
        continued = messages[-1]["role"] == "assistant"
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
            )
        except Exception as error:  # noqa: BLE001 - a template is the model author's program and may raise anything
            raise RowError(
                f"the chat template refused the messages: {describe(error)}", FailureKind.INVALID_ROW
            ) from None
        return self._ids(text)

    def _plain(self, value: Any) -> list[int]:
        """Return the ids of raw text with its special tokens, or ids as they are."""
        if not isinstance(value, str):
            return list(value)
        ids = self._ids(value)
        prefix = [] if ids and ids[:1] == self._prefix[:1] else self._prefix
        return [*prefix, *ids, *self._suffix] if ids else []

    def _ids(self, text: str) -> list[int]:
        # not verbose: it would warn of a text that is longer than the tokenizer's own idea of the limit
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _added(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after a text."""
        plain = self._ids("a")
        whole = list(self._tokenizer.encode("a"))
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return [], []

    def _check(self, ids: Sequence[int]) -> None:
        largest = max(ids)
        if largest >= self._vocab_size:
            raise RowError(
                f"the prompt has the token id {largest}, and the model knows only ids below {self._vocab_size}",
                FailureKind.INVALID_ROW,
            )

    # ---------------------------------------------------------------- length

    def _keep(self, tokens: int, request: Request) -> int:
        """Return how many prompt tokens to keep: all of them, or what ``truncate`` leaves."""
        wanted = request.params.max_new_tokens
        if self._limit is None or wanted == 0:
            return tokens
        most = self._limit if self._encoder_decoder else self._limit - 1
        if tokens <= most:
            return tokens
        if request.params.truncate is None:
            raise RowError(
                f"the prompt has {tokens} tokens and the model's limit is {self._limit}: no room to generate; "
                "shorten it, or set truncate='left' or 'right' to drop tokens from that side",
                FailureKind.TOO_LONG,
            )
        return most if self._encoder_decoder else self._limit - min(wanted, max(self._limit // 2, 1))

    def _room(self, tokens: int, wanted: int) -> int:
        if self._limit is None:
            return wanted
        return max(0, min(wanted, self._limit if self._encoder_decoder else self._limit - tokens))

    def _cut(self, value: Any, ids: list[int], keep: int, side: str) -> list[int]:
        """Drop tokens of raw text or ids from one side; the special tokens around a text stay."""
        prefix = self._prefix if isinstance(value, str) and ids[: len(self._prefix)] == self._prefix else []
        suffix = self._suffix if isinstance(value, str) else []
        inner = ids[len(prefix) : len(ids) - len(suffix)]
        left = keep - len(prefix) - len(suffix)
        if left <= 0:
            raise self._no_room(len(ids))
        return [*prefix, *(inner[-left:] if side == "left" else inner[:left]), *suffix]

    def _shorter(self, messages: Messages, keep: int, side: str) -> list[int]:
        """Shorten the last user message until the chat fits; everything around it stays."""
        ids = self._render(messages)
        last = max((i for i, m in enumerate(messages) if m["role"] == "user" and m.get("content")), default=None)
        content = self._ids(messages[last]["content"]) if last is not None else []
        left = len(content) - (len(ids) - keep)
        while left > 0 and last is not None:
            part = content[-left:] if side == "left" else content[:left]
            text = self._tokenizer.decode(part).strip("\ufffd")  # a character whose bytes were cut apart
            shorter = self._render([*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]])
            if len(shorter) <= keep:
                return shorter
            left -= len(shorter) - keep
        raise self._no_room(len(ids))

    def _no_room(self, tokens: int) -> RowError:
        return RowError(
            f"the prompt has {tokens} tokens and the model's limit is {self._limit}; what may be cut from it "
            "(the last user message, of a chat) is not enough",
            FailureKind.TOO_LONG,
        )


def _text_only(message: dict[str, Any]) -> dict[str, Any]:
    """Join text parts to one text, which every template takes."""
    content = message.get("content")
    if isinstance(content, list):
        other = next((part["type"] for part in content if part["type"] != "text"), None)
        if other is not None:
            raise RowError(
                f"a message has a part of type {other!r}; this engine takes only text", FailureKind.WRONG_TYPE
            )
        message["content"] = "".join(part["text"] for part in content)
    return message

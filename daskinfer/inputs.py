"""What an engine may be given (text, token ids, chat messages, pairs), checked and brought into plain Python types.

Rows come as whatever their source holds: Python objects, numpy and pyarrow values, pandas' several nulls. All are known by
their methods and type names, so that none of those libraries is imported here. Every check raises
:class:`~daskinfer.errors.RowError`, whose message names the place and the Python type and never holds the value itself.

Runs on: client | worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from numbers import Integral, Number
from typing import Any
from uuid import UUID

from daskinfer.errors import RowError
from daskinfer.records import FailureKind, Input

__all__ = [
    "as_field",
    "as_input",
    "as_messages",
    "as_pair",
    "as_prompt",
    "as_python",
    "as_text",
    "as_texts",
    "bad_character",
    "check_of",
]

_DEEPEST = 50
_PRINTABLE = (str, Number, date, time, timedelta, UUID)


def as_input(value: Any, where: str = "the prompt") -> Input:
    """Return a value given directly as a prompt (text, token ids or chat messages), checked and in plain Python types.

    Raises
    ------
    RowError
        It cannot be used; ``row_kind`` and ``message`` say why, and ``where`` begins the message.
    """
    listed = _listed(value)
    if listed and isinstance(as_python(listed[0]), Mapping):
        return as_messages(listed, where)
    return as_prompt(value, where)


def check_of(task: str) -> Callable[[Any, str], Input]:
    """Return what checks the inputs of a task: a function of a value and of where it stands.

    ``score`` takes pairs (:func:`as_pair`), ``classify`` texts and pairs, the others what :func:`as_input` takes.
    """
    return {"score": as_pair, "classify": _text_or_pair}.get(task, as_input)


def _text_or_pair(value: Any, where: str) -> Input:
    value = as_python(value)
    return as_pair(value, where) if isinstance(value, Mapping) or _listed(value) is not None else as_text(value, where)


# ---------------------------------------------------------------- values


def as_python(value: Any) -> Any:
    """Return a pyarrow scalar or array as what it holds; pandas, dask and pyarrow are recognised by their methods."""
    for method in ("as_py", "to_pylist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value


def _listed(value: Any) -> list[Any] | None:
    """Return a list-like value (list, tuple, numpy array, pyarrow list) as a list, or None for any other."""
    value = as_python(value)
    if isinstance(value, list | tuple):
        return list(value)
    if getattr(value, "shape", ()) != () and hasattr(value, "tolist"):
        return list(value.tolist())
    return None


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or NA (known by its type's name, so that pandas need not be imported)."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, bytes | Sequence | Mapping) or getattr(value, "shape", ()) != ():
        return False
    try:
        return bool(value != value)  # noqa: PLR0124 - only NaN and NaT differ from themselves
    except Exception:  # noqa: BLE001 - a foreign type's comparison may raise anything; such a value is not NaN
        return False


def _present(value: Any, where: str) -> Any:
    value = as_python(value)
    if _is_missing(value):
        raise RowError(f"{where} is missing ({value})", FailureKind.MISSING_PROMPT)
    return value


def bad_character(text: str) -> int | None:
    """Return the position of the first character that is half of a surrogate pair, which is no valid text, or None."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _valid(text: str, where: str) -> str:
    at = bad_character(text)
    if at is not None:
        raise RowError(
            f"{where} is not valid Unicode text: half of a surrogate pair at character {at}; "
            "decode the source with errors='replace'",
            FailureKind.INVALID_ROW,
        )
    return str(text)


def _wrong_type(value: Any, where: str, hint: str) -> RowError:
    return RowError(f"{where} holds {type(value).__name__}, {hint}", FailureKind.WRONG_TYPE)


def as_field(value: Any, where: str, spec: str) -> str:
    """Return the text that stands for a value in a template: ``format(value, spec)`` of text, numbers and dates.

    Raises
    ------
    RowError
        The value is missing, of another type, not valid text, or the format does not fit it.
    """
    if not isinstance(value, str):
        value = _present(value, where)
        scalar = getattr(value, "shape", None) == () and not isinstance(value, bytes)
        if not isinstance(value, _PRINTABLE) and not scalar:
            raise _wrong_type(value, where, "which a template cannot fill in; it takes text, numbers and dates")
    try:
        text = format(value, spec)
    except (ValueError, TypeError, OverflowError):
        raise _wrong_type(value, where, f"which the format {spec!r} cannot write") from None
    return _valid(text, where)


def as_prompt(value: Any, where: str) -> Input:
    """Return a value that is a whole prompt: text, or a list of token ids.

    Raises
    ------
    RowError
        The value is missing, empty, of another type, or not valid text.
    """
    if not isinstance(value, str):
        value = _present(value, where)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"{where} is empty", FailureKind.EMPTY_PROMPT)
        return _valid(value, where)
    ids = _listed(value)
    if ids is not None:
        return _token_ids(ids, value, where)
    hint = "decode it" if isinstance(value, bytes | bytearray) else "convert it, or fill it into a template (prompt=)"
    raise _wrong_type(value, where, f"not text; {hint}")


def _token_ids(ids: list[Any], value: Any, where: str) -> list[int]:
    if not ids:
        raise RowError(f"{where} is an empty list", FailureKind.EMPTY_PROMPT)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            hint = "; chat messages are named with messages=" if isinstance(token, Mapping) else ""
            raise _wrong_type(
                value, where, f"not text; a list must hold token ids, this one has {type(token).__name__}{hint}"
            )
        if token < 0:
            raise RowError(f"{where} has the token id {token}; ids are ≥ 0", FailureKind.INVALID_ROW)
    return [int(token) for token in ids]


# ---------------------------------------------------------------- texts and pairs of texts


def as_text(value: Any, where: str = "the text") -> str:
    """Return a text, checked.

    Raises
    ------
    RowError
        Missing, empty or not text.
    """
    value = _present(value, where)
    if not isinstance(value, str):
        raise _wrong_type(value, where, "not text")
    return str(as_prompt(value, where))


def as_pair(value: Any, where: str = "the pair") -> dict[str, Any]:
    """Return two texts as ``{"text": …, "text_pair": …}``; given so, or as a list-like of two.

    The second may be a list of texts, to be compared with the first one each.

    Raises
    ------
    RowError
        Not a pair, or a side of it is missing, empty or not text.
    """
    value = _present(value, where)
    if isinstance(value, Mapping):
        if set(value) != {"text", "text_pair"}:
            found = ", ".join(map(repr, value)) or "none"
            message = f"{where} has the keys {found}; a pair has 'text' and 'text_pair'"
            raise RowError(message, FailureKind.INVALID_ROW)
        first, second = value["text"], value["text_pair"]
    else:
        listed = _listed(value)
        if listed is None or len(listed) != 2:
            raise _wrong_type(value, where, "not a pair of texts: {'text': …, 'text_pair': …}, or a list of two")
        first, second = listed
    return {
        "text": as_text(first, f"the first text of {where}"),
        "text_pair": as_texts(second, f"the second text of {where}"),
    }


def as_texts(value: Any, where: str) -> str | list[str]:
    """Return a text, or a list of texts, checked; raises as :func:`as_text` does."""
    listed = _listed(value)
    if listed is None:
        return as_text(value, where)
    if not listed:
        raise RowError(f"{where} is an empty list", FailureKind.EMPTY_PROMPT)
    return [as_text(item, f"item {i} of {where}") for i, item in enumerate(listed, 1)]


# ---------------------------------------------------------------- chat messages


def as_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages as a list of new dicts, given as a list-like of mappings or as the JSON text of one.

    Keys whose value is null are dropped at any depth. A content is text or a list of ``{"type": …}`` parts; only a message
    with ``tool_calls`` may lack it.

    Raises
    ------
    RowError
        Missing, empty, not such a list, or a message is malformed; the message says which.
    """
    value = _present(value, where)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            hint = "text that is not JSON; chat messages are a list of {'role': …, 'content': …}"
            raise RowError(f"{where} holds {hint}", FailureKind.WRONG_TYPE) from None
        value = _present(value, where)
    listed = [] if isinstance(value, str) and not value.strip() else _listed(value)
    if listed is None:
        raise _wrong_type(value, where, "not a list of chat messages {'role': …, 'content': …}")
    messages = [_message(item, f"message {i} of {where}") for i, item in enumerate(listed, 1)]
    if not any(_has_content(message) for message in messages):
        raise RowError(f"{where} has no messages, or only empty ones", FailureKind.EMPTY_PROMPT)
    return messages


def _message(item: Any, where: str) -> dict[str, Any]:
    item = as_python(item)
    if not isinstance(item, Mapping):
        raise _wrong_type(item, where, "not a mapping with 'role' and 'content'")
    message: dict[str, Any] = _plain(item, where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where} has no role; give one such as 'user'", FailureKind.INVALID_ROW)
    if content is None and "tool_calls" not in message:
        raise RowError(f"{where} has no content", FailureKind.INVALID_ROW)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise RowError(f"{where} has a content part that is not {{'type': …}}", FailureKind.INVALID_ROW)
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise RowError(f"{where} has a text part without text", FailureKind.INVALID_ROW)
    elif content is not None and not isinstance(content, str):
        raise _wrong_type(content, f"the content of {where}", "not text or a list of parts")
    return message


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return bool(content.strip())
    return content is None or any(part["type"] != "text" or part["text"].strip() for part in content)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy in plain Python types, without the null keys that Arrow adds to structs."""
    value = as_python(value)
    if depth > _DEEPEST:
        raise RowError(f"{where} is nested more than {_DEEPEST} levels deep", FailureKind.INVALID_ROW)
    if isinstance(value, str):
        return _valid(value, where)
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not _is_missing(item)}
        return {_valid(str(key), where): _plain(item, where, depth + 1) for key, item in kept.items()}
    listed = _listed(value)
    if listed is not None:
        return [_plain(item, where, depth + 1) for item in listed]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    raise _wrong_type(value, where, "which chat messages cannot hold")

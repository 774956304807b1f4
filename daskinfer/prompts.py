"""Prompts: from the columns of a row to what an engine is given, and the checks on the way.

There are three ways to say where prompts come from: a template over columns (``"Summarise: {text}"``), one column whose
values are prompts or lists of token ids, and one column of chat messages. Pairs of texts come from two columns, or from one
that holds pairs. Settings that cannot work (no such column, a
malformed template) raise before anything runs. A value that cannot be used becomes a :class:`Problem` of its own row.

Runs on: client | worker.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from daskinfer.errors import ConfigError, InputError, MissingColumnError, RowError, TemplateError
from daskinfer.inputs import as_field, as_messages, as_prompt, as_python, as_text, as_texts, bad_character, check_of
from daskinfer.records import FailureKind, Input

__all__ = ["Problem", "Prompter", "prompter"]

_WIDEST = 10_000
_BRACES = "write {{ and }} for literal braces"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a row has no prompt.

    Attributes
    ----------
    kind : str
        One of :class:`~daskinfer.records.FailureKind`.
    message : str
        Names the column and the Python type; never holds the value itself.
    """

    kind: str
    message: str


class Prompter(ABC):
    """Makes prompts from columns; plain data, so it pickles.

    Attributes
    ----------
    columns : tuple of str
        The columns it reads.
    """

    columns: tuple[str, ...]

    def render(self, values: Mapping[str, Iterable[Any]], n: int) -> list[Input | Problem]:
        """Return the prompt of each of ``n`` rows, or the problem with it; the values are left as they are.

        Parameters
        ----------
        values : mapping of str to iterable
            At least :attr:`columns`, each with ``n`` values: lists, numpy or pyarrow arrays, pandas series.

        Raises
        ------
        ValueError
            A column has more or fewer than ``n`` values.
        """
        columns = [as_python(values[name]) for name in self.columns]
        prompts: list[Input | Problem] = []
        for _, *row in zip(range(n), *columns, strict=True):
            try:
                prompts.append(self._row(row))
            except RowError as error:
                prompts.append(Problem(error.row_kind, error.message))
        return prompts

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Return the settings that decide the prompts: a part of a run's fingerprint."""

    @abstractmethod
    def _row(self, row: Sequence[Any]) -> Input:
        """Return one row's prompt, or raise RowError."""


def prompter(
    *,
    prompt: str | None = None,
    columns: str | Sequence[str] | None = None,
    messages: str | None = None,
    available: tuple[str, ...],
    task: str = "generate",
) -> Prompter:
    """Return what makes the prompts of a job.

    Give one of ``prompt``, ``columns`` and ``messages``. Without any of them the column "prompt" is used, else the column
    "messages", else the only column there is.

    Parameters
    ----------
    prompt : str
        A template over columns. ``{first name}`` stands for that column's value, ``{price:.2f}`` for a formatted one;
        ``{{`` and ``}}`` are literal braces. Text, numbers and dates are filled in; other types fail the row.
    columns : str or sequence of str
        The column whose values are the prompts: text, or lists of token ids. For pairs of texts (tasks "score" and
        "classify") the two columns that hold them, or one that holds pairs; the second may hold lists of texts.
    messages : str
        The column of chat messages: lists of ``{"role": …, "content": …}``, or such a list as JSON text. Keys that are
        null are dropped, since Parquet adds them.
    available : tuple of str
        The columns of the input.
    task : str
        What the prompts are for. To score, pairs are needed, and the columns "text" and "text_pair" are the first choice.

    Raises
    ------
    ConfigError
        More than one is given, or a value of the wrong type.
    MissingColumnError, TemplateError
        The setting does not fit the columns, or the template is malformed.
    InputError
        Nothing is given and no column stands out.
    """
    given = [
        name for name, value in (("prompt", prompt), ("columns", columns), ("messages", messages)) if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given; say where prompts come from with one of them")
    if task != "generate":
        return _texts(prompt, columns, messages, available, task)
    if prompt is not None:
        return _template(prompt, available)
    if columns is not None:
        return _Column((_existing("columns", columns, available),))
    if messages is not None:
        return _Chat((_existing("messages", messages, available),))
    return _obvious(available)


def _texts(prompt: Any, columns: Any, messages: Any, available: tuple[str, ...], task: str) -> Prompter:
    """Return what makes the texts or pairs of a task that generates nothing."""
    if messages is not None:
        raise ConfigError(
            f"messages={messages!r}: task {task!r} takes texts, not chats; name their column with columns="
        )
    if prompt is not None:
        if task == "score":
            raise ConfigError(
                f"prompt={prompt!r}: a template makes one text, and task 'score' compares two; name both columns with "
                "columns=('query', 'passage')"
            )
        return _template(prompt, available)
    names = () if columns is None or isinstance(columns, str) or not isinstance(columns, Sequence) else tuple(columns)
    if len(names) == 2 and task in ("score", "classify"):
        return _Pair(tuple(_existing("columns", name, available) for name in names))
    if columns is not None:
        return _Column((_existing("columns", columns, available),), task)
    if task == "score" and {"text", "text_pair"} <= set(available):
        return _Pair(("text", "text_pair"))
    if task == "score" and len(available) != 1:
        raise InputError(
            f"which columns hold the pairs? The input has {', '.join(map(repr, available)) or 'no columns'}; name two with "
            "columns=('query', 'passage') (--column query --column passage)"
        )
    obvious = next((name for name in ("text", "prompt") if name in available), None)
    return _Column((obvious,), task) if obvious is not None and task != "score" else _obvious(available, task)


# ---------------------------------------------------------------- settings


def _existing(setting: str, value: Any, available: tuple[str, ...]) -> str:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [None]
    if len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"{setting}={value!r}: must be the name of one column; "
            "to make a prompt from several columns give a template, such as prompt='{title}: {text}'"
        )
    if names[0] not in available:
        raise MissingColumnError(names[0], available, f"{setting}={value!r}")
    return names[0]


def _obvious(available: tuple[str, ...], task: str = "generate") -> Prompter:
    if task == "generate" and "prompt" in available:
        return _Column(("prompt",))
    if task == "generate" and "messages" in available:
        return _Chat(("messages",))
    if len(available) == 1:
        return _Column(available, task)
    if not available:
        raise InputError("the input has no columns, so there is nothing to make prompts from")
    raise InputError(
        f"which column holds the prompts? The input has {', '.join(map(repr, available))}; name one with columns= "
        "(--column), or give a template such as prompt='Summarise: {text}' (--prompt)"
    )


def _template(template: Any, available: tuple[str, ...]) -> Prompter:
    if not isinstance(template, str):
        raise ConfigError(f"prompt={template!r}: must be a template text, such as 'Summarise: {{text}}'")
    if bad_character(template) is not None:
        raise TemplateError(template, "is not valid Unicode text (it holds half of a surrogate pair)")
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        reason = str(error)
        raise TemplateError(template, f"{reason[:1].lower()}{reason[1:]}; {_BRACES}") from None
    pieces: list[tuple[str, int | None, str]] = []
    used: dict[str, int] = {}
    for literal, field, spec, conversion in parsed:
        if field is None:
            pieces.append((literal, None, ""))
        else:
            _check_field(template, field, (spec or "", conversion), available)
            pieces.append((literal, used.setdefault(field, len(used)), spec or ""))
    if not used:
        hint = f"; to use the column as it is, give columns={template!r}" if template in available else ""
        raise TemplateError(
            template, f"names no column, so all rows would have the same prompt; write {{column}}{hint}"
        )
    return _Template(tuple(used), template, tuple(pieces))


def _check_field(template: str, field: str, how: tuple[str, str | None], available: tuple[str, ...]) -> None:
    spec, conversion = how
    if conversion is not None:
        raise TemplateError(
            template, f"{{{field}!{conversion}}} asks for a conversion, which templates lack; write {{{field}}}"
        )
    if "{" in spec:
        raise TemplateError(
            template, f"the format of {{{field}}} holds a column; only plain formats such as {{price:.2f}}"
        )
    if any(int(number) > _WIDEST for number in re.findall(r"\d+", spec)):
        raise TemplateError(template, f"the format {spec!r} of {{{field}}} asks for more than {_WIDEST} characters")
    if field in available:
        return
    if not field or field.isdecimal():
        raise TemplateError(template, f"{{{field}}} names no column; name one, such as {{text}}, or {_BRACES}")
    if "." in field or "[" in field:
        raise TemplateError(
            template,
            f"there is no column {field!r}, and templates do not look inside values; make it a column of its own first, "
            f"or {_BRACES}",
        )
    odd = field != field.strip() or any(c in field for c in "\"'\n,")
    raise MissingColumnError(field, available, f"the prompt template ({_BRACES})" if odd else "the prompt template")


# ---------------------------------------------------------------- the three ways


@dataclass(frozen=True)
class _Template(Prompter):
    columns: tuple[str, ...]
    template: str
    pieces: tuple[tuple[str, int | None, str], ...]

    def fingerprint(self) -> dict[str, str]:
        return {"prompt": self.template}

    def _row(self, row: Sequence[Any]) -> Input:
        parts = []
        for literal, index, spec in self.pieces:
            parts.append(literal)
            if index is not None:
                parts.append(as_field(row[index], f"column {self.columns[index]!r}", spec))
        text = "".join(parts)
        if not text.strip():
            raise RowError("the prompt is empty once the template is filled", FailureKind.EMPTY_PROMPT)
        return text


@dataclass(frozen=True)
class _Column(Prompter):
    columns: tuple[str, ...]
    task: str = "generate"

    def fingerprint(self) -> dict[str, str]:
        return {"columns": self.columns[0]}

    def _row(self, row: Sequence[Any]) -> Input:
        where = f"column {self.columns[0]!r}"
        return as_prompt(row[0], where) if self.task in ("generate", "embed") else check_of(self.task)(row[0], where)


@dataclass(frozen=True)
class _Pair(Prompter):
    columns: tuple[str, ...]

    def fingerprint(self) -> dict[str, str]:
        return {"columns": json.dumps(self.columns)}

    def _row(self, row: Sequence[Any]) -> Input:
        first, second = (f"column {name!r}" for name in self.columns)
        return {"text": as_text(row[0], first), "text_pair": as_texts(row[1], second)}


@dataclass(frozen=True)
class _Chat(Prompter):
    columns: tuple[str, ...]

    def fingerprint(self) -> dict[str, str]:
        return {"messages": self.columns[0]}

    def _row(self, row: Sequence[Any]) -> Input:
        return as_messages(row[0], f"column {self.columns[0]!r}")

"""From prompts to requests, with sampling parameters that are the same for all or one for each.

Runs on: client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from daskinfer.errors import ConfigError
from daskinfer.inputs import check_of
from daskinfer.records import Request, SamplingParams

__all__ = ["request_maker"]

SEQUENCES = ("stop", "stop_token_ids")
"""Parameters that are sequences themselves: only a sequence of sequences is one for each prompt."""
_CALLED = {"embed": "the text", "classify": "the text", "score": "the pair"}


def request_maker(
    prompts: Iterable[Any],
    params: SamplingParams,
    changes: Mapping[str, Any],
    *,
    raw: bool,
    system: str | None,
    task: str = "generate",
) -> Callable[[int, Any], Request]:
    """Return what makes a request of a position and a prompt; it raises ``RowError`` for a prompt that cannot be used.

    Parameters
    ----------
    prompts : iterable
        Asked for its length when a parameter is a list.
    params : SamplingParams
        With a seed.
    changes : mapping of str to Any
        A value for all prompts, or a sequence with one for each; None in it stands for the value in ``params``.
    raw, system
        As for :meth:`Driver.generate`.
    task : str
        What the prompts are for.

    Raises
    ------
    ConfigError
        A value out of range, or a sequence with more or fewer values than there are prompts; it names both numbers.
    UnknownOptionError
        A name that is not a sampling parameter.
    """
    lists = {name: list(value) for name, value in changes.items() if _is_list(name, value)}
    common = params.updated(**{name: value for name, value in changes.items() if name not in lists})
    check, where = check_of(task), _CALLED.get(task, "the prompt")
    if not lists:
        return lambda row, prompt: Request(row, check(prompt, where), common, raw, system)
    if not isinstance(prompts, Sized):
        raise ConfigError(
            f"{next(iter(lists))} is a list with a value for each prompt, but prompts is an iterator without a length; "
            "make it a list"
        )
    for name, values in lists.items():
        if len(values) != len(prompts):
            raise ConfigError(f"{name} has {len(values)} values for {len(prompts)} prompts; give one for each")
    made = rows_of(common, lists)
    return lambda row, prompt: Request(row, check(prompt, where), made[row], raw, system)


def rows_of(common: SamplingParams, lists: Mapping[str, Sequence[Any]]) -> list[SamplingParams]:
    """Return the parameters of each row; rows with the same values share one object, which travels once."""
    made: dict[str, SamplingParams] = {}
    rows: list[SamplingParams] = []
    for values in zip(*lists.values(), strict=True):
        changes = {name: value for name, value in zip(lists, values, strict=True) if value is not None}
        key = repr(changes)
        if key not in made:
            made[key] = common.updated(**changes)
        rows.append(made[key])
    return rows


def _is_list(name: str, value: Any) -> bool:
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        return False
    if name not in SEQUENCES:
        return True
    return bool(listed) and all(isinstance(v, Sequence | None) and not isinstance(v, str) for v in listed)

"""What the echo engine can play: its options, checked.

Runs on: worker; the options are checked on the client, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskinfer.engines.scripted import EVENTS
from daskinfer.errors import ConfigError
from daskinfer.records import Request

__all__ = ["EchoOptions"]


@dataclass(frozen=True)
class EchoOptions:
    """The ``options`` of a :class:`~daskinfer.config.ModelSpec` whose engine is "echo".

    Parameters
    ----------
    prefix, suffix : str
        The answer is prefix + text + suffix. The text is the prompt, the last message's content, or the joined ids.
    capacity : int
        Rows running at once.
    lengths : int, list, dict or "params"
        Tokens, hence steps, of a row: a number for all; a list, indexed by row id modulo its length; ``{"seed": 0, "low":
        1, "high": 64}``, drawn for each row id; or "params", the row's own ``max_new_tokens``.
    step_s, load_s : float
        Seconds that a step and the load sleep.
    load_error : str or None
        The load raises this text.
    load_fails_on : int or list of int
        The first n loads fail, or the loads of these numbers (from 1), counted over all processes that share ``log``.
    output : {"text", "vector"}
        A vector is float32, made from a hash of the text.
    dims : int
        Length of the vectors.
    log : str or None
        File to append events to, see :mod:`daskinfer.testing`.
    log_events : list of str
        Which events besides "load"; without "step" the log of a long run stays small.
    faults : dict of str to str or list of str
        What happens to rows whose text has a marker, by attempt: :class:`~daskinfer.engines.scripted.FaultScript`.
    faults_dir : str or None
        Where the attempts are counted over all processes; needed with ``faults``.
    oom_over : int or None
        A step does not fit the device when running rows times most tokens (read and written) of one is more.

    Raises
    ------
    ConfigError
        A value out of range.
    """

    prefix: str = "<"
    suffix: str = ">"
    capacity: int = 32
    lengths: Any = 1
    step_s: float = 0.0
    load_s: float = 0.0
    load_error: str | None = None
    load_fails_on: int | Sequence[int] = 0
    output: str = "text"
    dims: int = 8
    log: str | None = None
    log_events: Sequence[str] = EVENTS
    faults: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    faults_dir: str | None = None
    oom_over: int | None = None

    def __post_init__(self) -> None:
        failing = [self.load_fails_on] if isinstance(self.load_fails_on, int) else self.load_fails_on
        for name, ok, needs in (
            ("prefix", isinstance(self.prefix, str), "a text"),
            ("suffix", isinstance(self.suffix, str), "a text"),
            ("capacity", _whole(self.capacity), "a whole number ≥ 1"),
            ("lengths", _are_lengths(self.lengths), "a number ≥ 1, a list of them, {seed, low, high}, or 'params'"),
            (
                "lengths",
                self.output == "text" or self.lengths != "params",
                "a number of steps, as a vector has no tokens",
            ),
            ("step_s", _seconds(self.step_s), "a number of seconds ≥ 0"),
            ("load_s", _seconds(self.load_s), "a number of seconds ≥ 0"),
            ("load_fails_on", all(_whole(n, 0) for n in failing), "a number of loads, or a list of them"),
            ("load_fails_on", not any(failing) or self.log is not None, "0 without log=, where the loads are counted"),
            ("output", self.output in ("text", "vector"), "'text' or 'vector'"),
            ("dims", _whole(self.dims), "a whole number ≥ 1"),
            ("log", self.log is None or isinstance(self.log, str), "None or a path as text"),
            (
                "log_events",
                not isinstance(self.log_events, str) and set(self.log_events) <= set(EVENTS),
                f"among {', '.join(EVENTS)}",
            ),
            ("faults", isinstance(self.faults, Mapping), "a mapping of marker to actions"),
            ("faults_dir", self.faults_dir is not None or not self.faults, "a folder, where the attempts are counted"),
            ("oom_over", self.oom_over is None or _whole(self.oom_over), "None or a whole number ≥ 1"),
        ):
            if not ok:
                raise ConfigError(f"echo engine: {name}={getattr(self, name)!r}: must be {needs}")

    def load_fails(self, number: int) -> bool:
        """Whether the load of this number (from 1) is scripted to fail."""
        if isinstance(self.load_fails_on, int):
            return 0 < number <= self.load_fails_on
        return number in self.load_fails_on

    @property
    def plain(self) -> bool:
        """Whether every step ends all its rows and nothing is logged or goes wrong, as in benchmarks."""
        odd = self.faults or self.oom_over is not None or self.log is not None
        return self.lengths == 1 and self.output == "text" and not odd

    def length_rule(self) -> Callable[[Request], int]:
        """Return the function that says how many steps a row needs."""
        lengths = self.lengths
        if lengths == "params":
            return lambda request: request.params.max_new_tokens
        if isinstance(lengths, Mapping):
            seed, low, span = lengths["seed"], lengths["low"], lengths["high"] - lengths["low"] + 1
            return lambda request: low + _drawn(seed, request.row) % span
        if isinstance(lengths, Sequence):
            return lambda request: lengths[request.row % len(lengths)]
        return lambda request: lengths


def _whole(value: object, low: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _are_lengths(lengths: Any) -> bool:
    if isinstance(lengths, Mapping):
        if set(lengths) != {"seed", "low", "high"}:
            return False
        low, high = lengths["low"], lengths["high"]
        return _whole(low) and _whole(high, low)
    if isinstance(lengths, str):
        return lengths == "params"
    return bool(lengths) and all(map(_whole, lengths)) if isinstance(lengths, Sequence) else _whole(lengths)


def _drawn(seed: Any, row: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest(), "big")

"""The options of the engine, and how much memory it may use for keys and values.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch

from daskinfer.errors import ConfigError, UnknownOptionError

__all__ = ["Settings", "free_memory"]

_CGROUP = Path("/sys/fs/cgroup")
_MOST_GUESSED = 15  # tokens: a step in which any are guessed has 16
_SHARE = 0.6  # of the memory that is free once the model is loaded


@dataclass(frozen=True)
class Settings:
    """Engine options.

    Parameters
    ----------
    max_batch_rows : int or None
        Most rows at once. None: 64 on a CPU, 256 elsewhere.
    max_batch_tokens : int or None
        Tokens of a step. None: 1024 on a CPU, 2048 elsewhere.
    max_batch_bytes : int or None
        Memory for keys and values. None: 60 % of what is free once the model is loaded, if the rows can use so much.
    share_prefixes : bool
        Compute the beginnings that prompts have in common once.
    longest_first : bool
        Let in waiting rows with the largest ``max_new_tokens`` first, so that few long ones are left at the end.
    prompt_lookup_num_tokens : int or None
        In small steps compute up to so many tokens of a row along, at most 15, that are guessed from its prompt and answer;
        those the model agrees with are kept, so answers change by float rounding only. Rows that take the best token only.
        0: none. None: 7 on a CPU, 0 elsewhere.
    pack_weights : bool
        On a CPU in float32: lay the weights out once for the batches of decoding.
    compiled_kernels : bool
        On a CPU in float32, where Numba is installed: attention, what is between the multiplications, and the rounding for
        ``int8`` are compiled.
    int8 : bool
        On a CPU in float32: weights of the inner layers in 8 bits; faster, and answers change.
    allow_pickle : bool
        Load pickled weights, weights-only.
    slot_tokens : int
        Size of the smallest slot.

    Raises
    ------
    ConfigError
        A value out of range.
    UnknownOptionError
        Another option.
    """

    max_batch_rows: int | None = None
    max_batch_tokens: int | None = None
    max_batch_bytes: int | None = None
    share_prefixes: bool = True
    longest_first: bool = True
    prompt_lookup_num_tokens: int | None = None
    pack_weights: bool = True
    compiled_kernels: bool = True
    int8: bool = False
    allow_pickle: bool = False
    slot_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "max_batch_tokens", "max_batch_bytes", "slot_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"engine_options: {name}={value!r} must be a whole number of at least 1")
        guessed = self.prompt_lookup_num_tokens
        if guessed is not None and (type(guessed) is not int or not 0 <= guessed <= _MOST_GUESSED):
            raise ConfigError(
                f"engine_options: prompt_lookup_num_tokens={guessed!r} must be a whole number from 0 to {_MOST_GUESSED}"
            )
        if self.slot_tokens % 2:
            raise ConfigError(f"engine_options: slot_tokens={self.slot_tokens!r} must be even")
        for name in ("share_prefixes", "longest_first", "pack_weights", "compiled_kernels", "int8", "allow_pickle"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"engine_options: {name}={getattr(self, name)!r} must be true or false")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Return the settings of a specification's options."""
        known = tuple(f.name for f in fields(cls))
        for name in options:
            if name not in known:
                raise UnknownOptionError(name, "engine 'lm'", known)
        return cls(**options)

    def rows(self, device: torch.device) -> int:
        """Most rows at once."""
        return self.max_batch_rows or (64 if device.type == "cpu" else 256)

    def tokens(self, device: torch.device) -> int:
        """Tokens of a step."""
        return self.max_batch_tokens or (1024 if device.type == "cpu" else 2048)

    def lookup_tokens(self, device: torch.device) -> int:
        """Most tokens guessed per row and step."""
        asked = self.prompt_lookup_num_tokens
        return (7 if device.type == "cpu" else 0) if asked is None else asked

    def cache_tokens(self, device: torch.device, bytes_per_token: int) -> int:
        """Tokens whose keys and values there is memory for.

        Raises
        ------
        ConfigError
            Not enough for a single slot.
        """
        memory = self.max_batch_bytes or int(free_memory(device) * _SHARE)
        tokens = memory // bytes_per_token
        if tokens < self.slot_tokens:
            raise ConfigError(
                f"there are {memory:,} bytes for keys and values, which is {tokens} tokens of this model; "
                f"give it at least {self.slot_tokens * bytes_per_token:,} (engine_options max_batch_bytes)"
            )
        return tokens


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; for the CPU, within the limits of the control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        reclaimable = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        if limit != "max":
            free = min(free, int(limit) - int(used) + int(reclaimable.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass  # no such control group here
    return max(free, 0)

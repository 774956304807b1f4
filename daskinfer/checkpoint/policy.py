"""How often a checkpoint writes, and when a lock counts as left behind.

Runs on: client.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from daskinfer.errors import ConfigError

__all__ = ["CheckpointPolicy"]


@dataclass(frozen=True)
class CheckpointPolicy:
    """When rows become durable, and when visible.

    Parameters
    ----------
    chunk_rows, chunk_bytes, chunk_s : int, int, float
        A chunk is closed, and published once its rows are done, at so many rows or bytes, or after so many seconds.
    flush_s, flush_rows, flush_bytes : float, int, int
        Results go to disk after so many seconds (sooner in a young run), or when there are so many.
    interrupt_files : int
        Most files that an interrupt publishes per chunk; what is between other unfinished rows stays as parts.
    beat_s : float
        Seconds between signs of life in the lock.
    stale_s : float
        Age of the last one at which a lock held on another host may be taken over.
    """

    chunk_rows: int = 100_000
    chunk_bytes: int = 100 << 20
    chunk_s: float = 300.0
    flush_s: float = 2.0
    flush_rows: int = 20_000
    flush_bytes: int = 32 << 20
    interrupt_files: int = 32
    beat_s: float = 10.0
    stale_s: float = 120.0

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            low = 0 if setting.name == "flush_s" else 1 if isinstance(setting.default, int) else 1e-9
            if value < low:
                raise ConfigError(f"CheckpointPolicy.{setting.name}={value!r}: must be at least {low}")

"""Policies as Dask's configuration gives them: the sections ``daskinfer.batch``, ``daskinfer.retry``, and so on.

As Dask's own packages do, importing this adds the packaged ``daskinfer.yaml`` to Dask's defaults; it repeats the defaults
of :mod:`daskinfer.config` for people to read and change.

Runs on: client.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import dask

from daskinfer.config import BatchPolicy, FramePolicy, HealthPolicy, RetryPolicy, ShowPolicy, from_mapping

__all__ = ["DEFAULTS", "SECTIONS", "configured"]

DEFAULTS = Path(__file__).parents[1] / "daskinfer.yaml"
SECTIONS: dict[type, str] = {
    BatchPolicy: "batch",
    RetryPolicy: "retry",
    HealthPolicy: "health",
    FramePolicy: "dataframe",
    ShowPolicy: "show",
}
T = TypeVar("T")

for _values in dask.config.collect_yaml([str(DEFAULTS)]):
    dask.config.update_defaults(_values)


def configured(policy: type[T]) -> T:
    """Return a policy with the values of Dask's configuration.

    Raises
    ------
    UnknownOptionError
        The section has a key that the policy lacks.
    ConfigError
        A value of the wrong type or out of range.
    """
    where = f"daskinfer.{SECTIONS[policy]}"
    return from_mapping(policy, dask.config.get(where, default=None) or {}, f"Dask's configuration under {where}")

"""Batch inference for Dask: a model on every worker, every row back exactly once.

Names are imported when they are first used, so that ``import daskinfer`` is cheap.

Runs on: anywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from daskinfer.version import __version__

_HOME = {
    "Batch": "records",
    "BatchEngine": "engines.base",
    "BatchPolicy": "config",
    "Completed": "records",
    "Driver": "driver",
    "Engine": "engines.base",
    "EngineStats": "records",
    "Failed": "records",
    "HealthPolicy": "config",
    "Job": "driver",
    "ModelSpec": "config",
    "Request": "records",
    "Result": "records",
    "RetryPolicy": "config",
    "RunReport": "report",
    "SamplingParams": "records",
    "Usage": "records",
    "WorkerManager": "driver",
}

__all__ = [
    "Batch",
    "BatchEngine",
    "BatchPolicy",
    "Completed",
    "Driver",
    "Engine",
    "EngineStats",
    "Failed",
    "HealthPolicy",
    "Job",
    "ModelSpec",
    "Request",
    "Result",
    "RetryPolicy",
    "RunReport",
    "SamplingParams",
    "Usage",
    "WorkerManager",
    "__version__",
]

if TYPE_CHECKING:
    from daskinfer.config import BatchPolicy, HealthPolicy, ModelSpec, RetryPolicy
    from daskinfer.driver import Driver, Job, WorkerManager
    from daskinfer.engines.base import BatchEngine, Engine
    from daskinfer.records import Batch, Completed, EngineStats, Failed, Request, Result, SamplingParams, Usage
    from daskinfer.report import RunReport


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"daskinfer.{_HOME[name]}"), name)
    raise AttributeError(f"module 'daskinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)

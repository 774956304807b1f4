"""Batch inference for Dask: a model on every worker, every row back exactly once.

Names are imported when they are first used, so that ``import daskinfer`` is cheap.

Runs on: anywhere.
"""

from __future__ import annotations

import importlib
import sys
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
    "Results": "driver",
    "RetryPolicy": "config",
    "RunReport": "report",
    "SamplingParams": "records",
    "Usage": "records",
    "WorkerManager": "driver",
    **dict.fromkeys(("apply", "chat", "classify", "embed", "generate", "score"), "dataframe"),
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
    "Results",
    "RetryPolicy",
    "RunReport",
    "SamplingParams",
    "Usage",
    "WorkerManager",
    "__version__",
    "apply",
    "chat",
    "classify",
    "embed",
    "generate",
    "score",
]

if TYPE_CHECKING:
    from daskinfer.config import BatchPolicy, HealthPolicy, ModelSpec, RetryPolicy
    from daskinfer.dataframe import apply, chat, classify, embed, generate, score
    from daskinfer.driver import Driver, Job, Results, WorkerManager
    from daskinfer.engines.base import BatchEngine, Engine
    from daskinfer.records import Batch, Completed, EngineStats, Failed, Request, Result, SamplingParams, Usage
    from daskinfer.report import RunReport


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"daskinfer.{_HOME[name]}"), name)
    raise AttributeError(f"module 'daskinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)


def _infer(frame: Any) -> Any:
    return importlib.import_module("daskinfer.dataframe").Infer(frame)


def _register_accessors() -> None:
    """Give ``infer`` to the frames of libraries that are loaded already; ``import daskinfer.dataframe`` does it for all."""
    for module, frame in (("pandas", "pandas"), ("dask.dataframe.extensions", "dask.dataframe")):
        library, owner = sys.modules.get(module), sys.modules.get(frame)
        extensions: Any = getattr(getattr(library, "api", library), "extensions", library)
        register = getattr(extensions, "register_dataframe_accessor", None)
        if register is not None and owner is not None and not hasattr(getattr(owner, "DataFrame", object), "infer"):
            register("infer")(_infer)


_register_accessors()

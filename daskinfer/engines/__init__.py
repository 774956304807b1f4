"""Engines are found by name: an entry point of the group ``daskinfer.engines``, or ``pkg.mod:Class``.

Our own are registered in the same way as anybody's; nothing imports them.

Runs on: worker; the names are checked on the client.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.engines.base import Engine
from daskinfer.errors import ConfigError, describe

__all__ = ["engine_class", "engine_fields", "engine_names", "resolve"]

GROUP = "daskinfer.engines"


def engine_names() -> tuple[str, ...]:
    """Return the registered names."""
    return tuple(sorted({e.name for e in entry_points(group=GROUP)}))


def resolve(spec: ModelSpec) -> str:
    """Return the name of the engine that will serve this specification, "auto" resolved."""
    if spec.engine != "auto":
        return spec.engine
    return "transformers" if spec.task == "generate" else "encoder"


def engine_class(spec: ModelSpec) -> type[Engine]:
    """Import and return the engine class of a specification.

    Raises
    ------
    ConfigError
        No such engine, or it cannot be imported, or it lacks a method of the protocol.
    """
    name, code = resolve(spec), spec.engine_code
    if code is not None:
        import cloudpickle

        return _checked(_loaded(name, lambda: cloudpickle.loads(code)), name)
    if ":" in name:
        return _checked(_loaded(name, lambda: _import(name)), name)
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return _checked(_loaded(name, entry.load), name)
    raise ConfigError(
        f"engine={name!r}: there are {', '.join(engine_names())}; an engine of your own is named 'pkg.mod:Class'"
    )


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        raise ConfigError(f"engine={name!r} cannot be imported here: {describe(error)}") from error


def _checked(found: Any, name: str) -> type[Engine]:
    missing = [
        m
        for m in ("load", "add", "step", "abort", "stats", "close", "output_type")
        if not callable(getattr(found, m, None))
    ]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if not isinstance(found, type) or missing:
        detail = f"lacks {', '.join(missing)}" if missing else "is not a class"
        raise ConfigError(f"engine={name!r} {detail}; the short way is to subclass daskinfer.BatchEngine")
    return found


def engine_fields(engine: str | type) -> dict[str, Any]:
    """Return the :class:`ModelSpec` fields for an engine given by name or as a class.

    A class that cannot be imported elsewhere (from a notebook or a function) is pickled by value.
    """
    if isinstance(engine, str):
        return {"engine": engine}
    import cloudpickle

    name = f"{engine.__module__}:{engine.__qualname__}"
    if engine.__module__ not in ("__main__", "__mp_main__") and "<locals>" not in name:
        return {"engine": name}
    try:
        source = inspect.getsource(engine)
    except (OSError, TypeError):
        source = json.dumps(sorted(vars(engine)))
    digest = f"{name}@{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    return {"engine": name, "engine_code": cloudpickle.dumps(engine), "engine_digest": digest}

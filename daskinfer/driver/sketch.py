"""The settings of the sketch that daskinfer began with, in today's words.

That sketch was a driver with actors on another runtime. Its configuration is a mapping; each name is taken over here, so
``Driver({"model": …, "initial_worker_count": 2, …})`` works.

Runs on: client.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from daskinfer.config import BatchPolicy, HealthPolicy
from daskinfer.errors import ConfigError, UnknownOptionError

__all__ = ["Plan", "translated"]

ELSEWHERE = {
    "ray_runtime_env": "packages and environment variables of Dask workers are set where the workers are started (an image, "
    "a job script, or distributed.diagnostics.plugin.PipInstall)",
    "object_store_memory": "Dask workers have one memory limit (LocalCluster(memory_limit=…), dask worker --memory-limit)",
}
ELSEWHERE["compile"] = "models are run as they are; no engine here compiles them"
KNOWN = (
    "model",
    "dtype",
    "initial_worker_count",
    "batch_size",
    "actor_gpu",
    "actor_cpu",
    "trust_remote_code",
    "heartbeat_timeout",
    "detection_interval",
    "failure_threshold",
    "worker_monitor_interval",
    "schedule_interval",
    "ray_address",
    *ELSEWHERE,
)


@dataclass(frozen=True)
class Plan:
    """What a configuration asks for, as arguments of :class:`~daskinfer.Driver`.

    Attributes
    ----------
    model : str
    workers : int or None
    cluster : str or None
    batch, health
        Policies.
    spec : dict
        Fields of :class:`~daskinfer.config.ModelSpec`.
    settings : dict
        The configuration itself.
    """

    model: str
    workers: int | None
    cluster: str | None
    batch: BatchPolicy
    health: HealthPolicy
    spec: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hint(self) -> str:
        """What to change on machines without GPUs, for error messages."""
        wrong = [f'"actor_gpu": 0 (it is {self.settings["actor_gpu"]!r})'] if self.settings.get("actor_gpu") else []
        if self.settings.get("dtype") in ("float16", "bfloat16"):
            wrong.append(f'"dtype": "float32" (it is {self.settings["dtype"]!r})')
        if self.settings.get("compile"):
            wrong.append('"compile": False (it is True)')
        return f"; in this configuration set {', '.join(wrong)}" if wrong else ""


def translated(config: Mapping[str, Any], batch: BatchPolicy, health: HealthPolicy) -> Plan:
    """Return the plan of a configuration.

    Parameters
    ----------
    config : mapping
    batch, health
        What the configuration does not say.

    Raises
    ------
    UnknownOptionError
        A name that does not exist; the text lists those that do.
    ConfigError
        No model, or a value of the wrong type or out of range.

    Warns
    -----
    UserWarning
        For what Dask has another place for.
    """
    for name in config:
        if name not in KNOWN:
            raise UnknownOptionError(str(name), "Driver(config)", KNOWN)
    elsewhere = [f"{name}: {said}" for name, said in ELSEWHERE.items() if config.get(name)]
    if elsewhere:
        warnings.warn(f"these settings have no effect: {'; '.join(elsewhere)}", UserWarning, stacklevel=4)
    model = config.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model={model!r}: the configuration must name a model: a folder, a GGUF file or a hub name")
    return Plan(
        model,
        _whole(config, "initial_worker_count", 1),
        _address(config.get("ray_address")),
        _batch(config, batch),
        _health(config, health),
        _spec(config),
        dict(config),
    )


def _spec(config: Mapping[str, Any]) -> dict[str, Any]:
    gpus = _number(config, "actor_gpu", 0)
    if gpus is not None and gpus > 1:
        raise ConfigError(f"actor_gpu={gpus!r}: a worker has one GPU; use more workers instead, one per GPU")
    cpus = _number(config, "actor_cpu", 0)
    spec: dict[str, Any] = {
        "dtype": _named(config.get("dtype")),
        "device": None if gpus is None else "cuda:0" if gpus else "cpu",
        "threads": max(1, int(cpus)) if cpus else None,
    }
    for name in ("trust_remote_code", "compile"):
        if not isinstance(config.get(name, False), bool):
            raise ConfigError(f"{name}={config[name]!r}: must be True or False")
    spec["trust_remote_code"] = config.get("trust_remote_code", False)
    return {name: value for name, value in spec.items() if value is not None}


def _named(dtype: Any) -> str | None:
    """Return a dtype's name; torch.float32 is called "float32"."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _batch(config: Mapping[str, Any], batch: BatchPolicy) -> BatchPolicy:
    rows = _whole(config, "batch_size", 1)
    return batch if rows is None else replace(batch, rows=rows)


def _health(config: Mapping[str, Any], health: HealthPolicy) -> HealthPolicy:
    changes: dict[str, Any] = {}
    timeout = _seconds(config, "heartbeat_timeout")
    if timeout is not None:
        changes["heartbeat_timeout_s"] = timeout
    for name, field_name in (("detection_interval", "detection_interval_s"), ("worker_monitor_interval", "poll_s")):
        interval = _seconds(config, name)
        if interval is not None:
            changes[field_name] = interval
    threshold = _whole(config, "failure_threshold", 1)
    if threshold is not None:
        changes["failure_threshold"] = threshold
    _seconds(config, "schedule_interval")  # nothing is scheduled at intervals: every event is acted on at once
    return replace(health, **changes)


def _address(address: Any) -> str | None:
    """Return a scheduler's address; what meant "here" or "find one" means a cluster on this machine."""
    if address in (None, "", "auto", "local"):
        return None
    if not isinstance(address, str):
        raise ConfigError(
            f"ray_address={address!r}: must be the address of a Dask scheduler, such as 'tcp://host:8786'"
        )
    if address.startswith("ray://"):
        raise ConfigError(f"ray_address={address!r}: give the address of a Dask scheduler, such as 'tcp://host:8786'")
    return address


def _whole(config: Mapping[str, Any], name: str, least: int) -> int | None:
    value = config.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ConfigError(f"{name}={value!r}: must be a whole number ≥ {least}")
    return value


def _number(config: Mapping[str, Any], name: str, least: float) -> float | None:
    value = config.get(name)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value < least):
        raise ConfigError(f"{name}={value!r}: must be a number ≥ {least}")
    return value


def _seconds(config: Mapping[str, Any], name: str) -> float | None:
    value = _number(config, name, 0)
    if value is not None and value == 0:
        raise ConfigError(f"{name}={value!r}: must be a number of seconds > 0")
    return value

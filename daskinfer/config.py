"""Settings: small frozen dataclasses, composed, validated once, with units in their names.

Unknown keys are an error. Defaults stand here and nowhere else; the command line reads them from here, and a mapping
(such as Dask's configuration under ``daskinfer``) can override them through :func:`from_mapping`.

Runs on: anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from daskinfer.errors import ConfigError, UnknownOptionError

__all__ = ["BatchPolicy", "FramePolicy", "HealthPolicy", "ModelSpec", "RetryPolicy", "ShowPolicy", "from_mapping"]

TASKS = ("generate", "embed", "classify", "score")
ISOLATIONS = ("auto", "process", "thread")
T = TypeVar("T")


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "bytes": (bytes,),
    "Mapping[str, Any]": (Mapping,),
}


def _check_types(owner: Any) -> None:
    """Check the values' types, so that the rules may compare them; the annotations are text, see the first import."""
    for item in fields(owner):
        value = getattr(owner, item.name)
        wanted, _, optional = str(item.type).partition(" | ")
        fits = isinstance(value, _TYPES[wanted]) and (wanted == "bool" or not isinstance(value, bool))
        if not fits and not (optional and value is None):
            raise ConfigError(f"{type(owner).__name__}.{item.name}={value!r}: must be of type {item.type}")


def _check(owner: object, *rules: tuple[str, bool, str]) -> None:
    for name, ok, needs in rules:
        if not ok:
            raise ConfigError(f"{type(owner).__name__}.{name}={getattr(owner, name)!r}: must be {needs}")


@dataclass(frozen=True)
class ModelSpec:
    """What is loaded on each worker; its :attr:`key` names plugin, resource and metrics on a shared cluster.

    Parameters
    ----------
    model : str
        A local folder, a GGUF file, or a hub name.
    task : {"generate", "embed", "classify", "score"}
    engine : str
        "auto", a name from the entry point group ``daskinfer.engines``, or ``pkg.mod:Class``.
    revision : str or None
        Of a hub model.
    dtype, device : str
        "auto", or torch's names ("float32", "bfloat16"; "cpu", "cuda:0").
    trust_remote_code : bool
        Let the model's own Python code run on the workers.
    isolation : {"auto", "process", "thread"}
        Where the engine runs: its own child process, or a thread of the worker.
    threads : int or None
        Compute threads of the engine; None: the worker's share of the cores.
    options : dict
        The engine's own options; JSON-able.
    engine_code : bytes or None
        A class that is not importable on the workers, pickled by value; opened only in the engine's process.
    engine_digest : str
        Qualified name and source hash of that class: what a run's fingerprint knows of it.
    """

    model: str
    task: str = "generate"
    engine: str = "auto"
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    isolation: str = "auto"
    threads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    engine_code: bytes | None = field(default=None, repr=False)
    engine_digest: str = ""

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self,
            ("model", bool(self.model), "the name or folder of a model"),
            ("task", self.task in TASKS, f"one of {', '.join(TASKS)}"),
            ("isolation", self.isolation in ISOLATIONS, f"one of {', '.join(ISOLATIONS)}"),
            ("threads", self.threads is None or self.threads >= 1, "None or at least 1"),
        )
        try:
            json.dumps(dict(self.options), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"engine_options={self.options!r}: must hold plain JSON values ({error})") from None

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output of a row: the part of a run's fingerprint that is about the model."""
        return {
            "model": self.model,
            "revision": self.revision,
            "task": self.task,
            "engine": self.engine_digest or self.engine,
            "dtype": self.dtype,
            "options": {k: v for k, v in sorted(self.options.items()) if not k.startswith("max_batch_")},
        }

    @property
    def key(self) -> str:
        """Ten hexadecimal digits that name this specification.

        Of a class that travels by value all that is pickled counts, also what it closes over: a changed class is never
        served by an engine that has the old one. Its pickle differs between processes, so they do not share its engines.
        """
        everything = {
            **self.fingerprint(),
            "options": dict(sorted(self.options.items())),
            "device": self.device,
            "trust": self.trust_remote_code,
            "isolation": self.isolation,
            "threads": self.threads,
            "code": hashlib.sha256(self.engine_code).hexdigest() if self.engine_code else None,
        }
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def resource(self) -> str:
        """Name of the Dask resource that stands for a slot of this model."""
        return f"daskinfer-{self.key}"


@dataclass(frozen=True)
class BatchPolicy:
    """How rows are cut into batches and how many are in flight.

    Parameters
    ----------
    slots : int
        Batches in flight per ready worker.
    oversubscribe : float
        Rows in flight per row of engine capacity. With static batches of the capacity's size an engine that refills
        its slots sits at 30-55 % occupancy on ragged outputs; with 8 batches of half the capacity it is full.
    rows : int or None
        Rows per batch; None: from the engine's capacity and the measured speed.
    batch_bytes : int
        Largest batch (Dask warns at 10 MB).
    in_flight_bytes : int
        Largest sum of batches in flight.
    overhead_s : float
        Cost of one batch in client and scheduler. Batches grow until the scheduler is busy less than half the time.
    order_bytes : int
        Buffer for restoring the order of a stream.
    """

    slots: int = 8
    oversubscribe: float = 4.0
    rows: int | None = None
    batch_bytes: int = 4 << 20
    in_flight_bytes: int = 256 << 20
    overhead_s: float = 0.007
    order_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self,
            ("slots", self.slots >= 1, "at least 1"),
            ("oversubscribe", self.oversubscribe >= 1, "at least 1"),
            ("rows", self.rows is None or self.rows >= 1, "None or at least 1"),
            ("batch_bytes", 1 <= self.batch_bytes <= 10_000_000, "between 1 and 10,000,000"),
            ("in_flight_bytes", self.in_flight_bytes >= 1, "at least 1"),
            ("overhead_s", self.overhead_s >= 0, "at least 0"),
            ("order_bytes", self.order_bytes >= 0, "at least 0"),
        )


@dataclass(frozen=True)
class RetryPolicy:
    """What is tried again, and how often.

    Parameters
    ----------
    retries : int
        Further attempts for a row whose failure may pass (transient errors).
    backoff_s, backoff_max_s : float
        First and longest pause before a further attempt; it doubles each time.
    jitter : float
        Share of the pause that is random, so that retries do not arrive together.
    strikes : int
        Times a row may be alone in an engine that dies before it is failed.
    losses : int
        Times a row may be on a worker that is lost before it is treated as a suspect.
    """

    retries: int = 3
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    jitter: float = 0.5
    strikes: int = 1
    losses: int = 2

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self,
            ("retries", self.retries >= 0, "at least 0"),
            ("backoff_s", self.backoff_s >= 0, "at least 0"),
            ("backoff_max_s", self.backoff_max_s >= self.backoff_s, "at least backoff_s"),
            ("jitter", 0 <= self.jitter <= 1, "between 0 and 1"),
            ("strikes", self.strikes >= 1, "at least 1"),
            ("losses", self.losses >= 1, "at least 1"),
        )


@dataclass(frozen=True)
class HealthPolicy:
    """When something is called dead, and how long is waited for what.

    Parameters
    ----------
    step_timeout_s : float
        An engine whose step takes longer is killed and restarted.
    load_timeout_s : float
        A load that takes longer has failed.
    start_timeout_s : float
        Wait for the first ready worker, loads in progress not counted; also how long a running job may be without one.
    engine_restarts : int
        Restarts in a row without a finished row after which a worker's engine counts as broken.
    heartbeat_timeout_s : float
        A scheduler or a worker not heard of for longer is lost; at least three heartbeats of the workers.
    detection_interval_s : float
        How often the scheduler looks for workers that are silent or stuck.
    failure_threshold : int
        Such looks in a row that must find a worker wanting before it is evicted.
    poll_s : float
        How often the driver asks the scheduler for the workers' states; this also renews its lease.
    lease_grace_s : float
        A driver not heard of for longer has lost its lease, and its model is unloaded.
    drain_s : float
        How long an interrupted run waits for batches in flight.
    """

    step_timeout_s: float = 600.0
    load_timeout_s: float = 1800.0
    start_timeout_s: float = 120.0
    engine_restarts: int = 5
    heartbeat_timeout_s: float = 30.0
    detection_interval_s: float = 1.0
    failure_threshold: int = 3
    poll_s: float = 1.0
    lease_grace_s: float = 60.0
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self,
            *((f.name, getattr(self, f.name) > 0, "greater than 0") for f in fields(self) if f.name.endswith("_s")),
            ("engine_restarts", self.engine_restarts >= 0, "at least 0"),
            ("failure_threshold", self.failure_threshold >= 1, "at least 1"),
        )


@dataclass(frozen=True)
class FramePolicy:
    """How engines are kept for DataFrames, where no driver keeps them.

    Parameters
    ----------
    idle_s : float
        Seconds after which an engine that no partition uses is closed.
    """

    idle_s: float = 300.0

    def __post_init__(self) -> None:
        _check_types(self)
        _check(self, ("idle_s", self.idle_s >= 0, "at least 0"))


@dataclass(frozen=True, slots=True)
class ShowPolicy:
    """What is shown of rows on the scheduler's page.

    Parameters
    ----------
    messages : bool
        Also why rows failed; such a message may quote the row.
    """

    messages: bool = False

    def __post_init__(self) -> None:
        _check_types(self)


def from_mapping(kind: type[T], values: Mapping[str, Any], where: str | None = None) -> T:
    """Build a settings class from a mapping; keys may use ``-`` for ``_``, as Dask's configuration does.

    Raises
    ------
    UnknownOptionError
        A key that the class does not have.
    ConfigError
        Not a mapping, or a value of the wrong type or out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or kind.__name__}={values!r}: must be a mapping of option to value")
    known = tuple(f.name for f in fields(kind))  # type: ignore[arg-type]
    plain = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key in plain:
        if key not in known:
            raise UnknownOptionError(key, where or kind.__name__, known)
    return kind(**plain)


def replaced(settings: T, **changes: Any) -> T:
    """Return a copy of a settings object with the changes that are not None."""
    return replace(settings, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[type-var]

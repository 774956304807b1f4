"""From the arguments of ``df.infer.…`` to an :class:`Inference`: everything a partition needs, as plain data that pickles.

Settings that cannot work raise here, before anything runs.

Runs on: client.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from daskinfer.config import BatchPolicy, FramePolicy, HealthPolicy, ModelSpec, RetryPolicy, from_mapping
from daskinfer.dataframe.columns import AddedColumns
from daskinfer.dataframe.fields import fields_of
from daskinfer.driver.settings import configured
from daskinfer.engines import engine_class, engine_fields, resolve
from daskinfer.errors import ConfigError, MissingColumnError, OutputClashError, UnknownOptionError
from daskinfer.prompts import Prompter, prompter
from daskinfer.records import SamplingParams

__all__ = ["SAMPLING", "Inference", "asked", "prompts_from", "with_engine"]

_ROWS = ("raw", "system", "side", "output_type", "params", "batch", "retry", "health")
_SPEC = ("revision", "dtype", "device", "trust_remote_code", "isolation", "threads")
SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name != "truncate")


@dataclass(frozen=True, repr=False)
class Inference:
    """One inference over a frame.

    Attributes
    ----------
    spec : ModelSpec
    prompter : Prompter
    added : AddedColumns
    params : SamplingParams
    raw, system
        As for :meth:`daskinfer.Driver.generate`.
    batch, retry, health
        Policies.
    idle_s : float
        Seconds after which an engine that no partition uses is closed.
    """

    spec: ModelSpec
    prompter: Prompter
    added: AddedColumns
    params: SamplingParams
    raw: bool
    system: str | None
    batch: BatchPolicy
    retry: RetryPolicy
    health: HealthPolicy
    idle_s: float

    def __repr__(self) -> str:
        return f"<Inference {self.spec.task} with {self.spec.model}: {self.added.output}>"

    def __dask_tokenize__(self) -> str:
        added = self.added
        return json.dumps(
            [
                self.spec.key,
                dict(self.prompter.fingerprint()),
                [added.output, added.description, added.errors, added.side, added.details],
                self.params.to_dict(),
                [self.raw, self.system, self.idle_s],
                [repr(policy) for policy in (self.batch, self.retry, self.health)],
            ],
            sort_keys=True,
        )


def prompts_from(columns: Sequence[Any], value: Any, task: str, *, messages: bool = False) -> Prompter:
    """Return what makes the inputs: of a template, a column, two columns of pairs, or several columns as a mapping.

    Raises
    ------
    InputError
        No such column, or a template that cannot be filled.
    ConfigError
        Neither; or the frame has two columns of that name.
    """
    available = tuple(name for name in columns if isinstance(name, str))
    named = value if isinstance(value, list | tuple) else (value,)
    for name in named:
        if isinstance(name, str) and name not in available and ("{" not in name or messages or len(named) > 1):
            raise MissingColumnError(name, available, "the inference")
    if messages:
        made = prompter(messages=value, available=available)
    elif isinstance(value, str) and value not in available and "{" in value:
        made = prompter(prompt=value, available=available, task=task)
    elif isinstance(value, str) or task in ("classify", "score"):
        made = prompter(columns=value, available=available, task=task)
    else:
        made = fields_of(value)
    for name in made.columns:
        if available.count(name) > 1:
            raise ConfigError(f"the frame has {available.count(name)} columns {name!r}; rename one of them")
    return made


def asked(  # noqa: PLR0913 - a frame's inference has this much to say
    columns: Sequence[Any],
    made: Prompter,
    model: Any,
    *,
    task: str,
    not_options: Sequence[str] | None,
    output: str,
    errors: str,
    on_long: str | None,
    details: bool,
    settings: Mapping[str, Any],
) -> Inference:
    """Return the inference that was asked for.

    Parameters
    ----------
    columns : sequence
        The frame's.
    made : Prompter
    model : str, path, ModelSpec or Driver
    task : str
    not_options : sequence of str or None
        All other settings are options of the engine. None: none of them are.
    output, errors, on_long, details, settings
        As for :class:`daskinfer.dataframe.Infer`.

    Raises
    ------
    ConfigError
        A setting that does not exist or has an impossible value.
    OutputClashError
        The frame has a column of that name already.
    """
    settings = dict(settings)
    rows = {name: settings.pop(name) for name in _ROWS if name in settings}
    spec, base, policies = _model(model, task, settings, not_options)
    params = _params(base, rows, settings, on_long)
    description = rows.get("output_type") or engine_class(spec).output_type(spec)
    for name in ("token_ids", "logprobs"):
        if getattr(params, name):
            raise ConfigError(f"{name}: the output of a frame is text; {name} come from Driver.generate")
    if errors not in ("column", "raise"):
        raise ConfigError(f"errors={errors!r}: must be 'column' or 'raise'")
    if not isinstance(output, str) or not output:
        raise ConfigError(f"output={output!r}: must be the name of a column")
    added = AddedColumns(output, description, errors == "column", params.truncate, bool(details))
    clash = tuple(name for name in added.names if name in columns)
    if clash:
        raise OutputClashError(clash)
    return Inference(
        spec,
        made,
        added,
        params,
        bool(rows.get("raw", False)),
        rows.get("system"),
        rows.get("batch") or policies[0],
        rows.get("retry") or policies[1],
        rows.get("health") or policies[2],
        configured(FramePolicy).idle_s,
    )


def with_engine(model: Any, engine: str | type) -> Any:
    """Return a ModelSpec with this engine in place of its own, or the Driver that has been made with it.

    Raises
    ------
    ConfigError
        The driver has another engine; a class counts as another one also when what it closes over has changed.
    """
    from daskinfer.driver import Driver

    named = {"engine_code": None, "engine_digest": "", **engine_fields(engine)}
    if isinstance(model, ModelSpec):
        return replace(model, **named)
    if isinstance(model, Driver):
        wanted = replace(model.spec, **named)
        if wanted.engine_code is None:
            wanted = replace(wanted, engine=resolve(wanted))
        if wanted.key != model.spec.key:
            raise ConfigError(
                f"engine={wanted.engine!r}: the driver was made with the engine {model.spec.engine!r}, or with this class "
                "as it was before it was changed; make the driver with this engine, or give model= as a name or ModelSpec"
            )
        return model
    raise ConfigError(f"model={model!r}: must be a name, a path, a ModelSpec or a Driver")


def _model(
    model: Any, task: str, settings: dict[str, Any], not_options: Sequence[str] | None
) -> tuple[ModelSpec, SamplingParams, tuple[BatchPolicy, RetryPolicy, HealthPolicy]]:
    """Return specification, parameters to start from, and policies; what is left in ``settings`` is about rows."""
    from daskinfer.driver import Driver

    if isinstance(model, Driver | ModelSpec):
        for name in (*_SPEC, "engine", "engine_options"):
            if name in settings:
                raise ConfigError(
                    f"{name}={settings[name]!r}: the given {type(model).__name__} says that already; leave it out"
                )
    if isinstance(model, Driver):
        if model.spec.task != task:
            raise ConfigError(f"the driver's model does {model.spec.task!r}, and this asks for {task!r}")
        return model.spec, model.params, (model.batch, model.retry, model.health)
    policies = (configured(BatchPolicy), configured(RetryPolicy), configured(HealthPolicy))
    if isinstance(model, ModelSpec):
        spec = replace(model, task=task)
    else:
        given = {name: settings.pop(name) for name in _SPEC if name in settings}
        options = dict(settings.pop("engine_options", None) or {})
        engine = engine_fields(settings.pop("engine", "auto"))
        if not_options is not None:
            options |= {name: settings.pop(name) for name in list(settings) if name not in not_options}
        named = {"model": os.fspath(model), "task": task, "options": options, **given, **engine}
        spec = from_mapping(ModelSpec, named, "infer")
    if spec.engine_code is None:
        engine_class(spec)
        spec = replace(spec, engine=resolve(spec))
    return spec, SamplingParams(), policies


def _params(
    base: SamplingParams, rows: Mapping[str, Any], settings: Mapping[str, Any], on_long: str | None
) -> SamplingParams:
    for name in settings:
        if name not in SAMPLING:
            raise UnknownOptionError(
                name, "infer", tuple(sorted((*SAMPLING, *_ROWS, *_SPEC, "engine", "engine_options")))
            )
    given = rows.get("params")
    params = given if isinstance(given, SamplingParams) else base.updated(**(given or {}))
    side = rows.get("side") or params.truncate or "right"
    if on_long not in (None, "error", "truncate"):
        raise ConfigError(
            f"on_long={on_long!r}: must be 'error' or 'truncate', or None for what params or the driver say"
        )
    if side not in ("left", "right"):
        raise ConfigError(f"side={side!r}: must be 'left' or 'right', the side from which tokens are dropped")
    drops = params.truncate is not None if on_long is None else on_long == "truncate"
    params = params.updated(**settings, truncate=side if drops else None)
    if params.greedy or params.seed is not None:
        return params
    return params.updated(seed=secrets.randbits(63))  # drawn once, so that computing again gives the same

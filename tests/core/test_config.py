import math
import pickle
from typing import Any

import pytest

from daskinfer.config import BatchPolicy, HealthPolicy, ModelSpec, RetryPolicy, from_mapping, replaced
from daskinfer.errors import ConfigError, UnknownOptionError
from daskinfer.records import SamplingParams


@pytest.mark.parametrize("kind", [BatchPolicy, RetryPolicy, HealthPolicy])
def test_defaults_are_valid_and_pickle(kind: Any) -> None:
    settings = kind()
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (BatchPolicy, "slots", 0),
        (BatchPolicy, "slots", "8"),
        (BatchPolicy, "slots", True),
        (BatchPolicy, "slots", 1.5),
        (BatchPolicy, "oversubscribe", 0.5),
        (BatchPolicy, "rows", 0),
        (BatchPolicy, "rows", "8"),
        (BatchPolicy, "batch_bytes", 0),
        (BatchPolicy, "batch_bytes", 10_000_001),
        (BatchPolicy, "in_flight_bytes", 0),
        (BatchPolicy, "overhead_s", -1.0),
        (BatchPolicy, "overhead_s", None),
        (BatchPolicy, "order_bytes", -1),
        (RetryPolicy, "retries", -1),
        (RetryPolicy, "backoff_s", -0.1),
        (RetryPolicy, "backoff_s", math.nan),
        (RetryPolicy, "backoff_max_s", 0.1),
        (RetryPolicy, "jitter", 1.5),
        (RetryPolicy, "strikes", 0),
        (RetryPolicy, "losses", 0),
        (HealthPolicy, "step_timeout_s", 0),
        (HealthPolicy, "poll_s", -1.0),
        (HealthPolicy, "poll_s", math.nan),
        (HealthPolicy, "engine_restarts", -1),
        (ModelSpec, "model", ""),
        (ModelSpec, "model", None),
        (ModelSpec, "task", "paint"),
        (ModelSpec, "isolation", "fork"),
        (ModelSpec, "threads", 0),
        (ModelSpec, "threads", 2.0),
        (ModelSpec, "trust_remote_code", "no"),
        (ModelSpec, "options", [1]),
        (ModelSpec, "engine", None),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}\.{name}={value!r}: must be".replace("[", r"\[")):
        kind(**({"model": "m"} | {name: value} if kind is ModelSpec else {name: value}))


def test_whole_numbers_are_good_for_seconds() -> None:
    assert HealthPolicy(step_timeout_s=30).step_timeout_s == 30
    assert HealthPolicy(step_timeout_s=math.inf).step_timeout_s == math.inf


@pytest.mark.parametrize("options", [{"a": object()}, {"a": {1, 2}}, {1: "a", "b": 2}])
def test_engine_options_are_plain_json(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine_options=.*plain JSON"):
        ModelSpec("m", options=options)


# ---------------------------------------------------------------- what names a model


def test_the_key_names_what_is_loaded() -> None:
    spec = ModelSpec("m", options={"a": 1, "b": 2})
    assert spec.key == ModelSpec("m", options={"b": 2, "a": 1}).key
    assert len(spec.key) == 10
    assert spec.resource == f"daskinfer-{spec.key}"
    others = [
        ModelSpec("n"),
        ModelSpec("m"),
        ModelSpec("m", revision="v1"),
        ModelSpec("m", dtype="float32"),
        ModelSpec("m", device="cpu"),
        ModelSpec("m", engine="echo"),
        ModelSpec("m", engine_digest="__main__.Mine:abc"),
        ModelSpec("m", engine_code=b"class Mine"),
        ModelSpec("m", engine_code=b"class Mine, changed"),
        ModelSpec("m", trust_remote_code=True),
        ModelSpec("m", isolation="thread"),
        ModelSpec("m", threads=2),
        ModelSpec("m", options={"max_batch_rows": 8}),
    ]
    assert len({spec.key, *(other.key for other in others)}) == len(others) + 1


def test_c38_the_fingerprint_is_what_decides_the_output() -> None:
    spec = ModelSpec("m", options={"echo": 1})
    same = [
        ModelSpec("m", options={"echo": 1, "max_batch_rows": 8}),
        ModelSpec("m", options={"echo": 1}, threads=3, device="cpu", isolation="thread"),
    ]
    assert all(other.fingerprint() == spec.fingerprint() for other in same)
    different = [ModelSpec("m", options={"echo": 2}), ModelSpec("n"), ModelSpec("m", revision="v1")]
    assert all(other.fingerprint() != spec.fingerprint() for other in different)
    assert ModelSpec("m", engine="pkg.mod:E", engine_digest="E:abc").fingerprint()["engine"] == "E:abc"
    pickled = [ModelSpec("m", engine_digest="E:abc", engine_code=code) for code in (b"here", b"elsewhere")]
    assert pickled[0].fingerprint() == pickled[1].fingerprint()  # the same class is pickled otherwise in each process


def test_an_engine_class_is_not_shown() -> None:
    assert "secret" not in repr(ModelSpec("m", engine_code=b"secret"))


# ---------------------------------------------------------------- mappings


def test_mappings_use_dashes_or_underscores() -> None:
    assert from_mapping(BatchPolicy, {"batch-bytes": 5, "slots": 2}) == BatchPolicy(batch_bytes=5, slots=2)
    assert from_mapping(SamplingParams, {"max-new-tokens": 5}) == SamplingParams(max_new_tokens=5)
    assert from_mapping(HealthPolicy, {}) == HealthPolicy()


def test_unknown_keys_are_an_error_that_names_the_known() -> None:
    with pytest.raises(UnknownOptionError, match=r"daskinfer\.batch has no option 'row'; it has .*rows"):
        from_mapping(BatchPolicy, {"row": 5}, "daskinfer.batch")
    with pytest.raises(UnknownOptionError, match="RetryPolicy has no option '3'"):
        from_mapping(RetryPolicy, {3: 5})  # type: ignore[dict-item]  # YAML keys may be numbers


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"daskinfer\.batch=5: must be a mapping"):
        from_mapping(BatchPolicy, 5, "daskinfer.batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="RetryPolicy=None: must be a mapping"):
        from_mapping(RetryPolicy, None)  # type: ignore[arg-type]


def test_replaced_leaves_out_none() -> None:
    assert replaced(RetryPolicy(), retries=0, strikes=None) == RetryPolicy(retries=0)
    with pytest.raises(ConfigError, match="retries"):
        replaced(RetryPolicy(), retries=-1)

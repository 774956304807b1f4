"""Dask's configuration as the source of policies."""

import os
import subprocess
import sys
from dataclasses import fields
from typing import Any

import dask
import pytest

from daskinfer.config import BatchPolicy, FramePolicy, HealthPolicy, RetryPolicy, ShowPolicy
from daskinfer.driver.settings import DEFAULTS, SECTIONS, configured
from daskinfer.errors import ConfigError, UnknownOptionError

POLICIES: list[type] = [BatchPolicy, RetryPolicy, HealthPolicy, FramePolicy, ShowPolicy]


def packaged() -> dict[str, dict[str, Any]]:
    (values,) = dask.config.collect_yaml([str(DEFAULTS)])
    sections: dict[str, dict[str, Any]] = values["daskinfer"]
    return sections


def test_every_policy_has_its_section() -> None:
    assert set(packaged()) == set(SECTIONS.values())
    assert set(SECTIONS) == set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_packaged_file_states_every_default(policy: type) -> None:
    stated = {key.replace("-", "_"): value for key, value in packaged()[SECTIONS[policy]].items()}
    assert stated == {field.name: getattr(policy(), field.name) for field in fields(policy)}
    assert {name: type(value) for name, value in stated.items()} == {
        field.name: type(getattr(policy(), field.name)) for field in fields(policy)
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_without_changes_the_defaults_hold(policy: type) -> None:
    assert configured(policy) == policy()


@pytest.mark.parametrize("key", ["daskinfer.batch.batch-bytes", "daskinfer.batch.batch_bytes"])
def test_dask_s_configuration_changes_a_default(key: str) -> None:
    with dask.config.set({key: 1_000, "daskinfer.batch.rows": 7}):
        assert configured(BatchPolicy) == BatchPolicy(batch_bytes=1_000, rows=7)
    assert configured(BatchPolicy) == BatchPolicy()


def test_an_environment_variable_changes_a_default() -> None:
    code = "from daskinfer.driver.settings import *; print(configured(list(SECTIONS)[1]))"
    env = {**os.environ, "DASK_DASKINFER__RETRY__RETRIES": "0", "DASK_DASKINFER__RETRY__BACKOFF_S": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("RetryPolicy(retries=0, backoff_s=2, backoff_max_s=30.0,")


def test_an_unknown_key_names_its_section_and_the_known_ones() -> None:
    with (
        dask.config.set({"daskinfer.retry.tries": 3}),
        pytest.raises(UnknownOptionError, match=r"daskinfer\.retry has no option 'tries'; it has .*retries"),
    ):
        configured(RetryPolicy)


@pytest.mark.parametrize("value", ["3", -1, None, True])
def test_a_value_of_the_wrong_kind_is_refused(value: object) -> None:
    with dask.config.set({"daskinfer.retry.retries": value}), pytest.raises(ConfigError, match="retries"):
        configured(RetryPolicy)

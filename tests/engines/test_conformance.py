"""Every engine against the one suite of checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class
from daskinfer.engines.base import Engine
from tests.engines.conformance import CASES, CHECKS, Case


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case_and_spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, ModelSpec]:
    case: Case = request.param
    return case, case.spec(tmp_path_factory.mktemp(case.name))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_engine(case_and_spec: tuple[Case, ModelSpec], check: Callable[[Engine, Case], None]) -> None:
    case, spec = case_and_spec
    engine = engine_class(spec)(spec)
    engine.load()
    try:
        check(engine, case)
    finally:
        engine.close()


def test_output_type_needs_no_load(case_and_spec: tuple[Case, ModelSpec]) -> None:
    _, spec = case_and_spec
    absent = ModelSpec("no-such-model", engine=spec.engine, options=spec.options)
    assert engine_class(absent).output_type(absent) == "string"


def test_close_without_load(case_and_spec: tuple[Case, ModelSpec]) -> None:
    _, spec = case_and_spec
    engine_class(spec)(spec).close()

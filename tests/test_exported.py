"""What ``import daskinfer`` gives, and what it must not load."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import daskinfer

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "pandas", "pyarrow", "bokeh", "dask", "distributed", "tornado", "numpy", "rich")


def pure_modules() -> list[str]:
    """The modules that the import contract calls the core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    core = next(c for c in contracts if c["name"].startswith("The core knows neither Dask"))
    return [str(name) for name in core["source_modules"]]


def loaded_by(*modules: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after importing these modules."""
    code = f"import sys, {', '.join(modules)}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_daskinfer_is_cheap() -> None:
    assert loaded_by("daskinfer") == set()


def test_importing_the_pure_modules_is_cheap() -> None:
    assert {"daskinfer.window", "daskinfer.prompts", "daskinfer.metrics"} <= set(pure_modules())
    assert loaded_by(*pure_modules()) == set()


def test_importing_what_a_person_watches_is_cheap() -> None:
    assert loaded_by("daskinfer.progress", "daskinfer.report") == set()


def test_the_public_names_are_sorted_and_there() -> None:
    assert list(daskinfer.__all__) == sorted(daskinfer.__all__)
    assert len(set(daskinfer.__all__)) == len(daskinfer.__all__)
    assert [name for name in daskinfer.__all__ if not hasattr(daskinfer, name)] == []
    assert set(daskinfer.__all__) <= set(dir(daskinfer))


def test_the_public_names_are_documented() -> None:
    objects = {name: getattr(daskinfer, name) for name in daskinfer.__all__ if not name.startswith("__")}
    assert [name for name, value in objects.items() if callable(value) and not inspect.getdoc(value)] == []


@pytest.mark.parametrize("name", ["no_such_name", "_private"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(daskinfer, name)

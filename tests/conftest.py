"""What all tests share: no network, no process left behind, and where echo engines write."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads and our forks do not go together

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # how fast a machine is decides no test

_GRACE_S = 5.0
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # live as long as the test process


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "keeps_children: replaces processes of a shared cluster, which live on")


@pytest.fixture
def echo_log(tmp_path: Path) -> Path:
    """The file for an echo engine's ``log``."""
    return tmp_path / "echo.jsonl"


@pytest.fixture
def fault_dir(tmp_path: Path) -> Path:
    """The folder for an echo engine's ``faults_dir``."""
    return tmp_path / "faults"


@pytest.fixture(autouse=True)
def _no_child_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves child processes behind, and end them.

    Fixtures of a wider scope are set up before this one, so the processes of a shared cluster are not the test's.
    """
    before = set(_children())
    yield
    if request.node.get_closest_marker("keeps_children") is not None:
        return
    left = _left_after_grace(before)
    if left:
        told = "\n".join(f"  {child.pid}: {_command(child)[:200]}" for child in left)
        for child in left:
            child.kill()
        psutil.wait_procs(left, timeout=_GRACE_S)
        pytest.fail(f"child processes were left behind:\n{told}", pytrace=False)


def _left_after_grace(before: set[psutil.Process]) -> set[psutil.Process]:
    deadline = time.monotonic() + _GRACE_S
    while (left := set(_children()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _children() -> list[psutil.Process]:
    """The living direct children; a grandchild without a living parent is no longer ours to see."""
    return [child for child in psutil.Process().children() if (command := _command(child)) and not _is_helper(command)]


def _is_helper(command: str) -> bool:
    return any(name in command for name in _HELPERS)


def _command(child: psutil.Process) -> str:
    """The command line; "" for one that has ended."""
    try:
        return " ".join(child.cmdline())
    except psutil.Error:
        return ""


# ---------------------------------------------------------------- what a test may need of the machine


@pytest.fixture(scope="session")
def require_chromium() -> tuple[str, str]:
    """The paths of Chromium and its driver."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        _missing("Chromium and chromedriver: apt-get install chromium chromium-driver")
    return browser, driver


@pytest.fixture(scope="session")
def require_root() -> None:
    """The test process is root."""
    if os.geteuid() != 0:
        _missing("root")


@pytest.fixture(scope="session")
def require_kernel() -> None:
    """Numba can compile, and has threads."""
    try:
        from daskinfer.engines.lm.few import FewAttention
        from daskinfer.engines.lm.kernels import gathered

        FewAttention(gathered())
    except (ImportError, RuntimeError) as error:
        _missing(f"Numba with OpenMP's threads (Debian's libgomp1): {error}")


def _missing(what: str) -> NoReturn:
    """Skip on somebody's machine; fail in CI, where a skipped test would go unseen."""
    if os.environ.get("CI"):
        pytest.fail(f"CI has to provide {what}", pytrace=False)
    pytest.skip(f"needs {what}")

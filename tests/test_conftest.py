"""The guard against child processes that outlive their test, and the needs that are skipped or fail."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAVES_A_CHILD = """
import subprocess, sys
import pytest

def start():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

@pytest.fixture(scope="module")
def shared():
    process = start()
    yield process
    process.kill()
    process.wait()

def test_leaves_one():
    global left
    left = start()

def test_the_one_left_was_ended():
    assert left.poll() is not None

def test_shared_processes_are_not_the_tests(shared):
    assert shared.poll() is None

@pytest.mark.keeps_children
def test_allowed():
    global allowed
    allowed = start()

def test_ends_it():
    allowed.kill()
    allowed.wait()

def test_without_children(): pass
"""
NEEDS = """
def test_root(require_root): pass
def test_browser(require_chromium): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    guard = (Path(__file__).parent / "conftest.py").read_text().replace("_GRACE_S = 5.0", "_GRACE_S = 0.2")
    pytester.makeconftest(guard)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None)
    return pytester


def test_a_child_left_behind_fails_its_test_and_is_ended(project: pytest.Pytester) -> None:
    project.makepyfile(LEAVES_A_CHILD)
    outcome = project.runpytest_inprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=6, errors=1)
    outcome.stdout.fnmatch_lines(["*ERROR at teardown of test_leaves_one*", "child processes were left behind:"])


def test_what_the_machine_lacks_is_skipped_with_the_reason(project: pytest.Pytester) -> None:
    project.makepyfile(NEEDS)
    outcome = project.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    outcome.assert_outcomes(skipped=2)
    outcome.stdout.fnmatch_lines(["*needs root", "*needs Chromium and chromedriver: apt-get install *"])


def test_what_ci_lacks_is_a_failure(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    project.makepyfile(NEEDS)
    outcome = project.runpytest_inprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(errors=2)
    outcome.stdout.fnmatch_lines(["*CI has to provide root*", "*CI has to provide Chromium*"])

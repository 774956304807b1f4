"""Scripted faults: rows that fail alone, and processes that really die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daskinfer.engines.scripted import Action, FaultScript
from daskinfer.errors import ConfigError, EngineDiedError
from daskinfer.records import Completed, Failed
from daskinfer.testing import EchoEngine, Request, attempts, call_counts, echo_spec, read_log, run_engine, wait_until

ROW_ACTIONS = {
    "value_error": "error",
    "row_error": "rejected",
    "connection_error": "transient",
    "timeout": "transient",
    "oom": "out_of_memory",
    "fail:builtins.KeyError": "error",
    "fail:daskinfer.errors.TransientError": "transient",
}
CHILD = """
import json, sys
from daskinfer.testing import EchoEngine, Request, echo_spec
options, prompts = json.loads(sys.argv[1])
engine = EchoEngine(echo_spec(**options))
engine.load()
engine.add([Request(i, prompt) for i, prompt in enumerate(prompts)])
while engine.stats().waiting + engine.stats().running:
    for result in engine.step():
        print(result.id, flush=True)
engine.close()
"""


def run_once(options: dict[str, Any], prompt: str = "a bad row") -> Completed | Failed:
    engine = EchoEngine(echo_spec(**options))
    (result,) = run_engine(engine, [Request(5, prompt)])
    return result


def child(prompts: list[str], **options: object) -> subprocess.Popen[str]:
    plain = json.dumps([{k: str(v) if k in ("log", "faults_dir") else v for k, v in options.items()}, prompts])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, plain], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("action", "kind"), ROW_ACTIONS.items())
def test_a_faulty_row_fails_alone(action: str, kind: str, fault_dir: Path) -> None:
    engine = EchoEngine(echo_spec(capacity=2, faults={"bad": action}, faults_dir=fault_dir))
    results = run_engine(engine, [Request(0, "a"), Request(1, "bad"), Request(2, "c")])
    assert {r.id: r.kind for r in results if isinstance(r, Failed)} == {1: kind}
    assert {r.id: r.output for r in results if isinstance(r, Completed)} == {0: "<a>", 2: "<c>"}
    assert engine.stats().row_steps == 2


def test_c41_an_exception_with_a_broken_text_fails_the_row(fault_dir: Path) -> None:
    action = f"fail:{__name__}.unspeakable"
    result = run_once({"faults": {"bad": action}, "faults_dir": fault_dir})
    assert isinstance(result, Failed)
    assert result.message == "UnspeakableError: <its __str__ raised ZeroDivisionError>"


class UnspeakableError(Exception):
    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)

    def __str__(self) -> str:
        raise ZeroDivisionError


def unspeakable(text: str) -> Exception:
    return UnspeakableError(text, 2)


def test_actions_go_by_attempt_and_the_last_one_repeats(fault_dir: Path) -> None:
    options = {"faults": {"bad": ["connection_error", "ok", "value_error"]}, "faults_dir": fault_dir}
    results = [run_once(options) for _ in range(4)]
    assert [r.kind if isinstance(r, Failed) else "ok" for r in results] == ["transient", "ok", "error", "error"]
    assert attempts(fault_dir) == {5: 4}


def test_the_first_marker_in_the_text_decides_and_rows_without_one_are_not_counted(fault_dir: Path) -> None:
    options = {"faults": {"very bad": "row_error", "bad": "timeout"}, "faults_dir": fault_dir}
    told = [run_once(options, prompt) for prompt in ("very bad", "bad", "good")]
    assert [r.kind if isinstance(r, Failed) else "ok" for r in told] == ["rejected", "transient", "ok"]
    assert attempts(fault_dir) == {5: 2}


def test_attempts_before_any_are_none(fault_dir: Path) -> None:
    assert attempts(fault_dir) == {}


# ---------------------------------------------------------------- the step


@pytest.mark.parametrize(
    ("action", "expected"),
    [("system_exit", SystemExit), ("raise:daskinfer.errors.EngineDiedError", EngineDiedError)],
)
def test_what_leaves_the_step_loses_no_row(action: str, expected: Any, fault_dir: Path) -> None:
    engine = EchoEngine(echo_spec(capacity=2, faults={"bad": [action, "ok"]}, faults_dir=fault_dir))
    engine.add([Request(0, None), Request(1, "b"), Request(2, "bad"), Request(3, "d")])
    with pytest.raises(expected):
        engine.step()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().steps) == (2, 1, 0)
    assert sorted(r.id for _ in range(2) for r in engine.step()) == [0, 1, 2, 3]


def test_sleep_is_a_slow_step_and_the_row_is_answered(fault_dir: Path) -> None:
    assert run_once({"faults": {"bad": "sleep:0.01"}, "faults_dir": fault_dir}).ok


# ---------------------------------------------------------------- the process


@pytest.mark.parametrize(
    ("action", "returncode"),
    [("exit", 1), ("sigkill", -signal.SIGKILL), ("segv", -signal.SIGSEGV), ("system_exit", 1)],
)
def test_c39_a_poison_row_takes_its_process_and_the_next_attempt_runs(
    action: str, returncode: int, fault_dir: Path, echo_log: Path
) -> None:
    prompts = ["a", "b", "c", "poison", "e"]
    options = {"capacity": 2, "faults": {"poison": [action, "ok"]}, "faults_dir": fault_dir, "log": echo_log}
    first = child(prompts, **options)
    out, _ = first.communicate(timeout=60)
    assert (first.returncode, out.split()) == (returncode, ["0", "1"])
    assert read_log(echo_log)[-1].event == "step"
    assert read_log(echo_log)[-1].ids == (2, 3)  # the mate that was in the same step

    second = child(prompts, **options)
    out, _ = second.communicate(timeout=60)
    assert (second.returncode, out.split()) == (0, ["0", "1", "2", "3", "4"])
    assert attempts(fault_dir) == {3: 2}
    assert call_counts(echo_log) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1}
    assert read_log(echo_log)[-1].event == "close"


@pytest.mark.parametrize("action", ["hang", "sigstop"])
def test_c51_an_engine_that_stands_still_can_be_killed(action: str, fault_dir: Path, echo_log: Path) -> None:
    prompts = ["a", "poison"]
    running = child(prompts, capacity=1, faults={"poison": action}, faults_dir=fault_dir, log=echo_log)
    try:
        wait_until(
            lambda: [e for e in read_log(echo_log) if e.event == "step" and e.ids == (1,)], 60, "the hanging step"
        )
        assert running.poll() is None
    finally:
        running.kill()
        out, _ = running.communicate(timeout=60)
    assert out.split() == ["0"]
    assert call_counts(echo_log) == {0: 1}


# ---------------------------------------------------------------- scripts


@pytest.mark.parametrize("text", ["", "explode", "exit:1", "sleep", "sleep:long", "raise:Error", "fail:", ":", 3])
def test_an_action_that_does_not_exist_is_refused_with_those_that_do(text: Any, fault_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no action .*; there are ok, value_error, .*, fail:pkg\.Class"):
        echo_spec(faults={"bad": ["ok", text]}, faults_dir=fault_dir)


def test_a_marker_without_actions_is_refused(fault_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"faults\['bad'\]=\[\]: must name at least one action"):
        FaultScript({"bad": []}, str(fault_dir))


def test_a_factory_that_makes_no_exception_is_refused() -> None:
    with pytest.raises(ConfigError, match="must return an exception"):
        Action.parse("fail:builtins.len").row_error(0)

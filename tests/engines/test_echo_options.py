"""The echo engine's loads and log, over several processes, and the options it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daskinfer.errors import ConfigError, UnknownOptionError
from daskinfer.testing import EchoEngine, Request, call_counts, echo_spec, loads, read_log, run_engine


def loaded(**options: Any) -> EchoEngine:
    engine = EchoEngine(echo_spec(**options))
    engine.load()
    return engine


# ---------------------------------------------------------------- loading and the log


def test_a_load_can_be_scripted_to_fail(echo_log: Path) -> None:
    with pytest.raises(RuntimeError, match="no such weights"):
        loaded(load_error="no such weights", log=echo_log)
    assert loads(echo_log) == [os.getpid()]


@pytest.mark.parametrize(
    ("fails_on", "expected"), [(2, [False, False, True, True]), ([2, 4], [True, False, True, False])]
)
def test_failing_loads_are_counted_over_processes(echo_log: Path, fails_on: Any, expected: Any) -> None:
    def load() -> bool:
        code = (
            "import json, sys\nfrom daskinfer.testing import *\n"
            "try: EchoEngine(echo_spec(**json.loads(sys.argv[1]))).load()\nexcept RuntimeError: sys.exit(3)"
        )
        options = json.dumps({"load_fails_on": fails_on, "log": str(echo_log), "log_events": []})
        ended = subprocess.run([sys.executable, "-c", code, options], check=False)
        assert ended.returncode in (0, 3)
        return ended.returncode == 0

    assert [load() for _ in expected] == expected
    assert len(set(loads(echo_log))) == len(expected)


def test_the_log_tells_who_ran_what(echo_log: Path) -> None:
    engine = loaded(log=echo_log, capacity=2)
    run_engine(engine, [Request(0, "a"), Request(1, None), Request(2, "c")])
    engine.close()
    assert {e.pid for e in read_log(echo_log)} == {os.getpid()}
    told = [(e.event, e.ids) for e in read_log(echo_log)]
    assert told == [("load", ()), ("fail", (1,)), ("step", (0, 2)), ("finish", (0, 2)), ("close", ())]
    assert call_counts(echo_log) == {0: 1, 2: 1}


def test_the_log_of_a_long_run_can_leave_steps_out(echo_log: Path) -> None:
    engine = loaded(log=echo_log, lengths=50, log_events=["finish"])
    run_engine(engine, [Request(i, "a") for i in range(3)])
    assert [e.event for e in read_log(echo_log)] == ["load", "finish"]


def test_processes_write_one_log_at_once_without_tearing_it(echo_log: Path) -> None:
    code = (
        "import sys\nfrom daskinfer.testing import *\n"
        "run_engine(EchoEngine(echo_spec(log=sys.argv[1], capacity=8)), [Request(i, 'a') for i in range(800)])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(echo_log)]) for _ in range(3)]
    assert [w.wait() for w in writers] == [0, 0, 0]
    assert call_counts(echo_log) == dict.fromkeys(range(800), 3)


# ---------------------------------------------------------------- what it refuses


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(UnknownOptionError, match=r"'capacty'; it has capacity, dims, faults"):
        echo_spec(capacty=3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"lengths": 0}, "lengths=0"),
        ({"lengths": []}, "lengths="),
        ({"lengths": [1, 0]}, "lengths="),
        ({"lengths": "long"}, "lengths='long'"),
        ({"lengths": {"low": 1, "high": 2}}, "lengths="),
        ({"lengths": {"seed": 0, "low": 3, "high": 2}}, "lengths="),
        ({"lengths": "params", "output": "vector"}, "lengths='params'"),
        ({"step_s": -1}, "step_s=-1"),
        ({"load_s": "1"}, "load_s='1'"),
        ({"load_fails_on": 1}, "load_fails_on=1"),
        ({"output": "image"}, "output='image'"),
        ({"dims": 0}, "dims=0"),
        ({"prefix": None}, "prefix=None"),
        ({"log": 3}, "log=3"),
        ({"log_events": ["end"]}, "log_events="),
        ({"faults": ["exit"]}, "faults="),
        ({"faults": {"x": "exit"}}, "faults_dir=None"),
        ({"oom_over": 0}, "oom_over=0"),
    ],
)
def test_an_option_out_of_range_is_named(options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        echo_spec(**options)

"""What the benchmarks share: the result file says how it was made, spreads and memory samples are right."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from daskinfer.testing import wait_until

FILE = Path(__file__).parent.parent / "benchmarks" / "_common.py"


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_common", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_result_says_how_and_where_it_was_made(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = FILE.parent / "bench_sorting.py"
    monkeypatch.setattr("sys.argv", [str(script), "--rows", "7", "--results", str(tmp_path)])
    options = common.arguments("Sorting is quick.", rows=3).parse_args(["--rows", "7", "--results", str(tmp_path)])
    path = common.write_result("sorting", options, {"seconds": common.Spread.of([3.0, 1.0, 2.0]), "where": tmp_path})
    written = json.loads(path.read_text())
    assert path == tmp_path / "sorting.json"
    assert written["command"] == f"python benchmarks/bench_sorting.py --rows 7 --results {tmp_path.name}"
    assert written["options"] == {"seed": 0, "repeats": 5, "rows": 7}
    assert written["results"] == {"seconds": {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3}, "where": str(tmp_path)}
    assert written["versions"]["daskinfer"]
    assert written["machine"]["cores"] >= 1
    assert "seconds: 2 (1 to 3, 3 runs)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_that_is_no_json_leaves_the_old_result(common: ModuleType, tmp_path: Path) -> None:
    options = common.arguments("x").parse_args(["--results", str(tmp_path)])
    common.write_result("x", options, {"n": 1})
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        common.write_result("x", options, {"n": object()})
    assert json.loads((tmp_path / "x.json").read_text())["results"] == {"n": 1}


def test_timed_leaves_the_warm_ups_out(common: ModuleType) -> None:
    calls: list[int] = []
    assert len(common.timed(lambda: calls.append(1), repeats=3, warmups=2)) == 3
    assert len(calls) == 5


def test_memory_of_this_process_is_sampled(common: ModuleType) -> None:
    with common.RssSampler(interval_s=0.01) as sampler:
        block = b"x" * (64 << 20)
        wait_until(lambda: len(sampler.samples) > 3)
    assert len(block) == 64 << 20
    assert sampler.growth_bytes > 48 << 20
    assert sampler.peak_bytes == max(size for _, size in sampler.samples)


def test_children_are_added_and_a_process_that_ends_is_no_error(common: ModuleType) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with common.RssSampler(interval_s=0.01) as alone, common.RssSampler(children=True, interval_s=0.01) as family:
            wait_until(lambda: len(alone.samples) > 2 and len(family.samples) > 2)
        assert family.peak_bytes > alone.peak_bytes
        with common.RssSampler(child.pid, interval_s=0.01) as alone:
            child.kill()
            child.wait()
        assert 0 < alone.peak_bytes < family.peak_bytes
    finally:
        child.kill()
        child.communicate()


def test_the_machine_line_names_python_and_the_package(common: ModuleType) -> None:
    line = common.machine_line()
    assert f"Python {sys.version_info.major}." in line
    assert "daskinfer " in line

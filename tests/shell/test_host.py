"""One engine in a child process or a thread: what comes back when it works, dies, hangs, or fails to load."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from daskinfer.config import HealthPolicy, ModelSpec
from daskinfer.errors import RemoteError
from daskinfer.host import Host, HostSettings
from daskinfer.host.channels import child_environment, describe_exit
from daskinfer.records import Batch, FaultKind, Report, Request, SamplingParams
from daskinfer.testing import call_counts, conservation, echo_spec, loads

HEALTH = HealthPolicy(step_timeout_s=30, engine_restarts=2)


def batch(key: str, texts: list[str], *, first: int = 0, probe: bool = False, **params: Any) -> Batch:
    sampling = SamplingParams(**params)
    return Batch(key, tuple(Request(first + i, text, sampling) for i, text in enumerate(texts)), probe=probe)


def with_host(
    spec: ModelSpec,
    test: Callable[[Host], Awaitable[None]],
    health: HealthPolicy = HEALTH,
    states: list[str] | None = None,
) -> None:
    async def go() -> None:
        host = Host(spec, HostSettings(health, worker="tcp://w"), (states if states is not None else []).append)
        await host.start()
        try:
            await asyncio.wait_for(test(host), 60)
        finally:
            await host.close()

    asyncio.run(go())


async def until(predicate: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if predicate():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the state was not reached")


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_rows_come_back_under_their_own_ids(isolation: str) -> None:
    async def test(host: Host) -> None:
        # Two jobs with the same row ids are inside the engine at once.
        first, second = await asyncio.gather(
            host.run(batch("a", [f"a{i}" for i in range(50)], max_new_tokens=9)),
            host.run(batch("b", [f"b{i}" for i in range(50)], max_new_tokens=9)),
        )
        for name, report in (("a", first), ("b", second)):
            conservation(range(50), report.results)
            assert {r.id: r.output for r in report.results if r.ok} == {i: f"<{name}{i}>" for i in range(50)}  # type: ignore[union-attr]
            assert report.fault is None
            assert report.worker == "tcp://w"
            assert report.usage.completion_tokens == 100
        figures = host.figures()
        assert figures["state"] == "ready"
        assert figures["completion_tokens"] == 200
        assert figures["batches"] == 0
        assert (figures["isolation"], figures["step_timeout_s"], figures["load_timeout_s"]) == (
            isolation,
            HEALTH.step_timeout_s,
            HEALTH.load_timeout_s,
        )

    states: list[str] = []
    with_host(echo_spec(isolation=isolation, lengths=2, capacity=8), test, states=states)
    assert states == ["loading", "ready", "closed"]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_failed_load_says_why(isolation: str) -> None:
    async def test() -> None:
        host = Host(echo_spec(isolation=isolation, load_error="no such weights"), HostSettings(HEALTH))
        with pytest.raises(RemoteError, match="no such weights"):
            await host.start()
        assert host.state == "failed"
        report = await host.run(batch("a", ["x"]))
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ENGINE_NOT_READY
        assert "no such weights" in report.fault.message
        await host.close()

    asyncio.run(test())


def test_a_load_that_takes_too_long_has_failed() -> None:
    async def test() -> None:
        host = Host(echo_spec(load_s=60), HostSettings(HealthPolicy(load_timeout_s=0.5)))
        with pytest.raises(RemoteError, match=r"load_timeout_s=0\.5"):
            await host.start()
        await host.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("exit", "exit code"),
        ("sigkill", "SIGKILL (the kernel does that when memory runs out)"),
        ("segv", "SIGSEGV"),
        ("system_exit", "the engine raised SystemExit: 1"),
        ("raise:builtins.KeyboardInterrupt", "the engine raised KeyboardInterrupt"),
        ("raise:builtins.BaseException", "the engine raised BaseException"),
    ],
)
def test_c39_c51_a_dead_engine_is_restarted_and_its_finished_rows_are_kept(
    action: str, said: str, fault_dir: Path, echo_log: Path
) -> None:
    spec = echo_spec(
        faults={"bad": [action, "ok"]},
        faults_dir=fault_dir,
        log=echo_log,
        capacity=2,
        lengths=[1, 1, 3, 1, 1],
        step_s=0.01,
    )

    async def test(host: Host) -> None:
        texts = ["ok0", "ok1", "slow", "bad", "ok4"]
        running = asyncio.create_task(host.run(batch("a", texts)))
        report = await running
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ENGINE_DIED
        assert said in report.fault.message
        assert {r.id for r in report.results} == {0, 1}
        assert set(report.fault.suspects) == {2, 3, 4}
        again = await host.run(batch("b", texts[2:], first=2))
        assert again.fault is None
        conservation([2, 3, 4], again.results)
        assert host.restarts == 1

    states: list[str] = []
    with_host(spec, test, states=states)
    assert states == ["loading", "ready", "restarting", "ready", "closed"]
    assert len(loads(echo_log)) == 2


def test_c51_a_hung_engine_is_killed_after_the_step_timeout(fault_dir: Path) -> None:
    spec = echo_spec(faults={"bad": ["hang", "ok"]}, faults_dir=fault_dir)

    async def test(host: Host) -> None:
        report = await host.run(batch("a", ["bad"]))
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ENGINE_HUNG
        assert "step_timeout_s=0.5" in report.fault.message
        assert (await host.run(batch("b", ["good"]))).fault is None

    with_host(spec, test, HealthPolicy(step_timeout_s=0.5))


@pytest.mark.slow
def test_a_thread_that_hangs_is_given_up(fault_dir: Path) -> None:
    spec = echo_spec(isolation="thread", faults={"bad": "sleep:7"}, faults_dir=fault_dir)

    async def test(host: Host) -> None:
        report = await host.run(batch("a", ["bad"]))
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ENGINE_HUNG
        await until(lambda: host.state == "failed")

    with_host(spec, test, HealthPolicy(step_timeout_s=0.3))


def test_batches_that_only_waited_go_to_the_next_engine(fault_dir: Path) -> None:
    spec = echo_spec(faults={"bad": ["exit", "ok"]}, faults_dir=fault_dir)

    async def test(host: Host) -> None:
        died = asyncio.create_task(host.run(batch("a", ["bad"])))
        await until(lambda: host.state == "restarting")
        waited = await host.run(batch("b", ["x", "y"], first=10))
        assert (await died).fault is not None
        assert waited.fault is None
        conservation([10, 11], waited.results)

    with_host(spec, test)


def test_an_engine_that_dies_for_ever_is_given_up(fault_dir: Path) -> None:
    spec = echo_spec(faults={"bad": "exit"}, faults_dir=fault_dir)

    async def test(host: Host) -> None:
        for n in range(10):
            report = await host.run(batch(str(n), ["bad"]))
            assert report.fault is not None
            if report.fault.kind is FaultKind.ENGINE_NOT_READY:
                break
        assert host.state == "failed"
        assert "engine_restarts" in str(host.error)
        assert host.loads == 3

    with_host(spec, test, HealthPolicy(engine_restarts=2))


def test_a_probe_runs_alone(echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, lengths=5, step_s=0.005)

    async def test(host: Host) -> None:
        reports = await asyncio.gather(
            host.run(batch("a", ["a"] * 4)),
            host.run(batch("p", ["p"], first=100, probe=True)),
            host.run(batch("b", ["b"] * 4, first=200)),
        )
        assert all(report.fault is None for report in reports)

    with_host(spec, test)
    from daskinfer.testing import read_log

    together = [set(entry.ids) for entry in read_log(echo_log) if entry.event == "step"]
    assert {100} in together
    assert all(100 not in ids or ids == {100} for ids in together)


def test_aborted_rows_get_no_result_and_the_others_go_on(echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, lengths=200, step_s=0.005, capacity=4)

    async def test(host: Host) -> None:
        running = asyncio.create_task(host.run(batch("a", ["x"] * 4)))
        await until(lambda: host.figures()["running"] == 4)
        host.abort("a")
        report = await running
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ABORTED
        host.abort("unknown")
        other = await host.run(batch("b", ["y"], first=50, max_new_tokens=3))
        assert other.fault is None

    with_host(spec, test)
    assert call_counts(echo_log) == {50: 1}


def test_the_same_batch_twice_runs_once(echo_log: Path) -> None:
    async def test(host: Host) -> None:
        one = batch("a", ["x"])
        first, second = await asyncio.gather(host.run(one), host.run(one))
        assert first == second

    with_host(echo_spec(log=echo_log, step_s=0.05), test)
    assert call_counts(echo_log) == {0: 1}


def test_closing_hands_unfinished_batches_back() -> None:
    async def test() -> None:
        host = Host(echo_spec(lengths=1000, step_s=0.01), HostSettings(HEALTH))
        await host.start()
        running = asyncio.create_task(host.run(batch("a", ["x"], max_new_tokens=1000)))
        await until(lambda: host.figures()["running"] == 1)
        pid = host.figures()["pid"]
        await host.close()
        report: Report = await running
        assert report.fault is not None
        assert report.fault.kind is FaultKind.PREEMPTED
        assert not psutil.pid_exists(pid)
        await host.close()

    asyncio.run(test())


def test_what_the_model_prints_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(host: Host) -> None:
        assert (await host.run(batch("a", ["x"]))).fault is None

    with caplog.at_level(logging.INFO, "daskinfer.engine"):
        with_host(ModelSpec("noisy", engine="tests.shell.engines:NoisyEngine"), test)
    assert "a line from the model" in caplog.text
    assert "a line from a C library" in caplog.text


def test_an_engine_that_forgets_a_row_does_not_hang_the_job() -> None:
    async def test(host: Host) -> None:
        report = await host.run(batch("a", ["x", "forget", "y"]))
        assert report.fault is None
        assert {r.id for r in report.results} == {0, 2}

    with_host(ModelSpec("forgetful", engine="tests.shell.engines:ForgetfulEngine"), test)


def test_c57_the_engine_ends_with_its_parent() -> None:
    """Even in the middle of a step, and also what the engine itself has started."""
    script = (
        "import asyncio, sys\n"
        "from daskinfer.config import ModelSpec\n"
        "from daskinfer.host import Host, HostSettings\n"
        "from daskinfer.records import Batch, Request\n"
        "async def main():\n"
        "    host = Host(ModelSpec('x', engine='tests.shell.engines:HelperEngine'), HostSettings())\n"
        "    await host.start()\n"
        "    asyncio.create_task(host.run(Batch('a', (Request(0, 'x'),))))\n"
        "    while not host.figures()['batches']: await asyncio.sleep(0.01)\n"
        "    print(host.figures()['pid'], flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    engine = psutil.Process(int(process.stdout.readline()))
    with_helpers = [engine, *engine.children()]
    assert len(with_helpers) == 3  # the engine, the guard of its process group, and its own helper
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(with_helpers, timeout=10)
    assert not alive


def test_a_death_while_rows_are_taken_in_is_that_batchs_doing() -> None:
    async def test(host: Host) -> None:
        report = await host.run(batch("a", ["x", "die"]))
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ENGINE_DIED
        assert set(report.fault.suspects) == {0, 1}
        assert (await host.run(batch("b", ["x"]))).fault is None

    with_host(ModelSpec("fragile", engine="tests.shell.engines:FragileEngine"), test)


def test_an_output_that_cannot_be_sent_fails_its_row_alone() -> None:
    async def test(host: Host) -> None:
        report = await host.run(batch("a", ["x", "lock", "tensor", "y"]))
        assert report.fault is None
        failed = {r.id: r for r in report.results if not r.ok}
        assert set(failed) == {1, 2}
        assert "_thread.lock, which cannot be sent" in failed[1].message  # type: ignore[union-attr]
        assert "numpy" in failed[2].message  # type: ignore[union-attr]
        assert host.restarts == 0

    with_host(ModelSpec("fragile", engine="tests.shell.engines:FragileEngine"), test)


def test_an_engine_whose_helper_keeps_its_output_open_is_killed_all_the_same() -> None:
    async def test() -> None:
        host = Host(ModelSpec("daemon", engine="tests.shell.engines:DaemonEngine"), HostSettings(HEALTH))
        await host.start()
        helper = psutil.Process(int(host.figures()["engine.helper"]))
        running = asyncio.create_task(host.run(batch("a", ["x"])))
        report = await asyncio.wait_for(running, 20)
        assert report.fault is not None
        assert report.fault.kind is FaultKind.ENGINE_DIED
        await asyncio.wait_for(host.close(), 20)
        helper.kill()

    asyncio.run(test())


def test_describe_exit_names_the_signal() -> None:
    assert describe_exit(-9) == "the engine's process was killed by SIGKILL (the kernel does that when memory runs out)"
    assert describe_exit(-11).endswith("SIGSEGV")
    assert describe_exit(-200).endswith("signal 200")
    assert describe_exit(3).endswith("exit code 3")


def test_the_childs_environment_undoes_what_slows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    env = child_environment(3)
    assert env["OMP_NUM_THREADS"] == "3"
    assert int(env["MALLOC_TRIM_THRESHOLD_"]) >= 1 << 30
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert child_environment(1)["TOKENIZERS_PARALLELISM"] == "false"


def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert int(child_environment(2)["GOMP_SPINCOUNT"]) <= 10_000
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not {"GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(child_environment(2))

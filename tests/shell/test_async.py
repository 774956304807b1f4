"""The same methods on an asynchronous Client."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from daskinfer import Driver
from daskinfer.config import HealthPolicy
from daskinfer.errors import ConfigError, JobCancelledError, NotRunningError
from daskinfer.testing import echo_spec

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1, lease_grace_s=5)


def run_with(cluster: LocalCluster, test: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """Run a coroutine with a driver on an asynchronous client, and check that its loop is never blocked."""

    async def main() -> None:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            pulse = asyncio.create_task(beat())
            async with Driver(echo_spec(prefix="async ", **options), cluster=client, health=QUICK) as driver:
                await test(driver)
            pulse.cancel()
            assert beats > 0
            assert client.status == "running"

    asyncio.run(main())


def test_methods_are_awaitable_and_stream_is_an_asynchronous_iterator(cluster: LocalCluster, tmp_path: Path) -> None:
    async def test(driver: Any) -> None:
        assert driver.asynchronous
        assert len(await driver.wait_until_ready(30)) == 2
        assert [r.output for r in await driver.generate(["a", "b"])] == ["async a>", "async b>"]
        assert [r.output async for r in driver.stream(["c", "d"])] == ["async c>", "async d>"]
        async for result in driver.stream(f"{i}" for i in range(100_000)):
            if result.id == 3:
                break
        report = await driver.run([{"text": "e"}], tmp_path / "out.jsonl", columns="text")
        assert report.completed == 1
        both = await asyncio.gather(driver.generate(["f"] * 50), driver.generate(["g"] * 50))
        assert [len(results) for results in both] == [50, 50]

    run_with(cluster, test)


def test_jobs_and_tasks_are_awaitable(cluster: LocalCluster) -> None:
    async def test(driver: Any) -> None:
        job = await driver.submit([f"{i}" for i in range(20)])
        assert [r.id async for r in job] == list(range(20))
        assert len(await job.result(30)) == 20
        assert job.status().state == "done"
        slow = await driver.submit(f"{i}" for i in range(1_000_000))
        assert await slow.cancel() is True
        with pytest.raises(JobCancelledError):
            await slow.result()
        task = await driver.submit_task({"prompt": "x"})
        assert (await driver.get_result(task, 30))["generated_text"] == "async x>"
        status = await driver.worker_manager.worker_status()
        assert len(status) == 2
        with pytest.raises(ConfigError, match="bare scheduler address"):
            await driver.scale(3)

    run_with(cluster, test)


def test_c59_the_plain_with_statement_on_an_asynchronous_client_says_what_to_write(cluster: LocalCluster) -> None:
    async def main() -> None:
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            driver: Any = Driver(echo_spec(), cluster=client, health=QUICK)
            with pytest.raises(ConfigError, match="async with"), driver:
                pass
            starting: Any = driver.start()
            assert inspect.iscoroutine(starting)
            assert await starting is driver
            await driver.stop()
            await driver.stop()
            with pytest.raises(NotRunningError):
                await driver.submit_task({"prompt": "x"})

    asyncio.run(main())

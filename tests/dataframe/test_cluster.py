"""Frames on a cluster: one load per worker, drivers' models, placement, cancelling, workers that die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.delayed import delayed
from distributed import Client, LocalCluster, wait

from daskinfer import Driver, SamplingParams
from daskinfer.config import HealthPolicy
from daskinfer.dataframe import progress, release
from daskinfer.dataframe.engines import Engines
from daskinfer.errors import ConfigError, ModelLoadError, NotRunningError
from daskinfer.testing import call_counts, echo_spec, loads, read_log, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:The inplace keyword")]


def forty(rows: int = 400) -> tuple[pd.DataFrame, Any]:
    """A pandas frame with labels that repeat and ids with leading zeros; the same in 40 partitions, 3 of them empty."""
    text = pd.array([f"t{i}" if i % 7 else None for i in range(rows)], dtype="string[pyarrow]")
    ids = pd.array([f"{i:06d}" for i in range(rows)], dtype="string[pyarrow]")
    frame = pd.DataFrame({"id": ids, "text": text}, index=[i // 3 for i in range(rows)])
    parts = [frame.iloc[at] for at in np.array_split(np.arange(rows), 37)]
    for at in (1, 17, 39):
        parts.insert(at, frame.iloc[:0])
    return frame, dd.from_delayed([delayed(part) for part in parts], meta=frame.iloc[:0])


def test_forty_partitions_equal_pandas_row_for_row(client: Client, echo_log: Path, tmp_path: Path) -> None:
    frame, ddf = forty()
    assert ddf.npartitions == 40
    spec = echo_spec(log=echo_log)
    made = ddf.infer.generate("Say {text}", model=spec, details=True)
    wanted = frame.infer.generate("Say {text}", model=echo_spec(isolation="thread"), details=True)
    got = made.compute()
    pd.testing.assert_frame_equal(got, wanted)
    assert got.dtypes.equals(made.dtypes)
    assert got["id"].tolist()[:2] == ["000000", "000001"]

    workers = client.scheduler_info()["workers"]
    assert len(loads(echo_log)) == len(workers) == 2
    assert sum(call_counts(echo_log).values()) == frame["text"].notna().sum()

    made.to_parquet(tmp_path / "out")
    stored = dd.read_parquet(tmp_path / "out")
    assert stored.dtypes.equals(made.dtypes)
    pd.testing.assert_frame_equal(stored.compute(), wanted)

    before = len(read_log(echo_log))
    head = made.head(5)
    assert len(head) == 5
    rows = [row for entry in read_log(echo_log)[before:] if entry.event == "finish" for row in entry.ids]
    assert {row >> 40 for row in rows} == {0}
    assert len(rows) <= 11
    assert len(loads(echo_log)) == 2


def test_persisted_answers_are_not_asked_for_again(client: Client, echo_log: Path) -> None:
    frame, ddf = forty(80)
    made = ddf.infer.generate("{text}", model=echo_spec(log=echo_log)).persist()
    wait(made)
    asked = sum(call_counts(echo_log).values())
    assert asked == made["output"].count().compute() == frame["text"].notna().sum()
    assert made.npartitions == 40
    assert sum(call_counts(echo_log).values()) == asked


def test_a_driver_s_model_is_used_where_it_is(client: Client, echo_log: Path) -> None:
    frame, ddf = forty(80)
    spec = echo_spec(log=echo_log)
    with Driver(spec, cluster=client, params=SamplingParams(max_new_tokens=0)) as driver:
        driver.wait_until_ready()
        wait_until(lambda: len(loads(echo_log)) == 2, message="both loads")
        made = ddf.infer.generate("{text}", model=driver, errors="column")
        eager = frame.infer.generate("{text}", model=driver)
        pd.testing.assert_frame_equal(made.compute(), eager)
        assert set(eager["output"].dropna()) == {""}, "the driver's parameters count"
        assert len(loads(echo_log)) == 2
        with pytest.raises(ConfigError, match="'generate', and this asks for 'embed'"):
            ddf.infer.embed("text", model=driver)


def test_an_engine_that_its_driver_takes_away_is_replaced(client: Client, echo_log: Path) -> None:
    _, ddf = forty(80)
    spec = echo_spec(log=echo_log, step_s=0.05, capacity=1)
    driver = Driver(spec, cluster=client).start()
    driver.wait_until_ready()
    future = client.compute(ddf.infer.generate("{text}", model=spec))
    wait_until(lambda: len(call_counts(echo_log)) > 3, message="the first rows")
    driver.stop()
    assert future.result()["output"].notna().sum() == 68
    assert len(loads(echo_log)) > 2


async def _offer(dask_worker: Any = None, amount: float = 1) -> None:
    await dask_worker.set_resources(special=amount)


def test_placement_keeps_partitions_on_the_driver_s_workers(client: Client, echo_log: Path) -> None:
    frame, ddf = forty(80)
    spec = echo_spec(log=echo_log)
    chosen = next(iter(client.scheduler_info()["workers"]))
    client.run(_offer, workers=[chosen])
    try:
        with Driver(spec, cluster=client, requires={"special": 1}) as driver:
            driver.wait_until_ready()
            made = ddf.infer.generate("{text}", model=driver)
            with driver.placement():
                total = made["output"].count().compute()
            assert total == frame["text"].notna().sum()
            assert len(set(loads(echo_log))) == 1
            made["output"].count().compute()
            assert len(set(loads(echo_log))) == 2, "without it other workers load the model themselves"
    finally:
        client.run(_offer, amount=0, workers=[chosen])
    with pytest.raises(NotRunningError):
        Driver(spec, cluster=client).placement()


def test_a_cancelled_partition_is_aborted_in_the_engine(client: Client, echo_log: Path) -> None:
    frame = pd.DataFrame({"text": ["a"] * 5_000})
    spec = echo_spec(log=echo_log, step_s=0.05, capacity=1)
    future = client.compute(dd.from_pandas(frame, npartitions=1).infer.generate("text", model=spec))

    def told() -> list[tuple[str, str]]:
        """What heartbeats tell of this partition (a test before this one may still have left one of its own)."""
        found = progress(client).query("rows == 5_000")
        return list(zip(found["partition"], found["model"], strict=True))

    assert wait_until(told, 60, "the partition in the heartbeats") == [("output, partition 0", "echo")]
    wait_until(lambda: call_counts(echo_log), 60, "the first row")
    future.cancel()
    wait_until(lambda: any(entry.event == "abort" for entry in read_log(echo_log)), 20, "the abort")
    assert len(call_counts(echo_log)) < 5_000
    wait_until(lambda: progress(client).empty, 20, "the heartbeats to tell of none")


def test_a_load_that_fails_raises_why_and_the_next_one_tries_again(client: Client, echo_log: Path) -> None:
    _, ddf = forty(80)
    spec = echo_spec(log=echo_log, load_fails_on=1)
    one = ddf.partitions[0]
    with pytest.raises(ModelLoadError, match="scripted failure of load 1"):
        one.infer.generate("{text}", model=spec).compute()
    assert one.infer.generate("{text}", model=spec).compute()["output"].notna().any()


def test_engines_are_closed_when_idle_and_on_request(client: Client, echo_log: Path) -> None:
    def closed() -> int:
        return sum(entry.event == "close" for entry in read_log(echo_log))

    frame = pd.DataFrame({"text": ["a"]})
    spec = echo_spec(log=echo_log, isolation="thread")
    with dask.config.set({"daskinfer.dataframe.idle-s": 0}):
        frame.infer.generate("text", model=spec)
        wait_until(lambda: closed() == 1, message="the end of the idle engine")
        dd.from_pandas(frame, npartitions=1).infer.generate("text", model=spec).compute()
        wait_until(lambda: closed() == 2, message="the end of the worker's")
    frame.infer.generate("text", model=spec)
    dd.from_pandas(frame, npartitions=1).infer.generate("text", model=spec).compute()
    assert (len(loads(echo_log)), closed()) == (4, 2)
    release()
    release(client)
    wait_until(lambda: closed() == 4, message="the end of both")


@pytest.mark.slow
@pytest.mark.keeps_children
def test_a_worker_that_dies_costs_its_partitions_again(echo_log: Path, tmp_path: Path) -> None:
    frame, ddf = forty(200)
    spec = echo_spec(log=echo_log, step_s=0.02, capacity=4)
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())
        future = client.compute(ddf.infer.generate("{text}", model=spec))
        wait_until(lambda: len(call_counts(echo_log)) > 20, 60, "the first rows")
        os.kill(pids[0], signal.SIGKILL)
        wanted = frame.infer.generate("{text}", model=echo_spec(isolation="thread"))
        pd.testing.assert_frame_equal(future.result(timeout=60), wanted)
        assert sum(call_counts(echo_log).values()) >= wanted["output"].count()


def test_engines_are_loaded_once_however_many_ask(echo_log: Path) -> None:
    spec = echo_spec(log=echo_log, isolation="thread", load_s=0.1)

    async def asked() -> int:
        engines = Engines("here", 1)
        health = Driver(spec, cluster="tcp://nowhere:1").health
        hosts = await asyncio.gather(*(engines.acquire(spec, health, 60) for _ in range(5)))
        for host in hosts:
            engines.release(spec, host, 60)
        assert len(set(map(id, hosts))) == len(engines) == 1
        assert await engines.acquire(spec, health, 60) is hosts[0]
        await engines.close(idle_only=True)
        assert len(engines) == 1, "it is in use"
        await engines.close()
        return len(engines)

    assert asyncio.run(asked()) == 0
    assert len(loads(echo_log)) == 1


def test_an_engine_that_nobody_waits_for_any_more_is_closed() -> None:
    spec = echo_spec(isolation="thread", load_s=0.2)

    async def left() -> None:
        engines = Engines("here", 1)
        waiting = asyncio.create_task(engines.acquire(spec, HealthPolicy(), 0))
        await asyncio.sleep(0)
        (held,) = engines._held.values()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while engines._held:  # noqa: ASYNC110 - it is a timer that closes it
            await asyncio.sleep(0)
        await asyncio.gather(*engines._closing)
        assert (held.host.state, held.host._channel) == ("closed", None)

    asyncio.run(asyncio.wait_for(left(), 20))

"""A long run in bounded memory; the million rows are in benchmarks/bench_million.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster

from daskinfer.driver import Driver
from daskinfer.records import Event, RowsResolved
from daskinfer.scheduler_plugin import MESSAGES_KEPT, keep_few_messages
from daskinfer.testing import echo_spec

ROWS, MARK = 200_000, 50_000
MOST_GROWTH = 150_000_000


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Complete, in input order across the files; the driver's process, scheduler included, stays small."""
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for row in range(ROWS):
            file.write(json.dumps({"id": f"{row:07}", "text": f"row {row}"}) + "\n")
    me = psutil.Process()
    done, at_mark, peak = 0, 0, 0

    def watch(event: Event) -> None:
        nonlocal done, at_mark, peak
        if isinstance(event, RowsResolved):
            done += event.completed + event.failed
            if done >= MARK:
                rss = me.memory_info().rss
                at_mark = at_mark or rss
                peak = max(peak, rss)

    with Driver(echo_spec(capacity=2048), workers=2) as driver:
        report = driver.run(source, tmp_path / "out", columns="text", keep=["id"], observers=[watch])
    assert (report.completed, report.failed) == (ROWS, 0)
    row = 0
    for file_path in sorted((tmp_path / "out").glob("data-*.parquet")):
        table = pq.read_table(file_path)
        assert table["id"].to_pylist() == [f"{i:07}" for i in range(row, row + len(table))]
        assert table["output"].to_pylist() == [f"<row {i}>" for i in range(row, row + len(table))]
        row += len(table)
    assert row == ROWS
    assert peak - at_mark < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.cluster
def test_sent_batches_are_not_kept_in_the_logs_of_dask() -> None:
    """Dask logs the last 1,000 messages of each comm, which would be as many batches."""
    with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=":0") as cluster, Client(cluster) as client:
        with Driver(echo_spec(capacity=2), cluster=client) as driver:
            assert sum(1 for _ in driver.stream(f"row {row}" for row in range(200))) == 200
        logs = [client.scheduler_comm.recent_message_log]
        logs += [comm.recent_message_log for comm in cluster.scheduler.stream_comms.values()]
        assert [log.maxlen for log in logs] == [MESSAGES_KEPT] * 2


def test_a_comm_without_a_log_is_left_alone() -> None:
    comm = SimpleNamespace(recent_message_log=None)
    keep_few_messages(comm)
    assert comm.recent_message_log is None
    keep_few_messages(None)

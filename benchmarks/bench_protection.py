"""Claim: on a job that nothing disturbs, protection costs at most 2 points of engine idle share and processor time.

    python benchmarks/bench_protection.py [--rows 3200] [--repeats 3]

An engine that computes for a fixed processor time per step runs the same rows twice per repeat, in an order drawn from the
seed: once protected as by default, once with what protects switched off, that is the engine's watchdog, the workers'
heartbeats, the failure detector, and all but the first of the driver's polls. Both run the engine in a child process. Two
figures are added up: the share of the time from the first to the last step that the engine spent outside its steps, though
rows waited, and processor seconds outside the engine's process by those inside. The difference of the sums is the cost.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from _common import Spread, arguments, cpu_s, write_result

from daskinfer import BatchPolicy, Driver, HealthPolicy
from daskinfer.cluster import local_cluster
from daskinfer.engines.base import BatchEngine
from daskinfer.preflight import by_value
from daskinfer.records import EngineStats, Request
from daskinfer.testing import wait_until

NEVER_S = 1e6
UNPROTECTED = HealthPolicy(
    poll_s=NEVER_S, detection_interval_s=NEVER_S, lease_grace_s=NEVER_S, start_timeout_s=NEVER_S, step_timeout_s=NEVER_S
)


class Burner(BatchEngine):
    """Computes for so many seconds of processor time per step, and says when it did."""

    max_batch_rows = 32

    def load(self) -> None:
        import numpy as np

        self.matrix = np.ones((128, 128))
        self.first = self.last = self.busy = 0.0

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        import time

        began = time.monotonic()
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            self.matrix @ self.matrix
        self.last = time.monotonic()
        self.first = self.first or began
        self.busy += self.last - began
        return [str(request.input) for request in requests]

    def stats(self) -> EngineStats:
        from dataclasses import replace

        return replace(super().stats(), extra={"busy_s": self.busy, "span_s": self.last - self.first})


def unwatch(dask_worker: Any) -> None:
    """Stop a worker's heartbeats and its engines' watchdogs."""
    dask_worker.periodic_callbacks["heartbeat"].stop()
    for plugin in dask_worker.plugins.values():
        for task in getattr(getattr(plugin, "host", None), "_tasks", ()):
            task.cancel()


def measured(cluster: Any, rows: int, number: int, *, protected: bool) -> dict[str, float]:
    """Run the rows once and return the two figures; each run has a number, so that no heartbeat is of another's engine."""
    health = HealthPolicy() if protected else UNPROTECTED
    # the same in both: without polls the driver would not learn how large batches should be; two steps each
    batches = BatchPolicy(rows=64)
    options = {"engine": Burner, "batch": batches, "engine_options": {"run": number}, "threads": 1, "health": health}
    with Driver("burner", cluster=cluster, **options) as driver:  # type: ignore[arg-type]
        dispatcher = driver._running  # noqa: SLF001 - its view of the workers is asked for by hand

        def view() -> Any:
            driver._sync(dispatcher.refresh)  # noqa: SLF001
            return driver.workers()[0]

        wait_until(lambda: view().state == "ready" and view().metrics.get("pid"), 60)
        worker = next(iter(driver.client.run(os.getpid).values()))
        engine = int(view().metrics["pid"])
        if not protected:
            driver.client.run(by_value(unwatch))
        outside = cpu_s(worker, os.getpid())
        inside = cpu_s(engine)
        done = sum(1 for _ in driver.stream((f"row {i}" for i in range(rows)), ordered=False))
        outside = cpu_s(worker, os.getpid()) - outside
        inside = cpu_s(engine) - inside
        assert done == rows
        if not protected:
            driver.client.run(by_value(rewatch))
        steps = -(-rows // 32)
        wait_until(lambda: view().metrics["steps"] >= steps, 30, "the last heartbeat")
        figures = view().metrics
    return {
        "idle_share": 1 - figures["engine.busy_s"] / figures["engine.span_s"],
        "cpu_outside_by_inside": outside / inside,
    }


def rewatch(dask_worker: Any) -> None:
    """Start a worker's heartbeats again."""
    dask_worker.periodic_callbacks["heartbeat"].start()


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Run all pairs."""
    random = Random(options.seed)
    runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with local_cluster(1, dashboard_address=":0") as cluster:
        for repeat in range(options.repeats + 1):
            for second, protected in enumerate(random.sample([True, False], 2)):
                found = measured(cluster, options.rows, 2 * repeat + second, protected=protected)
                if repeat:  # the first pair warms up
                    runs[protected].append(found)
    sums = {protected: [sum(run.values()) for run in listed] for protected, listed in runs.items()}
    points = [100 * (with_ - without) for with_, without in zip(sums[True], sums[False], strict=True)]
    return {
        "cost in points": Spread.of(points),
        **{
            f"{name}, {'protected' if protected else 'unprotected'}": Spread.of(run[name] for run in runs[protected])
            for name in ("idle_share", "cpu_outside_by_inside")
            for protected in (True, False)
        },
    }


def main() -> None:
    """Measure, print and write the result."""
    options = arguments(__doc__ or "", repeats=3, rows=3_200).parse_args()
    began = time.monotonic()
    result = compared(options)
    write_result("protection", options, {**result, "seconds": round(time.monotonic() - began, 1)})


if __name__ == "__main__":
    main()

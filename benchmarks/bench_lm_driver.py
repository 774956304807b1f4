"""Claim: through the whole driver the slots of engine "lm" stay 95 % full while rows wait, at a cost of at most 3 + 3 %.

    python benchmarks/bench_lm_driver.py [--rows 400]

A data frame of prompts (token ids) with lengths of their own runs through a driver on a cluster of one worker, into a
folder that a run could resume. The engine itself notes its steps up to the one that begins the last row: which share of its
slots had a row, and which share of the time it spent outside its steps. Processor seconds of driver, scheduler and worker
outside the engine's process are related to those inside.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
from _common import arguments, cpu_s, write_result
from _lm import ragged
from transformers import AutoTokenizer

from daskinfer import Driver
from daskinfer.cluster import local_cluster
from daskinfer.demo import generation_model
from daskinfer.engines.hf.gguf import converted
from daskinfer.engines.lm import LMEngine
from daskinfer.records import EngineStats, Result
from daskinfer.testing import wait_until


class Watched(LMEngine):
    """Notes what its steps were like, up to the one that began the last row."""

    def load(self) -> None:
        super().load()
        self._first = self._busy = 0.0
        self._noted = {"busy_s": 0.0, "span_s": 0.0, "noted_steps": 0, "noted_slots": 0, "noted_row_steps": 0}

    def step(self) -> list[Result]:
        import time

        core = self._core
        assert core is not None
        waited = core.scheduler.waiting
        begun = time.monotonic()
        results = super().step()
        ended = time.monotonic()
        self._first = self._first or begun
        self._busy += ended - begun
        if waited:
            self._noted = {
                "busy_s": self._busy,
                "span_s": ended - self._first,
                "noted_steps": core.counts["steps"],
                "noted_slots": core.counts["steps"] * core.slots,
                "noted_row_steps": core.counts["row_steps"],
            }
        return results

    def stats(self) -> EngineStats:
        from dataclasses import replace

        stats = super().stats()
        return replace(stats, extra={**stats.extra, **self._noted})


def measured(rows: pd.DataFrame, threads: int) -> dict[str, float]:
    """Run the rows and return the figures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(1, dashboard_address=":0") as cluster,
        Driver(
            generation_model(),
            cluster=cluster,
            engine=Watched,
            threads=threads,
            engine_options={"share_prefixes": False},
            params={"ignore_eos": True},
        ) as driver,
    ):
        dispatcher = driver._running  # noqa: SLF001 - its view of the workers is asked for by hand

        def view() -> Any:
            driver._sync(dispatcher.refresh)  # noqa: SLF001
            return driver.workers()[0]

        wait_until(lambda: view().state == "ready" and view().metrics.get("pid"), 120)
        engine = int(view().metrics["pid"])
        others = [next(iter(driver.client.run(os.getpid).values())), os.getpid()]
        outside, inside = cpu_s(*others), cpu_s(engine)
        begun = time.perf_counter()
        report = driver.run(rows, Path(folder) / "out", columns="prompt", row_params={"max_new_tokens": "n"})
        seconds = time.perf_counter() - begun
        outside, inside = cpu_s(*others) - outside, cpu_s(engine) - inside
        if report.completed != len(rows):
            raise RuntimeError(f"{report.completed} of {len(rows)} rows completed")
        wait_until(lambda: view().metrics["completion_tokens"] >= rows["n"].sum(), 30, "the last heartbeat")
        figures = view().metrics
    slots = figures["engine.noted_slots"] / figures["engine.noted_steps"]
    return {
        "seconds": seconds,
        "occupied": figures["engine.noted_row_steps"] / figures["engine.noted_slots"],
        "occupied_while_rows_waited_in_the_engine": figures["full_row_steps"] / (figures["full_steps"] * slots),
        "idle_share": 1 - figures["engine.busy_s"] / figures["engine.span_s"],
        "cpu_outside_by_inside": outside / inside,
        "steps_while_rows_waited": figures["engine.noted_steps"],
        "steps_while_rows_waited_in_the_engine": figures["full_steps"],
        "output_tokens_per_s": float(rows["n"].sum()) / seconds,
    }


def main() -> None:
    """Measure, print and write the result."""
    options = arguments(__doc__ or "", rows=400, threads=2).parse_args()
    pairs = ragged(AutoTokenizer.from_pretrained(converted(Path(generation_model()))), options.rows, options.seed)
    rows = pd.DataFrame({"prompt": [ids for ids, _ in pairs], "n": [n for _, n in pairs]})
    write_result("lm_driver", options, measured(rows, options.threads))


if __name__ == "__main__":
    main()

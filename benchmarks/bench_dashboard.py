"""What the page costs the scheduler, at 100 workers: less than 1 % of a core closed, at most 5 % with one open.

The scheduler is real, with its web server; the workers are figures only, put on the board as often as a driver asks for
them.
Measured is the processor time of the whole process (scheduler, board, page) over some seconds: with nothing done, with the
board fed and no page open, and with one page open, whose messages a client reads and drops. The conditions take turns. The
board alone is measured as well, since on a busy machine the difference of two processor times says little.

    python benchmarks/bench_dashboard.py

Runs on: scheduler.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from random import Random
from typing import Any

from _common import Spread, arguments, write_result
from distributed import Scheduler

from daskinfer.dashboard import preload
from daskinfer.dashboard.serving import show
from daskinfer.metrics import Metrics
from daskinfer.records import BatchReturned, BatchSubmitted, RowsResolved, RunStarted, Timings, Usage
from daskinfer.scheduler_plugin import DaskinferScheduler

READ = """
import sys
from bokeh.client import pull_session
session = pull_session(url=sys.argv[1])
print("open", flush=True)
session._loop_until_closed()
"""
READER = (sys.executable, "-c", READ)
POLL_S = 0.5
KEY = "0123456789"


class Fake:
    """A job that goes on, and its workers."""

    def __init__(self, workers: int, rng: Random) -> None:
        self.rng = rng
        self.metrics = Metrics()
        self.metrics.apply(RunStarted(0.0, 1_000_000))
        self.now = 0.0
        self.figures = [self._worker(n) for n in range(workers)]

    def _worker(self, n: int) -> dict[str, Any]:
        metrics = {
            "name": str(n),
            "state": "ready",
            "capacity": 64,
            "steps": 0,
            "row_steps": 0,
            "full_steps": 0,
            "full_row_steps": 0,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "padded_tokens": 0,
            "restarts": 0,
            "ram_bytes": 2_000_000_000,
            "step_bins": [number for index in range(20, 35) for number in (index, 100 * index)],
        }
        row = {"slots": 8, "capacity": 64, "error": "", "state": "ready", "status": "running", "metrics": metrics}
        return {"address": f"tcp://10.0.0.{n}:40000", **row}

    def told(self) -> dict[str, Any]:
        """Let half a second go by and return what a driver says then."""
        self.now += POLL_S
        for _ in range(20):
            rows, tokens = self.rng.randint(4, 16), self.rng.randint(100, 2_000)
            key = f"k-{self.rng.random()}"
            self.metrics.apply(BatchSubmitted(self.now, key, rows, 0))
            timings = Timings(0.1, self.rng.random(), 1)
            self.metrics.apply(BatchReturned(self.now, key, rows, "w", Usage(tokens, tokens), timings, answered=rows))
            self.metrics.apply(RowsResolved(self.now, rows, 0, Usage(tokens, tokens)))
        for row in self.figures:
            figures = row["metrics"]
            figures |= {"running": self.rng.randint(40, 64), "waiting": self.rng.randint(0, 99)}
            for name in ("steps", "full_steps", "row_steps", "full_row_steps", "prompt_tokens", "completion_tokens"):
                figures[name] += self.rng.randint(1, 50)
        shown = self.metrics.snapshot().to_dict(workers=False)
        job = {"name": "answers", "kind": "run", "snapshot": shown}
        return {"about": {"model": "fake", "engine": "none", "task": "generate"}, "jobs": {"job": job}}


async def busy(
    seconds: float, feed: Fake, plugin: DaskinferScheduler | None, scheduler: Scheduler
) -> tuple[float, float]:
    """Return shares of a core over some seconds: of all but what it takes to make figures up, and of the board alone."""
    began, used = time.monotonic(), time.process_time()
    made_up = shown = 0.0
    while time.monotonic() - began < seconds:
        if plugin is not None:
            start = time.process_time()
            told = feed.told()
            rows = [{**row, "metrics": dict(row["metrics"])} for row in feed.figures]
            made_up += time.process_time() - start
            start = time.process_time()
            show(plugin.board, KEY, told, rows, scheduler)
            shown += time.process_time() - start
        await asyncio.sleep(POLL_S)
    wall = time.monotonic() - began
    return (time.process_time() - used - made_up) / wall, shown / wall


async def measure(options: Any) -> dict[str, list[float]]:
    """Take turns."""
    preload.register()
    rng = Random(options.seed)
    figures: dict[str, list[float]] = {"idle": [], "closed": [], "board": [], "open": []}
    async with Scheduler(dashboard_address=":0", host="127.0.0.1", port=0) as scheduler:
        plugin = DaskinferScheduler()
        scheduler.add_plugin(plugin)
        await plugin.start(scheduler)
        feed = Fake(options.workers, rng)
        address = f"http://127.0.0.1:{scheduler.http_server.port}/daskinfer"
        for _ in range(3):
            show(plugin.board, KEY, feed.told(), feed.figures, scheduler)
        for _ in range(options.repeats):
            figures["idle"].append((await busy(options.seconds, feed, None, scheduler))[0])
            closed, board = await busy(options.seconds, feed, plugin, scheduler)
            figures["closed"].append(closed)
            figures["board"].append(board)
            reader = await asyncio.create_subprocess_exec(*READER, address, stdout=asyncio.subprocess.PIPE)
            assert reader.stdout is not None
            assert (await reader.stdout.readline()).strip() == b"open"
            await asyncio.sleep(2)
            figures["open"].append((await busy(options.seconds, feed, plugin, scheduler))[0])
            with suppress(ProcessLookupError):
                reader.kill()
            await reader.wait()
        await plugin.before_close()
    return figures


def main() -> None:
    """Measure and write."""
    options = arguments("What the page costs the scheduler.", workers=100, seconds=10, repeats=3).parse_args()
    figures = asyncio.run(measure(options))
    idle = Spread.of(figures["idle"]).median
    costs = {name: [value - idle for value in figures[name]] for name in ("closed", "open")}
    write_result(
        "dashboard",
        options,
        {
            "core_share_idle": Spread.of(figures["idle"]),
            "core_share_closed": Spread.of(costs["closed"]),
            "core_share_of_the_board": Spread.of(figures["board"]),
            "core_share_open": Spread.of(costs["open"]),
        },
    )


if __name__ == "__main__":
    main()

"""Records the events of five real runs whose rows take unevenly long, for the tests of the time left.

Not a measurement: it writes ``tests/core/recorded/<name>.json``, which ``tests/core/test_time_left.py`` plays back. Each run
is a driver on a local cluster with two workers and the echo engine; how many steps a row takes is drawn from a seed.

Runs on: client.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from daskinfer import Driver
from daskinfer.cluster import local_cluster
from daskinfer.records import BatchReturned, Event, RowsResolved, RunEnded, RunStarted
from daskinfer.testing import echo_spec

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "core" / "recorded"
STEP_S = 0.02
CAPACITY = 8


def lengths(name: str, rng: Random, rows: int) -> list[int]:
    """Return the steps of each row."""
    match name:
        case "uniform":
            drawn = [rng.randint(1, 64) for _ in range(rows)]
        case "lognormal":
            drawn = [round(rng.lognormvariate(2.5, 1.0)) for _ in range(rows)]
        case "bimodal":
            drawn = [rng.randint(90, 160) if rng.random() < 0.15 else rng.randint(2, 12) for _ in range(rows)]
        case "geometric":
            drawn = [round(rng.expovariate(1 / 20)) for _ in range(rows)]
        case "in_blocks":  # files of unlike kinds, one after the other
            drawn = [rng.randint(5, 15) if row // 60 % 2 else rng.randint(20, 60) for row in range(rows)]
        case _:
            raise ValueError(name)
    return [max(1, min(n, 400)) for n in drawn]


def compact(event: Event) -> list[Any] | None:
    """Return the event as a short list, None for those that do not matter to the time left."""
    at = round(event.at, 3)
    match event:
        case RunStarted():
            return ["started", at, event.total]
        case RowsResolved():
            return ["resolved", at, event.completed, event.usage.prompt_tokens, event.usage.completion_tokens]
        case BatchReturned():
            return ["returned", at, event.rows, round(event.timings.waited_s, 3), round(event.timings.ran_s, 3)]
        case RunEnded():
            return ["ended", at, event.state]
    return None


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with local_cluster(2, dashboard_address=":0") as cluster:
        for name in ("uniform", "lognormal", "bimodal", "geometric", "in_blocks"):
            drawn = lengths(name, Random(f"{options.seed}-{name}"), options.rows)
            spec = echo_spec(capacity=CAPACITY, step_s=STEP_S, lengths=drawn)
            events: list[list[Any]] = []

            def note(event: Event, events: list[list[Any]] = events) -> None:
                if (short := compact(event)) is not None:
                    events.append(short)

            frame = pd.DataFrame({"text": [f"row {row}" for row in range(options.rows)]})
            with Driver(spec, cluster=cluster) as driver, TemporaryDirectory() as folder:
                driver.wait_until_ready()
                driver.run(frame, Path(folder) / "out", columns="text", observers=[note])
            start = events[0][1]
            for event in events:
                event[1] = round(event[1] - start, 3)
            (FOLDER / f"{name}.json").write_text(json.dumps(events, separators=(",", ":")) + "\n")
            print(f"{name}: {len(events)} events, {events[-1][1]:.1f} s")


if __name__ == "__main__":
    main()

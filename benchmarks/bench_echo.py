"""Claim: the echo engine costs under 3 µs a row of one step, so that a run with it measures what is around the engine.

Runs on: anywhere.
"""

from __future__ import annotations

import argparse
import gc
from random import Random
from typing import Any

from _common import Spread, arguments, timed, write_result

from daskinfer.records import Request
from daskinfer.testing import EchoEngine, echo_spec

CASES: dict[str, dict[str, Any]] = {
    "one step per row, capacity 32": {"capacity": 32},
    "one step per row, capacity 1024": {"capacity": 1024},
    "1 to 64 steps per row, capacity 32": {"capacity": 32, "lengths": {"seed": 0, "low": 1, "high": 64}},
}


def measure(options: argparse.Namespace, case: dict[str, Any]) -> dict[str, Spread]:
    """Return microseconds per row and per row and step."""
    random = Random(options.seed)
    rows = [Request(i, " ".join(["word"] * random.randint(3, 8))) for i in range(options.rows)]
    engine = EchoEngine(echo_spec(**case))
    engine.load()

    def run() -> None:
        for start in range(0, len(rows), options.chunk):
            engine.add(rows[start : start + options.chunk])
            while engine.stats().waiting:
                engine.step()
        while engine.stats().running:
            engine.step()

    gc.collect()
    gc.freeze()  # else the collector's walks over the waiting rows are counted as the engine's
    seconds = timed(run, repeats=options.repeats)
    gc.unfreeze()
    row_steps = engine.stats().row_steps / (options.repeats + 1)
    return {
        "us_per_row": Spread.of(1e6 * s / options.rows for s in seconds),
        "us_per_row_step": Spread.of(1e6 * s / row_steps for s in seconds),
    }


def main() -> None:
    """Measure all cases and write the result."""
    options = arguments(str(__doc__).splitlines()[0], rows=50_000, chunk=8_192).parse_args()
    write_result("echo", options, {name: measure(options, case) for name, case in CASES.items()})


if __name__ == "__main__":
    main()

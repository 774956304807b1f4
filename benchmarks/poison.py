"""Rows that kill or hang their engine: each fails alone and says why, and every other row is answered.

    python benchmarks/poison.py [--rows 10000] [--workers 2] [--step-timeout 5] [--kinds segv exit hang]

The rows go through the echo engine into a folder of Parquet files. One row of each kind, at a place drawn from the seed,
does harm whenever it is run: a real segmentation fault, ``os._exit``, a hang of an hour. Nobody lends a hand. The number of
engine restarts is counted from the loads in the engines' own log; suspects are the rows that were inside an engine when it
died and had not been suspected before. The bound for p such rows among n suspects is p · (log2(n) + 1).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from _common import arguments, write_result

KINDS = ("segv", "exit", "hang")
CAUSES = {
    "segv": "SIGSEGV",
    "exit": "exit code 1",
    "hang": "step_timeout_s",
    "sigkill": "SIGKILL",
    "system_exit": "SystemExit",
    "raise:builtins.KeyboardInterrupt": "KeyboardInterrupt",
    "raise:builtins.BaseException": "BaseException",
}
"""What a row's failure must name, by kind of harm."""


class Watch:
    """Counts, from a run's events, the rows that became suspects and those that others did meanwhile."""

    def __init__(self) -> None:
        self.attempts: dict[str, int] = {}
        self.workers: dict[str, str] = {}
        self.suspects = 0
        self.decided: Counter[str] = Counter()
        self._fresh = False

    def __call__(self, event: Any) -> None:
        """Take an event."""
        from daskinfer.records import BatchReturned, BatchSubmitted, RowsRetried

        match event:
            case BatchSubmitted():
                self.attempts[event.key] = event.attempt
            case BatchReturned():
                self._fresh = self.attempts.pop(event.key, 0) == 0
            case RowsRetried():
                self.decided[event.verdict] += event.rows
                if event.verdict == "split" and self._fresh:
                    self.suspects += event.rows


def rows_of(n: int, poison: dict[int, str]) -> list[dict[str, Any]]:
    """Return the rows; those with a kind of harm carry its marker."""
    return [{"id": i, "text": f"row {i} {f'<{poison[i]}>' if i in poison else ''}"} for i in range(n)]


def measured(rows: int, workers: int, step_timeout_s: float, kinds: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Run once and check everything that was promised.

    Raises
    ------
    AssertionError
        What was not kept.
    """
    import pandas as pd

    from daskinfer import Driver, HealthPolicy
    from daskinfer.testing import echo_spec, loads

    poison = dict(zip(Random(seed).sample(range(rows), len(kinds)), kinds, strict=True))
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder) / "log", Path(folder) / "out"
        spec = echo_spec(
            capacity=32,
            lengths={"seed": seed, "low": 1, "high": 8},
            step_s=0.002,
            log=log,
            log_events=["load"],
            faults={f"<{kind}>": kind for kind in kinds},
            faults_dir=Path(folder) / "faults",
        )
        began = time.perf_counter()
        with Driver(spec, workers=workers, health=HealthPolicy(step_timeout_s=step_timeout_s)) as driver:
            report = driver.run(rows_of(rows, poison), out, columns="text", observers=[watch])
        seconds = time.perf_counter() - began
        restarts = len(loads(log)) - workers
        written = pd.concat([pd.read_parquet(file) for file in sorted(out.glob("data-*.parquet"))])
    bad = written[written["error"].notna()]
    failed = dict(zip(bad["id"].tolist(), bad["error"].tolist(), strict=True))
    bound = len(kinds) * (math.log2(max(1, watch.suspects)) + 1)
    assert sorted(written["id"]) == list(range(rows)), "rows are missing, or there twice"
    assert report.completed == rows - len(kinds), f"{report.completed} completed"
    assert set(failed) == set(poison), f"failed {sorted(failed)}, poison {sorted(poison)}"
    for row, kind in poison.items():
        assert CAUSES.get(kind, kind) in failed[row], f"{kind}: {failed[row]}"
    assert restarts <= bound, f"{restarts} restarts, bound {bound:.1f} for {watch.suspects} suspects"
    return {
        "completed": report.completed,
        "failed": {poison[row]: error for row, error in sorted(failed.items())},
        "suspects": watch.suspects,
        "engine_restarts": restarts,
        "bound": round(bound, 1),
        "rows_by_decision": dict(watch.decided),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__ or "", rows=10_000, workers=2, step_timeout=5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help=f"harm, one row each: {', '.join(CAUSES)}")
    options = parser.parse_args()
    result = measured(options.rows, options.workers, options.step_timeout, tuple(options.kinds), options.seed)
    write_result("poison", options, result)


if __name__ == "__main__":
    main()

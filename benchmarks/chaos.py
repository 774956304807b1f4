"""Runs that are disturbed at random moments: no row is lost, doubled or failed, and little is computed twice.

    python benchmarks/chaos.py [--seed 0] [--seeds 20] [--rows 4000] [--workers 2] [--faults 6]

Each seed is a run of its own: the command line, on a scheduler and workers that are processes of their own, which the next
seed gets as this one leaves them, through echo engines whose rows take 1 to 8 steps of 10 ms. The faults and the numbers of
finished rows at which they come are drawn from the seed. As root, where the kernel has network namespaces, every third seed
has its workers behind links that are cut and slowed down too. Compared with a run that nothing disturbs are the rows of the
output, one by one, and the wall time. Rows recomputed are those that an engine finished though one had finished them before;
allowed are, at every moment, those that were in flight, or not yet on disk, when the faults before came.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from _common import ROOT, arguments, machine_line, write_result

sys.path.insert(0, str(ROOT))

from tests.chaos.links import Link, links, missing_for_links
from tests.chaos.processes import Place, ProcessCluster
from tests.chaos.story import KINDS, LINK_KINDS, Outcome, Story, checked, plan


def told(
    seed: int, folder: Path, options: Any, cluster: ProcessCluster, made: Sequence[Link] = (), *, faults: int
) -> Outcome:
    """Run one seed."""
    kinds = (*KINDS, *LINK_KINDS, *LINK_KINDS) if made else KINDS
    story = Story(
        folder,
        options.rows,
        plan(seed, options.rows, faults, kinds),
        workers=options.workers,
        seed=seed,
        links=made,
        tell=lambda text: print(f"  {text}", flush=True),
    )
    return story.run(cluster)


def cluster_in(folder: Path, places: list[Place]) -> ProcessCluster:
    """Return a cluster with a folder of its own."""
    folder.mkdir()
    return ProcessCluster(folder, places)


@dataclass
class Table:
    """What came of the seeds so far."""

    missing: str
    calm: Outcome
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Take a seed's outcome in, and compare its output with that of the undisturbed run."""
        self.rows.append(
            {
                "seed": outcome.seed,
                "faults": dict(sorted(outcome.faults.items())),
                "lost": outcome.lost,
                "duplicated": outcome.duplicated,
                "failed": outcome.failed,
                "recomputed": outcome.recomputed,
                "in_flight": outcome.in_flight,
                "drivers": outcome.drivers,
                "seconds": round(outcome.seconds, 1),
                "seconds_lost": round(outcome.seconds - self.calm.seconds, 1),
            }
        )
        self.injected += outcome.faults
        self.wrong += [f"seed {outcome.seed}: {what}" for what in checked(outcome, self.calm.table)]

    def results(self) -> dict[str, Any]:
        """Return all of it, for the file."""
        sums = ("lost", "duplicated", "failed", "recomputed", "in_flight")
        return {
            "links": self.missing or "yes",
            "undisturbed_seconds": round(self.calm.seconds, 1),
            "faults_injected": dict(sorted(self.injected.items())),
            "totals": {name: sum(row[name] for row in self.rows) for name in sums},
            "wrong": self.wrong,
            "seeds": self.rows,
        }

    def __str__(self) -> str:
        names = ("seed", "lost", "duplicated", "failed", "recomputed", "in_flight", "drivers", "seconds_lost")
        lines = ["  ".join(f"{name:>12}" for name in ("faults", *names))]
        shown = ((sum(row["faults"].values()), *(row[name] for name in names)) for row in self.rows)
        lines += ["  ".join(f"{value:>12}" for value in values) for values in shown]
        counts = (f"{kind:<20}{count:>4}" for kind, count in sorted(self.injected.items()))
        return "\n".join([*lines, "", *counts, *self.wrong])


def main() -> None:
    """Run all seeds, print and write the table; exit with 1 when a promise was not kept."""
    parser = arguments(__doc__ or "", seeds=20, rows=4_000, workers=2, faults=6)
    options = parser.parse_args()
    print(machine_line())
    missing = missing_for_links()
    print(f"without links: needs {missing}" if missing else "with links", flush=True)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = () if missing else stack.enter_context(links(options.workers))
        plain = stack.enter_context(cluster_in(home / "plain", [Place()] * options.workers))
        linked = stack.enter_context(cluster_in(home / "linked", [link.place for link in made])) if made else plain
        told(0, home / "first", options, plain, faults=0)  # so that all have started
        table = Table(missing, told(0, home / "undisturbed", options, plain, faults=0))
        print(f"undisturbed: {table.calm.seconds:.1f} s", flush=True)
        for seed in range(options.seed, options.seed + options.seeds):
            print(f"seed {seed}, {time.strftime('%H:%M:%S')}", flush=True)
            where = (linked, made) if made and seed % 3 == 2 else (plain,)
            try:
                table.add(told(seed, home / f"seed{seed}", options, *where, faults=options.faults))
                print(table.rows[-1], flush=True)
            except AssertionError as error:
                print(f"seed {seed}: {error}", flush=True)
                table.wrong.append(f"seed {seed}: {str(error).splitlines()[0][:200]}")
            with redirect_stdout(StringIO()):  # what is there when somebody stops it counts
                write_result("chaos", options, table.results())
    print(table)
    write_result("chaos", options, table.results())
    sys.exit(bool(table.wrong))


if __name__ == "__main__":
    main()

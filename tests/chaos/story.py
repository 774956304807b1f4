"""A run that is disturbed at seeded moments, and what became of its rows.

Theory of operation. A driver (``daskinfer run --resume``) sends rows through the echo engine on a cluster of real processes.
The engines log every row that they finish, so how far the run is, and what was computed twice, is known without asking
any of the processes that are about to be killed. A plan, drawn from the seed, says at how many finished rows which fault
comes. Workers that end are started again, and so is a driver that was told to stop, as a cluster manager or a person would.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import LocalCluster

from daskinfer.driver import Driver
from tests.chaos.journal import peak
from tests.chaos.links import Link
from tests.chaos.processes import Member, Place, ProcessCluster, kill
from tests.chaos.slowing import Slowed

__all__ = ["KINDS", "LINK_KINDS", "Fault", "Outcome", "Story", "checked", "plan", "undisturbed"]

ENGINE = {"capacity": 8, "lengths": {"seed": 0, "low": 1, "high": 8}}
STEP_S = 0.01
STEP_TIMEOUT_S = 3.0
STUCK_S = 120.0
INTERRUPTED = {signal.SIGTERM: 143, signal.SIGINT: 130}

KINDS = (
    "engine killed",
    "engine stopped",
    "worker killed",
    "worker stopped",
    "nanny killed",
    "driver killed",
    "driver interrupted",
    "scheduler killed",
    "worker preempted",
    "worker added",
    "worker retired",
    "worker slowed",
)
LINK_KINDS = ("link cut", "link cut for long", "link slowed")


@dataclass(frozen=True)
class Fault:
    """What happens, and at how many finished rows."""

    kind: str
    at: int


@dataclass
class Outcome:
    """What became of a run.

    Attributes
    ----------
    faults : Counter
        How many of each kind were injected.
    lost, duplicated, failed : int
        Rows that are missing from the output, that are in it again, and that are in it as failed.
    recomputed : int
        Times that an engine finished a row which one had finished before.
    in_flight : int
        Rows in flight or not yet on disk at the faults, together: as many may be recomputed.
    drivers : int
        Times that the driver was started.
    seconds : float
    table : pyarrow.Table
        The output, in the order of its files.
    """

    seed: int
    faults: Counter[str]
    lost: int
    duplicated: int
    failed: int
    recomputed: int
    in_flight: int
    drivers: int
    seconds: float
    table: pa.Table


def plan(seed: int, rows: int, count: int, kinds: Sequence[str]) -> list[Fault]:
    """Draw faults: every kind at most once more than any other, the instants apart from one another."""
    rng = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += rng.sample(list(kinds), min(len(kinds), count - len(drawn)))
    pieces = [rows * 0.85 * (at + rng.random() * 0.6 + 0.2) / count for at in range(count)]
    return [Fault(kind, int(at)) for kind, at in zip(drawn, pieces, strict=True)]


@dataclass
class Story:
    """One disturbed run.

    Attributes
    ----------
    folder : Path
        For input, output and logs.
    rows, workers, seed : int
    faults : sequence of Fault
        By their instants.
    links : sequence of Link
        Where workers are; those beyond run beside the scheduler.
    tell : callable
        Given a line of text at each fault.
    """

    folder: Path
    rows: int
    faults: Sequence[Fault] = ()
    workers: int = 2
    seed: int = 0
    links: Sequence[Link] = ()
    tell: Callable[[str], object] = lambda _: None

    def run(self, cluster: ProcessCluster | None = None) -> Outcome:
        """Run to the end of all rows.

        Parameters
        ----------
        cluster : ProcessCluster or None
            One that runs, and goes on to run afterwards, with as many workers; None makes one.

        Raises
        ------
        AssertionError
            The run stood still, a process ended in a way that it should not have, or more rows were computed twice than were
            in flight at the faults before.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_input(self.folder / "in.jsonl", self.rows)
        places = [link.place for link in self.links] + [Place()] * (self.workers - len(self.links))
        with nullcontext(cluster) if cluster is not None else ProcessCluster(self.folder, places) as running:
            running.restore(places)
            telling = _Telling(self, running)
            try:
                return telling.told()
            finally:
                telling.close()


@dataclass
class _Telling:
    """The state of a story while it is told."""

    story: Story
    cluster: ProcessCluster
    driver: subprocess.Popen[bytes] | None = None
    drivers: int = 0
    done: set[int] = field(default_factory=set)
    recomputed: int = 0
    in_flight: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    slowed: list[Slowed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.story.seed)
        self._read = self._told = 0
        self._moved = time.monotonic()
        self._later: list[tuple[int, float, Callable[[], None]]] = []
        self._rows = self.story.rows
        self._log = self.story.folder / "echo.jsonl"

    def told(self) -> Outcome:
        began = time.monotonic()
        self._start_driver()
        for fault in self.story.faults:
            self._until(lambda at=fault.at: len(self.done) >= at, f"{fault.at} rows")  # type: ignore[misc]
            self.story.tell(f"{len(self.done):>6} rows, {time.monotonic() - began:5.1f} s: {fault.kind}")
            flying, self._told = peak(self.story.folder / "journal", self._told)
            self._check_recomputed()
            self.in_flight += flying
            getattr(self, f"_{fault.kind.replace(' ', '_')}")()
            self.injected[fault.kind] += 1
        assert self.driver is not None
        self._until(lambda: self.driver is not None and self.driver.poll() == 0, "the end")
        seconds = time.monotonic() - began
        self._look()
        self._check_recomputed()
        return self._outcome(seconds)

    def _check_recomputed(self) -> None:
        """Compare what was computed twice until now with what was in flight at the faults until now."""
        told = f"{self.recomputed} rows recomputed after {dict(self.injected)}, {self.in_flight} were in flight"
        assert self.recomputed <= self.in_flight, told

    def close(self) -> None:
        for slowed in self.slowed:
            slowed.stop()
        for *_, action in self._later:
            with contextlib.suppress(psutil.Error, subprocess.CalledProcessError):
                action()
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

    # ---------------------------------------------------------------- the run

    def _start_driver(self) -> None:
        options = {**ENGINE, "step_s": STEP_S, "log": str(self._log), "log_events": ["finish"]}
        places = [str(self.story.folder / name) for name in ("journal", "in.jsonl", "out")]
        command = ["-m", "tests.chaos.journal", places[0], "run", *places[1:], "--model", "echo", "--engine", "echo"]
        command += ["--engine-options", json.dumps(options), "--column", "text", "--scheduler", self.cluster.address]
        command += ["--step-timeout", str(STEP_TIMEOUT_S), "--resume"]
        self.driver = self.cluster.spawn("driver", command, folder=self.story.folder)
        self.drivers += 1

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait, while ended workers are started again and what was disturbed for a while is healed."""
        self._moved = time.monotonic()
        while not reached():
            self._tick()
            code = None if self.driver is None else self.driver.poll()
            if code:
                raise AssertionError(
                    f"the driver ended with {code} before {what}: {self.cluster.log('driver', folder=self.story.folder)}"
                )
            if code == 0 and not reached():
                raise AssertionError(f"the run ended before {what}: {dict(self.injected)}")
            time.sleep(0.02)

    def _tick(self) -> None:
        if self._look():
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > STUCK_S:
            logs = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self._logs())
            raise AssertionError(f"{len(self.done)} of {self._rows} rows, and no further one in {STUCK_S:g} s\n{logs}")
        due = [item for item in self._later if len(self.done) >= item[0] or time.monotonic() >= item[1]]
        for item in due:
            self._later.remove(item)
            item[2]()
        self.cluster.ensure()

    def _logs(self) -> list[Path]:
        return sorted({*self.story.folder.glob("*.log"), *self.cluster.folder.glob("*.log")})

    def _look(self) -> bool:
        """Read on in the engines' log; tell whether there was a row."""
        if not self._log.exists():
            return False
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        before = len(self.done)
        for line in whole.splitlines():
            entry = json.loads(line)
            for row in entry["ids"] if entry["event"] == "finish" else ():
                self.recomputed += row in self.done
                self.done.add(row)
        return len(self.done) > before

    def _heal_later(self, action: Callable[[], None], rows: int, seconds: float) -> None:
        """Undo something when so many more rows are finished, or the time is over."""
        self._later.append((len(self.done) + rows, time.monotonic() + seconds, action))

    # ---------------------------------------------------------------- whom it meets

    def _some(self, find: Callable[[Member], Any], *, spare: int = 0) -> Any:
        """Return what ``find`` returns for a member drawn by chance, once there is one for which it is true.

        With ``spare``, there must be as many members besides.
        """
        found: list[Any] = []
        if sum(not member.leaving for member in self.cluster.members) <= spare:
            self.cluster.add(Place())

        def look() -> bool:
            members = self.cluster.present()
            found[:] = [it for it in map(find, members) if it] if len(members) > spare else []
            return bool(found)

        self._until(look, "a victim")
        return self._rng.choice(found)

    def _engine(self) -> psutil.Process:
        found: psutil.Process = self._some(self.cluster.engine)
        return found

    # ---------------------------------------------------------------- what happens

    def _engine_killed(self) -> None:
        kill(self._engine())

    def _engine_stopped(self) -> None:
        kill(self._engine(), signal.SIGSTOP)

    def _worker_killed(self) -> None:
        kill(self._some(self.cluster.worker))

    def _worker_stopped(self) -> None:
        worker = self._some(self.cluster.worker)
        kill(worker, signal.SIGSTOP)
        seconds = self._rng.choice((1.0, 3.0, 9.0))
        self._heal_later(lambda: kill(worker, signal.SIGCONT), self._rows // 10, seconds)

    def _nanny_killed(self) -> None:
        self._some(lambda member: member.process).kill()

    def _worker_preempted(self) -> None:
        member = self._some(lambda member: member, spare=1)
        member.away = True
        member.process.terminate()
        self._heal_later(lambda: setattr(member, "away", False), self._rows // 8, 6.0)

    def _worker_added(self) -> None:
        self.cluster.add(Place())

    def _worker_retired(self) -> None:
        member = self._some(self._loaded, spare=1)
        member.leaving = True
        name = f"w{member.number}.{member.starts}"
        code = (
            "from distributed import Client\n"
            f"with Client({self.cluster.address!r}) as client:\n    client.retire_workers(names=[{name!r}])"
        )
        self.cluster.spawn("retire", ["-c", code])

    def _loaded(self, member: Member) -> Member | None:
        return member if self.cluster.engine(member) is not None else None

    def _worker_slowed(self) -> None:
        self.slowed.append(Slowed(self._engine()))
        self._heal_later(self.slowed[-1].stop, self._rows // 5, 10.0)

    def _driver_killed(self) -> None:
        assert self.driver is not None
        self.driver.kill()
        self._driver_ends(-signal.SIGKILL)
        self._start_driver()

    def _driver_interrupted(self) -> None:
        assert self.driver is not None
        number = self._rng.choice((signal.SIGTERM, signal.SIGINT))
        self.driver.send_signal(number)
        self._driver_ends(INTERRUPTED[number], "--resume")
        self._start_driver()

    def _scheduler_killed(self) -> None:
        scheduler = self.cluster.scheduler
        assert scheduler is not None
        scheduler.kill()
        scheduler.wait()
        self._driver_ends(1, "scheduler", "--resume")
        self.cluster.start_scheduler()
        self._start_driver()

    def _driver_ends(self, code: int, *said: str) -> None:
        """Wait for the driver's end, and check how it ended."""
        assert self.driver is not None
        deadline = time.monotonic() + STUCK_S
        while self.driver.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the driver did not end: {self.cluster.log('driver', folder=self.story.folder)}")
            self._look()
            time.sleep(0.02)
        log = self.cluster.log("driver", folder=self.story.folder)
        if self.driver.returncode != code or not all(text in log for text in said):
            raise AssertionError(f"the driver ended with {self.driver.returncode}, not {code} and {said}: {log}")

    def _link_cut(self) -> None:
        self._cut(1.5)

    def _link_cut_for_long(self) -> None:
        self._cut(8.0)

    def _cut(self, seconds: float) -> None:
        link = self._rng.choice(list(self.story.links))
        link.cut()
        self._heal_later(link.heal, self._rows, seconds)

    def _link_slowed(self) -> None:
        link = self._rng.choice(list(self.story.links))
        link.slow()
        self._heal_later(link.heal, self._rows // 5, 5.0)

    # ---------------------------------------------------------------- what came of it

    def _outcome(self, seconds: float) -> Outcome:
        table = _table(self.story.folder / "out")
        there = Counter(table.column("id").to_pylist())
        return Outcome(
            self.story.seed,
            self.injected,
            sum(row not in there for row in range(self._rows)),
            there.total() - len(there),
            table.num_rows - table.column("error").null_count,
            self.recomputed,
            self.in_flight,
            self.drivers,
            seconds,
            table,
        )


def write_input(path: Path, rows: int) -> None:
    """Write the rows."""
    path.write_text("".join(json.dumps({"id": i, "text": f"row {i}"}) + "\n" for i in range(rows)))


def undisturbed(folder: Path, rows: int) -> pa.Table:
    """Return the output of a run in this process, where nothing goes wrong."""
    write_input(folder / "in.jsonl", rows)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Driver("echo", engine="echo", engine_options=ENGINE, isolation="thread", cluster=cluster) as driver,
    ):
        driver.run(folder / "in.jsonl", folder / "out", columns="text")
    return _table(folder / "out")


def _table(out: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(file) for file in sorted(out.glob("data-*.parquet")))


def checked(outcome: Outcome, undisturbed: pa.Table) -> Iterator[str]:
    """Yield what is not as it must be."""
    if outcome.lost or outcome.duplicated:
        yield f"{outcome.lost} rows lost, {outcome.duplicated} duplicated"
    if outcome.failed:
        errors = Counter(outcome.table.column("error").drop_null().to_pylist())
        yield f"{outcome.failed} rows failed: {errors.most_common(3)}"
    if not outcome.table.equals(undisturbed):
        yield "the output is not that of the undisturbed run"

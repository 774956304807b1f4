"""A cluster of real processes that somebody keeps alive: a scheduler, workers with nannies, and who starts them again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
TCP_TIMEOUT_S = 11  # Dask takes no less
HEARTBEAT_TIMEOUT_S = 4

SETTINGS: dict[str, Any] = {
    "distributed": {
        "comm": {"timeouts": {"connect": "5s", "tcp": f"{TCP_TIMEOUT_S}s"}},
        "worker": {"memory": {"target": False, "spill": False, "pause": False, "terminate": False}},
        "admin": {"tick": {"limit": "1h"}},
    },
    "daskinfer": {"health": {"heartbeat-timeout-s": HEARTBEAT_TIMEOUT_S, "poll-s": 0.2}, "retry": {"backoff-s": 0.1}},
}
"""Dask's configuration in all processes: as by default, but a lost connection is noticed in seconds."""


@dataclass
class Place:
    """Where a worker runs.

    Attributes
    ----------
    command : list of str
        What is put before a worker's command.
    scheduler : str
        The scheduler's host, seen from there.
    host : str
        The worker's own. A worker finds it by looking at its way to the scheduler: one that starts while its link is cut
        would call itself 127.0.0.1, and nobody could ever fetch from it.
    """

    command: list[str] = field(default_factory=list)
    scheduler: str = "127.0.0.1"
    host: str = "127.0.0.1"


@dataclass(eq=False)
class Member:
    """One worker that there should be; it is started again when it has ended, as a cluster manager would.

    Attributes
    ----------
    process : subprocess.Popen or None
        The nanny, as long as it is not away.
    """

    number: int
    place: Place
    process: subprocess.Popen[bytes] | None = None
    away: bool = False
    leaving: bool = False
    starts: int = 0


class ProcessCluster:
    """A scheduler and workers, each a process of its own.

    Parameters
    ----------
    folder : Path
        For logs and what the workers write.
    places : sequence of Place
        One worker each.
    """

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self.folder = folder
        self.members = [Member(number, place) for number, place in enumerate(places)]
        self.scheduler: subprocess.Popen[bytes] | None = None
        self._spawned: list[subprocess.Popen[bytes]] = []
        self.port = _free_port()
        self._numbers = len(places)
        config = folder / "dask.yaml"
        config.write_text(json.dumps(SETTINGS))
        self.env = {**os.environ, "DASK_CONFIG": str(config), "PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"}

    @property
    def address(self) -> str:
        """The scheduler's, for a driver on this machine."""
        return f"tcp://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start_scheduler()
        self.ensure()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- starting

    def start_scheduler(self) -> None:
        """Start the scheduler, on the port it had, and wait until it listens."""
        arguments = ["--host", "0.0.0.0", "--port", str(self.port), "--no-dashboard", "--no-show"]
        self.scheduler = self.spawn("scheduler", ["-m", "distributed.cli.dask_scheduler", *arguments])
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.scheduler.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the scheduler did not start: {self.log('scheduler')}")
            time.sleep(0.05)

    def ensure(self) -> None:
        """Start the workers that have ended, unless they are away or left for good."""
        for member in list(self.members):
            ended = member.process is None or member.process.poll() is not None
            if ended and member.leaving:
                self.members.remove(member)
            elif ended and not member.away:
                self._start(member)

    def restore(self, places: Sequence[Place]) -> None:
        """Have one worker at each place, as at the beginning; those that were added last go."""
        for member in self.members:
            member.away = False
        kept: list[Member] = []
        for place in places:
            free = (m for m in self.members if m.place == place and not m.leaving and m not in kept)
            kept.append(next(free, None) or self.add(place))
        for member in [m for m in self.members if m not in kept]:
            _end([member.process])
            self.members.remove(member)
        self.ensure()

    def add(self, place: Place) -> Member:
        """Add a worker."""
        member = Member(self._numbers, place)
        self._numbers += 1
        self.members.append(member)
        self._start(member)
        return member

    def _start(self, member: Member) -> None:
        member.starts += 1
        name = f"w{member.number}.{member.starts}"
        options = ["--name", name, "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
        options += ["--host", member.place.host]
        options += ["--local-directory", str(self.folder / "local"), "--nworkers", "1"]
        where = f"tcp://{member.place.scheduler}:{self.port}"
        member.process = self.spawn(
            f"worker{member.number}", ["-m", "distributed.cli.dask_worker", where, *options], member.place.command
        )

    def spawn(
        self, log: str, arguments: list[str], before: Sequence[str] = (), folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start Python with arguments; what it says is appended to a log."""
        with ((folder or self.folder) / f"{log}.log").open("ab") as file:
            process = subprocess.Popen(
                [*before, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )
        self._spawned = [*(p for p in self._spawned if p.poll() is None), process]
        return process

    def log(self, name: str, most: int = 3_000, folder: Path | None = None) -> str:
        """Return the end of a log."""
        path = (folder or self.folder) / f"{name}.log"
        return path.read_text(errors="replace")[-most:] if path.exists() else ""

    # ---------------------------------------------------------------- looking

    def present(self) -> list[Member]:
        """Return the members whose nanny runs and that are to stay."""
        return [
            m for m in self.members if m.process is not None and m.process.poll() is None and not (m.away or m.leaving)
        ]

    def worker(self, member: Member) -> psutil.Process | None:
        """Return the worker's process, below its nanny."""
        return _child(member.process, "multiprocessing.spawn")

    def engine(self, member: Member) -> psutil.Process | None:
        """Return the engine's process, below the worker."""
        return _child(self.worker(member), "daskinfer.host.child")

    # ---------------------------------------------------------------- ending

    def close(self) -> None:
        """End everything that was started here, and what that started."""
        _end(self._spawned)
        self._spawned = []
        self.members, self.scheduler = [], None


def _end(processes: Sequence[subprocess.Popen[bytes] | None]) -> None:
    """Kill processes, and those that they started."""
    family: list[psutil.Process] = []
    for process in filter(None, processes):
        if process.poll() is None:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                family += [*parent.children(recursive=True), parent]
    for relative in family:
        kill(relative)
    psutil.wait_procs(family, timeout=10)
    for process in filter(None, processes):
        process.wait(10)


def _child(parent: Any, command: str) -> psutil.Process | None:
    """Return the child that runs a module; of an engine's two processes the one that is not the guard."""
    if parent is None:
        return None
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent.pid).children():
            with contextlib.suppress(psutil.Error):
                if any(command in argument for argument in child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    return child
    return None


def kill(process: psutil.Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))

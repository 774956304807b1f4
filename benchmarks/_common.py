"""What every benchmark needs: how it was run and on what, spreads instead of single figures, and memory over time.

A benchmark is a script that tests one claim, ``benchmarks/bench_<claim>.py``::

    from _common import Spread, arguments, timed, write_result

    def main() -> None:
        options = arguments("How long sorting takes.", rows=100_000).parse_args()
        rows = list(range(options.rows))
        Random(options.seed).shuffle(rows)
        seconds = timed(lambda: sorted(rows), repeats=options.repeats)
        write_result("sorting", options, {"seconds": Spread.of(seconds)})

Runs on: anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("daskinfer", "dask", "distributed", "torch", "transformers", "numpy", "pandas", "pyarrow", "vllm", "ray")


def arguments(description: str, *, seed: int = 0, repeats: int = 5, **sizes: int) -> argparse.ArgumentParser:
    """Return a parser with ``--seed``, ``--repeats``, ``--results`` and one whole-number option per size given.

    Parameters
    ----------
    description : str
        The claim.
    seed, repeats : int
        Defaults.
    **sizes : int
        Further options and their defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=seed, help="of every random choice")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed runs, after one that is not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help="size")
    return parser


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several measurements."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise at least one value."""
        listed = sorted(values)
        return cls(statistics.median(listed), listed[0], listed[-1], len(listed))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g}, {self.n} runs)"


def timed(function: Callable[[], object], *, repeats: int, warmups: int = 1) -> list[float]:
    """Return the wall seconds of each of ``repeats`` calls, made after ``warmups`` calls that are not timed."""
    for _ in range(warmups):
        function()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return seconds


# ---------------------------------------------------------------- where it ran


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, accelerators, system, Python and how busy the machine is now."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _lines("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": round(psutil.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the installed ones of :data:`PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit the working tree stands on, marked ``+`` when the package has been changed since."""
    head = _lines("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if not head:
        return None
    return head[0] + ("+" if _lines("git", "-C", str(ROOT), "status", "--porcelain", "--", "daskinfer") else "")


def machine_line() -> str:
    """Return machine and versions as one line, to stand above a table."""
    here = machine()
    gpus = f", {len(here['gpus'])} x {here['gpus'][0]}" if here["gpus"] else ", no GPU"
    listed = ", ".join(f"{name} {number}" for name, number in versions().items())
    memory = here["memory_bytes"] / 2**30
    return (
        f"{here['cpu']}, {here['cores']} cores, {memory:.0f} GiB{gpus}; Python {here['python']}, {listed}; {commit()}"
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _lines(*command: str) -> list[str]:
    """Return what a command prints, by line; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


# ---------------------------------------------------------------- results


def write_result(name: str, options: argparse.Namespace, results: Mapping[str, Any]) -> Path:
    """Write ``<results>/<name>.json`` and print machine line and results; return the file.

    The file holds the command that made it, the options, machine, versions, commit and the results. It is replaced
    atomically.

    Parameters
    ----------
    name : str
        Of the benchmark.
    options : argparse.Namespace
        From :func:`arguments`.
    results : mapping
        JSON-able; values may be dataclasses, such as :class:`Spread`.
    """
    settings = {key: _public(value) for key, value in vars(options).items() if key != "results"}
    document = {
        "name": name,
        "command": _command(),
        "options": settings,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "results": dict(results),
    }
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    partial = path.with_suffix(".json.part")
    partial.write_text(json.dumps(document, indent=2, default=_plain) + "\n")
    partial.replace(path)
    print(machine_line())
    for key, value in results.items():
        print(f"{key}: {_shown(value)}")
    return path


def _shown(value: Any) -> str:
    return ", ".join(f"{k} {_shown(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _command() -> str:
    """Return the command line, free of this machine's paths."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return shlex.join(["python", str(shown), *(str(_public(Path(a))) if a[:1] == "/" else a for a in sys.argv[1:])])


def _public(value: Any) -> Any:
    """Return a path to data by its name alone."""
    return value.name if isinstance(value, Path) else value


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


# ---------------------------------------------------------------- memory


def cpu_s(*pids: int) -> float:
    """Return the processor seconds of some processes."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(t.user + t.system for t in times))


class RssSampler:
    """Samples the resident memory of a process in a thread, while the ``with`` block runs.

    Parameters
    ----------
    pid : int or None
        None: this process.
    children : bool
        Add the memory of all its descendants. Pages that they share are counted once for each.
    interval_s : float
        Pause between two samples.

    Attributes
    ----------
    samples : list of (float, int)
        Seconds since the block began, and bytes. The process may end earlier; then there are no more samples.
    """

    def __init__(self, pid: int | None = None, *, children: bool = False, interval_s: float = 0.05) -> None:
        self.samples: list[tuple[float, int]] = []
        self._process = psutil.Process(pid)
        self._children, self._interval_s = children, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rss-sampler", daemon=True)
        self._begun = 0.0

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    @property
    def peak_bytes(self) -> int:
        """Largest sample."""
        return max((size for _, size in self.samples), default=0)

    @property
    def growth_bytes(self) -> int:
        """Largest sample less the first one."""
        return self.peak_bytes - self.samples[0][1] if self.samples else 0

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            if not self._sample():
                return

    def _sample(self) -> bool:
        try:
            size = self._process.memory_info().rss
            family = self._process.children(recursive=True) if self._children else []
        except psutil.Error:
            return False
        for child in family:
            try:
                size += child.memory_info().rss
            except psutil.Error:
                continue
        self.samples.append((time.monotonic() - self._begun, size))
        return True

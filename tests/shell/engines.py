"""Engines that misbehave in ways the echo engine does not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from daskinfer.engines.base import BatchEngine
from daskinfer.records import Completed, EngineStats, Request, Result


class NoisyEngine(BatchEngine):
    """Writes to stdout and stderr, as models' code does."""

    def load(self) -> None:
        print("a line from the model")
        subprocess.run(["sh", "-c", "echo a line from a C library >&2"], check=True)
        sys.stdout.write("x" * 3_000_000 + "\n")

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        return [str(request.input) for request in requests]


class ForgetfulEngine(BatchEngine):
    """Never answers some rows."""

    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        return ["" for _ in requests]

    def step(self) -> list[Result]:
        held, self._waiting = self._waiting, {}
        return [Completed(r.id, "") for _, r in held.values() if r.input != "forget"]

    def stats(self) -> EngineStats:
        return EngineStats(waiting=len(self._waiting))


class HelperEngine(BatchEngine):
    """Starts a process of its own and then computes for a long time."""

    def load(self) -> None:
        self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        time.sleep(60)
        return ["" for _ in requests]


class SeedEngine(BatchEngine):
    """Answers with the run's seed."""

    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        return [str(request.params.seed) for request in requests]

"""Engines that misbehave in ways the echo engine does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
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


class FragileEngine(BatchEngine):
    """Dies when it takes a certain row in, and answers others with what cannot be sent."""

    def load(self) -> None:
        pass

    def prepare(self, request: Request) -> Request:
        if request.input == "die":
            os._exit(3)
        return request

    def infer(self, requests: Sequence[Request]) -> Sequence[object]:
        strange = {"lock": threading.Lock(), "tensor": Tensor()}
        return [strange.get(str(request.input), "fine") for request in requests]


class Tensor:
    """Looks like one of torch's."""

    def detach(self) -> None: ...


class DaemonEngine(BatchEngine):
    """Leaves a helper with a session of its own behind, and dies at the first row."""

    def load(self) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        self.helper = subprocess.Popen(command, start_new_session=True)

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    def stats(self) -> EngineStats:
        return EngineStats(extra={"helper": self.helper.pid})


class QuotingEngine(BatchEngine):
    """Dies with its prompt on its lips."""

    def load(self) -> None: ...

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        raise SystemExit(f"cannot answer {requests[0].input}")


class TelltaleEngine(QuotingEngine):
    """Prints its prompt before."""

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        print(requests[0].input)
        sys.stderr.write(f"{requests[0].input}\n")
        return super().infer(requests)


class UnpicklableEngine(BatchEngine):
    """Answers with something that cannot be sent, and that shows the prompt."""

    def load(self) -> None: ...

    def infer(self, requests: Sequence[Request]) -> Sequence[object]:
        class Answer:
            def __init__(self, text: object) -> None:
                self.text, self.lock = text, threading.Lock()

            def __repr__(self) -> str:
                return f"<Answer to {self.text}>"

        return [Answer(request.input) for request in requests]


class TokenEngine(BatchEngine):
    """Answers with the token in its environment."""

    def load(self) -> None: ...

    def infer(self, requests: Sequence[Request]) -> Sequence[str]:
        return [os.environ.get("HF_TOKEN", "") for _ in requests]

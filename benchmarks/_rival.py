"""Rivals of engine "lm" in processes of their own, each stopped while the engine runs: idle ones take time, too.

Runs on: anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from _common import Spread
from _lm import Rows, folder, parts, run

from daskinfer.engines.lm import LMEngine


class Rival:
    """A script that answers rows, warm between runs.

    The script's first line on stdin is ``{"model": folder, "rows": [[token ids, new tokens], …], "threads": n}``. Then each
    line is one run, and the answer to each is a line ``{"seconds": …, "tokens": [[…], …]}`` on stdout.

    Parameters
    ----------
    script : str
        Its name, beside this file.
    asked : dict
        What its first line says.
    python : str
    environment : dict
        Added to this process's.
    """

    def __init__(
        self,
        script: str,
        asked: dict[str, Any],
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        path = Path(__file__).with_name(script)
        self._process = subprocess.Popen(
            [python, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._send(json.dumps(asked))
        self._read()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the rival ended with {self._process.wait()}; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __call__(self) -> dict[str, Any]:
        """Answer the rows; return seconds and tokens."""
        self._signal(signal.SIGCONT)
        self._send("go")
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.Error):  # one that has died says so when it is read from
            own = psutil.Process(self._process.pid)
            for process in (own, *own.children(recursive=True)):
                process.send_signal(number)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)


def against(
    engine: LMEngine,
    rows: Rows,
    threads: int,
    repeats: int,
    script: str,
    **process: Any,
) -> dict[str, Any]:
    """Time engine and rival in turn, after one untimed run of each; return seconds, ratios and equal rows."""
    rival = Rival(script, {"model": folder(engine), "rows": rows, "threads": threads}, **process)
    ours, theirs = [], []
    try:
        texts, found = run(engine, rows), rival()
        for _ in range(repeats):
            begun = time.perf_counter()
            run(engine, rows)
            ours.append(time.perf_counter() - begun)
            theirs.append(rival()["seconds"])
    finally:
        rival.close()
    decoded = [parts(engine).tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found["tokens"]]
    return {
        "seconds": Spread.of(ours),
        "rival_seconds": Spread.of(theirs),
        "times_faster": Spread.of([b / a for a, b in zip(ours, theirs, strict=True)]),
        "rows": len(rows),
        "equal_rows": sum(a == b for a, b in zip(texts, decoded, strict=True)),
    }

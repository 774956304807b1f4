"""Claim: engine "lm" is at least twice as fast as transformers' own continuous batching, both warm.

Each runs in a process of its own, and transformers' is stopped while the engine runs: its thread goes on when idle.
"""

from __future__ import annotations

from _common import arguments, write_result
from _lm import loaded, parts, ragged
from _rival import against


def main() -> None:
    options = arguments("Against transformers' continuous batching.", rows=64, threads=2).parse_args()
    engine = loaded(options.threads, share_prefixes=False)
    rows = ragged(parts(engine).tokenizer, options.rows, options.seed)
    results = against(engine, rows, options.threads, options.repeats, "_continuous_rival.py")
    write_result("lm_continuous", options, results)


if __name__ == "__main__":
    main()

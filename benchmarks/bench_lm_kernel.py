"""Claim: what is compiled makes engine "lm" quicker on the ragged workload than tensor operations do, same tokens."""

from __future__ import annotations

from _common import arguments, write_result
from _lm import loaded, paired, parts, ragged, run


def main() -> None:
    options = arguments("Compiled kernels against tensor operations.", rows=64, threads=2).parse_args()
    engine = loaded(options.threads, share_prefixes=False)
    other = loaded(options.threads, share_prefixes=False, compiled_kernels=False)
    assert engine.stats().extra["compiled_kernels"], "Numba is not installed, or has no threads"
    rows = ragged(parts(engine).tokenizer, options.rows, options.seed)
    results = paired(lambda: run(engine, rows), lambda: run(other, rows), options.repeats)
    write_result("lm_kernel", options, results)


if __name__ == "__main__":
    main()

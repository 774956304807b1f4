"""Embedding quality: all DBpedia passages and test queries, the encoder engine against sentence-transformers.

The largest difference between their vectors, nDCG@10 of both over the test queries, and what float16, int8 and binary
vectors and 8-bit weights cost.

    pip install --no-deps sentence-transformers scikit-learn scipy joblib threadpoolctl narwhals
    python benchmarks/bench_encoder_quality.py --data dbpedia-entity

Runs on: anywhere.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _common import arguments, write_result
from bench_encoder import engine_system, library_system, passages

from daskinfer import demo
from daskinfer.engines.encoder.pooling import at_precision

Array = npt.NDArray[Any]


def queries(folder: Path) -> tuple[list[str], list[str], dict[str, dict[str, int]]]:
    """Ids and texts of the test queries, and the relevance of passages to each."""
    relevant: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, passage, score = line.split("\t")
        relevant.setdefault(query, {})[passage] = int(score)
    rows = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["_id"] in relevant]
    return [row["_id"] for row in rows], [row["text"] for row in rows], relevant


def ndcg(
    found: Array, corpus: Array, ids: Sequence[str], names: Sequence[str], relevant: Mapping[str, Mapping[str, int]]
) -> float:
    """Mean nDCG@10 of a ranking by inner product."""
    gains: list[float] = []
    scores = found @ corpus.T
    for row, query in enumerate(ids):
        best = np.argsort(-scores[row], kind="stable")[:10]
        got = sum((2.0 ** relevant[query].get(names[i], 0) - 1) / math.log2(at + 2) for at, i in enumerate(best))
        ideal = sorted(relevant[query].values(), reverse=True)[:10]
        most = sum((2.0**score - 1) / math.log2(at + 2) for at, score in enumerate(ideal))
        if most > 0:
            gains.append(got / most)
    return sum(gains) / len(gains)


def cosines(exact: Array, found: Array) -> dict[str, float]:
    """Smallest and median cosine of two sets of vectors, row by row."""
    plain = found.astype(np.float64)
    values = (plain * exact).sum(1) / np.linalg.norm(plain, axis=1) / np.linalg.norm(exact, axis=1)
    return {"smallest": float(values.min()), "median": float(np.median(values))}


def main() -> None:
    parser = arguments(__doc__ or "", repeats=1, passages=6_000, threads=2)
    parser.add_argument("--data", type=Path, required=True, help="folder of the passages")
    options = parser.parse_args()
    data = options.data
    model, texts = demo.embedding_model(), passages(data)[: options.passages]
    names = [json.loads(line)["_id"] for line in (data / "corpus.jsonl").read_text().splitlines()][: len(texts)]
    ids, asked, relevant = queries(data)
    vectors: dict[str, tuple[Array, Array]] = {}
    seconds: dict[str, float] = {}
    systems = {
        "engine": engine_system(model, options.threads),
        "sentence-transformers": library_system(model, options.threads, 16),
        "engine int8_weights": engine_system(model, options.threads, int8_weights=True),
    }
    for name, encode in systems.items():
        begun = time.perf_counter()
        vectors[name] = encode(texts), encode(asked)
        seconds[name] = time.perf_counter() - begun
    corpus, found = vectors["engine"]
    theirs = vectors["sentence-transformers"]
    quality = {name: ndcg(q, c, ids, names, relevant) for name, (c, q) in vectors.items()}
    losses = {"int8_weights": cosines(corpus, vectors["engine int8_weights"][0])}
    for precision in ("float16", "int8"):
        reduced = at_precision(corpus, precision)
        losses[precision] = cosines(corpus, reduced)
        plain = reduced.astype(np.float32)
        plain /= np.linalg.norm(plain, axis=1, keepdims=True)
        quality[precision] = ndcg(found, plain, ids, names, relevant)
    signs = [np.unpackbits(at_precision(part, "binary"), axis=1) * 2.0 - 1.0 for part in (found, corpus)]
    quality["binary"] = ndcg(signs[0], signs[1], ids, names, relevant)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(vectors["engine"], theirs, strict=True))
    results = {
        "passages": len(texts),
        "queries": len(ids),
        "largest_difference": largest,
        "ndcg_at_10": quality,
        "cosine_with_float32": losses,
        "seconds": seconds,
    }
    write_result("encoder_quality", options, results)


if __name__ == "__main__":
    main()

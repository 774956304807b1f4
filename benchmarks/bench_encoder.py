"""Embedding speed: the encoder engine against sentence-transformers and fixed batches, on one process and the same threads.

Every round runs every system once over the same texts, in an order that changes from round to round; ratios are medians
over the rounds. Wall time counts; processor time is given too, since it is steadier on a machine that others use. Two
workloads: DBpedia passages as they are, and texts of log-normal lengths (median 24, 90 % below 69
tokens) cut from them. The limit is the time of the model's linear layers alone at the speed of a large float32 matrix
product, measured in the same rounds.

With ``--pool`` also a driver with two workers of one thread each, against sentence-transformers' pool of two processes. The
data are the passages of BEIR's dbpedia-entity: a folder with ``corpus.jsonl`` (and ``queries.jsonl`` and ``qrels/test.tsv``
for ``bench_encoder_quality.py``).

    pip install --no-deps sentence-transformers scikit-learn scipy joblib threadpoolctl narwhals
    pip install ray  # for --ray
    python benchmarks/bench_encoder.py --data dbpedia-entity --pool --ray 300

Runs on: anywhere.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _common import Spread, arguments, write_result
from _encoder_pool import driver_system, pool_systems, ray_data
from transformers import AutoModel, AutoTokenizer

from daskinfer import demo
from daskinfer.config import ModelSpec
from daskinfer.engines.encoder import EncoderEngine
from daskinfer.engines.hf import quiet
from daskinfer.records import Completed, Request, SamplingParams

LONGEST = 256
CUT = SamplingParams(truncate="right")
Vectors = npt.NDArray[np.float32]
System = Callable[[Sequence[str]], Vectors]


def passages(folder: Path) -> list[str]:
    """The DBpedia passages: title and text."""
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    return [f"{row['title']} {row['text']}".strip() for row in rows]


def log_normal(texts: Sequence[str], n: int, random: Random) -> list[str]:
    """Texts of log-normal lengths, of the passages' words (about 1.3 tokens each)."""
    words = " ".join(texts).split()
    sigma = math.log(69 / 24) / 1.2816
    made = []
    for _ in range(n):
        size = max(1, min(round(random.lognormvariate(math.log(24), sigma) / 1.3), 190))
        begin = random.randrange(len(words) - size)
        made.append(" ".join(words[begin : begin + size]))
    return made


# ---------------------------------------------------------------- the systems


def engine_system(model: str, threads: int, **options: Any) -> System:
    """Our engine, driven as its host drives it."""
    engine = EncoderEngine(ModelSpec(model, task="embed", device="cpu", threads=threads, options=options))
    engine.load()
    inner = torch.get_num_threads()

    def encode(texts: Sequence[str]) -> Vectors:
        torch.set_num_threads(inner)
        engine.add([Request(i, text, CUT) for i, text in enumerate(texts)])
        found: dict[int, Any] = {}
        while len(found) < len(texts):
            for result in engine.step():
                assert isinstance(result, Completed), result
                found[result.id] = result.output
        return np.stack([found[i] for i in range(len(texts))])

    return encode


def library_system(model: str, threads: int, batch: int) -> System:
    """sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    with quiet():
        theirs = SentenceTransformer(model, device="cpu")

    def encode(texts: Sequence[str]) -> Vectors:
        torch.set_num_threads(threads)
        found: Vectors = theirs.encode(list(texts), batch_size=batch, show_progress_bar=False)
        return found

    return encode


def fixed_system(model: str, threads: int, batch: int) -> System:
    """What people write first: fixed batches in input order, padded to their longest row."""
    with quiet():
        network = AutoModel.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(texts: Sequence[str]) -> Vectors:
        torch.set_num_threads(threads)
        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), batch):
                part = list(texts[start : start + batch])
                inputs = tokenizer(part, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
                mask = inputs["attention_mask"][:, :, None]
                tokens = network(**inputs).last_hidden_state * mask
                found.append(torch.nn.functional.normalize(tokens.sum(1) / mask.sum(1), dim=1).numpy())
        return np.concatenate(found)

    return encode


def multiply(threads: int) -> tuple[float, float]:
    """The speed of a large float32 matrix product: FLOPs per second on all threads, and per processor second."""
    torch.set_num_threads(threads)
    a = torch.randn(1536, 1536)
    begun, spent = time.perf_counter(), time.process_time()
    for _ in range(12):
        a @ a
    flops = 12 * 2 * 1536**3
    return flops / (time.perf_counter() - begun), flops / (time.process_time() - spent)


def work(model: str, texts: Sequence[str]) -> tuple[int, float]:
    """Tokens of the texts, and the FLOPs of the model's linear layers over them."""
    with quiet():
        network = AutoModel.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = sum(map(len, tokenizer(list(texts), truncation=True, max_length=LONGEST, padding=False)["input_ids"]))
    layers = (m for name, m in network.named_modules() if isinstance(m, torch.nn.Linear) and "pooler" not in name)
    return tokens, 2.0 * tokens * sum(layer.in_features * layer.out_features for layer in layers)


# ---------------------------------------------------------------- rounds


def compare(systems: dict[str, System], texts: Sequence[str], model: str, threads: int, rounds: int) -> dict[str, Any]:
    """Time all systems in turn and put them in relation to the engine."""
    tokens, flops = work(model, texts)
    reference = systems["engine"](texts)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    limits: list[tuple[float, float]] = []
    difference = {name: float(np.abs(system(texts[:40]) - reference[:40]).max()) for name, system in systems.items()}
    names = list(systems)
    for number in range(rounds):
        speeds = [multiply(threads)]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begun, spent = time.perf_counter(), time.process_time()
            systems[name](texts)
            runs[name].append((time.perf_counter() - begun, time.process_time() - spent))
            speeds.append(multiply(threads))
        limits.append(
            (flops / statistics.median(s for s, _ in speeds), flops / statistics.median(s for _, s in speeds))
        )
    return {
        "texts": len(texts),
        "tokens": tokens,
        "linear_flops": flops,
        "largest_difference": difference,
        "wall": _related(limits, runs, 0),
        "processor": _related(limits, runs, 1),
    }


def _related(limits: list[tuple[float, float]], runs: dict[str, list[tuple[float, float]]], which: int) -> Any:
    """Wall or processor seconds, and what they are to the engine's of the same round."""
    ours = [run[which] for run in runs["engine"]]
    return {
        "limit_seconds": Spread.of(limit[which] for limit in limits),
        "share_of_limit": Spread.of(limit[which] / own for limit, own in zip(limits, ours, strict=True)),
        "seconds": {name: Spread.of(run[which] for run in times) for name, times in runs.items()},
        "times_as_long_as_the_engine": {
            name: Spread.of(run[which] / own for run, own in zip(times, ours, strict=True))
            for name, times in runs.items()
        },
    }


def against_ray(model: str, texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Two workers of a driver that is ready, and Ray Data, in turn."""
    import ray

    ours: list[float] = []
    theirs: list[dict[str, float]] = []
    begun = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    start_s = time.perf_counter() - begun
    with driver_system(model) as engine:
        engine(texts[:40])
        for _ in range(rounds):
            begun = time.perf_counter()
            engine(texts)
            ours.append(time.perf_counter() - begun)
            theirs.append(ray_data(model, texts, 32))
    ray.shutdown()
    return {
        "texts": len(texts),
        "ray_init_seconds": start_s,
        "driver_seconds": Spread.of(ours),
        **{f"ray_{name}": Spread.of(run[name] for run in theirs) for name in ("seconds", "seconds_at_steady_rate")},
        "times_faster_at_steady_rate": Spread.of(
            run["seconds_at_steady_rate"] / own for run, own in zip(theirs, ours, strict=True)
        ),
    }


def main() -> None:
    parser = arguments(__doc__ or "", repeats=5, texts=150, threads=2)
    parser.add_argument("--data", type=Path, required=True, help="folder of the passages")
    parser.add_argument("--batches", type=int, nargs="*", default=[16, 32, 64, 128], help="of sentence-transformers")
    parser.add_argument("--workloads", nargs="*", default=["passages", "log_normal"])
    parser.add_argument("--variants", default="{}", help="JSON: more engines, name to options")
    parser.add_argument("--pool", action="store_true", help="also two workers with one thread each")
    parser.add_argument("--name", default="encoder", help="of the result")
    parser.add_argument("--ray", type=int, default=0, metavar="TEXTS", help="also Ray Data, with so many passages")
    options = parser.parse_args()
    model, random = demo.embedding_model(), Random(options.seed)
    everything = passages(options.data)
    workloads = {
        "passages": random.sample(everything, options.texts),
        "log_normal": log_normal(everything, options.texts * 3, random),
    }
    results: dict[str, Any] = {}
    if options.pool:  # first, while nothing else runs here
        with pool_systems(model, [16, 32]) as systems:
            for name in options.workloads:
                found = compare(systems, workloads[name], model, options.threads, options.repeats)
                results[f"{name}, two workers"] = {k: v for k, v in found.items() if k != "processor"}
    if options.ray:
        results["Ray Data"] = against_ray(model, random.sample(everything, options.ray), options.repeats)
    systems = {"engine": engine_system(model, options.threads)}
    for name, given in json.loads(options.variants).items():
        systems[name] = engine_system(model, options.threads, **given)
    for batch in options.batches:
        systems[f"sentence-transformers {batch}"] = library_system(model, options.threads, batch)
    if options.batches:
        systems["fixed batches 32"] = fixed_system(model, options.threads, 32)
    for name in options.workloads:
        results[name] = compare(systems, workloads[name], model, options.threads, options.repeats)
    write_result(options.name, options, results)


if __name__ == "__main__":
    main()

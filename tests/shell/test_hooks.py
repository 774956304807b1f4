"""Per-row parameters, and callables before and after the model."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from daskinfer import Driver
from daskinfer.config import HealthPolicy
from daskinfer.driver.hooks import called, finished, preprocessor, row_params
from daskinfer.errors import ConfigError, FingerprintError, MissingColumnError, UnknownOptionError
from daskinfer.prompts import Problem
from daskinfer.records import Completed, Failed, SamplingParams
from daskinfer.testing import echo_spec

QUICK = HealthPolicy(poll_s=0.1)
COMMON = SamplingParams(max_new_tokens=7)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parameters_of_a_row() -> None:
    by_name = row_params({"max_new_tokens": "n", "temperature": "t"}, ("n", "t"))
    assert by_name is not None
    values: dict[str, list[Any]] = {"n": [3, None, 1.0, -1], "t": [0.5, float("nan"), None, None]}
    assert by_name.of(values, 0, COMMON) == SamplingParams(max_new_tokens=3, temperature=0.5)
    assert by_name.of(values, 1, COMMON) is COMMON
    assert by_name.of(values, 2, COMMON).max_new_tokens == 1
    with pytest.raises(ConfigError, match="max_new_tokens=-1"):
        by_name.of(values, 3, COMMON)
    whole = row_params("p", ("p",))
    assert whole is not None
    values = {"p": [{"top_k": 4, "top_p": None}, '{"top_k": 5}', None, "{", [1], {"topk": 1}]}
    assert [whole.of(values, at, COMMON).top_k for at in range(3)] == [4, 5, 0]
    for at, said in ((3, "not JSON"), (4, "holds list"), (5, "topk")):
        with pytest.raises(ConfigError, match=said):
            whole.of(values, at, COMMON)
    with pytest.raises(MissingColumnError, match="'m'"):
        row_params({"top_k": "m"}, ("n",))
    with pytest.raises(UnknownOptionError, match="topk"):
        row_params({"topk": "n"}, ("n",))
    with pytest.raises(ConfigError, match="row_params=3"):
        row_params(3, ("n",))  # type: ignore[arg-type]
    assert row_params(None, ()) is None


def test_a_callable_that_raises_fails_only_the_rows_at_fault() -> None:
    def double(rows: list[int]) -> list[int]:
        if 3 in rows:
            raise KeyError("three")
        return [2 * row for row in rows]

    made = called(double, [1, 2, 3, 4], "preprocess")
    assert made[:2] + made[3:] == [2, 4, 8]
    assert isinstance(made[2], KeyError)
    assert called(double, [], "preprocess") == []
    with pytest.raises(ConfigError, match="preprocess returned 1 values for 2 rows"):
        called(lambda rows: rows[:1], [1, 2], "preprocess")
    with pytest.raises(ConfigError, match="must be a callable"):
        preprocessor(3, ())  # type: ignore[arg-type]


def test_what_preprocess_returns_is_checked_like_any_prompt() -> None:
    asked = preprocessor(lambda rows: [row["a"] for row in rows], ("a",))
    rendered = asked.render({"a": ["x", None, [1, 2], ValueError("no")]}, 4)
    assert rendered[0] == "x"
    assert rendered[2] == [1, 2]
    assert [p.kind for p in rendered if isinstance(p, Problem)] == ["missing_prompt", "error"]
    assert list(asked.fingerprint()) == ["preprocess"]


def test_what_postprocess_returns_is_checked() -> None:
    results: list[Any] = [Completed(0, "a"), Failed(1, "k", "m"), Completed(2, "b"), Completed(3, "c")]
    made = finished(lambda outputs: [o.upper() if o != "b" else 7 for o in outputs], results, text=True)
    assert made[0] == Completed(0, "A")
    assert made[1] is results[1]
    assert made[2] == Failed(2, "wrong_type", "postprocess returned int, and the output column holds text")
    failing: Callable[[list[Any]], list[Any]] = lambda outputs: [1 / 0 for _ in outputs]  # noqa: E731
    assert [getattr(r, "kind", "") for r in finished(failing, results[:1], text=True)] == ["error"]


@pytest.mark.cluster
def test_c22_parameters_from_a_column_of_a_run(cluster: LocalCluster, tmp_path: Path) -> None:
    rows = [{"text": f"{i}", "n": n} for i, n in enumerate([1, 2, 0, None, 3, -1])]
    with Driver(echo_spec(lengths="params"), cluster=cluster, health=QUICK, params={"max_new_tokens": 9}) as driver:
        report = driver.run(rows, tmp_path / "out.jsonl", columns="text", row_params={"max_new_tokens": "n"})
    assert (report.completed, report.failed) == (5, 1)
    written = lines_of(tmp_path / "out.jsonl")
    assert [row["completion_tokens"] for row in written[:5]] == [1, 2, 0, 9, 3]
    assert (written[2]["output"], written[2]["finish_reason"]) == ("", "length")
    assert written[5]["error"].startswith("invalid_row: max_new_tokens=-1")


@pytest.mark.cluster
def test_c48_callables_may_hold_anything_since_they_stay_here(cluster: LocalCluster, tmp_path: Path) -> None:
    """A large array, a lock, a logger and an open file; the batches stay small."""
    array, lock, logger = np.zeros(50_000_000, dtype=np.uint8), threading.Lock(), logging.getLogger("mine")

    def before(rows: list[dict[str, Any]]) -> list[str]:
        with lock:
            logger.debug("%d rows", len(rows))
            return [f"{row['a']}+{row['b'] + int(array[0])}" for row in rows]

    with (
        (tmp_path / "notes.txt").open("w") as file,
        Client(cluster) as client,
        Driver(echo_spec(prefix="c48 "), cluster=client, health=QUICK) as driver,
    ):

        def after(outputs: list[str]) -> list[str]:
            file.write(f"{len(outputs)}\n")
            return [output.upper() for output in outputs]

        rows = [{"a": "x", "b": i} for i in range(500)]
        out = tmp_path / "out.jsonl"
        assert driver.run(rows, out, preprocess=before, postprocess=after).completed == 500
        assert [row["output"] for row in lines_of(out)] == [f"C48 X+{i}>" for i in range(500)]
        with pytest.raises(FingerprintError, match="preprocess"):
            driver.run(rows, out, preprocess=lambda rows: ["x" for _ in rows], postprocess=after, resume=True)
        with pytest.raises(ConfigError, match="leave prompt, columns and messages out"):
            driver.run(rows, out, preprocess=before, columns="a")
        with pytest.raises(ConfigError, match="token_ids"):
            driver.run(rows, out, columns="a", params={"token_ids": True})

"""Vectors, labels and scores through the driver and the command line, from tiny random models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from distributed import Client, LocalCluster
from transformers import AutoModelForSequenceClassification

from daskinfer import Completed, Driver, Failed
from daskinfer.cli import main
from daskinfer.config import HealthPolicy
from daskinfer.driver.results import Results
from daskinfer.errors import ConfigError, InputError, RowFailedError
from daskinfer.testing import echo_spec
from tests.engines.encoder.models import TEXTS, change_weights, hidden, logits, make, pooled, sentence_folder
from tests.engines.tiny import words

pytestmark = pytest.mark.cluster

QUICK = HealthPolicy(poll_s=0.1)
LONG = words(60)


@pytest.fixture(scope="module")
def here() -> Iterator[LocalCluster]:
    """One worker in this process, where torch is loaded already."""
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        yield cluster


def driver_for(cluster: LocalCluster, folder: Path, **options: Any) -> Driver:
    given = {"max_batch_tokens": 64, **options.pop("engine_options", {})}
    return Driver(
        folder, cluster=cluster, isolation="thread", device="cpu", health=QUICK, engine_options=given, **options
    )


def vectors_of(folder: Path, texts: list[str]) -> Any:
    found = torch.stack([pooled(tokens, "mean") for tokens in hidden(folder, texts)])
    return torch.nn.functional.normalize(found, dim=1).numpy()


# ---------------------------------------------------------------- embed


def test_c24_embed_through_the_driver(here: LocalCluster, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    with driver_for(here, folder) as driver:
        assert (driver.spec.task, driver.spec.engine) == ("embed", "encoder")
        results = driver.embed(TEXTS)
        (alone,) = driver.embed(TEXTS[:1])
        mixed = driver.embed([TEXTS[0], "", LONG, None, 3.5])
        cut = driver.embed([LONG], truncate="right")
        with pytest.raises(ConfigError, match=r"generate\(\) is for task 'generate'.*call embed\(\)"):
            driver.generate(TEXTS)
    array = results.to_numpy()
    assert array.shape == (len(TEXTS), 32)
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, vectors_of(folder, TEXTS), atol=1e-5)
    assert isinstance(alone, Completed)
    np.testing.assert_allclose(alone.output, array[0], atol=1e-6)
    kinds = [result.kind if isinstance(result, Failed) else None for result in mixed]
    assert kinds == [None, "empty_prompt", "too_long", "missing_prompt", "wrong_type"]
    assert mixed.failures[0].message.startswith("the text is empty")
    filled = mixed.to_numpy(failed=float("nan"))
    assert np.isnan(filled[1:]).all()
    np.testing.assert_allclose(filled[0], array[0], atol=1e-6)
    with pytest.raises(RowFailedError, match=r"row 1 failed \(empty_prompt\).*4 of 5 rows failed"):
        mixed.to_numpy()
    assert cut.to_pandas()["truncated_tokens"].tolist() == [62 - 48]


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's, which pandas 3.1 is to take away
@pytest.mark.parametrize(
    ("precision", "kind", "rounding"),
    [("float32", "float", 1e-6), ("float16", "halffloat", 1e-3), ("int8", "int8", 1), ("binary", "uint8", 0)],
)
def test_c24_a_run_writes_fixed_size_lists(
    here: LocalCluster, tmp_path: Path, precision: str, kind: str, rounding: float
) -> None:
    folder = sentence_folder(tmp_path / "model")
    rows = [{"id": i, "text": text} for i, text in enumerate([*TEXTS, "", LONG])]
    out, nothing = tmp_path / "out", tmp_path / "nothing"
    size = 4 if precision == "binary" else 32
    with driver_for(here, folder, engine_options={"precision": precision}) as driver:
        report = driver.run(rows, out)
        expected = driver.embed(TEXTS).to_numpy()
        driver.run([{"text": ""}, {"text": None}], nothing, max_failures=10)  # its part has nulls only
    assert (report.completed, report.failed) == (len(TEXTS), 2)
    (file,) = out.glob("data-*.parquet")
    for path, missing in ((file, 2), (*nothing.glob("data-*.parquet"), 2)):
        column = pq.read_table(path)["output"]
        assert pa.types.is_fixed_size_list(column.type)
        assert (column.type.list_size, str(column.type.value_type)) == (size, kind)
        assert column.null_count == missing
    for frame in (pd.read_parquet(out), dd.read_parquet(str(out)).compute()):
        assert frame["output"].isna().tolist() == [False] * len(TEXTS) + [True, True]
        found = np.stack(frame["output"].iloc[:-2].tolist()).astype(float)
        np.testing.assert_allclose(found, expected.astype(float), rtol=0, atol=rounding)


def test_c24_zero_vectors_stay_zero_and_say_so(here: LocalCluster, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model")
    norm = "encoder.layer.1.output.LayerNorm."
    change_weights(folder, {norm + "weight": torch.zeros(32), norm + "bias": torch.zeros(32)})
    with driver_for(here, folder) as driver:
        driver.run([{"text": text} for text in TEXTS], tmp_path / "out.jsonl")
        assert not driver.embed(TEXTS).to_numpy().any()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["zero_vector"] * len(TEXTS)
    assert lines[0]["output"] == [0.0] * 32


def test_the_same_methods_are_awaitable(here: LocalCluster, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)

    async def embedded() -> Any:
        async with Client(here.scheduler_address, asynchronous=True) as client:
            driver: Any = Driver(folder, cluster=client, isolation="thread", device="cpu", health=QUICK)
            async with driver:
                return await driver.embed(TEXTS)

    np.testing.assert_allclose(asyncio.run(embedded()).to_numpy(), vectors_of(folder, TEXTS), atol=1e-5)


# ---------------------------------------------------------------- classify and score

LABELS = {"0": "neg", 1: "neu", "2": "pos"}


@pytest.mark.parametrize(("top_k", "size"), [(1, None), (2, 2), (0, 3)])
def test_c25_labels_have_one_shape(here: LocalCluster, tmp_path: Path, top_k: int, size: int | None) -> None:
    folder = make(tmp_path / "model", head="text", id2label=LABELS)
    with driver_for(here, folder, engine_options={"top_k": top_k, "max_batch_rows": 2}) as driver:
        assert driver.spec.task == "classify"
        results = driver.classify([*TEXTS[:5], (TEXTS[0], TEXTS[1]), "", LONG])
        driver.run([{"text": text} for text in [*TEXTS[:5], ""]], tmp_path / "out")
    assert [result.ok for result in results] == [True] * 6 + [False, False]
    frame = pd.read_parquet(tmp_path / "out")
    for found in (results.outputs[:5], frame["output"].tolist()[:5]):
        listed = [[output] if size is None else list(output) for output in found]
        assert {len(output) for output in listed} == {size or 1}
        assert {label["label"] for output in listed for label in output} <= {"neg", "neu", "pos"}
        if size == 3:
            assert all(sum(label["score"] for label in output) == pytest.approx(1, abs=1e-5) for output in listed)


def test_c25_several_labels_are_independent(here: LocalCluster, tmp_path: Path) -> None:
    folder = make(tmp_path, head="text", num_labels=4, problem_type="multi_label_classification")
    expected = logits(folder, AutoModelForSequenceClassification, TEXTS[:3]).sigmoid()
    with driver_for(here, folder) as driver:
        results = driver.classify(TEXTS[:3])
    for output, scores in zip(results.outputs, expected.tolist(), strict=True):
        assert sorted(label["score"] for label in output) == pytest.approx(sorted(scores), abs=1e-5)


def test_scores_of_pairs_by_columns_and_directly(here: LocalCluster, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", head="text", id2label={0: "LABEL_0"})
    pairs = list(zip(TEXTS[:6], TEXTS[6:12], strict=True))
    expected = logits(folder, AutoModelForSequenceClassification, pairs).sigmoid()[:, 0].numpy()
    rows = [{"query": first, "passage": second} for first, second in pairs] + [{"query": "w1", "passage": None}]
    with driver_for(here, folder, task="score") as driver:
        scores = driver.score(pairs).to_numpy()
        apart = driver.score([first for first, _ in pairs], [second for _, second in pairs]).to_numpy()
        against = driver.score(TEXTS[0], [second for _, second in pairs])
        assert [result.ok for result in driver.score([("w1", ""), "w1", ("w1", "w2", "w3")])] == [False] * 3
        with pytest.raises(InputError, match="which columns hold the pairs"):
            driver.run(rows, tmp_path / "out")
        driver.run(rows, tmp_path / "out", columns=("query", "passage"))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(apart, scores, atol=1e-6)
    assert len(against) == 6
    frame = pd.read_parquet(tmp_path / "out")
    assert frame["output"].dtype == np.float32
    np.testing.assert_allclose(frame["output"].iloc[:6], expected, atol=1e-5)
    assert frame["error"].iloc[6].startswith("missing_prompt: column 'passage' is missing")


def test_lists_are_ranked(here: LocalCluster, tmp_path: Path) -> None:
    folder = make(tmp_path, head="text", id2label={0: "LABEL_0"})
    scores = logits(folder, AutoModelForSequenceClassification, [(TEXTS[0], text) for text in TEXTS[1:4]])[:, 0]
    with driver_for(here, folder, task="score", engine_options={"rank": True}) as driver:
        (result,) = driver.score([(TEXTS[0], TEXTS[1:4])])
    assert isinstance(result, Completed)
    assert [place["index"] for place in result.output] == scores.argsort(descending=True).tolist()


# ---------------------------------------------------------------- the command line


def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["daskinfer", "run", *arguments, "--quiet"])
    with pytest.raises(SystemExit) as exited:
        main()
    said = capsys.readouterr()
    return int(exited.value.code or 0), said.out + said.err


@pytest.mark.slow
def test_embed_on_the_command_line(
    here: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sentence_folder(tmp_path / "model")
    pd.DataFrame({"id": range(3), "body": [*TEXTS[:2], LONG]}).to_parquet(tmp_path / "in.parquet")
    given = [str(tmp_path / "in.parquet"), str(tmp_path / "out.csv"), "--model", str(folder), "--task", "embed"]
    given += ["--column", "body", "--truncate", "right", "--scheduler", here.scheduler_address]
    options = '{"dims": 16, "pooling": "cls", "normalize": true}'
    code, said = cli(monkeypatch, capsys, *given, "--engine-options", options)
    assert code == 0, said
    cells = pd.read_csv(tmp_path / "out.csv")["output"].map(json.loads).tolist()
    with driver_for(here, folder, engine_options=json.loads(options)) as driver:
        expected = driver.embed([*TEXTS[:2], LONG], truncate="right").to_numpy()
    assert expected.shape == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.array(cells, np.float32), expected, atol=1e-6)


@pytest.mark.slow
def test_pairs_on_the_command_line(
    here: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pd.DataFrame({"a": TEXTS[:3], "b": TEXTS[3:6]}).to_csv(tmp_path / "in.csv", index=False)
    folder = make(tmp_path / "model", head="text", id2label={0: "LABEL_0"})
    given = [str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl"), "--scheduler", here.scheduler_address]
    given += ["--model", str(folder), "--task", "score"]
    code, said = cli(monkeypatch, capsys, *given)
    assert (code, "which columns hold the pairs" in said) == (1, True)
    given += ["--column", "a", "--column", "b"]
    code, said = cli(monkeypatch, capsys, *given, "--labels", "w1, w2")
    assert (code, "labels belongs to task classify" in said) == (2, True)
    code, said = cli(monkeypatch, capsys, *given)
    assert code == 0, said
    expected = logits(
        folder, AutoModelForSequenceClassification, list(zip(TEXTS[:3], TEXTS[3:6], strict=True))
    ).sigmoid()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["output"] for line in lines] == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


def test_own_labels_through_the_driver(here: LocalCluster, tmp_path: Path) -> None:
    folder = make(tmp_path, head="text", id2label={0: "contradiction", 1: "entailment"})
    with driver_for(here, folder, engine_options={"labels": ["w1", "w2"]}) as driver:
        assert {output["label"] for output in driver.classify(TEXTS[:3]).outputs} <= {"w1", "w2"}


# ---------------------------------------------------------------- results


def test_results_without_vectors() -> None:
    results = Results([Completed(0, "a", "stop"), Failed(1, "error", "no")])
    assert results.outputs == ["a", None]
    assert results.to_numpy(failed=0).tolist() == ["a", None]
    frame = results.to_pandas()
    assert frame.index.tolist() == [0, 1]
    assert frame["finish_reason"].tolist()[0] == "stop"
    assert frame["error"].tolist()[1] == "error: no"
    scores = Results([Completed(0, 0.5), Failed(1, "error", "no")])
    assert scores.to_numpy(failed=-1).tolist() == [0.5, -1]
    assert len(Results([]).to_numpy()) == 0
    assert len(Results([]).to_pandas()) == 0


def test_what_stands_for_a_failed_row_fits_its_type() -> None:
    bad = Failed(1, "error", "no")
    for dtype in (np.int8, np.uint8):
        vectors = Results([Completed(0, np.array([1, 2], dtype)), bad])
        for failed in (float("nan"), float("inf"), 0.5, 300):
            with pytest.raises(ConfigError, match=f"type {np.dtype(dtype)} cannot hold it"):
                vectors.to_numpy(failed=failed)
        assert vectors.to_numpy(failed=0).tolist() == [[1, 2], [0, 0]]
        assert vectors.to_numpy(failed=3.0).dtype == dtype
        with pytest.raises(RowFailedError, match=r"1 of 2 rows failed.*to_numpy\(failed=0\)"):
            vectors.to_numpy()
    halves = Results([Completed(0, np.array([1, 2], np.float16)), bad])
    assert np.isnan(halves.to_numpy(failed=float("nan"))[1]).all()
    assert halves.to_numpy(failed=0.1).dtype == np.float16
    with pytest.raises(ConfigError, match="type float16 cannot hold it"):
        halves.to_numpy(failed=1e9)
    for filler in (None, 0.0):
        with pytest.raises(RowFailedError, match=r"no\. all rows failed"):
            Results([bad]).to_numpy(failed=filler)


def test_a_job_gives_results(here: LocalCluster) -> None:
    spec = echo_spec(isolation="thread", output="vector", dims=3)
    with Driver(spec, cluster=here, health=QUICK) as driver:
        found = driver.submit(["a", "b", "a"]).result(60)
    array = found.to_numpy()
    assert array.shape == (3, 3)
    assert np.array_equal(array[0], array[2])

"""The engine as the host sees it: the protocol, lanes, memory, options, and what is known without loading."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class, resolve
from daskinfer.engines.base import Engine
from daskinfer.engines.encoder import EncoderEngine, EncoderOptions
from daskinfer.engines.encoder.recipe import read_recipe
from daskinfer.errors import ConfigError, EngineDiedError, OutOfMemoryError, UnknownOptionError
from daskinfer.records import Completed, Failed, Request, Result, SamplingParams, pack_results, unpack_results
from tests.engines.conformance import CHECKS, Case, drain
from tests.engines.encoder.models import TEXTS, loaded, make, run, sentence_folder, spec_of, vectors
from tests.engines.tiny import words


class Rounded(EncoderEngine):
    """Scores to three digits: batch mates may change what comes after."""

    def step(self) -> list[Result]:
        return [
            replace(result, output=round(result.output, 3)) if isinstance(result, Completed) else result
            for result in super().step()
        ]


CASE = Case(
    "encoder",
    lambda folder: spec_of(
        make(folder, "bert", "text", id2label={0: "LABEL_0"}), "score", max_batch_rows=4, max_batch_lanes=2
    ),
    good=lambda i: Request(i, [words(1 + i % 9, i), words(1 + i % 4, i + 1)], SamplingParams(max_new_tokens=5)),
    bad=lambda i: Request(i, ["", "w1"], SamplingParams(max_new_tokens=5)),
)


@pytest.fixture(scope="module")
def conformant(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return CASE.spec(tmp_path_factory.mktemp("encoder"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(conformant: ModelSpec, check: Callable[[Engine, Case], None]) -> None:
    engine = Rounded(conformant)
    engine.load()
    try:
        check(engine, CASE)
    finally:
        engine.close()


def test_auto_resolves_to_it() -> None:
    for task in ("embed", "classify", "score"):
        spec = ModelSpec("no-such-folder", task=task)
        assert resolve(spec) == "encoder"
        assert engine_class(spec) is EncoderEngine
    assert resolve(ModelSpec("no-such-folder")) != "encoder"


# ---------------------------------------------------------------- lanes


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_give_the_same(tmp_path: Path, lanes: int) -> None:
    folder = make(tmp_path)
    expected = vectors(spec_of(folder, max_batch_lanes=1), TEXTS)
    found = vectors(spec_of(folder, max_batch_lanes=lanes, max_batch_rows=2), TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class Blocked(EncoderEngine):
    """Batches wait inside the model until the test lets them go."""

    def load(self) -> None:
        super().load()
        self.entered, self.release = threading.Semaphore(0), threading.Event()

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        self.entered.release()
        assert self.release.wait(30)
        return super().infer(requests)


def test_batches_run_side_by_side_and_can_be_aborted(tmp_path: Path) -> None:
    engine = Blocked(spec_of(make(tmp_path), max_batch_lanes=2, max_batch_rows=2))
    engine.load()
    try:
        engine.add([Request(i, text) for i, text in enumerate(TEXTS)])
        found: list[Result] = []
        stepping = threading.Thread(target=lambda: found.extend(engine.step()))
        stepping.start()
        assert engine.entered.acquire(timeout=30)
        assert engine.entered.acquire(timeout=30)  # both lanes, before either is done
        deadline = time.monotonic() + 30
        while (running := engine.stats().running) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)  # the last one is noted just after it has begun
        assert running == 4
        assert running + engine.stats().waiting == len(TEXTS)
        inside = [row for batch in engine._running.values() for row in batch.ids]
        engine.abort([inside[0], inside[-1]])
        assert engine.stats().running == 2
        engine.release.set()
        stepping.join(30)
        results = found + drain(engine)
    finally:
        engine.release.set()
        engine.close()
    assert sorted(r.id for r in results) == sorted(set(range(len(TEXTS))) - {inside[0], inside[-1]})


def test_the_last_rows_are_shared_by_the_lanes(tmp_path: Path) -> None:
    engine = loaded(spec_of(make(tmp_path), max_batch_lanes=2, max_batch_tokens=5000, max_batch_rows=500))
    try:
        engine.add([Request(i, words(30, i)) for i in range(20)])
        results = drain(engine)
        stats = engine.stats()
    finally:
        engine.close()
    assert len(results) == 20
    assert stats.steps >= 2


def test_threads_are_given_back(tmp_path: Path) -> None:
    before, threads = torch.get_num_threads(), threading.active_count()
    engine = loaded(replace(spec_of(make(tmp_path)), threads=2))
    try:
        assert engine.stats().extra["lanes"] == 2
        assert torch.get_num_threads() == 1
    finally:
        engine.close()
    assert torch.get_num_threads() == before
    assert threading.active_count() <= threads + 1  # a progress bar's own monitor may stay


# ---------------------------------------------------------------- faults


class Faulty(EncoderEngine):
    """Raises what the test says, for batches it says."""

    fault: Callable[[int], BaseException | None] = staticmethod(lambda rows: None)

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        error = self.fault(len(requests))
        if error is not None:
            raise error
        return super().infer(requests)


def _with_fault(folder: Path, fault: Callable[[int], BaseException | None], **options: Any) -> Faulty:
    engine = Faulty(spec_of(folder, max_batch_tokens=1000, **options))
    engine.load()
    engine.fault = fault
    return engine


def test_batches_that_do_not_fit_are_halved(tmp_path: Path) -> None:
    folder = make(tmp_path)
    expected = vectors(spec_of(folder), TEXTS)
    engine = _with_fault(folder, lambda rows: OutOfMemoryError("too much") if rows > 3 else None)
    try:
        engine.add([Request(i, text) for i, text in enumerate(TEXTS)])
        found = {r.id: r for r in drain(engine)}
        assert engine.stats().extra["out_of_memory"] >= 1
    finally:
        engine.close()
    for i, row in enumerate(expected):
        result = found[i]
        assert isinstance(result, Completed)
        np.testing.assert_allclose(result.output, row, rtol=1e-5, atol=1e-5)


def test_a_row_that_breaks_the_model_fails_alone(tmp_path: Path) -> None:
    class Poisoned(EncoderEngine):
        def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
            if any(request.id == 7 for request in requests):
                raise ValueError("poison")
            return super().infer(requests)

    engine = Poisoned(spec_of(make(tmp_path), max_batch_tokens=1000))
    engine.load()
    try:
        engine.add([Request(i, text) for i, text in enumerate(TEXTS)])
        found = drain(engine)
    finally:
        engine.close()
    assert [r.id for r in found if isinstance(r, Failed)] == [7]
    assert len(found) == len(TEXTS)


def test_a_dead_device_kills_the_engine(tmp_path: Path) -> None:
    engine = _with_fault(make(tmp_path), lambda rows: EngineDiedError("gone"))
    try:
        engine.add([Request(0, TEXTS[0])])
        with pytest.raises(EngineDiedError, match="gone"):
            drain(engine)
    finally:
        engine.close()


def test_a_text_that_breaks_the_tokenizer_fails_alone(tmp_path: Path) -> None:
    engine = loaded(spec_of(make(tmp_path)))
    try:
        assert engine._preparer is not None
        tokeniser = engine._preparer._tokeniser
        whole = tokeniser.texts

        def breaking(texts: Sequence[Any]) -> Any:
            if any(first == "bad" for first, _ in texts):
                raise OverflowError("cannot")
            return whole(texts)

        tokeniser.texts = breaking  # type: ignore[method-assign]
        engine.add([Request(i, text) for i, text in enumerate(["w1", "bad", "w2", "w3"])])
        found = {r.id: r for r in drain(engine)}
    finally:
        engine.close()
    failed = found[1]
    assert isinstance(failed, Failed)
    assert "OverflowError" in failed.message
    assert all(isinstance(found[i], Completed) for i in (0, 2, 3))


# ---------------------------------------------------------------- vectors in one block


def test_vectors_travel_as_one_block(tmp_path: Path) -> None:
    results = run(spec_of(make(tmp_path), max_batch_tokens=1000), TEXTS)
    assert isinstance(results[0], Completed)
    block = results[0].output.base
    assert block is not None
    assert sum(isinstance(r, Completed) and r.output.base is block for r in results) > 1
    packed = pack_results(results)
    assert isinstance(packed[1], np.ndarray)
    assert packed[1].shape == (len(TEXTS), 32)
    assert packed[1].dtype == np.float32
    for before, after in zip(results, unpack_results(packed), strict=True):
        assert isinstance(before, Completed)
        assert isinstance(after, Completed)
        assert np.array_equal(before.output, after.output)


def test_padding_is_counted_and_packing_has_none(tmp_path: Path) -> None:
    folder = make(tmp_path)
    wasted = {}
    for packing in (True, False):
        engine = loaded(spec_of(folder, packing=packing, max_batch_tokens=400))
        engine.add([Request(i, text) for i, text in enumerate(TEXTS)])
        drain(engine)
        wasted[packing] = engine.stats().padded_tokens
        engine.close()
    assert wasted[True] == 0
    assert wasted[False] > 0


# ---------------------------------------------------------------- options, and the type without loading


def test_the_type_is_known_without_torch_models(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    assert EncoderEngine.output_type(spec_of(folder)) == "float32[32]"


def test_options_are_checked() -> None:
    with pytest.raises(UnknownOptionError, match="'poolin'"):
        EncoderOptions.of(ModelSpec("m", task="embed", options={"poolin": "cls"}))
    with pytest.raises(ConfigError, match="pooling belongs to task embed, but this is score"):
        EncoderOptions.of(ModelSpec("m", task="score", options={"pooling": "cls"}))


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "sum"},
        {"precision": "float8"},
        {"dims": 0},
        {"dims": True},
        {"normalize": 1},
        {"prompt": 3},
        {"packing": None},
        {"max_batch_lanes": 0},
        {"prompt": "a", "prompt_name": "b"},
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine_options"):
        EncoderOptions.of(ModelSpec("m", task="embed", options=options))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1},
        {"threshold": "x"},
        {"activation": "relu"},
        {"aggregation": "last"},
        {"labels": []},
        {"labels": "ab"},
        {"labels": ["a", "a"]},
        {"labels": ["a"], "hypothesis": "no place"},
    ],
)
def test_wrong_values_for_labels_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine_options"):
        EncoderOptions.of(ModelSpec("m", task="classify", options=options))


def test_too_many_dims_and_bits(tmp_path: Path) -> None:
    folder = make(tmp_path)
    with pytest.raises(ConfigError, match="dims=33 is more than the 32"):
        EncoderEngine.output_type(spec_of(folder, dims=33))
    with pytest.raises(ConfigError, match="eight dimensions in a byte, but there are 12"):
        EncoderEngine.output_type(spec_of(folder, dims=12, precision="binary"))


def test_a_model_for_another_task_is_refused(tmp_path: Path) -> None:
    engine = EncoderEngine(spec_of(make(tmp_path), "classify"))
    with pytest.raises(ConfigError, match="lacks 2 weights of BertForSequenceClassification"):
        engine.load()
    engine.close()
    with pytest.raises(ConfigError, match="does embed, classify and score"):
        EncoderEngine.output_type(spec_of(tmp_path, "generate"))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        EncoderEngine.output_type(spec_of(tmp_path))


def test_unknown_modules_are_named() -> None:
    files = {
        "config.json": {"hidden_size": 8},
        "modules.json": [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1", "type": "sentence_transformers.models.WeightedLayerPooling"},
        ],
    }
    with pytest.raises(ConfigError, match=r"module 'sentence_transformers\.models\.WeightedLayerPooling'"):
        read_recipe(files.get, "m")
    files["modules.json"] = [{"path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
    with pytest.raises(ConfigError, match="StaticEmbedding"):
        read_recipe(files.get, "m")


def test_a_hub_model_that_cannot_be_reached_is_said() -> None:
    with pytest.raises(ConfigError, match="is no folder here, and the hub does not give it"):
        EncoderEngine.output_type(ModelSpec("nobody/no-such-model", task="embed"))


def test_c25_labels_of_mixed_key_types() -> None:
    recipe = read_recipe({"config.json": {"id2label": {"0": "neg", 2: "pos", 1: "neu"}}}.get, "m")
    assert recipe.labels == ("neg", "neu", "pos")
    assert read_recipe({"config.json": {"label2id": {"b": 1, "a": "0"}}}.get, "m").labels == ("a", "b")
    assert read_recipe({"config.json": {"num_labels": 3}}.get, "m").labels == ("LABEL_0", "LABEL_1", "LABEL_2")

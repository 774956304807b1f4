"""The engine through its protocol: ends, limits, broken rows, options, and what it says of itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.config import ModelSpec
from daskinfer.engines import engine_class
from daskinfer.engines.lm import LMEngine
from daskinfer.engines.lm.settings import Settings, free_memory
from daskinfer.errors import ConfigError, EngineDiedError, UnknownOptionError
from daskinfer.records import Completed, Failed, Request, SamplingParams
from tests.engines import conformance, tiny
from tests.engines.lm.models import drain, greedy, load, outputs, own_model, prompts, text

Folders = Callable[[str], Path]


def ask(engine: LMEngine, *inputs: Any, **params: Any) -> list[Any]:
    """Answer some prompts with the same parameters; return the results in order."""
    rows = [Request(i, given, SamplingParams(**params), raw=True) for i, given in enumerate(inputs)]
    results = drain(engine, [rows])
    return [results[i] for i in range(len(inputs))]


def test_auto_finds_it_by_name() -> None:
    assert engine_class(ModelSpec("any")) is LMEngine
    assert LMEngine.output_type(ModelSpec("any")) == "string"


# ---------------------------------------------------------------- ends


def test_a_stop_string_across_token_borders_ends_the_row(model_folder: Folders) -> None:
    engine, model = load(model_folder("llama")), own_model(model_folder("llama"))
    ids = prompts()[5]
    plain = str(tiny.make_tokenizer().decode(greedy(model, ids, 20)))
    words = plain.split()
    assert len(words) > 4
    stop = f"{words[2]} {words[3][:2]}"  # ends in the middle of a token
    [stopped] = ask(engine, ids, max_new_tokens=20, stop=(stop, "never"))
    assert stopped.output == plain[: plain.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.usage.completion_tokens == 4


def test_lists_of_end_tokens_and_ignoring_them(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama", generation={"eos_token_id": [tiny.EOS, tiny.END]})
    engine, model = load(folder), own_model(folder)
    ids = prompts()[4]
    first = greedy(model, ids, 5)[2]
    [by_id] = ask(engine, ids, max_new_tokens=12, stop_token_ids=(first,))
    assert by_id.finish_reason == "stop"
    assert by_id.output.split() == text(greedy(model, ids, 5)).replace("w", " w").split()[:2]
    [on] = ask(engine, ids, max_new_tokens=12, ignore_eos=True)
    assert (on.finish_reason, on.usage.completion_tokens) == ("length", 12)
    [late] = ask(engine, ids, max_new_tokens=12, min_new_tokens=12)
    assert late.usage.completion_tokens == 12


@pytest.mark.parametrize("engine_name", ["lm", "transformers"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "top_k": 9, "seed": 4, "repetition_penalty": 1.2}])
def test_logprobs_are_those_of_the_model(engine_name: str, params: dict[str, Any], model_folder: Folders) -> None:
    """Several rows at once against one pass of the model over each; rows that did not ask get text."""
    model = own_model(model_folder("llama"))
    engine = engine_class(ModelSpec(str(model_folder("llama")), engine=engine_name))(
        ModelSpec(str(model_folder("llama")), engine=engine_name)
    )
    engine.load()
    asked = SamplingParams(max_new_tokens=9, logprobs=True, token_ids=True, **params)
    rows = [Request(i, ids, asked if i % 2 else SamplingParams(), raw=True) for i, ids in list(prompts().items())[:6]]
    engine.add(rows)
    found = {result.id: result for result in conformance.drain(engine)}
    for row in rows:
        result = found[row.id]
        assert isinstance(result, Completed)
        output = result.output
        if row.id % 2 == 0:
            assert isinstance(output, str)
            continue
        ids, written = output["input_ids"], output["output_ids"]
        scores = model(torch.tensor([ids + written])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = [scores[at, token].item() for at, token in enumerate(written)]
        assert output["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert len(written) == len(output["logprobs"]) > 0
    engine.close()


def test_no_tokens_asked_for_is_an_empty_answer_without_a_step(model_folder: Folders) -> None:
    engine = load(model_folder("llama"))
    [empty] = ask(engine, [9, 10], max_new_tokens=0)
    assert (empty.output, empty.finish_reason) == ("", "length")
    assert engine.stats().steps == 0


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_c02_prompts_that_fill_the_context(kind: str, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, kind, context=32)
    engine, model = load(folder, slot_tokens=8), own_model(folder)
    rows = [[8 + i % 40 for i in range(n)] for n in (30, 31, 32, 33, 5)]
    found = ask(engine, *rows, max_new_tokens=10, ignore_eos=True)
    assert [r.usage.completion_tokens for r in found if r.ok] == [2, 1, 10]
    assert [r.finish_reason for r in found if r.ok] == ["length"] * 3
    assert [(r.kind, "no room to generate" in r.message) for r in found if not r.ok] == [("too_long", True)] * 2
    [later] = ask(engine, rows[4], max_new_tokens=4)
    assert later.output.replace(" ", "") == text(greedy(model, rows[4], 4))
    [cut] = ask(engine, rows[3], max_new_tokens=10, truncate="left", ignore_eos=True)
    assert cut.usage.truncated_tokens == 11


def test_a_row_that_memory_cannot_hold_fails_and_the_others_do_not(model_folder: Folders) -> None:
    engine = load(model_folder("llama"), max_batch_bytes=256 * 40, slot_tokens=8)
    assert engine.stats().extra["kv_tokens"] == 40
    long, short = ask(engine, list(range(8, 48)), [9, 10, 11], max_new_tokens=5)
    assert (long.kind, short.ok) == ("out_of_memory", True)
    assert "max_batch_bytes" in long.message


def test_no_memory_for_a_single_slot_is_said_at_load(model_folder: Folders) -> None:
    with pytest.raises(ConfigError, match="give it at least 16,384"):
        load(model_folder("llama"), max_batch_bytes=100)


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("options", [{}, {"generation": {"eos_token_id": [tiny.EOS, tiny.END]}}])
def test_c11_no_pad_token_is_needed(tmp_path: Path, options: dict[str, Any]) -> None:
    engine = load(tiny.make(tmp_path, "llama", pad=False, **options))
    assert all(r.ok for r in ask(engine, *(tiny.words(1 + i) for i in range(4)), max_new_tokens=3, ignore_eos=True))
    assert engine.stats().row_steps == 4 * engine.stats().steps


def test_c11_an_empty_end_token_is_refused_at_load(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama")
    tiny.edit_json(folder / "tokenizer_config.json", eos_token="")
    with pytest.raises(ConfigError, match="eos_token"):
        load(folder)


def test_c12_one_beginning_token(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "llama", bos=True, template=tiny.TEMPLATE_WITH_BOS)
    engine = load(folder)
    chat = [{"role": "user", "content": "w1 w2"}]
    rows = [
        Request(0, chat, SamplingParams(max_new_tokens=1)),
        Request(1, "w1 w2", SamplingParams(max_new_tokens=1)),
        Request(2, "<s> <|user|> w1 w2 <|end|> <|assistant|>", SamplingParams(max_new_tokens=1), raw=True),
        Request(3, "w1 w2", SamplingParams(max_new_tokens=1), raw=True),
    ]
    found = drain(engine, [rows])
    counts = [r.usage.prompt_tokens for _, r in sorted(found.items()) if isinstance(r, Completed)]
    assert counts == [6, 6, 6, 3]


# ---------------------------------------------------------------- parameters


def test_c15_zero_is_greedy_and_the_models_own_settings_reach_no_row(tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": tiny.EOS}
    folder = tiny.make(tmp_path, "llama", generation=own)
    engine = load(folder)
    ids = prompts()[7]
    expected = text(greedy(own_model(folder), ids, 9))
    rows = [
        Request(0, ids, SamplingParams(max_new_tokens=9)),
        Request(1, ids, SamplingParams(max_new_tokens=9, temperature=0.0, top_p=0.5)),
        *(Request(i, ids, SamplingParams(max_new_tokens=9, temperature=2.0, seed=1)) for i in range(2, 12)),
    ]
    found = outputs(drain(engine, [rows]))
    assert found[0] == found[1] == expected
    assert len(set(found.values())) > 2


def test_c16_an_answer_is_as_long_as_asked(model_folder: Folders) -> None:
    engine = load(model_folder("llama"))
    ids = prompts()[7]
    most, few = (ask(engine, ids, max_new_tokens=n, ignore_eos=True)[0] for n in (40, 3))
    assert (most.usage.completion_tokens, most.finish_reason) == (40, "length")
    assert few.usage.completion_tokens == 3
    assert most.output.startswith(few.output)


def test_c17_a_row_draws_the_same_wherever_it_runs(model_folder: Folders) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=123)
    kept = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    found = []
    for slots, parts in ((64, 1), (5, 2), (1, 4)):
        texts: dict[int, str] = {}
        for part in range(parts):
            engine = load(model_folder("llama"), max_batch_rows=slots)
            texts |= outputs(drain(engine, [[Request(i, [9, 10, 11], params) for i in range(64) if i % parts == part]]))
        found.append(texts)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) > 30
    free = SamplingParams(max_new_tokens=8, temperature=1.0)
    a, b = (outputs(drain(load(model_folder("llama")), [[Request(i, [9], free) for i in range(8)]])) for _ in range(2))
    assert a != b
    assert random.getstate() == kept[0]
    assert np.random.get_state()[1].tolist() == kept[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), kept[2])


def test_c53_engines_of_several_threads_do_not_share_a_tokenizer(model_folder: Folders) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rows = [Request(i, tiny.words(1 + i % 20, i), SamplingParams(max_new_tokens=3)) for i in range(60)]
    engines = [load(model_folder("llama")) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [outputs(results) for results in pool.map(lambda engine: drain(engine, [rows]), engines)]
    assert found[0] == found[1] == found[2] == found[3]


# ---------------------------------------------------------------- broken rows and steps


def poison(engine: LMEngine, token: int) -> None:
    """Make the embedding of a token no number."""
    assert engine._loaded is not None
    with torch.no_grad():
        engine._loaded.model.get_input_embeddings().weight[token] = torch.nan


def test_a_row_that_is_not_a_number_fails_alone_and_leaves_nothing_behind(model_folder: Folders) -> None:
    engine = load(model_folder("gpt_neox"), max_batch_rows=2)  # its output weights are not tied to the embeddings
    good = ask(engine, [9, 10, 11], max_new_tokens=6)[0]
    poison(engine, 40)
    found = ask(engine, [9, 10, 11], [40, 9, 9, 9], [9, 10, 11], [9, 10, 11], max_new_tokens=6)
    assert [r.ok for r in found] == [True, False, True, True]
    assert found[1].kind == "error"
    assert "not numbers" in found[1].message
    assert {r.output for r in found if r.ok} == {good.output}


def test_out_of_memory_in_a_step_makes_it_go_on_with_less(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = load(model_folder("llama"), max_batch_tokens=64), own_model(model_folder("llama"))
    core = engine._core
    assert core is not None
    run = core._run

    def short_of_memory(plan: Any) -> list[int]:
        if plan.ids.shape[1] > 20:
            raise MemoryError("no memory")
        return run(plan)

    monkeypatch.setattr(core, "_run", short_of_memory)
    rows = [Request(i, ids, SamplingParams(max_new_tokens=7)) for i, ids in prompts().items()]
    found = outputs(drain(engine, [rows]))
    assert found == {r.id: text(greedy(model, r.input, 7)) for r in rows}
    assert 2 <= engine.stats().extra["out_of_memory"] <= 4
    assert engine.stats().capacity < 64

    monkeypatch.setattr(core, "_run", lambda plan: (_ for _ in ()).throw(MemoryError("none at all")))
    engine.add(rows)
    with pytest.raises(EngineDiedError, match="no memory for a step of a single token"):
        drain(engine)


def test_after_running_out_of_memory_it_grows_back_and_does_not_run_out_over_and_over(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(model_folder("llama"), max_batch_tokens=64, max_batch_rows=16, share_prefixes=False)
    core = engine._core
    assert core is not None
    run, most, steps = core._run, 30, 0

    def short_of_memory(plan: Any) -> list[int]:
        nonlocal steps
        steps += 1
        if plan.ids.shape[1] > most:
            raise MemoryError("no memory")
        return run(plan)

    monkeypatch.setattr(core, "_run", short_of_memory)
    ids = tiny.words(5)
    rows = [Request(i, ids, SamplingParams(max_new_tokens=3, ignore_eos=True)) for i in range(400)]
    assert all(result.ok for result in drain(engine, [rows]).values())
    ran_out = engine.stats().extra["out_of_memory"]
    assert steps > 100
    assert ran_out <= 8
    most = 1_000
    assert all(result.ok for result in drain(engine, [rows, rows_from(rows, 400), rows_from(rows, 800)]).values())
    assert engine.stats().extra["out_of_memory"] == ran_out
    assert engine.stats().capacity == 16
    assert core.scheduler.budget == 64


@pytest.mark.parametrize("rows", [1, 2])
def test_a_long_prompt_is_read_though_full_steps_never_fit(
    rows: int, model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that memory runs out what was read is lost; so it has to run out ever more seldom."""
    engine = load(model_folder("llama"), max_batch_tokens=4, max_batch_rows=rows)
    core = engine._core
    assert core is not None
    run = core._run

    def short_of_memory(plan: Any) -> list[int]:
        if plan.ids.shape[1] >= 4:
            raise MemoryError("no memory")
        return run(plan)

    monkeypatch.setattr(core, "_run", short_of_memory)
    ids = [5 + i % 20 for i in range(tiny.CONTEXT - 10)]
    requests = [Request(i, ids, SamplingParams(max_new_tokens=2, ignore_eos=True)) for i in range(rows)]
    assert all(result.ok for result in drain(engine, [requests]).values())
    extra = engine.stats().extra
    assert 1 < extra["out_of_memory"] < 12
    assert extra["recomputed_tokens"] > 0


def rows_from(rows: list[Request], first: int) -> list[Request]:
    """Return the rows under other numbers."""
    return [replace(row, id=row.id + first) for row in rows]


def test_out_of_memory_while_a_pool_grows_loses_no_row(model_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = load(model_folder("llama"), slot_tokens=8), own_model(model_folder("llama"))
    core = engine._core
    assert core is not None
    resize, calls = core._cache._resize, []

    def short_of_memory(operation: Any) -> None:
        calls.append(operation)
        if len(calls) == 6:
            raise MemoryError("no memory")
        resize(operation)

    monkeypatch.setattr(core._cache, "_resize", short_of_memory)
    rows = [Request(i, ids, SamplingParams(max_new_tokens=7)) for i, ids in prompts().items()]
    assert outputs(drain(engine, [rows])) == {r.id: text(greedy(model, r.input, 7)) for r in rows}
    assert engine.stats().extra["out_of_memory"] == 1


def test_wrong_rows_fail_at_the_next_step_or_are_forgotten(model_folder: Folders) -> None:
    engine = load(model_folder("llama"))
    engine.add([Request(i, bad, SamplingParams()) for i, bad in enumerate(["", 3.5, [10**6], None])])
    assert engine.stats().waiting == 4
    engine.abort([3])
    results = engine.step()
    assert all(isinstance(r, Failed) for r in results)
    assert sorted(r.id for r in results) == [0, 1, 2]
    assert engine.step() == []


# ---------------------------------------------------------------- what it says of itself


def test_occupancy_and_counts(model_folder: Folders) -> None:
    engine = load(model_folder("llama"), max_batch_rows=4, max_batch_tokens=4096, share_prefixes=False)
    rows = [
        Request(i, ids, SamplingParams(max_new_tokens=2 + i % 9, ignore_eos=True)) for i, ids in prompts(40).items()
    ]
    drain(engine, [rows])
    stats = engine.stats()
    assert stats.occupancy == 1.0
    assert stats.prompt_tokens == sum(len(r.input) for r in rows) == stats.extra["prefill_tokens"]
    assert stats.completion_tokens == sum(r.params.max_new_tokens for r in rows)
    assert stats.extra["decode_tokens"] == stats.completion_tokens - len(rows)
    assert stats.padded_tokens == 0
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_rows": 0}, "max_batch_rows=0"),
        ({"prompt_lookup_num_tokens": 16}, "prompt_lookup_num_tokens=16 must be a whole number from 0 to 15"),
        ({"prompt_lookup_num_tokens": True}, "prompt_lookup_num_tokens=True"),
        ({"max_batch_tokens": "many"}, "max_batch_tokens='many'"),
        ({"slot_tokens": 7}, "slot_tokens=7"),
        ({"int8": 1}, "int8=1"),
        ({"compiled_kernels": "yes"}, "compiled_kernels='yes'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LMEngine(ModelSpec("any", engine="lm", options=options))


def test_an_unknown_option_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownOptionError, match=r"engine 'lm' has no option 'slots'; it has .*max_batch_rows"):
        LMEngine(ModelSpec("any", engine="lm", options={"slots": 3}))


def test_free_memory_heeds_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from daskinfer.engines.lm import settings

    cpu = torch.device("cpu")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 50000\n")
    monkeypatch.setattr(settings, "_CGROUP", tmp_path)
    assert free_memory(cpu) == 650_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu) > 1_000_000
    monkeypatch.setattr(settings, "_CGROUP", tmp_path / "none")
    assert free_memory(cpu) > 1_000_000
    assert Settings(max_batch_bytes=1000).cache_tokens(cpu, 10) == 100


def test_close_before_load_and_twice(model_folder: Folders) -> None:
    engine = LMEngine(ModelSpec(str(model_folder("llama")), engine="lm"))
    engine.close()
    engine.load()
    engine.close()
    engine.close()

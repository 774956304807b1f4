"""The engine writes what ``generate`` writes for each row alone, under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from daskinfer.engines.lm import core, sampling
from daskinfer.engines.lm.lookup import Lookup
from daskinfer.records import Request, Result, SamplingParams
from tests.engines import tiny
from tests.engines.lm import models
from tests.engines.lm.models import SUPPORTED, drain, greedy, load, outputs, own_model, prompts, sampled, text

SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "one-slot": {"max_batch_rows": 1, "max_batch_tokens": 32},
    "pieces": {"max_batch_rows": 3, "max_batch_tokens": 7, "slot_tokens": 8},
    "little-memory": {"slot_tokens": 8, "max_batch_bytes": 2 * 2 * 32 * 4 * 110},
    "no-sharing": {"share_prefixes": False, "max_batch_rows": 5, "max_batch_tokens": 4096},
    "not-guessing": {"prompt_lookup_num_tokens": 0, "max_batch_rows": 2},
    "arrival": {"longest_first": False, "pack_weights": False, "slot_tokens": 16, "max_batch_rows": 8},
    "not-compiled": {"compiled_kernels": False},
    "not-compiled-pieces": {"compiled_kernels": False, "max_batch_rows": 3, "max_batch_tokens": 7, "slot_tokens": 8},
}
Folders = Callable[[str], Path]
PROMPTS = prompts()


def lengths(row: int) -> int:
    return 3 + 2 * row


@pytest.fixture(scope="session")
def expected(model_folder: Folders) -> Callable[[str], dict[int, str]]:
    @cache
    def of(kind: str) -> dict[int, str]:
        model = own_model(model_folder(kind))
        return {row: text(greedy(model, ids, lengths(row))) for row, ids in PROMPTS.items()}

    return of


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", SUPPORTED)
def test_c10_greedy_tokens_are_those_of_generate(
    kind: str, schedule: str, model_folder: Folders, expected: Callable[[str], dict[int, str]]
) -> None:
    engine = load(model_folder(kind), **SCHEDULES[schedule])
    rows = [Request(row, ids, SamplingParams(max_new_tokens=lengths(row))) for row, ids in PROMPTS.items()]
    found = outputs(drain(engine, [rows[:5], [], [], rows[5:11], rows[11:]]))
    assert found == expected(kind)
    extra = engine.stats().extra
    assert engine.stats().padded_tokens == 0
    if schedule == "little-memory":
        assert extra["preemptions"] > 0
    if schedule != "no-sharing":
        assert extra["prefix_tokens"] > 0
    assert extra["kv_allocated_tokens"] <= extra["kv_tokens"]


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("sharing", [True, False])
def test_guesses_save_steps_and_change_no_answer(
    kind: str,
    sharing: bool,
    model_folder: Folders,
    expected: Callable[[str], dict[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = own_model(model_folder(kind))
    answers = {tuple(ids): greedy(model, ids, lengths(row)) for row, ids in PROMPTS.items()}

    def guess(self: Lookup, prompt: list[int], answer: list[int], room: int) -> list[int]:
        following = [*answers.get(tuple(prompt), [])[len(answer) :], tiny.EOS, 7, 7][: min(room, 5)]
        return [7 if len(answer) % 3 == at else token for at, token in enumerate(following)]  # some are wrong

    monkeypatch.setattr(Lookup, "guess", guess)
    engine = load(model_folder(kind), max_batch_rows=3, slot_tokens=8, share_prefixes=sharing)
    rows = [Request(row, ids, SamplingParams(max_new_tokens=lengths(row))) for row, ids in PROMPTS.items()]
    assert outputs(drain(engine, [rows[:5], [], [], rows[5:11], rows[11:]])) == expected(kind)
    stats = engine.stats()
    assert stats.extra["guessed_tokens"] > stats.extra["guessed_right_tokens"] > 0
    assert stats.row_steps < stats.completion_tokens


def test_rows_that_do_not_take_the_best_token_are_not_guessed(model_folder: Folders) -> None:
    engine = load(model_folder("llama"), max_batch_rows=1)
    prompt = [5, 6, 7] * 6
    for params in ({"temperature": 1.0}, {"repetition_penalty": 1.1}, {"logprobs": True}, {"min_new_tokens": 2}):
        drain(engine, [[Request(0, prompt, SamplingParams(max_new_tokens=30, ignore_eos=True, **params))]])
        assert engine.stats().extra["guessed_tokens"] == 0, params
    drain(engine, [[Request(0, prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))]])
    assert engine.stats().extra["guessed_tokens"] > 0


def test_scores_of_a_wrong_guess_that_are_no_numbers_do_no_harm(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Request(0, [5, 6, 7] * 6, SamplingParams(max_new_tokens=12, ignore_eos=True))
    expected = drain(load(model_folder("llama")), [[row]])
    engine = load(model_folder("llama"))
    real = sampling.choose

    def choose(logits: torch.Tensor, answers: list[Any]) -> list[int]:
        if len(answers) > 1:
            logits[-1] = torch.nan
        return real(logits, answers)

    monkeypatch.setattr(Lookup, "guess", lambda self, prompt, answer, room: [3, 3][: min(room, 2)])
    monkeypatch.setattr(core, "choose", choose)
    assert drain(engine, [[row]]) == expected
    assert engine.stats().extra["preemptions"] == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_guessed_token_whose_keys_are_no_numbers_does_no_harm(
    bad: float, model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    rows = [Request(0, [5, 6, 7] * 6, params), Request(1, [6, 5, 4] * 3, params)]
    expected = drain(load(model_folder("llama")), [rows])
    engine = load(model_folder("llama"))
    assert engine._loaded is not None
    used = {token for row in rows for token in (*row.input, *greedy(own_model(model_folder("llama")), row.input, 12))}
    unused = min(set(range(5, len(tiny.VOCAB))) - used)
    with torch.no_grad():
        engine._loaded.model.get_input_embeddings().weight[unused] = bad
    monkeypatch.setattr(Lookup, "guess", lambda self, prompt, answer, room: [unused][: min(room, 1)])
    assert drain(engine, [rows]) == expected
    assert engine.stats().extra["preemptions"] == 2


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_sampled_tokens_do_not_depend_on_the_schedule(kind: str, model_folder: Folders) -> None:
    params = [
        SamplingParams(max_new_tokens=15, temperature=0.8, seed=7),
        SamplingParams(max_new_tokens=12, temperature=1.2, top_k=9, top_p=0.9, seed=7),
        SamplingParams(max_new_tokens=12, repetition_penalty=1.4, min_new_tokens=4),
        SamplingParams(max_new_tokens=9, temperature=1.0, min_p=0.1, repetition_penalty=1.1, seed=1),
    ]
    rows = {row: (ids, params[row % 4]) for row, ids in PROMPTS.items()}
    model = own_model(model_folder(kind))
    expected = {row: text(sampled(model, row, *of)) for row, of in rows.items()}
    for options in SCHEDULES.values():
        engine = load(model_folder(kind), **options)
        # the host renumbers rows; the seed goes with the row's own number
        requests = [Request(1000 + row, *of, origin=row) for row, of in rows.items()]
        found = outputs(drain(engine, [requests[:9], requests[9:]]))
        assert {row - 1000: out for row, out in found.items()} == expected


@pytest.mark.parametrize("slots", [1, 2, 64])
@pytest.mark.parametrize("budget", [32, 4096])
def test_rows_join_and_leave_at_any_step(slots: int, budget: int, model_folder: Folders) -> None:
    model = own_model(model_folder("llama"))
    engine = load(model_folder("llama"), max_batch_rows=slots, max_batch_tokens=budget, slot_tokens=8)
    rows = [Request(row, ids, SamplingParams(max_new_tokens=lengths(row) % 17 + 1)) for row, ids in PROMPTS.items()]
    expected = {r.id: text(greedy(model, r.input, r.params.max_new_tokens)) for r in rows}
    found: dict[int, Result] = {}
    gone = {3, 8, 9}
    for at in range(2_000):
        if at < len(rows):
            engine.add([rows[at]])
        if at == 11:
            engine.abort(sorted(gone | {999}))
        found |= {r.id: r for r in engine.step()}
        stats = engine.stats()
        if at > len(rows) and stats.running == stats.waiting == 0:
            break
    assert {row: out for row, out in outputs(found).items() if row not in gone} == {
        row: out for row, out in expected.items() if row not in gone
    }
    assert engine.stats().extra["kv_used_tokens"] <= 64  # what is left is shared beginnings


def test_an_answer_does_not_depend_on_batch_mates(model_folder: Folders) -> None:
    engine = load(model_folder("llama"))
    mates = [Request(100 + i, ids, SamplingParams(max_new_tokens=20)) for i, ids in prompts(20, seed=3).items()]
    row = Request(0, PROMPTS[5], SamplingParams(max_new_tokens=20))
    alone = drain(engine, [[row]])[0]
    among = drain(engine, [mates[:10], [row], mates[10:]])[0]
    assert alone == among


@pytest.mark.parametrize("kind", models.REFUSED)
def test_what_it_cannot_compute_falls_to_another_engine(
    kind: str, model_folder: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(model_folder(kind), max_batch_tokens=100, max_batch_rows=3)
    assert len([r for r in caplog.records if "using engine 'transformers'" in r.message]) == 1
    model = own_model(model_folder(kind))
    rows = [Request(row, ids, SamplingParams(max_new_tokens=4)) for row, ids in list(PROMPTS.items())[:5]]
    assert outputs(drain(engine, [rows])) == {r.id: text(greedy(model, r.input, 4)) for r in rows}
    assert engine.stats().capacity == 3
    assert str(engine.stats().extra["replaced_by"]).startswith("transformers: ")
    engine.abort([1])
    engine.close()

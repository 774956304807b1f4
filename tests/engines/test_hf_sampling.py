"""Picking tokens: transformers' own semantics, one row's draws apart from another's; and how answers end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from daskinfer.engines.hf import NOT_A_NUMBER, Answer, Prompt, SpecialTokens, pick
from daskinfer.records import Completed, Failed, FinishReason, SamplingParams
from tests.engines import tiny

SPECIAL = SpecialTokens(frozenset({tiny.EOS}), tiny.PAD, None, {"<|end|>": tiny.END})
TOKENIZER = tiny.make_tokenizer()
V = len(tiny.VOCAB)


def answer(row: int = 0, prompt: tuple[int, ...] = (9, 10), special: SpecialTokens = SPECIAL, **params: Any) -> Answer:
    return Answer(Prompt(row, list(prompt), SamplingParams(**params)), special, TOKENIZER)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def push_all(it: Answer, tokens: list[int]) -> int:
    """Give tokens until it is finished; return how many it took."""
    for n, token in enumerate(tokens, 1):
        if it.push(token):
            return n
    return len(tokens)


# ---------------------------------------------------------------- picking


def test_greedy_takes_the_best_and_changes_nothing() -> None:
    scores = logits(5)
    before = scores.clone()
    rows = [answer(i, repetition_penalty=2.0 if i == 2 else 1.0, min_new_tokens=i) for i in range(5)]
    tokens = pick(scores, rows)
    assert torch.equal(scores, before)
    assert tokens[0] == int(scores[0].argmax())
    assert tokens == [pick(scores[i : i + 1], [rows[i]])[0] for i in range(5)]


def _reference(scores: torch.Tensor, context: list[int], p: SamplingParams) -> torch.Tensor:
    """The distribution that transformers samples from: its processors in its order."""
    chain = LogitsProcessorList()
    if p.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.min_new_tokens:
        chain.append(MinNewTokensLengthLogitsProcessor(len(context), p.min_new_tokens, [tiny.EOS]))
    if p.temperature != 1:
        chain.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    ids: Any = torch.tensor([context])
    changed: Any = chain(ids, scores.clone())
    return torch.softmax(changed, -1)[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.5, "min_new_tokens": 3},
    ],
    ids="-".join,
)
def test_drawn_from_the_distribution_transformers_draws_from(params: dict[str, Any]) -> None:
    n = 3000
    scores = logits(1, seed=4)
    scores[0, tiny.EOS] = scores.max()
    scores[0, 9] = scores.max()
    expected = _reference(scores, [9, 10], SamplingParams(**params))
    rows = [answer(i, seed=1, **params) for i in range(n)]
    drawn = torch.bincount(torch.tensor(pick(scores.expand(n, V), rows)), minlength=V) / n
    assert float((drawn - expected).abs().sum()) / 2 < 0.05
    assert not bool(drawn[expected == 0].any())


@given(
    st.floats(0, 1, exclude_max=True),
    st.lists(st.sampled_from([-torch.inf, -3.0, 0.0, 1.0, 2.5]), min_size=2, max_size=12).filter(
        lambda row: max(row) > -torch.inf
    ),
)
@settings(max_examples=300)
def test_a_token_of_probability_zero_is_never_drawn(number: float, row: list[float]) -> None:
    it = answer(temperature=1.0)
    it.draw = lambda: number  # type: ignore[method-assign]
    (token,) = pick(torch.tensor([row]), [it])
    assert row[token] > -torch.inf


def test_c17_draws_depend_on_seed_and_row_alone() -> None:
    scores = logits(1).expand(8, V)
    alone = [pick(scores[:1], [answer(i, temperature=1.0, seed=5)])[0] for i in range(8)]
    assert pick(scores, [answer(i, temperature=1.0, seed=5) for i in range(8)]) == alone
    assert pick(scores, [answer(i, temperature=1.0, seed=6) for i in range(8)]) != alone
    mixed = [answer(i, temperature=1.0, seed=5) if i % 2 else answer(i) for i in range(8)]
    assert [t for i, t in enumerate(pick(scores, mixed)) if i % 2] == alone[1::2]
    first = answer(3, temperature=1.0, seed=5)
    numbers = [first.draw() for _ in range(4)]
    again = answer(3, temperature=1.0, seed=5)
    assert [again.draw() for _ in range(4)] == numbers
    assert len(set(numbers)) == 4


def test_draws_are_the_same_in_every_process() -> None:
    assert answer(3, temperature=1.0, seed=5).draw() == 0.7625780472577379


def test_scores_that_are_no_numbers() -> None:
    scores = logits(3)
    scores[1, 5] = torch.nan
    rows = [answer(0), answer(1), answer(2, temperature=1.0, seed=0)]
    assert [token == NOT_A_NUMBER for token in pick(scores, rows)] == [False, True, False]
    assert rows[1].push(NOT_A_NUMBER)
    failed = rows[1].result()
    assert isinstance(failed, Failed)
    assert "float32" in failed.message


def test_half_precision_scores() -> None:
    scores = logits(2).to(torch.bfloat16)
    assert pick(scores, [answer(0), answer(1)]) == scores.float().argmax(-1).tolist()


# ---------------------------------------------------------------- ends


def done(it: Answer) -> Completed:
    result = it.result()
    assert isinstance(result, Completed)
    return result


def test_an_end_token_counts_and_does_not_show() -> None:
    it = answer(max_new_tokens=10)
    assert push_all(it, [8, 9, tiny.EOS, 10]) == 3
    assert done(it).output == "w0 w1"
    assert done(it).finish_reason == FinishReason.STOP
    assert (done(it).usage.prompt_tokens, done(it).usage.completion_tokens) == (2, 3)


def test_length() -> None:
    it = answer(max_new_tokens=2)
    assert push_all(it, [8, 9, 10]) == 2
    assert (done(it).output, done(it).finish_reason) == ("w0 w1", FinishReason.LENGTH)
    assert answer(max_new_tokens=0).finished


def test_end_tokens_of_the_row() -> None:
    it = answer(stop_token_ids=(20,), ignore_eos=True)
    assert push_all(it, [8, tiny.EOS, 9, 20, 10]) == 4
    assert done(it).output == "w0 w1"
    assert answer(stop_token_ids=(20,)).ends == {20, tiny.EOS}
    assert not answer(min_new_tokens=1).may_end


def test_a_stop_string_that_is_a_special_token() -> None:
    it = answer(stop=("<|end|>",))
    assert push_all(it, [8, 9, tiny.END, 10]) == 3
    assert (done(it).output, done(it).finish_reason) == ("w0 w1", FinishReason.STOP)


@pytest.mark.parametrize(
    ("stop", "took", "output"),
    [
        ("w2", 3, "w0 w1 "),
        ("1 w", 3, "w0 w"),
        (" ", 2, "w0"),
        ("w0 w1 w2 w3", 4, ""),
        ("w9", 5, "w0 w1 w2 w3 w4"),
        (("w3", "w1"), 2, "w0 "),
        (("w2 w3", "0 w1 w2 w3"), 4, "w"),
    ],
)
def test_stop_strings_may_cross_tokens(stop: Any, took: int, output: str) -> None:
    it = answer(stop=stop, max_new_tokens=5)
    assert push_all(it, [8, 9, 10, 11, 12]) == took
    assert done(it).output == output
    assert done(it).finish_reason == (FinishReason.LENGTH if stop == "w9" else FinishReason.STOP)
    assert done(it).usage.completion_tokens == took


def test_a_long_answer_with_stop_strings_is_looked_at_from_its_end() -> None:
    it = answer(stop=("w3 w4",), max_new_tokens=500)
    assert push_all(it, [8] * 300 + [11, 12, 8]) == 302
    assert done(it).output == "w0 " * 300


def test_context_is_what_the_decoder_sees() -> None:
    it = answer()
    it.push(20)
    assert list(it.context) == [9, 10, 20]
    two = answer(special=SpecialTokens(frozenset({tiny.EOS}), tiny.PAD, tiny.BOS))
    two.push(20)
    assert list(two.context) == [tiny.BOS, 20]

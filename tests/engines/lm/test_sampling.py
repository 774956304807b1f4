"""Tokens are chosen as the shared, row-wise implementation on transformers' own processors does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.engines.hf import Answer, Prompt, SpecialTokens, pick
from daskinfer.engines.hf.answers import NOT_A_NUMBER
from daskinfer.engines.lm import sampling
from daskinfer.engines.lm.sampling import choose
from daskinfer.records import SamplingParams

VOCABULARY = 50
SPECIAL = SpecialTokens(frozenset({3, 4}), 0)


def answers(params: list[SamplingParams], written: int = 2) -> list[Answer]:
    made = []
    for row, p in enumerate(params):
        answer = Answer(Prompt(row, [5 + row % 7, 9, 11, 9], p), SPECIAL, tokenizer=None)
        for token in range(written):
            answer.push(20 + token)
        made.append(answer)
    return made


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 49, 200]),
    min_p=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_new_tokens=st.sampled_from([0, 2, 3]),
    stop_token_ids=st.sampled_from([(), (7,), (10**6,)]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=80)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from([0.3, 3.0, 30.0]))
def test_all_rows_at_once_are_each_row_alone(params: list[SamplingParams], seed: int, spread: float) -> None:
    logits = torch.randn(len(params), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread
    kept = logits.clone()
    expected = [pick(logits[i : i + 1], [a])[0] for i, a in enumerate(answers(params))]
    assert choose(logits, answers(params)) == expected
    assert torch.equal(logits, kept)


def test_a_flat_distribution_is_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CANDIDATES", 4)
    params = [SamplingParams(temperature=1.0, top_p=p, seed=s) for p in (0.2, 0.9) for s in range(20)]
    logits = torch.randn(len(params), VOCABULARY, generator=torch.Generator().manual_seed(0)) * 0.1
    assert choose(logits, answers(params)) == pick(logits, answers(params))


def test_forbidden_tokens_are_never_drawn() -> None:
    params = [SamplingParams(temperature=2.0, top_k=3, seed=seed) for seed in range(300)]
    logits = torch.zeros(len(params), VOCABULARY)
    logits[:, 17:20] = 5.0
    assert set(choose(logits, answers(params))) == {17, 18, 19}


def test_what_is_not_a_number_hurts_that_row_alone() -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[1, 5] = torch.nan
    params: list[Any] = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1),
    ]
    chosen = choose(logits, answers(params))
    assert chosen[1] == NOT_A_NUMBER
    assert NOT_A_NUMBER not in (chosen[0], chosen[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    logits = torch.randn(4, VOCABULARY).to(dtype)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.5, seed=1),
        SamplingParams(temperature=1.0, top_p=0.5, seed=1),
    ]
    assert choose(logits[:3], answers(params)) == pick(logits[:3], answers(params))


@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 300, 1024])
def test_the_best_token_is_the_first_of_the_largest(vocabulary: int) -> None:
    scores = torch.randint(0, 40, (50, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    scores[0] = -torch.inf
    scores[1, vocabulary // 2] = torch.nan
    best, tokens = sampling._best(scores)
    assert torch.equal(best.isnan(), torch.arange(50) == 1)
    for row in [0, *range(2, 50)]:
        expected = scores[row].tolist().index(max(scores[row].tolist()))
        assert (float(best[row]), int(tokens[row])) == (float(scores[row, expected]), expected)

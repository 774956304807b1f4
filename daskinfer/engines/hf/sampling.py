"""The next token of each row from the model's scores, every row by its own parameters.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from daskinfer.engines.hf.answers import NOT_A_NUMBER, Answer
from daskinfer.records import SamplingParams

__all__ = ["note_logprobs", "pick"]


def pick(logits: torch.Tensor, answers: Sequence[Answer]) -> list[int]:
    """Return the next token of each row; :data:`NOT_A_NUMBER` for a row whose scores are not numbers.

    The scores are changed by transformers' own processors in its order: repetition penalty, ends forbidden before
    ``min_new_tokens``, then, for rows that sample, temperature, top-k, top-p and min-p. One random number per token, drawn
    by the row itself, is looked up in the cumulated probabilities: so batch mates have no part in it.

    Parameters
    ----------
    logits : torch.Tensor
        Shape (rows, vocabulary), of any floating dtype and device; not changed.
    answers : sequence of Answer
        The rows' state, in the same order.
    """
    scores = _restricted(logits.float(), answers)
    best, tokens = scores.max(dim=-1)
    picked: list[int] = tokens.tolist()
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, answer in enumerate(answers):
        p = answer.params
        if not p.greedy:
            groups.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(row)
    for rows in groups.values():
        drawn = _sample(scores[rows], answers[rows[0]].params, [answers[row].draw() for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            picked[row] = token
    for row, broken in enumerate(torch.isnan(best).tolist()):
        if broken:
            picked[row] = NOT_A_NUMBER
    note_logprobs(logits, picked, answers)
    return picked


def note_logprobs(logits: torch.Tensor, picked: Sequence[int], answers: Sequence[Answer]) -> None:
    """Give the rows that want it the log-probability of their next token, in the model's own distribution.

    Parameters
    ----------
    logits : torch.Tensor
        Shape (rows, vocabulary), as the model gave them.
    picked : sequence of int
        The tokens; rows whose scores are not numbers are passed over.
    answers : sequence of Answer
    """
    rows = [row for row, a in enumerate(answers) if a.params.logprobs and picked[row] != NOT_A_NUMBER]
    if rows:
        wanted = torch.tensor([picked[row] for row in rows], device=logits.device)[:, None]
        found = logits[rows].float().log_softmax(dim=-1).gather(1, wanted)[:, 0].tolist()
        for row, value in zip(rows, found, strict=True):
            answers[row].logprobs.append(value)


def _restricted(scores: torch.Tensor, answers: Sequence[Answer]) -> torch.Tensor:
    """Apply what counts for greedy rows too."""
    copied = False
    for row, answer in enumerate(answers):
        penalty, banned = answer.params.repetition_penalty, () if answer.may_end else tuple(answer.ends)
        if penalty == 1 and not banned:
            continue
        if not copied:
            scores, copied = scores.clone(), True
        one = scores[row : row + 1]
        if penalty != 1:
            context: Any = torch.tensor([list(answer.context)], device=scores.device)
            one = RepetitionPenaltyLogitsProcessor(float(penalty))(context, one)
        if banned:
            one[:, [token for token in banned if token < one.shape[1]]] = -torch.inf
        scores[row] = one[0]
    return scores


def _sample(scores: torch.Tensor, params: SamplingParams, numbers: Sequence[float]) -> list[int]:
    """Draw one token for each row of equal parameters."""
    no_ids: Any = torch.empty((len(scores), 0), dtype=torch.long, device=scores.device)
    for warper in _warpers(params):
        scores = warper(no_ids, scores)
    if scores.device.type == "mps":
        scores = scores.cpu()  # it has no float64
    cumulated = scores.softmax(dim=-1).double().cumsum(dim=-1)
    wanted = torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None] * cumulated[:, -1:]
    # the first token whose cumulated probability exceeds the number: never one whose own probability is 0
    below: list[int] = (cumulated <= wanted).sum(dim=-1).clamp(max=scores.shape[1] - 1).tolist()
    return below


def _warpers(params: SamplingParams) -> list[Any]:
    warpers: list[Any] = []
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers

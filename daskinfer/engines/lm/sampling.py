"""The next token of each row, all rows at once, each by its own parameters.

The rules and their order are those of transformers: repetition penalty, ends forbidden before ``min_new_tokens``, then, for
rows that sample, temperature, top-k, top-p and min-p. One random number per token, drawn by the row itself, is looked up in
the cumulated probabilities, so batch mates have no part in it.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daskinfer.engines.hf.answers import NOT_A_NUMBER, Answer
from daskinfer.engines.hf.sampling import note_logprobs

__all__ = ["choose"]

_CANDIDATES = 1024  # sorting these is enough for nearly every row with top_p; the others are sorted whole
_STRIP = 128


def choose(logits: torch.Tensor, answers: Sequence[Answer]) -> list[int]:
    """Return the next token of each row; :data:`NOT_A_NUMBER` for a row whose scores are not numbers.

    Parameters
    ----------
    logits : torch.Tensor
        Shape (rows, vocabulary), of any floating dtype and device; not changed.
    answers : sequence of Answer
        The rows' state, in the same order.
    """
    scores = _restricted(logits.float(), answers)
    best, tokens = _best(scores)
    sampling = [row for row, answer in enumerate(answers) if not answer.params.greedy]
    if sampling:
        at = torch.tensor(sampling, device=scores.device)
        tokens[at] = _sample(scores[at], [answers[row] for row in sampling])
    picked: list[int] = tokens.masked_fill_(torch.isnan(best), NOT_A_NUMBER).tolist()
    note_logprobs(logits, picked, answers)
    return picked


def _best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest score and its first token; a score that is not a number counts as largest.

    As ``scores.max(dim=-1)``, in a sixth of the time on a CPU: registers are compared whole, but not with an index each.
    """
    whole = scores.shape[1] - scores.shape[1] % _STRIP
    strips = scores[:, :whole].reshape(len(scores), whole // _STRIP, _STRIP).amax(dim=-1)
    if whole < scores.shape[1]:
        strips = torch.cat((strips, scores[:, whole:].amax(dim=-1, keepdim=True)), dim=1)
    best, strip = strips.max(dim=-1)
    inside = (strip[:, None] * _STRIP + torch.arange(_STRIP, device=scores.device)).clamp_(max=scores.shape[1] - 1)
    return best, strip * _STRIP + scores.gather(1, inside).argmax(dim=-1)


def _restricted(scores: torch.Tensor, answers: Sequence[Answer]) -> torch.Tensor:
    """Apply what counts for greedy rows too."""
    penalised = [row for row, answer in enumerate(answers) if answer.params.repetition_penalty != 1]
    banned = [(row, e) for row, a in enumerate(answers) if not a.may_end for e in a.ends if e < scores.shape[1]]
    if not penalised and not banned:
        return scores
    scores = scores.clone()
    if penalised:
        at, kept, penalty = _penalties(penalised, answers, scores.device)
        found = scores[at, kept]
        scores[at, kept] = torch.where(found < 0, found * penalty, found / penalty)
    if banned:
        rows, ends = zip(*banned, strict=True)
        scores[list(rows), list(ends)] = -torch.inf
    return scores


def _penalties(
    rows: Sequence[int], answers: Sequence[Answer], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row, token and penalty of every token that stands before the next one, each once."""
    at: list[int] = []
    kept: list[int] = []
    penalties: list[float] = []
    for row in rows:
        seen = set(answers[row].context)
        kept += seen
        at += [row] * len(seen)
        penalties += [float(answers[row].params.repetition_penalty)] * len(seen)
    return torch.tensor(at, device=device), torch.tensor(kept, device=device), torch.tensor(penalties, device=device)


def _sample(scores: torch.Tensor, answers: Sequence[Answer]) -> torch.Tensor:
    """Draw one token for each row."""
    device = scores.device

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(answer.params, name) for answer in answers], dtype=dtype, device=device)[:, None]

    scores = scores / column("temperature", torch.float32)
    top_k, top_p = column("top_k", torch.long), column("top_p", torch.float32)
    scores = _top_k(scores, top_k)
    scores = _top_p(scores, top_p)
    min_p = column("min_p", torch.float32)
    if bool((min_p > 0).any()):
        # the best token is never below the limit, since min_p is at most 1
        limit = scores.amax(dim=-1, keepdim=True) + min_p.log()
        scores = scores.masked_fill(scores < limit, -torch.inf)
    if device.type == "mps":
        scores = scores.cpu()  # it has no float64
    cumulated = scores.softmax(dim=-1).double().cumsum(dim=-1)
    draws = torch.tensor([answer.draw() for answer in answers], dtype=torch.float64, device=cumulated.device)
    wanted = draws[:, None] * cumulated[:, -1:]
    # the first token whose cumulated probability exceeds the number: never one whose own probability is 0
    found = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return found.clamp_(max=scores.shape[1] - 1).to(device)


def _top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    most = min(int(top_k.max()), scores.shape[1])
    if most == 0:
        return scores
    best = scores.topk(most, dim=-1).values
    last = best.gather(1, (top_k - 1).clamp(0, most - 1))
    return scores.masked_fill((scores < last) & (top_k > 0), -torch.inf)


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest best tokens whose probabilities together reach ``top_p``."""
    limited = (top_p < 1)[:, 0]
    if not bool(limited.any()):
        return scores
    rows = limited.nonzero()[:, 0]
    part, wanted = scores[rows], top_p[rows]
    best = part.topk(min(_CANDIDATES, part.shape[1]), dim=-1).values
    total = part.logsumexp(dim=-1, keepdim=True)
    reached = (best - total).exp().cumsum(dim=-1)
    short = (reached[:, -1:] < wanted)[:, 0]
    last = best.gather(1, _last_kept(best, total, wanted))
    if bool(short.any()):
        whole = part[short].sort(dim=-1, descending=True).values
        last[short] = whole.gather(1, _last_kept(whole, total[short], wanted[short]))
    scores = scores.clone()
    scores[rows] = part.masked_fill(part < last, -torch.inf)
    return scores


def _last_kept(best: torch.Tensor, total: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the index of the last token to keep, of tokens sorted from the best one down."""
    before = (best - total).exp().cumsum(dim=-1)[:, :-1]
    return (before < wanted).sum(dim=-1, keepdim=True)

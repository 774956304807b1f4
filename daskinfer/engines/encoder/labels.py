"""From a classifier's numbers to labels: of texts, of spans of text, and zero-shot.

Runs on: worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from daskinfer.engines.encoder.options import EncoderOptions
from daskinfer.engines.encoder.recipe import Recipe
from daskinfer.engines.encoder.rows import Tokens
from daskinfer.errors import ConfigError

__all__ = [
    "LABEL",
    "SPANS",
    "activated",
    "default_activation",
    "listed",
    "spans",
    "zero_shot_classes",
    "zero_shot_scores",
]

LABEL = "struct<label: string, score: float32>"
SPANS = "struct<label: string, score: float32, start: int32, end: int32, text: string>[]"


def default_activation(recipe: Recipe, options: EncoderOptions) -> str:
    """Return what turns a text classifier's numbers into scores."""
    if options.activation is not None:
        return options.activation
    if options.multi_label is not None:
        return "sigmoid" if options.multi_label or len(recipe.labels) == 1 else "softmax"
    if recipe.problem == "regression":
        return "none"
    one = len(recipe.labels) == 1  # a softmax over it would be 1 for every text
    return "sigmoid" if one or recipe.problem == "multi_label_classification" else "softmax"


def activated(numbers: torch.Tensor, activation: str) -> torch.Tensor:
    """Return scores along the last dimension."""
    if activation == "softmax":
        return numbers.softmax(dim=-1)
    return numbers.sigmoid() if activation == "sigmoid" else numbers


def listed(scores: Sequence[float], labels: Sequence[str], top_k: int, threshold: float) -> Any:
    """Return the best labels, best first: a dict for ``top_k`` 1, else a list of dicts."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    best = order[:top_k] if top_k else order
    if top_k == 1:
        return {"label": labels[best[0]], "score": scores[best[0]]}
    return [{"label": labels[i], "score": scores[i]} for i in best if scores[i] >= threshold]


# ---------------------------------------------------------------- zero-shot


def zero_shot_classes(labels: Sequence[str], model: str) -> tuple[int, int]:
    """Return which outputs of a model of natural language inference mean entailment and contradiction.

    Raises
    ------
    ConfigError
        The model has no such outputs.
    """
    names = [label.lower() for label in labels]
    entailment = next((i for i, name in enumerate(names) if name.startswith("entail")), None)
    if entailment is None or len(names) < 2:
        raise ConfigError(
            f"model={model!r} has the outputs {', '.join(labels)}; labels= (zero-shot) needs a model of natural language "
            "inference, one of whose outputs is 'entailment'"
        )
    against = (i for i, name in enumerate(names) if name.startswith(("contradict", "not_entail", "not entail")))
    return entailment, next(against, 0 if entailment else len(names) - 1)


def zero_shot_scores(numbers: torch.Tensor, classes: tuple[int, int], *, multi_label: bool) -> torch.Tensor:
    """Return one score per label from the model's numbers for one text, shape (labels, classes)."""
    if multi_label or len(numbers) == 1:
        return numbers[:, [classes[1], classes[0]]].softmax(dim=-1)[:, 1]
    return numbers[:, classes[0]].softmax(dim=0)


# ---------------------------------------------------------------- spans


def spans(scores: torch.Tensor, tokens: Tokens, text: str, labels: Sequence[str], how: str) -> list[dict[str, Any]]:
    """Return the labelled spans of a text.

    Parameters
    ----------
    scores : torch.Tensor
        Shape (tokens, labels); rows sum to 1.
    tokens : Tokens
        With their places.
    text : str
    labels : sequence of str
        "O" is no label. A beginning "B-" or "I-" tells whether a token begins a span or goes on with it.
    how : str
        "none": every token; "simple": tokens; "first", "average", "max": whole words, by that token's or mean scores.
    """
    assert tokens.spans is not None
    assert tokens.words is not None
    places = [i for i, (begin, end) in enumerate(tokens.spans) if end > begin and tokens.words[i] is not None]
    if how in ("none", "simple"):
        groups = [[i] for i in places]
    else:
        groups = [list(group) for _, group in groupby(places, key=lambda i: tokens.words[i] if tokens.words else None)]
    pieces = [_piece(scores, group, tokens.spans, labels, how) for group in groups]
    if how == "none":
        return [_span(piece["label"], [piece], text) for piece in pieces if piece["label"] != "O"]
    joined: list[list[dict[str, Any]]] = []
    for before, piece in pairwise([None, *pieces]):
        assert piece is not None
        if before is not None and _goes_on(before["label"], piece["label"]):
            joined[-1].append(piece)
        else:
            joined.append([piece])
    return [_span(_plain(group[0]["label"]), group, text) for group in joined if group[0]["label"] != "O"]


def _piece(
    scores: torch.Tensor, group: list[int], places: Sequence[tuple[int, int]], labels: Sequence[str], how: str
) -> dict[str, Any]:
    own = scores[group]
    if how == "average":
        found = own.mean(dim=0)
    elif how == "max":
        found = own[own.max(dim=1).values.argmax()]
    else:
        found = own[0]
    best = int(found.argmax())
    return {
        "label": labels[best],
        "score": float(found[best]),
        "start": places[group[0]][0],
        "end": places[group[-1]][1],
    }


def _goes_on(before: str, label: str) -> bool:
    return _plain(before) == _plain(label) and not label.startswith("B-")


def _plain(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _span(label: str, pieces: list[dict[str, Any]], text: str) -> dict[str, Any]:
    start, end = pieces[0]["start"], pieces[-1]["end"]
    score = sum(piece["score"] for piece in pieces) / len(pieces)
    return {"label": label, "score": score, "start": start, "end": end, "text": text[start:end]}

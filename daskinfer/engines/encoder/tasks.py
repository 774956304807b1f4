"""What each task makes of a row's input, and of what the model says.

Runs on: worker; ``output_type`` anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from daskinfer.config import ModelSpec
from daskinfer.engines.encoder.labels import (
    LABEL,
    SPANS,
    activated,
    default_activation,
    listed,
    spans,
    zero_shot_classes,
    zero_shot_scores,
)
from daskinfer.engines.encoder.options import ACTIVATIONS, EncoderOptions
from daskinfer.engines.encoder.pooling import Vectors, at_precision, vector_type
from daskinfer.engines.encoder.recipe import Recipe
from daskinfer.engines.encoder.rows import Row, Text, Tokens
from daskinfer.engines.encoder.task import NOT_NUMBERS, Task, done
from daskinfer.errors import ConfigError, RowError
from daskinfer.inputs import as_pair, as_prompt, as_text
from daskinfer.records import FailureKind

__all__ = ["ZERO_VECTOR", "task_of"]

ZERO_VECTOR = "zero_vector"
"""The ``finish_reason`` of a vector that is zero everywhere, and so has no direction."""


def task_of(spec: ModelSpec, options: EncoderOptions, recipe: Recipe) -> Task:
    """Return the task of a specification.

    Raises
    ------
    ConfigError
        The model or the options do not fit it.
    """
    if spec.task == "embed":
        return Embed(spec, options, recipe)
    if spec.task == "score":
        return Rank(spec, options, recipe) if options.rank else Score(spec, options, recipe)
    if spec.task != "classify":
        raise ConfigError(f"task={spec.task!r}: engine 'encoder' does embed, classify and score")
    if options.labels is not None:
        return ZeroShot(spec, options, recipe)
    return Spans(spec, options, recipe) if recipe.per_token else Classify(spec, options, recipe)


# ---------------------------------------------------------------- vectors


class Embed(Task):
    """A vector for each text."""

    head = "none"

    def _type(self) -> str:
        return vector_type(self.recipe, self.options)

    def ready(self, folder: Path, device: torch.device) -> None:
        """Load dense layers."""
        self._vectors = Vectors(self.recipe, self.options, folder, device)

    @property
    def prefix(self) -> str:
        """The prompt: given, or one of the model's by name, or the model's default."""
        if self.options.prompt is not None:
            return self.options.prompt
        name = self.options.prompt_name or self.recipe.default_prompt
        if name is None:
            return ""
        if name not in self.recipe.prompts:
            known = ", ".join(map(repr, self.recipe.prompts)) or "none"
            raise ConfigError(f"engine_options: the model has no prompt {name!r}; it has {known}")
        return self.recipe.prompts[name]

    def texts(self, value: Any) -> Sequence[Text] | Tokens:
        """Return the text, or the token ids."""
        if isinstance(value, str):
            return [(as_text(value), None)]
        found = as_prompt(value, "the text")
        if isinstance(found, str):
            return [(found, None)]
        return Tokens([token for token in found if isinstance(token, int)])

    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return vectors: views of one array."""
        sequences = [row.sequences[0] for row in rows]
        made = self._vectors(numbers, [len(s.ids) for s in sequences], [s.skip for s in sequences])
        usable, zero = made.isfinite().all(dim=1).tolist(), (made == 0).all(dim=1).tolist()
        block = at_precision(made.cpu().numpy(), self.options.precision)
        return [
            done(row, block[i], ZERO_VECTOR if zero[i] else None)
            if usable[i]
            else RowError(NOT_NUMBERS, FailureKind.ERROR)
            for i, row in enumerate(rows)
        ]


# ---------------------------------------------------------------- labels


class Classify(Task):
    """The label of each text or pair, or its best labels."""

    def _type(self) -> str:
        self._labels = self.recipe.labels
        self._activation = default_activation(self.recipe, self.options)
        many = len(self._labels) > 1 and self._activation == "sigmoid"
        self._top_k = (0 if many else 1) if self.options.top_k is None else self.options.top_k
        return LABEL if self._top_k == 1 else f"{LABEL}[]"

    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return labels with scores."""
        scores = activated(numbers, self._activation).tolist()
        return [self._output(row, own) for row, own in zip(rows, scores, strict=True)]

    def _output(self, row: Row, scores: list[float]) -> Any:
        if any(score != score for score in scores):  # noqa: PLR0124 - NaN
            return RowError(NOT_NUMBERS, FailureKind.ERROR)
        return done(row, listed(scores, self._labels, self._top_k, self.options.threshold))


class ZeroShot(Classify):
    """Labels of the caller's own, each compared with the text by a model of natural language inference."""

    def _type(self) -> str:
        found = super()._type()
        self._classes = zero_shot_classes(self.recipe.labels, self.spec.model)
        self._labels = tuple(self.options.labels or ())
        self._top_k = 1 if self.options.top_k is None else self.options.top_k
        if self.options.top_k is None and self.options.multi_label:
            self._top_k = 0
        return found if self.options.top_k is not None else (LABEL if self._top_k == 1 else f"{LABEL}[]")

    def texts(self, value: Any) -> Sequence[Text] | Tokens:
        """Return the text with each label's sentence."""
        text = as_text(value)
        return [(text, self.options.hypothesis.replace("{}", label)) for label in self._labels]

    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return labels with scores."""
        multi_label = bool(self.options.multi_label)
        found = numbers.reshape(len(rows), len(self._labels), -1)
        return [
            self._output(row, zero_shot_scores(own, self._classes, multi_label=multi_label).tolist())
            for row, own in zip(rows, found, strict=True)
        ]


class Spans(Task):
    """The labelled spans of each text: names, places, parts of speech."""

    head = "token"

    def _type(self) -> str:
        for name in ("top_k", "multi_label", "activation"):
            if getattr(self.options, name) is not None:
                raise ConfigError(f"engine_options: {name} is for classifiers of texts; this model labels tokens")
        return SPANS

    def texts(self, value: Any) -> Sequence[Text] | Tokens:
        """Return the text."""
        return [(as_text(value), None)]

    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return lists of spans, in the order of the text."""
        scores = numbers.softmax(dim=-1).cpu()
        parts = torch.split(scores, [row.tokens for row in rows])
        return [self._output(row, part) for row, part in zip(rows, parts, strict=True)]

    def _output(self, row: Row, scores: torch.Tensor) -> Any:
        if scores.isnan().any():
            return RowError(NOT_NUMBERS, FailureKind.ERROR)
        found = spans(scores, row.sequences[0], str(row.input), self.recipe.labels, self.options.aggregation)
        return done(row, [span for span in found if span["score"] >= self.options.threshold])


# ---------------------------------------------------------------- scores


class Score(Task):
    """How well the second text of each pair answers the first."""

    def _type(self) -> str:
        self._activation = self.options.activation or self._own_activation()
        self._outputs = len(self.recipe.labels)
        return "float32" if self._outputs == 1 else f"float32[{self._outputs}]"

    def _own_activation(self) -> str:
        """Return what a cross-encoder of sentence-transformers applies."""
        config = self.recipe.config
        found = (config.get("sentence_transformers") or {}).get("activation_fn")
        found = found or config.get("sbert_ce_default_activation_function")
        if not found:
            return "sigmoid" if len(self.recipe.labels) == 1 else "none"
        name = str(found).rpartition(".")[2].lower()
        name = "none" if name == "identity" else name
        if name not in ACTIVATIONS:
            raise ConfigError(f"the model's activation {found!r} is not known; set the option activation")
        return name

    def texts(self, value: Any) -> Sequence[Text] | Tokens:
        """Return the pair."""
        first, second = as_pair(value).values()
        if isinstance(second, list):
            raise RowError("the second text is a list; set the option rank to have it ranked", FailureKind.WRONG_TYPE)
        return [(first, second)]

    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return numbers, or vectors of a model with several outputs."""
        scores = activated(numbers, self._activation).cpu()
        usable = scores.isfinite().all(dim=1).tolist()
        found: Any = scores[:, 0].tolist() if self._outputs == 1 else scores.numpy()
        return [
            done(row, found[i]) if usable[i] else RowError(NOT_NUMBERS, FailureKind.ERROR) for i, row in enumerate(rows)
        ]


class Rank(Score):
    """The texts of a list in the order in which they answer a text."""

    def _type(self) -> str:
        if super()._type() != "float32":
            raise ConfigError(f"model={self.spec.model!r} has {self._outputs} outputs; rank needs a model with one")
        return "struct<index: int32, score: float32>[]"

    def texts(self, value: Any) -> Sequence[Text] | Tokens:
        """Return the text with each text of the list."""
        first, second = as_pair(value).values()
        return [(first, item) for item in ([second] if isinstance(second, str) else second)]

    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return rankings: places in the row's list, best first."""
        scores = activated(numbers, self._activation)[:, 0].cpu()
        parts = torch.split(scores, [len(row.sequences) for row in rows])
        return [self._output(row, part) for row, part in zip(rows, parts, strict=True)]

    def _output(self, row: Row, scores: torch.Tensor) -> Any:
        if not scores.isfinite().all():
            return RowError(NOT_NUMBERS, FailureKind.ERROR)
        order = scores.argsort(descending=True, stable=True).tolist()
        return done(row, [{"index": i, "score": float(scores[i])} for i in order])

"""The options of the encoder engine.

Runs on: anywhere; they are checked on the client too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from daskinfer.config import ModelSpec
from daskinfer.errors import ConfigError, UnknownOptionError

__all__ = ["ACTIVATIONS", "AGGREGATIONS", "POOLINGS", "PRECISIONS", "EncoderOptions"]

POOLINGS = ("mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean")
PRECISIONS = ("float32", "float16", "int8", "binary")
ACTIVATIONS = ("softmax", "sigmoid", "none")
AGGREGATIONS = ("none", "simple", "first", "average", "max")
_NUMBERS = ("max_batch_tokens", "max_batch_rows", "max_batch_lanes", "max_tokens", "dims")
_EMBED = frozenset(("pooling", "normalize", "prompt", "prompt_name", "dims", "precision"))
_CLASSIFY = frozenset(("top_k", "threshold", "aggregation", "labels", "hypothesis", "multi_label"))
_TASK_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_EMBED, ("embed",)),
    **dict.fromkeys(_CLASSIFY, ("classify",)),
    "activation": ("classify", "score"),
    "rank": ("score",),
}


@dataclass(frozen=True)
class EncoderOptions:
    """Engine options; each task has some of its own, and one given to another task is refused.

    Parameters
    ----------
    max_batch_tokens : int or None
        Tokens of one forward pass. None: 1024 on a CPU, so that a batch stays in the cache, 32768 elsewhere.
    max_batch_rows : int or None
        Rows of one forward pass. None: one for each 8 of its tokens.
    max_batch_lanes : int or None
        Forward passes at the same time, each with its share of the threads. None: one per thread, at most 8, on a CPU;
        1 elsewhere.
    packing : bool
        Compute rows end to end without padding, on a CPU and where the model allows it, which is tried out at load.
    max_tokens : int or None
        Longest row, with its prompt and special tokens. None: what the model says.
    allow_pickle : bool
        Load pickled weights, weights-only.
    int8_weights : bool
        On a CPU: linear layers in 8 bits. Faster, and vectors change: ``stats().extra["int8_cosine"]`` is the smallest
        cosine with the exact ones over a few sentences.
    pooling : str or None
        (embed) How token vectors become one: "mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens" or
        "weightedmean". None: what the model's folder says, else "mean".
    normalize : bool or None
        (embed) Scale vectors to length 1. None: what the model's folder says. A zero vector stays zero.
    prompt : str or None
        (embed) Put before every text: an instruction, "query: ".
    prompt_name : str or None
        (embed) The same, by its name in the model's folder. None: the folder's default, if it has one.
    dims : int or None
        (embed) Keep only so many leading dimensions (Matryoshka); they are normalised afterwards.
    precision : {"float32", "float16", "int8", "binary"}
        (embed) Of the output. "int8" scales each vector so that its largest number becomes ±127, which keeps cosines;
        "binary" is one bit per dimension (greater than 0), eight in a uint8.
    activation : {"softmax", "sigmoid", "none"} or None
        (classify, score) What turns the model's numbers into scores. None: what the model says, else softmax over its
        labels, sigmoid for multi-label models and those with a single output. Score: as in sentence-transformers.
    top_k : int or None
        (classify) How many labels, best first: 1 is a struct, more (0 = all) a list of structs. None: 1, and for
        multi-label models all.
    threshold : float
        (classify) Labels with a lower score are left out of a list, which may become empty.
    aggregation : {"none", "simple", "first", "average", "max"}
        (classify, token models) How the labels of tokens become those of spans, as in transformers' pipeline.
    labels : list of str or None
        (classify) Zero-shot: these labels, and a model of natural language inference.
    hypothesis : str
        (classify) Zero-shot: the sentence that is compared with the text; "{}" stands for the label.
    multi_label : bool or None
        (classify) Scores that do not depend on the other labels. None: what the model says; zero-shot: no.
    rank : bool
        (score) A row is a text and a list of texts: the output is their ranking.

    Raises
    ------
    ConfigError
        A value that is not allowed, or an option of another task.
    UnknownOptionError
        Another option.
    """

    max_batch_tokens: int | None = None
    max_batch_rows: int | None = None
    max_batch_lanes: int | None = None
    packing: bool = True
    max_tokens: int | None = None
    allow_pickle: bool = False
    int8_weights: bool = False
    pooling: str | None = None
    normalize: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    dims: int | None = None
    precision: str = "float32"
    activation: str | None = None
    top_k: int | None = None
    threshold: float = 0.0
    aggregation: str = "simple"
    labels: Sequence[str] | None = None
    hypothesis: str = "This example is {}."
    multi_label: bool | None = None
    rank: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name in _NUMBERS:
            if (value := getattr(self, name)) is not None and not _whole(value, 1):
                raise _wrong(name, value, "a whole number of at least 1")
        if self.top_k is not None and not _whole(self.top_k, 0):
            raise _wrong("top_k", self.top_k, "a whole number ≥ 0 (0 = all)")
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float):
            raise _wrong("threshold", self.threshold, "a number")
        for name, allowed in (
            ("pooling", (None, *POOLINGS)),
            ("precision", PRECISIONS),
            ("activation", (None, *ACTIVATIONS)),
            ("aggregation", AGGREGATIONS),
        ):
            if getattr(self, name) not in allowed:
                raise _wrong(name, getattr(self, name), f"one of {', '.join(filter(None, allowed))}")
        if self.prompt is not None and self.prompt_name is not None:
            raise ConfigError("engine_options: prompt and prompt_name are two ways to say one thing; give one of them")
        self._check_labels()

    def _check_types(self) -> None:
        for item in fields(self):
            value, (kind, _, optional) = getattr(self, item.name), str(item.type).partition(" | ")
            wanted = {"bool": (bool, "true or false"), "str": (str, "a text")}.get(kind)
            if wanted is not None and not isinstance(value, wanted[0]) and not (optional and value is None):
                raise _wrong(item.name, value, wanted[1])

    def _check_labels(self) -> None:
        if self.labels is None:
            return
        labels = () if isinstance(self.labels, str) else tuple(self.labels)
        if not labels or not all(isinstance(label, str) and label.strip() for label in labels):
            raise _wrong("labels", self.labels, "a list of texts")
        if len(set(labels)) < len(labels):
            raise _wrong("labels", self.labels, "different from each other")
        if self.hypothesis.count("{}") != 1:
            raise _wrong("hypothesis", self.hypothesis, "a sentence with one {} for the label")
        object.__setattr__(self, "labels", labels)

    @classmethod
    def of(cls, spec: ModelSpec) -> EncoderOptions:
        """Return the options of a specification."""
        known = tuple(f.name for f in fields(cls))
        for name in spec.options:
            if name not in known:
                raise UnknownOptionError(name, "engine 'encoder'", known)
            tasks = _TASK_OF.get(name, (spec.task,))
            if spec.task not in tasks:
                raise ConfigError(
                    f"engine_options: {name} belongs to task {' or '.join(tasks)}, but this is {spec.task}"
                )
        return cls(**spec.options)


def _whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _wrong(name: str, value: Any, needs: str) -> ConfigError:
    return ConfigError(f"engine_options: {name}={value!r} must be {needs}")

"""What the engine asks of a task.

Runs on: worker; ``output_type`` anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from daskinfer.config import ModelSpec
from daskinfer.engines.encoder.options import EncoderOptions
from daskinfer.engines.encoder.recipe import Recipe
from daskinfer.engines.encoder.rows import Row, Text, Tokens
from daskinfer.errors import RowError
from daskinfer.inputs import as_pair, as_text
from daskinfer.records import Completed, FailureKind, Usage

__all__ = ["NOT_NUMBERS", "Task", "done"]

NOT_NUMBERS = "the model's numbers are not numbers (NaN); a dtype with a wider range may help, such as dtype='float32'"


class Task(ABC):
    """One of the things the engine does.

    Attributes
    ----------
    head : {"none", "text", "token"}
        What the model ends with.
    output_type : str
    """

    head: ClassVar[str] = "text"

    def __init__(self, spec: ModelSpec, options: EncoderOptions, recipe: Recipe) -> None:
        self.spec, self.options, self.recipe = spec, options, recipe
        self.output_type = self._type()

    @abstractmethod
    def _type(self) -> str:
        """Return the type of an output."""

    def ready(self, folder: Path, device: torch.device) -> None:
        """Load what the task needs besides the model."""

    @property
    def prefix(self) -> str:
        """What is put before every text."""
        return ""

    def texts(self, value: Any) -> Sequence[Text] | Tokens:
        """Return the texts, or pairs of texts, that the model is run on for a row; or its token ids.

        Raises
        ------
        RowError
            The row is not what this task takes.
        """
        if isinstance(value, str):
            return [(as_text(value), None)]
        first, second = as_pair(value).values()
        if isinstance(second, list):
            raise RowError("the second text of the pair is a list", FailureKind.WRONG_TYPE)
        return [(first, second)]

    @abstractmethod
    def outputs(self, rows: Sequence[Row], numbers: torch.Tensor) -> list[Any]:
        """Return one output per row: ``Completed``, or an exception that fails the row.

        Parameters
        ----------
        rows : sequence of Row
        numbers : torch.Tensor
            What the model gave for all their sequences, in order.
        """


def done(row: Row, output: Any, finish_reason: str | None = None) -> Completed:
    """Return the result of a row, with the tokens that were read for it."""
    return Completed(row.id, output, finish_reason, Usage(row.tokens, 0, row.truncated))

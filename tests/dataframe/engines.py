"""Engines of one's own, light to import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from daskinfer import BatchEngine, ModelSpec, Request


class ShowInput(BatchEngine):
    """Answers with its input as JSON text."""

    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        return [json.dumps(request.input) for request in requests]


class Misfits(BatchEngine):
    """Gives a number where text was promised."""

    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        return [5 if request.input == "bad" else request.input for request in requests]


class ShowParams(BatchEngine):
    """Answers with the row's parameters, its id and an option."""

    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        mark = self.spec.options.get("mark", "")
        return [f"{r.params.temperature} {r.params.max_new_tokens} {mark}" for r in requests]


class Rows(BatchEngine):
    """Answers with the row's id and whether it has a seed."""

    def load(self) -> None:
        pass

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        return [{"row": request.row, "seeded": request.params.seed is not None} for request in requests]

    @classmethod
    def output_type(cls, spec: ModelSpec) -> str:
        return "struct<row: int64, seeded: bool>"


class LoadsNowhere(BatchEngine):
    """Cannot be loaded in the process whose id it is given."""

    def load(self) -> None:
        import os

        assert os.getpid() != self.spec.options["client"], "the model was loaded in the client"

    def infer(self, requests: Sequence[Request]) -> Sequence[Any]:
        with open(self.spec.options["calls"], "a") as file:  # noqa: PTH123
            file.writelines(f"{request.input}\n" for request in requests)
        return [request.input for request in requests]

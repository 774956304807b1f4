"""Each tiny model is made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engines.lm import models


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model by the name of its architecture."""
    return cache(lambda kind: models.make(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

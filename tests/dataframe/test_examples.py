"""The examples of ``docs/dataframes.md`` run as scripts, those of docstrings as they are."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import pytest

from daskinfer.dataframe import accessor, columns
from tests.test_docs import blocks, run_example

PRINTED = (
    "['text', 'lang', 'summary', 'summary_error']\n['<Summarise: a cat>', <NA>]\n",
    "['<a>', '<b>']\n",
    "[{'length': 3, 'vowels': 1}, {'length': 4, 'vowels': 3}]\n",
)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("at", range(len(PRINTED)))
def test_the_examples_of_frames_run(at: int, tmp_path: Path) -> None:
    code = blocks("docs/dataframes.md", "python")
    assert len(code) == len(PRINTED)
    assert run_example(code[at], tmp_path) == PRINTED[at]


@pytest.mark.parametrize("module", [accessor, columns], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_are_true(module: ModuleType) -> None:
    tested = doctest.testmod(module)
    assert tested.attempted
    assert not tested.failed

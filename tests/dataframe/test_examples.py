"""The examples of ``docs/dataframes.md`` run as scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

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

"""What the chaos suite needs: links, and a run that nothing disturbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from tests.chaos.links import Link, links, missing_for_links
from tests.chaos.story import undisturbed


@pytest.fixture(scope="session")
def undisturbed_output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], pa.Table]:
    """The output of so many rows, from an engine in this process."""
    return lambda rows: undisturbed(tmp_path_factory.mktemp("undisturbed"), rows)


@pytest.fixture
def two_links() -> Iterator[Sequence[Link]]:
    """Two links; skipped where they cannot be made."""
    missing = missing_for_links()
    if missing.startswith("ip and tc") and os.environ.get("CI"):
        pytest.fail(f"CI has to provide {missing}", pytrace=False)
    if missing:
        pytest.skip(f"needs {missing}")
    with links(2) as made:
        yield made


@pytest.fixture
def story_folder(tmp_path: Path) -> Path:
    """Where a story is told."""
    return tmp_path / "story"

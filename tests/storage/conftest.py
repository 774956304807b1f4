"""What the tests of storage share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def pieces_of_few_rows() -> Iterator[None]:
    """Publish chunks in pieces of a few rows, so that small tests go the way of large chunks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("daskinfer.checkpoint.loaded.GROUP_BYTES", 400)
        patched.setattr("daskinfer.checkpoint.loaded._MOST_KEPT", 800)
        patched.setattr("daskinfer.checkpoint.parquetio._PART_GROUP_BYTES", 400)
        yield

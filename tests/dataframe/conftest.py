"""What the tests of frames share: a cluster, and no engine left open between tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from daskinfer.cluster import local_cluster
from daskinfer.config import ModelSpec
from daskinfer.dataframe import release
from daskinfer.testing import echo_spec


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """Two workers with nannies, as the driver makes them."""
    made = local_cluster(2, dashboard_address=":0")
    yield made
    made.close()


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of that cluster, the default for what is computed; engines are closed afterwards."""
    with Client(cluster) as client:
        yield client
        release(client)


@pytest.fixture(autouse=True)
def _engines_closed() -> Iterator[None]:
    """Close this process's engines, so that no test uses another one's."""
    yield
    release()


@pytest.fixture
def light(echo_log: Path) -> ModelSpec:
    """An echo engine in a thread, with a log."""
    return echo_spec(log=echo_log, isolation="thread")


def text_frame(values: list[Any], dtype: str = "string[pyarrow]") -> Any:
    """A frame with one column of text."""
    import pandas as pd

    return pd.DataFrame({"text": pd.Series(values, dtype=dtype)})

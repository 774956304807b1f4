"""A cluster that tests share: models and resources are named by specification, so they do not meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

from daskinfer.cluster import local_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """Two workers with nannies, as the driver makes them."""
    made = local_cluster(2, dashboard_address=":0")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_client_left_open() -> Iterator[None]:
    """Fail a test that leaves a Dask client connected."""
    before = set(Client._instances)
    yield
    left = [c for c in set(Client._instances) - before if c.status not in ("closed", "closing")]
    for client in left:
        client.close()
    assert not left

"""The API server double without anything beside it: for tests of what speaks to an API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.rest import Api


@contextmanager
def bare_cluster(folder: Path) -> Iterator[Cluster]:
    """Nothing happens in it but what is asked."""
    server = ApiServer(token="a-token-of-the-tests")
    server.start()
    try:
        yield Cluster(folder=folder, api=Api(url=server.url, token=server.token), server=server)
    finally:
        server.close()

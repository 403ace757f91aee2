"""A DynamoDB to test on, and a proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

pytest.importorskip("boto3")
pytest.importorskip("aiobotocore")

from tests.support.dynamodb import Place
from tests.support.servers import Proxy


@pytest.fixture(scope="session")
def place(dynamodb) -> Place:
    """A DynamoDB, with a table for the tests of this session."""
    return dynamodb


@pytest.fixture
def proxy(place) -> Iterator[Proxy]:
    """A proxy in front of a DynamoDB that speaks plain HTTP."""
    parts = urlsplit(place.endpoint_url or "")
    if parts.scheme != "http":
        pytest.skip("a proxy can be put in front of plain HTTP alone")
    proxy = Proxy(parts.hostname, parts.port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def behind(place, proxy) -> Place:
    """The same DynamoDB, behind the proxy."""
    return replace(place, endpoint_url=f"http://127.0.0.1:{proxy.port}")

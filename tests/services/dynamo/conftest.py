"""A DynamoDB to test on: the one that `STM_TEST_DYNAMO_URL` names, or DynamoDB Local, started here.

The URL is one of the driver's; the table that it names is not touched. Credentials come from wherever AWS
programs look for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.servers import Proxy

pytest.importorskip("boto3")
pytest.importorskip("aiobotocore")

from tests.support.dynamodb_local import Local, Place, fetched, place_at, with_table


class CountingProxy(Proxy):
    """A proxy that counts the requests that pass."""

    requests = 0

    async def _pass(self, source, target, direction):
        proxy = self

        class Counting:
            async def read(self, size):
                data = await source.read(size)
                proxy.requests += data.lower().count(b"x-amz-target:")
                return data

        await super()._pass(Counting() if direction == "to server" else source, target, direction)


@pytest.fixture(scope="session")
def jar(unobtainable) -> Path:
    """DynamoDB Local."""
    try:
        return fetched()
    except LookupError as reason:
        unobtainable(str(reason))


@pytest.fixture(scope="session")
def place(request, tmp_path_factory) -> Iterator[Place]:
    """A DynamoDB, with a table for the tests of this session."""
    url = os.environ.get("STM_TEST_DYNAMO_URL")
    if url:
        with with_table(place_at(url)) as place:
            yield place
        return
    server = Local(request.getfixturevalue("jar"), tmp_path_factory.mktemp("dynamodb"))
    server.start()
    try:
        with with_table(server.place) as place:
            yield place
    finally:
        server.stop()


@pytest.fixture
def proxy(place) -> Iterator[CountingProxy]:
    """A proxy in front of a DynamoDB that speaks plain HTTP."""
    parts = urlsplit(place.endpoint_url or "")
    if parts.scheme != "http":
        pytest.skip("a proxy can be put in front of plain HTTP alone")
    proxy = CountingProxy(parts.hostname, parts.port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


@pytest.fixture
def behind(place, proxy) -> Place:
    """The same DynamoDB, behind the proxy."""
    return replace(place, endpoint_url=f"http://127.0.0.1:{proxy.port}")

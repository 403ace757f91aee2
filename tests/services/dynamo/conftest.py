"""A DynamoDB to test on, and a proxy in front of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from stm_backends.testing.faults import Proxy

pytest.importorskip("boto3")
pytest.importorskip("aiobotocore")

import boto3

from stm_backends.drivers.contract import Key
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from tests.services.dynamo.support import TINY, noted
from tests.support.dynamodb import PRETENDED, Place


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
    with Proxy(f"{parts.hostname}:{parts.port}") as proxy:
        yield proxy


@pytest.fixture
def behind(place, proxy) -> Place:
    """The same DynamoDB, behind the proxy."""
    return replace(place, endpoint_url=f"http://127.0.0.1:{proxy.port}")


@pytest.fixture
def local(place):
    """A server of 2020, by its URL."""
    if place.credentials != PRETENDED:
        pytest.skip("asks DynamoDB Local")
    return place.endpoint_url


@pytest.fixture
async def old(local):
    """The same, by way of a proxy that notes the requests."""
    async with noted(local) as requests:
        yield requests


@pytest.fixture(scope="session")
def moto():
    """A server that answers as DynamoDB does today, by its URL."""
    from tests.support.moto import moto_server  # noqa: PLC0415 -- takes a second

    with moto_server() as url:
        yield url


@pytest.fixture
def key() -> Key:
    """A key that no other test uses."""
    return Key(f"acme:{uuid.uuid4().hex}:memory", "chat")


@pytest.fixture
def client(place):
    """A client of boto3, past the driver."""
    client = boto3.client("dynamodb", **place.aws)
    yield client
    client.close()


@pytest.fixture
def driver_on(place):
    """What makes a driver on a client, which needs no opening."""

    def make(client: Any, **options: Any) -> DynamoDriver:
        return DynamoDriver(DynamoSettings(table=place.table), client=client, **{"sizes": TINY, **options})

    return make

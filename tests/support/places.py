"""Places of a test's own on any of the datastores: empty at first, and gone afterwards.

Client libraries are imported late, so that one that is not installed fails its own tests alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

SERVERS = {"redis": "redis_url", "postgres": "postgres_url", "mongo": "mongo_url", "dynamo": "dynamodb"}
"""The datastores of many hosts, and the fixtures of `tests/conftest.py` that start them."""

EACH = tuple(SERVERS)
"""For tests on each of them."""


def quick_on(quick: str, every: Sequence[str]) -> list[Any]:
    """Return parameters of which one is in every run, and the others in the full run only."""
    return [pytest.param(one, marks=() if one == quick else pytest.mark.full) for one in every]


on_each_datastore = pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]), indirect=True)
"""Marks a test that takes the URL of a `datastore`; SQLite is one of them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a test may write; it has to be set up, by `create=True` or `--create`.

    `address` is where the server listens that takes writes, and `through(port)` the URL of the same place by
    way of a proxy on that port of the loopback.
    """

    url: str
    address: tuple[str, int] = ("", 0)
    through: Callable[[int], str] = str

    def by_way_of(self, port: int) -> Place:
        """Return the same place, by way of a proxy."""
        return replace(self, url=self.through(port))

    def options(self, **more: object) -> str:
        """Return the URL with more settings in it."""
        return with_query(self.url, **more)


def with_query(url: str, **more: object) -> str:
    """Return a URL with more parameters."""
    added = "&".join(f"{name}={value}" for name, value in more.items())
    return f"{url}{'&' if '?' in url else '?'}{added}"


def without_query(url: str) -> str:
    """Return a URL as client libraries take it that know none of our settings."""
    return url.partition("?")[0]


def in_file(folder: Path) -> Place:
    """Return a place in an SQLite file that is not there yet."""
    return Place(url=f"sqlite:///{folder}/{_fresh()}.db")


def on(datastore: str, server: Any) -> contextlib.AbstractContextManager[Place]:
    """Return a place on a server, which is what the fixture of that name in `SERVERS` yields."""
    return _ON[datastore](server)


def _fresh() -> str:
    return f"stm_test_{uuid.uuid4().hex[:12]}"


def at_port(url: str, port: int) -> str:
    """Return a URL for the same user at a port of the loopback."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}127.0.0.1:{port}").geturl()


@contextlib.contextmanager
def _on_redis(server: str) -> Iterator[Place]:
    import redis  # noqa: PLC0415 -- as above

    parts, prefix = urlsplit(server), f"{_fresh()}:"
    yield Place(
        url=with_query(server, key_prefix=prefix),
        address=(parts.hostname or "localhost", parts.port or 6379),
        through=lambda port: with_query(at_port(server, port), key_prefix=prefix),
    )
    with contextlib.closing(redis.Redis.from_url(server)) as client:
        for key in client.scan_iter(match=f"{prefix}*", count=1000):
            client.delete(key)


@contextlib.contextmanager
def _on_postgres(server: str) -> Iterator[Place]:
    import asyncpg  # noqa: PLC0415

    parts, schema = urlsplit(server), _fresh()

    async def drop() -> None:
        connection = await asyncpg.connect(server)
        try:
            await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        finally:
            await connection.close()

    plain = parts._replace(query="sslmode=disable").geturl()
    yield Place(
        url=with_query(server, schema=schema),
        address=(parts.hostname or "localhost", parts.port or 5432),
        through=lambda port: with_query(at_port(plain, port), schema=schema),
    )
    asyncio.run(drop())


@contextlib.contextmanager
def _on_mongo(server: str) -> Iterator[Place]:
    from tests.support import mongod  # noqa: PLC0415

    database = _fresh()
    with mongod.MongoClient(server) as client:
        client.admin.command("ping")
        yield Place(
            url=mongod.in_database(server, database),
            address=client.primary or client.address,
            through=lambda port: mongod.in_database(server, database, port=port),
        )
        client.drop_database(database)


@contextlib.contextmanager
def _on_dynamo(server: Any) -> Iterator[Place]:
    table = replace(server, table=_fresh())
    parts = urlsplit(server.endpoint_url or "")
    yield Place(
        url=table.url,
        address=(parts.hostname or "", parts.port or 80),
        through=lambda port: replace(table, endpoint_url=f"http://127.0.0.1:{port}").url,
    )
    client = table.client()
    with contextlib.closing(client), contextlib.suppress(client.exceptions.ResourceNotFoundException):
        client.delete_table(TableName=table.table)


_ON: dict[str, Callable[[Any], contextlib.AbstractContextManager[Place]]] = {
    "redis": _on_redis,
    "postgres": _on_postgres,
    "mongo": _on_mongo,
    "dynamo": _on_dynamo,
}

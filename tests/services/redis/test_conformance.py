"""The Redis driver keeps the contract, and so do the memory and the store on top of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
import redis
from redis.asyncio import Redis

from stm_backends.drivers.contract import Key, Record
from stm_backends.testing import (
    Datastore,
    DriverContract,
    GraphContract,
    HandedIn,
    PodsContract,
    StoreContract,
    graphs_on,
    memories_on,
    open_at,
    stores_on,
)
from stm_backends_redis import RedisDriver
from tests.support.contract import deadline_of, reached
from tests.support.places import at_port
from tests.support.sealed import open_sealed

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}


def reads_of(server: redis.Redis) -> Callable[[], int]:
    """Return what counts the requests that a server has read, those of the counting left out."""
    own = itertools.count(1)
    return lambda: int(server.info("stats")["total_reads_processed"]) - next(own)


def place_of(key: Key) -> str:
    return f"stm:{{{key.scope}}}:{key.name}"


class TestRedisDriver(DriverContract):
    @pytest.fixture
    def datastore(self, request, redis_url, proxied_url, proxy):
        server, parts = redis.Redis.from_url(redis_url), urlsplit(redis_url)

        async def damage(key):
            server.rpop(place_of(key))

        async def cut(key):
            server.lset(place_of(key), -1, server.lindex(place_of(key), -1)[:-1])

        async def stored(key):
            place, name = place_of(key), key.name.encode()
            index = place.removesuffix(f":{key.name}")
            listed = server.zrangebylex(index, b"[" + name + b"\0", b"(" + name + b"\1")
            return [*listed, *([place] if server.exists(place) else ())]

        async def peek(key):
            version, measure, body, *tail = server.lrange(place_of(key), 0, -1) or (None, b"", b"")
            body = None if measure.endswith(b"-1") else body
            return version and Record(version.decode(), body, tuple(tail))

        async def handed_in():
            client = Redis.from_url(redis_url)
            return HandedIn(driver=RedisDriver(client=client), is_open=client.ping, close=client.aclose)

        yield Datastore(
            open=functools.partial(open_at, proxied_url, deadline_s=deadline_of(request), **SMALL),
            histories=12,
            damage=damage,
            cut=cut,
            stored=stored,
            peek=peek,
            **reached((parts.hostname, parts.port), functools.partial(at_port, redis_url), **SMALL),
            outage=proxy.cut,
            handed_in=handed_in,
            round_trips=reads_of(server),
            server=f"Redis {server.info('server')['redis_version']}",
        )
        server.close()


@pytest.mark.full
class TestRedisDriverAsUsersHaveIt(DriverContract):
    """The default settings."""

    @pytest.fixture
    def datastore(self, redis_url):
        return Datastore(open=functools.partial(open_at, redis_url), histories=3)


@pytest.mark.full
class TestSealedRedis(DriverContract):
    """Sealing takes no more round trips, and does not hide an outage."""

    @pytest.fixture
    def datastore(self, request, redis_url, proxied_url, proxy):
        server = redis.Redis.from_url(redis_url)
        yield Datastore(
            open=functools.partial(open_sealed, proxied_url, deadline_s=deadline_of(request), **SMALL),
            histories=3,
            outage=proxy.cut,
            round_trips=reads_of(server),
        )
        server.close()


class TestPodsOnRedis(PodsContract):
    @pytest.fixture
    def memories(self, request, proxied_url, proxy):
        deadline_s = deadline_of(request)
        opening = functools.partial(open_at, proxied_url, deadline_s=deadline_s)
        return memories_on(Datastore(open=opening, outage=proxy.cut), deadline_s=deadline_s)


class TestStoresOnRedis(StoreContract):
    @pytest.fixture
    def stores(self, request, proxied_url, proxy):
        opening = functools.partial(open_at, proxied_url, deadline_s=deadline_of(request))
        return stores_on(Datastore(open=opening, outage=proxy.cut))


class TestGraphsOnRedis(GraphContract):
    @pytest.fixture
    def graphs(self, request, proxied_url, proxy):
        opening = functools.partial(open_at, proxied_url, deadline_s=deadline_of(request))
        return graphs_on(Datastore(open=opening, outage=proxy.cut))

"""Servers that cannot be reached or hang, full pools, and clients that are handed in."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from redis.asyncio import Redis

from stm_backends.drivers.contract import KEEP, Key, Record
from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends_redis import RedisDriver
from stm_backends_redis.settings import RedisSettings
from stm_backends_redis.stream import LARGE
from tests.support.contract import opened

KEY = Key("tenant:user:memory", "conversation")


async def test_a_write_that_found_no_connection_was_certainly_not_done(proxied):
    place, proxy = proxied("redis")
    async with opened(place.options(deadline_s=2.0)) as driver:
        # Cut off, and then let through to a server that does not greet.
        async with proxy.stalled():
            for fault in (proxy.cut(), contextlib.nullcontext()):
                async with fault:
                    with pytest.raises(Unavailable):
                        await driver.load(KEY)
                    with pytest.raises(Unavailable, match="no connection"):
                        await driver.append(KEY, b"a", initial_version="initial", ttl=None)
        assert await driver.load(KEY) is None


async def test_a_driver_is_guarded_though_a_concurrent_opening_failed(server, monkeypatch):
    driver, greeted = RedisDriver(RedisSettings.from_url(server.url)), []
    greet = RedisDriver._greet  # noqa: SLF001 -- the first request of an opening

    async def greet_second(self, client):
        greeted.append(client)
        await greet(self, client)
        if len(greeted) == 1:
            raise Unavailable("refused")

    monkeypatch.setattr(RedisDriver, "_greet", greet_second)
    failed, succeeded = await asyncio.gather(driver.open(), driver.open(), return_exceptions=True)
    assert isinstance(failed, Unavailable)
    assert succeeded is None
    with pytest.raises(ConfigurationError, match="belongs to another event loop"):
        await asyncio.to_thread(asyncio.run, driver.load(KEY))
    await driver.close()


async def test_a_pool_makes_no_more_connections_than_it_may(server):
    async with opened(server.url, pool_size=3) as driver:
        # Large entries each need a connection; small ones share one.
        entries = [b"small", b"x" * LARGE] * 20
        writes = (driver.append(KEY, entry, initial_version="initial", ttl=None) for entry in entries)
        assert sorted(await asyncio.gather(*writes)) == list(range(1, 41))
        assert server.ask("INFO", "clients")["connected_clients"] <= 4


async def test_hundreds_of_operations_share_one_connection(server):
    async with opened(server.url, pool_size=3, deadline_s=20.0) as driver:
        server.pause()
        loads = [asyncio.ensure_future(driver.load(KEY)) for _ in range(300)]
        await asyncio.sleep(0.1)
        server.go_on()
        assert await asyncio.gather(*loads) == [None] * 300
        assert server.ask("INFO", "clients")["connected_clients"] == 2, "the driver's and this one"


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_that_decodes_answers_gives_the_driver_bytes(server, protocol):
    blob = bytes(range(256))
    async with Redis(port=server.port, decode_responses=True, protocol=protocol) as client:
        driver = RedisDriver(client=client)
        await driver.append(KEY, blob, initial_version="initial", ttl=None)
        await driver.replace(KEY, blob, version="v2", expect="initial", ttl=KEEP)
        assert await driver.load(KEY) == Record("v2", blob, (blob,))
        assert (await driver.scan(KEY.scope, limit=9)).names == (KEY.name,)
        await driver.close()
        await client.set("theirs", "text")
        assert await client.get("theirs") == "text"

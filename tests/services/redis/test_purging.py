"""Names of expired records in the indexes of Redis: found by purge, and nothing else is touched."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import redis
from redis.asyncio import Redis

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers.contract import Key
from stm_backends.drivers.purges import purges_of
from stm_backends.errors import Denied
from stm_backends.testing import open_at
from stm_backends_redis import RedisDriver
from tests.services.redis.conftest import PERMISSIONS, README, login

SCOPE = "tenant:user:memory"


def stale(port: int, *, names: int, scope: str = SCOPE, prefix: str = "stm:", live: int = 0) -> str:
    """Store an index that does not expire, with names that have expired and some that have not."""
    index = f"{prefix}{{{scope}}}"
    later = int((time.time() + 600) * 1000)
    entries = {f"{number:04}\x00{number + 1}": 0 for number in range(names)}
    entries |= {f"live{number:04}\x00{later}": 0 for number in range(live)}
    with contextlib.closing(redis.Redis(port=port)) as client:
        client.zadd(index, entries)
    return index


async def test_an_index_without_a_live_record_is_removed(server, driver):
    index = stale(server.port, names=450)
    assert purges_of(driver) is driver
    assert await driver.expired() == 450
    assert server.ask("ZCARD", index) == 450
    assert [await driver.purge(limit) for limit in (100, 300, 100)] == [100, 300, 50]
    assert server.ask("EXISTS", index) == 0
    assert await driver.purge(100) == 0


async def test_an_index_expires_again_once_only_expiring_records_are_left(server, driver):
    index = stale(server.port, names=30, live=20)
    assert server.ask("PTTL", index) == -1
    assert await driver.purge(1_000) == 30
    assert server.ask("ZCARD", index) == 20
    assert 590_000 < server.ask("PTTL", index) <= 601_000


async def test_live_records_and_other_keys_are_not_touched(server):
    prefix = "app*[x]?:"
    async with open_backend(server.url, key_prefix=prefix) as backend:
        driver = backend.driver.inner
        await driver.append(Key(SCOPE, "lasting"), b"a", initial_version="v", ttl=None)
        await driver.append(Key(SCOPE, "a}b"), b"a", initial_version="v", ttl=600)
        # The prefix of another application, which matches if it is taken as a pattern.
        other = stale(server.port, names=5, prefix="app1x2:")
        mine = stale(server.port, names=5, prefix=prefix, scope="other:user:memory")
        with contextlib.closing(redis.Redis(port=server.port)) as client:
            client.zadd(f"{prefix}{{of another kind", {"a": 1})
            before = {key: client.dump(key) for key in client.scan_iter() if key != mine.encode()}
            assert (await backend.sessions.purge(dry_run=True)).expired == 5
            assert client.zcard(mine) == 5
            assert (await backend.sessions.purge()).expired == 5
            assert {key: client.dump(key) for key in client.scan_iter()} == before
            assert client.zcard(other) == 5


async def test_a_foreign_member_at_the_end_of_a_page_is_passed_over(server, driver):
    index = stale(server.port, names=450)
    # The 200th of the index.
    server.ask("ZADD", index, 0, "0198x")
    assert await driver.expired() == 450
    assert await driver.purge(1_000) == 450
    assert server.ask("ZCARD", index) == 1


async def test_purge_needs_scan_and_works_for_a_tenant_without_it(server):
    server.ask("ACL", "SETUSER", "app", "on", ">p", "~stm:*", *PERMISSIONS)
    index = stale(server.port, names=5, scope="acme:u1:memory")
    async with open_backend(server.url, **login("app")) as backend:
        memory = backend.memory(MemoryKey("acme", "u1", "s"), ShortTermMemoryConfig("truncation"))
        await memory.add_turn(ConversationTurn("hello", "hi"))
        with pytest.raises(Denied, match="'scan'"):
            await backend.sessions.purge()
        assert (await backend.sessions.purge("acme")).expired == 0
        assert server.ask("ZCARD", index) == 1, "listing the tenant has removed the names"
    (purge,) = re.findall(r"`(\+\w+)` for `stm-backends purge` without a tenant", README)
    server.ask("ACL", "SETUSER", "app", purge)
    stale(server.port, names=5)
    async with open_backend(server.url, **login("app")) as backend:
        assert (await backend.sessions.purge()).expired == 5


@pytest.mark.parametrize("decoding", [False, True])
async def test_a_client_of_the_callers_is_used_for_a_purge(server, decoding):
    stale(server.port, names=250)
    client = Redis(port=server.port, decode_responses=decoding, max_connections=2)
    driver = RedisDriver(client=client)
    assert await driver.expired() == 250
    assert await driver.purge(1_000) == 250
    await client.aclose()


async def test_a_closed_driver_cannot_purge(server):
    driver = await open_at(server.url)
    await driver.close()
    with pytest.raises(Exception, match="not open"):
        await driver.purge(1)

"""Servers that die, hang, forget and fall silent; clients that are cancelled, and that are lent to us."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time

import pytest
import redis
from redis.asyncio import Redis

import stm_backends
from stm_backends.drivers.contract import ANY, KEEP, Key, Record, new_version
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing import open_at
from stm_backends.testing.workbench.processes import Task, Worker, ledger
from stm_backends_redis import RedisDriver, statements
from tests.support.servers import Proxy

KEY = Key("tenant:user:memory", "conversation")
INDEX = f"stm:{{{KEY.scope}}}"
PLACE = f"{INDEX}:{KEY.name}"


@pytest.fixture
def through_proxy(start):
    """A server of the test's own, and a way to it that can be cut."""
    server = start()
    proxy = Proxy("127.0.0.1", server.port)
    proxy.start()
    yield server, proxy
    proxy.stop()


async def test_a_write_that_found_no_connection_was_not_done_for_certain(through_proxy):
    server, proxy = through_proxy
    driver = await open_at(f"redis://127.0.0.1:{proxy.port}", deadline_s=2.0)
    # Cut off, and then let through to a server that does not greet.
    for fault in (proxy.cut, proxy.silence):
        fault()
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="no connection"):
            await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    proxy.restore()
    assert await driver.load(KEY) is None
    server.stop()
    with pytest.raises(Unavailable):
        await open_at(server.url)
    await driver.close()


async def test_more_operations_than_connections_wait_for_their_turn(start):
    server = start()
    driver = await open_at(server.url, pool_size=3)
    writes = (driver.append(KEY, b"%d" % n, initial_version="initial", ttl=None) for n in range(100))
    assert sorted(await asyncio.gather(*writes)) == list(range(1, 101))
    assert server.ask("INFO", "clients")["connected_clients"] <= 4
    server.pause()
    late = [asyncio.ensure_future(driver.load(KEY)) for _ in range(3)]
    await asyncio.sleep(0.1)
    waiting = asyncio.ensure_future(driver.append(KEY, b"", initial_version="initial", ttl=None))
    with pytest.raises(Unavailable, match="pool_size"):
        await waiting
    server.go_on()
    await asyncio.gather(*late)
    await driver.close()


async def test_more_than_a_hundred_operations_are_under_way_where_so_many_are_allowed(start):
    server = start()
    driver = await open_at(server.url, pool_size=120, deadline_s=20.0)
    server.pause()
    loads = [asyncio.ensure_future(driver.load(KEY)) for _ in range(120)]
    await asyncio.sleep(0.1)
    server.go_on()
    assert await asyncio.gather(*loads) == [None] * 120
    assert server.ask("INFO", "clients")["connected_clients"] > 120
    await driver.close()


async def test_a_server_that_has_forgotten_the_scripts_is_sent_them_again(start):
    server = start()
    driver = await open_at(server.url)

    def calls() -> dict[str, int]:
        stats = server.ask("INFO", "commandstats")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")}

    server.ask("CONFIG", "RESETSTAT")
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    assert calls() == {"eval": 1, "evalsha": 1}, "the first time costs a second round trip"
    for _ in range(3):
        await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    assert calls() == {"eval": 1, "evalsha": 4}
    server.ask("SCRIPT", "FLUSH")
    assert await driver.append(KEY, b"a", initial_version="initial", ttl=None) == 5
    assert await driver.append(KEY, b"a", initial_version="initial", ttl=None) == 6
    assert calls() == {"eval": 2, "evalsha": 6}
    await driver.close()


async def test_no_command_looks_through_the_keyspace(start):
    server = start()
    async with stm_backends.open_backend(server.url) as backend:
        memory = backend.memory(stm_backends.MemoryKey("t", "u", "s"))
        await memory.add_turn(stm_backends.ConversationTurn("hello", "hi"))
        await memory.get_llm_context()
        await backend.sessions.erase_user("t", "u")
    used = {name.removeprefix("cmdstat_") for name in server.ask("INFO", "commandstats")}
    assert "evalsha" in used
    assert not used & {"keys", "scan", "flushdb", "flushall", "randomkey"}
    assert server.ask("DBSIZE") <= 1


async def test_a_user_who_may_use_our_keys_alone_needs_no_more(start):
    server = start()
    await (await open_at(server.url, key_prefix="app:stm:")).close()
    driver = await open_at(server.url, key_prefix="app:stm:")
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    assert sorted(server.ask("KEYS", "*")) == [f"app:stm:{{{KEY.scope}}}".encode(), f"app:{PLACE}".encode()]
    await driver.close()


@pytest.mark.parametrize("drop", [0, 1, 99, 100, 101, 150, 199, 200])
async def test_a_fold_counts_what_stays_whichever_side_of_the_cut_it_looks_at(start, drop):
    server = start()
    driver = await open_at(server.url)
    entries = tuple(b"x" * (7 * n % 5_000) for n in range(200))
    for entry in entries:
        await driver.append(KEY, entry, initial_version="initial", ttl=None)
    assert await driver.replace(KEY, b"body", version="v", expect="initial", drop=drop, ttl=KEEP)
    # Loading compares what there is with what was counted.
    assert await driver.load(KEY) == Record("v", b"body", entries[drop:])
    left = entries[drop:]
    assert server.ask("LINDEX", PLACE, 1) == b"%d %d 4" % (len(left), sum(map(len, left)))
    await driver.close()


# Expiry


async def test_an_index_forgets_those_that_have_expired_though_nobody_lists_it(start):
    server = start()
    driver = await open_at(server.url)
    await driver.append(Key(KEY.scope, "lasting"), b"", initial_version="initial", ttl=None)
    for number in range(100):
        await driver.append(Key(KEY.scope, f"a{number}"), b"", initial_version="initial", ttl=0.001)
    assert server.ask("ZCARD", INDEX) < 40, "most that expired were removed by the births after them"
    await driver.append(Key(KEY.scope, "b"), b"", initial_version="initial", ttl=600)
    assert (await driver.scan(KEY.scope, limit=1000)).names == ("b", "lasting")
    assert server.ask("ZCARD", INDEX) == 2, "what a listing meets it removes"
    await driver.close()


async def test_a_listing_removes_no_more_than_a_page_and_shows_none_of_it(start):
    server = start()
    driver = await open_at(server.url)
    stale = {f"{number:03}\x00{number + 1}": 0 for number in range(50)}
    with contextlib.closing(redis.Redis(port=server.port)) as client:
        client.zadd(INDEX, stale)
    page = await driver.scan(KEY.scope, limit=10)
    assert page.names == ()
    assert page.after is not None
    assert server.ask("ZCARD", INDEX) == 39
    await driver.close()


async def test_an_index_lasts_as_long_as_the_last_of_its_records(start):
    server = start()
    driver = await open_at(server.url)

    def life() -> int:
        return server.ask("PTTL", INDEX)

    await driver.append(KEY, b"", initial_version="initial", ttl=100)
    assert 99_000 < life() <= 101_000
    await driver.append(Key(KEY.scope, "shorter"), b"", initial_version="initial", ttl=10)
    assert 99_000 < life() <= 101_000
    await driver.append(Key(KEY.scope, "shorter"), b"", initial_version="initial", ttl=200)
    assert 199_000 < life() <= 201_000
    await driver.append(Key(KEY.scope, "lasting"), b"", initial_version="initial", ttl=None)
    await driver.append(KEY, b"", initial_version="initial", ttl=1)
    assert life() == -1
    await driver.close()


@pytest.mark.parametrize("number", [3, 1_500])
@pytest.mark.parametrize("last", ["rewritten", "erased"])
async def test_an_index_expires_again_once_none_of_its_records_is_for_ever(start, number, last):
    server = start()
    driver = await open_at(server.url)
    names = [f"{n:04}" for n in range(number)]
    for name in names[-2:]:
        await driver.append(Key(KEY.scope, name), b"", initial_version="initial", ttl=None)
    for name in names[:-2]:
        await driver.append(Key(KEY.scope, name), b"", initial_version="initial", ttl=300)
    await driver.append(Key(KEY.scope, names[-2]), b"", initial_version="initial", ttl=200)
    assert server.ask("PTTL", INDEX) == -1, "one is left that is for ever"
    lasting = Key(KEY.scope, names[-1])
    if last == "erased":
        await driver.delete(lasting)
    else:
        assert await driver.replace(lasting, b"", version="v", expect=ANY, ttl=100)
    if number > statements.INDEX_LOOKED_THROUGH:
        assert server.ask("PTTL", INDEX) == -1, "a write looks through no more than so many"
        await driver.scan(KEY.scope, limit=100)
        assert server.ask("PTTL", INDEX) == -1
    listed = (await driver.scan(KEY.scope, limit=10_000)).names
    assert listed == tuple(names[: number - (last == "erased")])
    assert 200_000 < server.ask("PTTL", INDEX) <= 301_000, "as long as the last of its records, and no longer"
    await driver.close()


async def test_an_index_that_holds_a_record_for_ever_is_not_given_an_end_by_a_listing(start):
    server = start()
    driver = await open_at(server.url)
    await driver.append(KEY, b"", initial_version="initial", ttl=None)
    await driver.append(Key(KEY.scope, "other"), b"", initial_version="initial", ttl=100)
    assert (await driver.scan(KEY.scope, limit=10)).names == (KEY.name, "other")
    assert server.ask("PTTL", INDEX) == -1
    await driver.close()


async def test_each_record_has_one_entry_in_the_index_however_its_life_changes(start):
    server = start()
    driver = await open_at(server.url)
    for ttl in (None, 50, 60, None, 70):
        await driver.append(KEY, b"a", initial_version="initial", ttl=ttl)
        assert server.ask("ZCARD", INDEX) == 1
    await driver.replace(KEY, b"", version="v", expect=ANY, ttl=KEEP)
    assert server.ask("ZCARD", INDEX) == 1
    assert 0 < server.ask("PTTL", PLACE) <= 70_000
    assert await driver.delete(KEY)
    assert server.ask("DBSIZE") == 0
    await driver.close()


async def test_an_index_that_was_evicted_is_mended_by_the_next_write(start):
    server = start()
    driver = await open_at(server.url)
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    server.ask("DEL", INDEX)
    await driver.append(KEY, b"b", initial_version="initial", ttl=None)
    assert (await driver.scan(KEY.scope, limit=9)).names == (KEY.name,)
    await driver.close()


# Clients of the user's own


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_that_decodes_its_owners_answers_is_given_bytes_all_the_same(start, protocol):
    server = start()
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


# Ten at once


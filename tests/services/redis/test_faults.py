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


async def test_what_was_acknowledged_survives_the_death_of_a_server_that_always_syncs(start):
    server = start("--save", "", "--appendonly", "yes", "--appendfsync", "always")
    driver = await open_at(server.url)
    acknowledged: dict[str, list[str]] = {}
    unsure: list[str] = []
    dying = False

    async def write(label: str) -> None:
        mine = acknowledged.setdefault(label, [])
        for number in range(100_000):
            entry = f"{label}:{number}"
            try:
                await driver.append(KEY, entry.encode(), initial_version=new_version(), ttl=600)
            except StorageError:
                assert dying
                unsure.append(entry)
                return
            mine.append(entry)

    async with asyncio.TaskGroup() as tasks:
        for label in ("a", "b", "c"):
            tasks.create_task(write(label))
        await asyncio.sleep(0.5)
        dying = True
        server.kill()
    server.start()
    entries = await ledger(driver, KEY)
    assert len(entries) == len(set(entries))
    for label, mine in acknowledged.items():
        assert mine
        there = [entry for entry in entries if entry.startswith(f"{label}:")]
        assert there[: len(mine)] == mine
        assert set(there[len(mine) :]) <= set(unsure)
    assert (await driver.scan(KEY.scope, limit=9)).names == (KEY.name,)
    assert 0 < server.ask("PTTL", PLACE) <= 600_000
    await driver.close()


async def warm(driver) -> None:
    """Let the server know the scripts, so that the answer which is lost is that of the write itself."""
    other = Key("tenant:user:other", "conversation")
    await driver.append(other, b"", initial_version="initial", ttl=None)
    await driver.replace(other, b"", version="v", expect=ANY, ttl=None)


async def test_a_write_whose_answer_is_lost_is_unknown_and_sending_it_again_is_harmless(through_proxy):
    server, proxy = through_proxy
    driver = await open_at(f"redis://127.0.0.1:{proxy.port}", deadline_s=0.7)
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    await warm(driver)
    proxy.silence("to client")
    with pytest.raises(OutcomeUnknown, match="deadline"):
        await driver.replace(KEY, b"folded", version="v2", expect="initial", drop=1, ttl=KEEP)
    proxy.cut()
    proxy.restore()
    assert server.ask("LRANGE", PLACE, 0, -1)[0] == b"v2", "it was done all the same"
    assert await driver.replace(KEY, b"folded", version="v2", expect="initial", drop=1, ttl=KEEP) is True
    assert await driver.load(KEY) == Record("v2", b"folded", ())
    await driver.close()


async def test_a_connection_that_breaks_before_the_answer_leaves_a_write_unknown(through_proxy):
    _, proxy = through_proxy
    driver = await open_at(f"redis://127.0.0.1:{proxy.port}")
    await warm(driver)
    proxy.silence("to client")
    write = asyncio.ensure_future(driver.append(KEY, b"a", initial_version="initial", ttl=None))
    await asyncio.sleep(0.1)
    proxy.cut()
    with pytest.raises(OutcomeUnknown, match="connection was lost"):
        await write
    proxy.restore()
    assert (await driver.load(KEY)).tail == (b"a",)
    await driver.close()


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


async def test_a_server_that_hangs_ends_every_operation_at_its_deadline(start):
    server = start()
    driver = await open_at(server.url, deadline_s=0.5)
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    server.pause()
    before = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        await driver.append(KEY, b"b", initial_version="initial", ttl=None)
    with pytest.raises(Unavailable):
        await driver.load(KEY)
    assert time.monotonic() - before < 6
    server.go_on()
    assert b"a" in (await driver.load(KEY)).tail
    await driver.close()


async def test_cancelled_operations_leave_no_answer_for_the_next_one_to_take(start):
    driver = await open_at(start().url, pool_size=2)
    keys = [Key(KEY.scope, f"{n}") for n in range(4)]
    for key in keys:
        await driver.append(key, key.name.encode(), initial_version=key.name, ttl=None)
    for steps in range(40):
        loads = [asyncio.ensure_future(driver.load(key)) for key in keys]
        for _ in range(steps):
            await asyncio.sleep(0)
        loads[steps % 4].cancel()
        for key, load in zip(keys, loads, strict=True):
            with contextlib.suppress(asyncio.CancelledError):
                assert await load == Record(key.name, None, (key.name.encode(),))
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


async def test_the_named_classes_work_on_a_client_of_ones_own_without_being_opened(start):
    server = start()
    from stm_backends_redis import RedisShortTermMemory, RedisStateStore  # noqa: PLC0415

    async with Redis(port=server.port) as client:
        config = stm_backends.ShortTermMemoryConfig(strategy="truncation")
        key = stm_backends.MemoryKey("t", "u", "s")
        memory = RedisShortTermMemory(client, config, key=key)
        await memory.add_turn(stm_backends.ConversationTurn("hello", "hi"))
        again = RedisShortTermMemory(client, config, key=key, deadline_s=1.0)
        assert [turn.user_message for turn in await again.turns()] == ["hello"]
        store = RedisStateStore(client)
        await store.save_memory_state("some key", {"a": 1})
        assert await store.load_memory_state("some key") == {"a": 1}
        await memory.close()
        await again.close()
        assert await client.ping()


# Ten at once


async def test_ten_processes_that_open_at_once_with_create_all_write(start):
    server = start()
    opening = functools.partial(open_at, server.url, create=True)
    tasks = [Task(open=opening, key=KEY, label=f"w{n}", count=3) for n in range(10)]
    workers = [await Worker.start(task) for task in tasks]
    await asyncio.gather(*(worker.finish() for worker in workers))
    driver = await open_at(server.url)
    assert len(await ledger(driver, KEY)) == 30
    await driver.close()

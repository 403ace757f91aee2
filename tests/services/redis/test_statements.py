"""What is sent to Redis, what it costs there, and what becomes of the index of a scope."""

from __future__ import annotations

import contextlib

import pytest
import redis

import stm_backends
from stm_backends.drivers.contract import ANY, KEEP, Key, Record
from stm_backends.errors import Corrupt
from stm_backends.testing import open_at
from stm_backends_redis import slices, statements

KEY = Key("tenant:user:memory", "conversation")
INDEX = f"stm:{{{KEY.scope}}}"
PLACE = f"{INDEX}:{KEY.name}"


async def test_a_server_that_forgot_the_scripts_receives_them_again(server, driver):
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


async def test_every_key_begins_with_the_prefix(start):
    server = start()
    await (await open_at(server.url, key_prefix="app:stm:")).close()
    driver = await open_at(server.url, key_prefix="app:stm:")
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    assert sorted(server.ask("KEYS", "*")) == [f"app:stm:{{{KEY.scope}}}".encode(), f"app:{PLACE}".encode()]
    await driver.close()


@pytest.mark.parametrize("drop", [0, 1, 99, 100, 101, 150, 199, 200])
async def test_a_fold_counts_the_entries_and_bytes_that_stay(server, driver, drop):
    entries = tuple(b"x" * (7 * n % 5_000) for n in range(200))
    for entry in entries:
        await driver.append(KEY, entry, initial_version="initial", ttl=None)
    assert await driver.replace(KEY, b"body", version="v", expect="initial", drop=drop, ttl=KEEP)
    # Loading compares what there is with what was counted.
    assert await driver.load(KEY) == Record("v", b"body", entries[drop:])
    left = entries[drop:]
    assert server.ask("LINDEX", PLACE, 1) == b"%d %d 4" % (len(left), sum(map(len, left)))


@pytest.mark.parametrize("count", [1, 99, 150, 200])
async def test_a_rewrite_counts_the_new_bytes_and_not_the_old_ones(server, driver, count):
    entries = tuple(b"x" * (7 * n % 5_000) for n in range(200))
    for entry in entries:
        await driver.append(KEY, entry, initial_version="initial", ttl=None)
    rewrite = tuple(b"y" * (11 * n % 6_000) for n in range(count))
    assert await driver.replace(KEY, b"body", version="v", expect="initial", rewrite=rewrite, ttl=60)
    assert await driver.load(KEY) == Record("v", b"body", (*rewrite, *entries[count:]))
    size = sum(map(len, rewrite)) + sum(map(len, entries[count:]))
    assert server.ask("LINDEX", PLACE, 1) == b"200 %d 4" % size
    assert 0 < server.ask("PTTL", PLACE) <= 60_000


async def test_newest_entries_come_at_once_or_in_slices_by_their_own_size(server, driver):
    large, small = bytes(slices.LARGE // 4), b"a"
    for tail in ([large] * 9 + [small] * 9, [small] * 99 + [large] * 9, [large] * 9, [small] * 9):
        for entry in tail:
            await driver.append(KEY, entry, initial_version="v", ttl=None)
        for last in (0, 1, 9, len(tail) - 1, len(tail), len(tail) + 1):
            skipped = max(0, len(tail) - last)
            expected = Record("v", None, tuple(tail[skipped:]), skipped)
            for _ in range(2):
                server.ask("CONFIG", "RESETSTAT")
                assert await driver.load(KEY, last=last) == expected
            commands = server.ask("INFO", "commandstats")
            is_large = sum(map(len, expected.tail)) > slices.LARGE
            assert ("cmdstat_evalsha" not in commands) == is_large, (len(tail), last)
        await driver.delete(KEY)


async def test_writes_remove_expired_names_from_the_index(server, driver):
    # Names that expired long ago: how many expire meanwhile depends on how fast the machine is.
    stale = {f"{number:03}\x00{number + 1}": 0 for number in range(100)}
    with contextlib.closing(redis.Redis(port=server.port)) as client:
        client.zadd(INDEX, stale)
    lasting = [f"a{number:03}" for number in range(100)]
    for name in lasting:
        await driver.append(Key(KEY.scope, name), b"", initial_version="initial", ttl=None)
    assert server.ask("ZCARD", INDEX) < 100 + 10, "most that expired were removed by the births after them"
    assert (await driver.scan(KEY.scope, limit=1000)).names == tuple(lasting)
    assert server.ask("ZCARD", INDEX) == 100, "what a listing meets it removes"


async def test_a_scan_removes_at_most_a_page_of_expired_names_and_shows_none(server, driver):
    stale = {f"{number:03}\x00{number + 1}": 0 for number in range(50)}
    with contextlib.closing(redis.Redis(port=server.port)) as client:
        client.zadd(INDEX, stale)
    page = await driver.scan(KEY.scope, limit=10)
    assert page.names == ()
    assert page.after is not None
    assert server.ask("ZCARD", INDEX) == 39


async def test_an_index_lasts_as_long_as_the_last_of_its_records(server, driver):
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


@pytest.mark.parametrize("number", [3, 1_500])
@pytest.mark.parametrize("last", ["rewritten", "erased"])
async def test_an_index_expires_again_once_all_of_its_records_expire(server, driver, number, last):
    names = [f"{n:04}" for n in range(number)]
    for name in names[-2:]:
        await driver.append(Key(KEY.scope, name), b"", initial_version="initial", ttl=None)
    for name in names[:-2]:
        await driver.append(Key(KEY.scope, name), b"", initial_version="initial", ttl=300)
    await driver.append(Key(KEY.scope, names[-2]), b"", initial_version="initial", ttl=200)
    assert server.ask("PTTL", INDEX) == -1, "one record is left that does not expire"
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


async def test_a_scan_gives_no_expiry_to_an_index_with_a_lasting_record(server, driver):
    await driver.append(KEY, b"", initial_version="initial", ttl=None)
    await driver.append(Key(KEY.scope, "other"), b"", initial_version="initial", ttl=100)
    assert (await driver.scan(KEY.scope, limit=10)).names == (KEY.name, "other")
    assert server.ask("PTTL", INDEX) == -1


async def test_a_record_has_one_index_entry_however_its_expiry_changes(server, driver):
    for ttl in (None, 50, 60, None, 70):
        await driver.append(KEY, b"a", initial_version="initial", ttl=ttl)
        assert server.ask("ZCARD", INDEX) == 1
    await driver.replace(KEY, b"", version="v", expect=ANY, ttl=KEEP)
    assert server.ask("ZCARD", INDEX) == 1
    assert 0 < server.ask("PTTL", PLACE) <= 70_000
    assert await driver.delete(KEY)
    assert server.ask("DBSIZE") == 0


async def test_the_next_write_repairs_an_index_that_was_evicted(server, driver):
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    server.ask("DEL", INDEX)
    await driver.append(KEY, b"b", initial_version="initial", ttl=None)
    assert (await driver.scan(KEY.scope, limit=9)).names == (KEY.name,)


@pytest.mark.parametrize("member", [b"without nul", b"\xff\xfe\0", b"\0\xff", b"name\0not a number"])
async def test_a_member_of_the_index_of_another_kind_is_corrupt(server, driver, member):
    with contextlib.closing(redis.Redis(port=server.port)) as client:
        client.zadd(INDEX, {member: 0})
    with pytest.raises(Corrupt):
        await driver.scan(KEY.scope, limit=10)

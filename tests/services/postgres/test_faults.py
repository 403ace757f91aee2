"""A server that is killed, hangs, loses an answer or ends connections; and callers that are cancelled."""

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

import asyncpg
import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing import open_at
from stm_backends.testing.faults import Proxy
from stm_backends_postgres import PostgresDriver, PostgresSettings
from stm_backends_postgres.client import connect
from tests.services.postgres.support import started, together, until, waiting

KEY = Key("scope", "name")

TERMINATE = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND query LIKE $1"""


@pytest.fixture
def line(url):
    """A proxy of the test's own before the shared server, and the URL through it."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    with Proxy(f"{parts.hostname}:{parts.port or 5432}") as proxy:
        yield proxy, parts._replace(netloc=f"{user}@{proxy.address}", query="sslmode=disable").geturl()


async def test_a_write_that_never_left_is_not_done(line, schema, driver):
    proxy, url = line
    far = await open_at(url, schema=schema, deadline_s=1)
    await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    async with proxy.cut():
        with pytest.raises(StorageError):
            await far.append(KEY, b"b", initial_version="initial", ttl=None)
        with pytest.raises(Unavailable):
            await far.append(KEY, b"b", initial_version="initial", ttl=None)
    assert (await driver.load(KEY)).tail == (b"a",)
    await far.close()


async def test_appends_whose_shared_answer_is_lost_are_unknown_and_done_once(line, schema, driver):
    proxy, url = line
    far = await open_at(url, schema=schema)
    keys = [Key("scope", f"{number}") for number in range(8)]
    lost = proxy.lose_answer(b"lost 3")
    appends = [
        far.append(key, f"lost {key.name}".encode(), initial_version="initial", ttl=None) for key in keys
    ]
    answers = await together(far, *appends)
    assert lost.happened
    assert {type(answer) for answer in answers} == {OutcomeUnknown}
    assert [(await driver.load(key)).tail for key in keys] == [(f"lost {key.name}".encode(),) for key in keys]
    assert await far.append(keys[0], b"next", initial_version="initial", ttl=None) == 2
    await far.close()


async def test_turns_whose_shared_answer_is_lost_are_added_once(line, schema, driver):
    (proxy, url), config = line, ShortTermMemoryConfig(strategy="truncation")
    async with open_backend(url, schema=schema) as backend:
        memories = {
            f"question {number}": backend.memory(MemoryKey("acme", "u1", f"{number}"), config)
            for number in range(9)
        }
        await asyncio.gather(*(one.add_turn(ConversationTurn("before", "")) for one in memories.values()))
        lost = proxy.lose_answer(b"question 5")
        for _ in range(2):
            asked = (one.add_turn(ConversationTurn(text, ""), turn_id="1") for text, one in memories.items())
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                assert answer is None or isinstance(answer, OutcomeUnknown)
        assert lost.happened
        for text, one in memories.items():
            assert [turn.user_message for turn in await one.turns()] == ["before", text]


async def test_appends_of_a_statement_that_an_administrator_ends_are_done_once(url, schema, driver, admin):
    ours = await open_at(url, schema=schema, deadline_s=60)
    keys = [Key("scope", f"{number}") for number in range(4)]
    async with admin.transaction():
        await admin.execute(f"LOCK TABLE {schema}.stm_entry")
        appends = [ours.append(key, b"a", initial_version="initial", ttl=None) for key in keys]
        tasks = await started(ours, *appends)
        await until(lambda: _are_waiting(admin, schema, 2))
        assert await admin.fetchval(TERMINATE, f"%unnest%{schema}%") == 1
    lone, *answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert lone == 1
    for key, answer in zip(keys, answers, strict=True):
        assert answer == 1 or isinstance(answer, (Unavailable, OutcomeUnknown))
        record = await driver.load(key)
        done = () if record is None else record.tail
        assert done == (b"a",) or (answer != 1 and not done)
        again = await _until_answered(
            lambda key=key: ours.append(key, b"b", initial_version="initial", ttl=None)
        )
        assert again == len(done) + 1
    await ours.close()


async def test_a_full_pool_that_was_handed_in_is_unavailable(url, schema, driver):
    pool = await asyncpg.create_pool(url, min_size=1, max_size=1)
    small = open_backend("postgres", client=pool, schema=schema, deadline_s=0.4).driver
    async with pool.acquire():
        with pytest.raises(Unavailable, match="no connection was free"):
            await small.append(KEY, b"a", initial_version="initial", ttl=None)
    assert await small.append(KEY, b"b", initial_version="initial", ttl=None) == 1
    await pool.close()


async def test_connections_that_an_administrator_ends_are_made_again(url, schema, driver, admin):
    async with admin.transaction():
        await admin.execute(f"LOCK TABLE {schema}.stm_record")
        tasks = [
            asyncio.ensure_future(driver.delete(key))
            for key in (Key("scope", f"name {number}") for number in range(3))
        ]
        await until(lambda: _are_waiting(admin, schema, len(tasks)))
    await asyncio.gather(*tasks)
    assert await admin.fetchval(TERMINATE, f"%{schema}%") == len(tasks)
    assert await _until_answered(lambda: driver.append(KEY, b"a", initial_version="initial", ttl=None)) == 1


async def test_a_cancelled_caller_leaves_the_only_connection_usable(url, schema, driver, admin):
    small = await open_at(url, schema=schema, pool_size=1)
    async with admin.transaction():
        await admin.execute(f"LOCK TABLE {schema}.stm_record")
        task = asyncio.ensure_future(small.append(KEY, b"a", initial_version="initial", ttl=None))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - start < small.traits.deadline
    assert await small.append(KEY, b"b", initial_version="initial", ttl=None) == 1
    await small.close()


async def test_the_server_gives_up_a_statement_whose_caller_did(url, schema, driver, admin):
    async with admin.transaction():
        await admin.execute(f"LOCK TABLE {schema}.stm_record")
        task = asyncio.ensure_future(driver.append(KEY, b"a", initial_version="initial", ttl=None))
        await asyncio.sleep(0.2)
        task.cancel()
        async with asyncio.timeout(10):
            while await waiting(admin, schema):  # noqa: ASYNC110 -- the event is the server's
                await asyncio.sleep(0.01)
    assert await driver.load(KEY) is None


async def test_the_server_gives_up_a_shared_statement_with_its_last_caller(url, schema, driver, admin):
    ours = await open_at(url, schema=schema, deadline_s=60)
    keys = [Key("scope", f"{number}") for number in range(3)]
    async with admin.transaction():
        await admin.execute(f"LOCK TABLE {schema}.stm_entry")
        appends = [ours.append(key, b"a", initial_version="initial", ttl=None) for key in keys]
        lone, *shared = await started(ours, *appends)
        await until(lambda: _are_waiting(admin, schema, 2))
        for task in shared[1:]:
            task.cancel()
        await asyncio.sleep(0.2)
        assert await waiting(admin, schema) == 2, "one caller is left"
        shared[0].cancel()
        await until(lambda: _are_waiting(admin, schema, 1))
    assert await lone == 1
    assert [await driver.load(key) for key in keys] == [None] * 3
    await ours.close()


@pytest.mark.parametrize("setting", ["on", "off"])
async def test_durability_is_what_the_setting_says(url, setting):
    settings = PostgresSettings.from_url(url, synchronous_commit=setting)
    connection = await connect(settings)
    assert await connection.fetch("SHOW synchronous_commit") == [(setting,)]
    await connection.close()
    assert ("may lose the last moments" in PostgresDriver(settings).traits.durability) is (setting == "off")


async def test_of_a_pool_handed_in_durability_is_the_owners_affair(url):
    pool = await asyncpg.create_pool(url, min_size=0)
    assert "as set by `synchronous_commit`" in open_backend("postgres", client=pool).traits.durability
    await pool.close()


async def _are_waiting(admin, schema, count):
    return await waiting(admin, schema) == count


async def _until_answered(work):
    """Return the answer of something that a broken connection may fail a few times."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(StorageError):
                return await work()
            await asyncio.sleep(0.05)

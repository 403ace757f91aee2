"""Servers that cannot be reached or hang, full pools, and clients that are handed in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import weakref

import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, RedisError

from stm_backends.drivers.contract import KEEP, Key, Record
from stm_backends.errors import ConfigurationError, OutcomeUnknown, Unavailable
from stm_backends.testing.faults import Proxy
from stm_backends_redis import RedisDriver
from stm_backends_redis.errors import NotConnected
from stm_backends_redis.servers import Capacity
from stm_backends_redis.settings import RedisSettings
from stm_backends_redis.stream import LARGE
from tests.mutants.redis import FailsWithoutRoom, SendsThroughTheClient
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


CLIENTS = {
    "sharing": lambda port: Redis(port=port),
    "too small to share": lambda port: Redis(port=port, max_connections=2),
    "of a single connection": lambda port: Redis(port=port, single_connection_client=True),
    "that waits": lambda port: Redis.from_pool(
        BlockingConnectionPool(port=port, retry=Retry(NoBackoff(), 3))
    ),
}
"""Clients as programs have them, which repeat a command whose answer was lost."""


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_write_is_sent_once_though_the_client_handed_in_retries(server, kind):
    async with Proxy(f"127.0.0.1:{server.port}") as proxy, CLIENTS[kind](proxy.port) as client:
        driver = RedisDriver(client=client)
        entry = b"x" * LARGE
        append = functools.partial(driver.append, KEY, entry, initial_version="v", ttl=None)
        await append()
        # So that the server knows the script; else the lost answer would be that it does not.
        await driver.delete(Key(KEY.scope, "other"))
        for write, stored in (
            (append, Record("v", None, (entry, entry))),
            # The second of two would find nothing, so that a paused run would be lost without an error.
            (functools.partial(driver.delete, KEY), None),
        ):
            lost = proxy.lose_answer(b"EVALSHA")
            with pytest.raises(OutcomeUnknown):
                await write()
            assert lost.happened
            assert await driver.load(KEY) == stored
        await driver.close()


async def test_a_driver_that_lets_the_client_repeat_writes_is_rejected(server, monkeypatch):
    monkeypatch.setattr("stm_backends_redis.client.Server", SendsThroughTheClient)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await test_a_write_is_sent_once_though_the_client_handed_in_retries(server, "too small to share")


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


async def appends_of(driver):
    """Append small entries, which share a connection, and large ones, which each need one."""
    entries = [b"x" * LARGE, b"small"] * 20
    writes = (driver.append(KEY, entry, initial_version="initial", ttl=None) for entry in entries)
    # All of them, so that none is under way when the test ends.
    done = await asyncio.gather(*writes, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return sorted(done)


async def test_a_server_that_accepts_few_clients_is_shared(server, caplog):
    server.ask("CONFIG", "SET", "maxclients", 4)
    async with opened(server.url, deadline_s=20) as driver:
        assert await appends_of(driver) == list(range(1, 41))
        (record,) = caplog.records
        assert "no more can be opened: no connection to the server" in record.getMessage()


async def test_a_client_handed_in_that_makes_few_connections_is_shared(server):
    async with Redis(port=server.port, max_connections=3) as client:
        driver = RedisDriver(client=client)
        try:
            assert await appends_of(driver) == list(range(1, 41))
        finally:
            await driver.close()


async def test_a_driver_that_fails_without_a_free_connection_is_rejected(server, monkeypatch):
    monkeypatch.setattr("stm_backends_redis.servers.Capacity", FailsWithoutRoom)
    with pytest.raises(Unavailable, match="all connections of the client are in use"):
        await test_a_client_handed_in_that_makes_few_connections_is_shared(server)


async def test_commands_that_wait_fail_with_the_last_connection():
    capacity, began, go = Capacity(patience_s=30), asyncio.Event(), asyncio.Event()

    async def refused():
        if began.is_set():
            raise NotConnected
        began.set()
        await go.wait()
        raise NotConnected

    first = asyncio.create_task(capacity.run(refused))
    await began.wait()
    others = [asyncio.create_task(capacity.run(refused)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in others)
    others[0].cancel()
    go.set()
    ended = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(error) for error in ended] == [NotConnected, asyncio.CancelledError, *[NotConnected] * 2]
    assert len({*map(id, ended)}) == 4, "a shared one would keep the frames of all"


async def refuse():
    raise NotConnected


@contextlib.asynccontextmanager
async def all_in_use(*, patience_s):
    """Yield a capacity of one connection, which is in use, and the event that gives it back."""
    capacity, free = Capacity(patience_s=patience_s), asyncio.Event()
    holding = asyncio.create_task(capacity.run(free.wait))
    await asyncio.sleep(0)
    yield capacity, free
    free.set()
    await holding


async def test_a_command_that_waits_too_long_for_a_connection_was_not_sent():
    async with all_in_use(patience_s=0.05) as (capacity, free):
        with pytest.raises(MaxConnectionsError):
            await capacity.run(refuse)
        free.set()
        assert await capacity.run(free.wait), "the next has its turn"


async def test_an_attempt_that_was_refused_counts_as_waiting():
    async with all_in_use(patience_s=0.2) as (capacity, free):
        attempts = []

        async def attempt():
            attempts.append(None)
            if len(attempts) == 1:
                await asyncio.sleep(0.2)
                asyncio.get_running_loop().call_later(0.2, free.set)
                raise NotConnected

        with pytest.raises(MaxConnectionsError):
            await capacity.run(attempt)


async def test_a_command_that_comes_back_at_once_waits_behind_those_that_wait():
    capacity, done, in_use = Capacity(patience_s=30), [], []

    async def work(name):
        if in_use:
            raise NotConnected
        in_use.append(name)
        await asyncio.sleep(0)
        done.append(in_use.pop())

    async def come_back(name):
        for _ in range(3):
            await capacity.run(lambda: work(name))

    await asyncio.gather(*(come_back(name) for name in "abc"))
    assert "".join(done) == "abc" * 3


async def test_a_command_cancelled_at_its_turn_hands_it_on():
    async with all_in_use(patience_s=30) as (capacity, free):

        async def attempt():
            if not free.is_set():
                raise NotConnected

        first, second = (asyncio.create_task(capacity.run(attempt)) for _ in range(2))
        await asyncio.sleep(0.01)
        free.set()
        await asyncio.sleep(0)  # the place is handed over
        first.cancel()
        async with asyncio.timeout(20):
            await second
        assert first.cancelled()


async def test_a_refused_command_takes_the_connection_that_was_given_back_meanwhile():
    async with all_in_use(patience_s=30) as (capacity, free):
        attempts = []

        async def attempt():
            attempts.append(None)
            if len(attempts) == 1:
                free.set()
                await asyncio.sleep(0.01)
                raise NotConnected

        await capacity.run(attempt)
        assert len(attempts) == 2


async def test_commands_that_waited_too_long_leave_no_data_behind():
    class Entry:
        pass

    async with all_in_use(patience_s=0.01) as (capacity, _):

        async def command(entry):
            with pytest.raises(RedisError):
                await capacity.run(refuse)
            return weakref.ref(entry)

        entries = [await command(Entry()) for _ in range(3)]
        gc.collect()
        assert [entry() for entry in entries] == [None] * 3


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

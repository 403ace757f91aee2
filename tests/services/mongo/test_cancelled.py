"""Operations that are cancelled while the client waits for a server harm no later one."""

from __future__ import annotations

import asyncio
import sys
import uuid

import pytest
from pymongo import AsyncMongoClient
from pymongo.common import MIN_HEARTBEAT_INTERVAL

from stm_backends.drivers.contract import ANY, Key
from stm_backends_mongo import MongoDriver, MongoSettings
from stm_backends_mongo.calls import Calls
from stm_backends_mongo.client import make_client
from tests.mutants.mongo import CancelsItsCalls

DEADLINE_S = 5.0


async def several(number):
    """Wait until there are so many; a number is no event."""
    async with asyncio.timeout(30):
        while not number():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def twice(_client, tasks):
    """Cancel each operation again while its call ends."""
    for _ in range(2):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)


async def as_the_client_gives_up(client, tasks):
    """Cancel each operation once, when its call ends a wait for a server and wants the lock again."""
    lock = client._topology._lock  # noqa: SLF001 -- there is no other way to hold it
    async with lock:
        await asyncio.sleep(2 * MIN_HEARTBEAT_INTERVAL)  # each wait for a server ends after one
        await several(lambda: len(lock._waiters) >= len(tasks) * 3 // 4)  # noqa: SLF001
        for task in tasks:
            task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)


async def is_used_after_cancellations(proxied, proxy, settings_of, cancel, kind=MongoDriver):
    """Cancel operations in an outage, and use the client after it."""
    scope = f"acme:{uuid.uuid4().hex}:memory"
    client: AsyncMongoClient = AsyncMongoClient(proxied.url)
    driver = kind(settings_of(proxied, deadline_s=DEADLINE_S), client=client)
    await driver.append(Key(scope, "0"), b"a", initial_version="v", ttl=None)
    async with proxy.cut():
        with pytest.raises(Exception):  # noqa: B017, PT011 -- the client notices the outage
            await driver.load(Key(scope, "0"))
        tasks = [
            asyncio.ensure_future(operation)
            for name in "abcd"
            for operation in (
                driver.append(Key(scope, name), b"a", initial_version="v", ttl=None),
                driver.replace(Key(scope, name + name), b"", version="v", expect=ANY, ttl=None),
                driver.delete(Key(scope, name * 3)),
                driver.load(Key(scope, name)),
                driver.scan(scope, limit=10),
            )
        ]
        waiting = client._topology._condition._waiters  # noqa: SLF001
        await several(lambda: len(waiting) >= len(tasks) * 3 // 4)
        await cancel(client, tasks)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    try:
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), "an error of the client's own"
        assert (await driver.load(Key(scope, "0"))).tail == (b"a",)
        async with asyncio.timeout(DEADLINE_S + 30):
            await driver.close()
        assert not driver._calls._running, "a call outlived PyMongo's timeout"  # noqa: SLF001
    finally:
        # Else what a mutant has left would wait for the lock forever, and the event loop for that.
        lock = client._topology._lock  # noqa: SLF001
        while lock.locked() or lock._waiters:  # noqa: SLF001
            if lock.locked():
                lock.release()
            await asyncio.sleep(0)
        await client.close()


CANCELLATIONS = [twice, as_the_client_gives_up]


@pytest.mark.full
@pytest.mark.parametrize("cancel", CANCELLATIONS)
async def test_a_client_is_of_use_after_calls_were_cancelled(proxied, proxy, settings_of, cancel):
    await is_used_after_cancellations(proxied, proxy, settings_of, cancel)


@pytest.mark.full
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio.wait_for ends what it cancels since 3.12")
@pytest.mark.parametrize("cancel", CANCELLATIONS)
async def test_a_driver_that_cancels_its_calls_is_found(proxied, proxy, settings_of, cancel):
    with pytest.raises((AssertionError, RuntimeError)):
        await is_used_after_cancellations(proxied, proxy, settings_of, cancel, CancelsItsCalls)


async def test_a_call_is_never_cancelled_however_often_its_caller_is():
    calls, ended, may_end = Calls(), [], asyncio.Event()

    async def call():
        await may_end.wait()
        ended.append("as it would have")

    caller = asyncio.ensure_future(calls.run(call()))
    for _ in range(5):
        await asyncio.sleep(0)
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    await calls.ended(within=30)
    assert ended == ["as it would have"]


async def test_a_call_gives_its_answer_or_its_error():
    async def fail():
        raise LookupError("nothing there")

    assert await Calls().run(asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(LookupError, match="nothing there"):
        await Calls().run(fail())


@pytest.mark.parametrize("waits_for", ["a call", "loads"])
async def test_a_close_that_is_cancelled_leaves_no_client_open(monkeypatch, waits_for):
    driver, may_end, closed = MongoDriver(MongoSettings()), asyncio.Event(), []
    driver._client = make_client(MongoSettings())  # noqa: SLF001 -- as `open` does, without a server
    close = driver._client.close  # noqa: SLF001

    async def closing():
        await close()
        closed.append(True)

    monkeypatch.setattr(driver._client, "close", closing)  # noqa: SLF001
    call = asyncio.ensure_future(driver._calls.run(may_end.wait()))  # noqa: SLF001
    if waits_for == "loads":
        monkeypatch.setattr(driver._loads, "close", may_end.wait)  # noqa: SLF001
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(driver.close())
    for _ in range(5):
        await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert closed == [True]
    may_end.set()
    await call

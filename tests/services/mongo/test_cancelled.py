"""Operations that are cancelled more than once, while the client waits for a server, harm no later one."""

from __future__ import annotations

import asyncio
import sys

import pytest
from pymongo import AsyncMongoClient

from stm_backends.drivers.contract import ANY, Key
from stm_backends_mongo import MongoDriver
from stm_backends_mongo.calls import Calls
from tests.mutants.mongo import CancelsItsCalls

SCOPE = "acme:cancelled:memory"


async def is_used_after_cancellations(proxied, proxy, settings_of, kind=MongoDriver):
    """Cancel operations twice in an outage, and use the client after it."""
    client: AsyncMongoClient = AsyncMongoClient(proxied.url)
    driver = kind(settings_of(proxied, deadline_s=5.0), client=client)
    await driver.append(Key(SCOPE, "0"), b"a", initial_version="v", ttl=None)
    async with proxy.cut():
        with pytest.raises(Exception):  # noqa: B017, PT011 -- the client notices the outage
            await driver.load(Key(SCOPE, "0"))
        tasks = [
            asyncio.ensure_future(operation)
            for name in "abcd"
            for operation in (
                driver.append(Key(SCOPE, name), b"a", initial_version="v", ttl=None),
                driver.replace(Key(SCOPE, name + name), b"", version="v", expect=ANY, ttl=None),
                driver.delete(Key(SCOPE, name * 3)),
                driver.load(Key(SCOPE, name)),
                driver.scan(SCOPE, limit=10),
            )
        ]
        waiting = client._topology._condition._waiters  # noqa: SLF001 -- there is no other way to see it
        async with asyncio.timeout(30):
            while len(waiting) < len(tasks) * 3 // 4:  # noqa: ASYNC110 -- a number is no event
                await asyncio.sleep(0)
        for _ in range(2):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    try:
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), "an error of the client's own"
        assert (await driver.load(Key(SCOPE, "0"))).tail == (b"a",)
        await driver.close()
    finally:
        # Else what a mutant has left would wait for the lock forever, and the event loop for that.
        lock = client._topology._lock  # noqa: SLF001
        while lock.locked() or lock._waiters:  # noqa: SLF001
            if lock.locked():
                lock.release()
            await asyncio.sleep(0)
        await client.close()


async def test_a_client_is_of_use_after_calls_were_cancelled_twice(proxied, proxy, settings_of):
    await is_used_after_cancellations(proxied, proxy, settings_of)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio.wait_for ends what it cancels since 3.12")
async def test_a_driver_that_cancels_its_calls_twice_is_found(proxied, proxy, settings_of):
    with pytest.raises(AssertionError, match="of the client's own"):
        await is_used_after_cancellations(proxied, proxy, settings_of, CancelsItsCalls)


async def test_a_call_is_cancelled_once_however_often_its_caller_is():
    calls, cancelled, may_end = Calls(), [], asyncio.Event()

    async def call():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            cancelled.append(error)
            await may_end.wait()
            raise

    caller = asyncio.ensure_future(calls.run(call()))
    for _ in range(5):
        await asyncio.sleep(0)
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    await calls.ended(within=30)
    assert len(cancelled) == 1


async def test_a_call_gives_its_answer_or_its_error():
    async def fail():
        raise LookupError("nothing there")

    assert await Calls().run(asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(LookupError, match="nothing there"):
        await Calls().run(fail())

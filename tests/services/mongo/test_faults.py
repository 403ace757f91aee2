"""Elections, writes without a majority, outages, and servers that hang."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import KEEP, Driver, Key, Record, new_version
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends_mongo import open_driver
from tests.support.contract import opened
from tests.support.mongod import Mongod, until
from tests.support.outliving import outlives

KEY = Key("acme:u1:memory", "chat")

DEADLINE_S = 3.0


@pytest.fixture
def key(request):
    """A key of the test's own."""
    return Key(f"acme:{request.node.name}:memory", "chat")


class Writer:
    """Appends numbered entries one after the other, and retries what failed."""

    def __init__(self, driver: Driver, key: Key, label: str) -> None:
        self.driver, self.key, self.label = driver, key, label
        self.acknowledged = 0
        self.resent: set[bytes] = set()

    async def write(self, done: asyncio.Event) -> None:
        while not done.is_set():
            entry = b"%s:%d" % (self.label.encode(), self.acknowledged)
            try:
                await self.driver.append(self.key, entry, initial_version=new_version(), ttl=None)
                self.acknowledged += 1
            except StorageError:
                self.resent.add(entry)

    async def reach(self, count: int) -> None:
        while self.acknowledged < count:  # noqa: ASYNC110 -- a number is no event
            await asyncio.sleep(0.05)


async def fold(driver: Driver, key: Key, done: asyncio.Event) -> int:
    """Move the oldest entries into the body again and again; returns how often that was done."""
    folds = 0
    while not done.is_set():
        await asyncio.sleep(0.05)
        with contextlib.suppress(StorageError):
            record = await driver.load(key)
            if record is None or len(record.tail) < 3:
                continue
            drop, version = len(record.tail) - 2, new_version()
            body = b" ".join([record.body or b"", *record.tail[:drop]])
            for _ in range(20):
                with contextlib.suppress(OutcomeUnknown, Unavailable):
                    folds += await driver.replace(
                        key, body, version=version, expect=record.version, drop=drop, ttl=KEEP
                    )
                    break
    return folds


def without_repeats(entries: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(entries))


async def assert_nothing_is_lost(driver: Driver, key: Key, writers: list[Writer]) -> None:
    record = await driver.load(key)
    assert record is not None
    entries = [*(record.body or b"").split(), *record.tail]
    for writer in writers:
        mine = [entry for entry in entries if entry.startswith(writer.label.encode() + b":")]
        numbers = [int(entry.partition(b":")[2]) for entry in without_repeats(mine)]
        assert numbers == list(range(len(numbers))), "lost, or out of order"
        assert writer.acknowledged <= len(numbers) <= writer.acknowledged + 1
        doubled = {entry for entry in mine if mine.count(entry) > 1}
        assert doubled <= writer.resent, "stored twice although it was sent once"


@pytest.mark.full
async def test_nothing_acknowledged_is_lost_when_the_primary_is_killed(replica_set, replica_place, key):
    """The other members elect another primary, and what was acknowledged is there, each writer's in order."""
    done = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(opened(replica_place.url)) for _ in range(3)]
        writers = [Writer(driver, key, f"w{n}") for n, driver in enumerate(drivers)]
        tasks = [asyncio.ensure_future(writer.write(done)) for writer in writers]
        folding = asyncio.ensure_future(fold(drivers[0], key, done))
        await asyncio.sleep(0.7)
        victim = await asyncio.to_thread(replica_set.primary)
        before = [writer.acknowledged for writer in writers]
        victim.kill()
        try:
            await asyncio.to_thread(replica_set.primary)
            async with asyncio.timeout(30):
                for writer, count in zip(writers, before, strict=True):
                    await writer.reach(count + 20)
        finally:
            done.set()
            await asyncio.gather(*tasks)
            folds = await folding
            await asyncio.to_thread(victim.start)
        assert folds > 2
        await assert_nothing_is_lost(drivers[1], key, writers)
        await asyncio.to_thread(replica_set.settle)


@pytest.mark.full
async def test_a_conversation_that_folds_outlives_the_primary(replica_set, replica_place):
    async def fail_over() -> None:
        victim = await asyncio.to_thread(replica_set.primary)
        victim.kill()
        killed.append(victim)
        await asyncio.to_thread(replica_set.primary)

    killed: list[Mongod] = []
    try:
        async with open_backend(replica_place.url, create=True) as backend:
            await outlives(backend, fail_over)
    finally:
        for victim in killed:
            await asyncio.to_thread(victim.start)
        await asyncio.to_thread(replica_set.settle)


@pytest.mark.full
async def test_a_write_without_a_majority_is_unknown_and_not_read_yet(replica_set, replica_place, key):
    """A failover may still undo what only the primary has."""
    primary = await asyncio.to_thread(replica_set.primary)
    others = [member for member in replica_set.members if member is not primary]
    async with opened(replica_place.options(deadline_s=DEADLINE_S)) as driver:
        await driver.append(key, b"a", initial_version="v1", ttl=None)
        for member in others:
            member.pause()
        try:
            with pytest.raises(OutcomeUnknown):
                await driver.append(key, b"b", initial_version="v1", ttl=None)
            # It may have noticed by now that it is alone, and have stepped down.
            with contextlib.suppress(Unavailable):
                assert await driver.load(key) == Record("v1", None, (b"a",))
        finally:
            for member in others:
                member.go_on()
        await asyncio.to_thread(replica_set.settle)
        record = await driver.load(key)
        assert record is not None
        assert record.tail in ((b"a",), (b"a", b"b"))


async def test_what_was_never_sent_is_unavailable_and_was_not_done(proxied, place, proxy, key):
    async with opened(proxied.options(deadline_s=DEADLINE_S)) as driver, opened(place.url) as other:
        await driver.append(key, b"a", initial_version="v1", ttl=None)
        async with proxy.cut():
            with pytest.raises(StorageError):
                await driver.load(key)
            with pytest.raises(Unavailable, match="no suitable server was found"):
                await driver.append(key, b"b", initial_version="v1", ttl=None)
        assert await other.load(key) == Record("v1", None, (b"a",))


async def test_the_server_gives_up_at_the_deadline_too(single, single_place, key):
    """A lock that another holds keeps the server from writing; it lets go of the request by itself."""
    await asyncio.to_thread(single.ask, "fsync", lock=True)
    try:
        async with opened(single_place.options(deadline_s=DEADLINE_S)) as driver:
            with pytest.raises(OutcomeUnknown):
                await driver.append(key, b"a", initial_version="v1", ttl=None)

            def is_idle() -> bool:
                running = single.ask("currentOp", **{"command.findAndModify": "stm_records"})
                return not running["inprog"]

            await asyncio.to_thread(until, is_idle)
    finally:
        await asyncio.to_thread(single.ask, "fsyncUnlock")
    async with opened(single_place.url) as driver:
        assert await driver.load(key) is None


def test_a_driver_that_was_closed_can_be_opened_in_another_event_loop(place, key):
    driver = open_driver(place.url)

    async def use() -> int:
        await driver.open()
        try:
            return await driver.append(key, b"a", initial_version="v", ttl=None)
        finally:
            await driver.close()

    assert [asyncio.run(use()) for _ in range(2)] == [1, 2]


async def test_opening_again_during_an_outage_leaves_the_driver_open(proxied, proxy, key):
    async with opened(proxied.options(deadline_s=10)) as driver:
        async with proxy.cut():
            await driver.open()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(Unavailable):
                    assert await driver.load(key) is None
                    break

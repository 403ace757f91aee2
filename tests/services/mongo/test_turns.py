"""Writes of one process to one record take turns, so that they do not make each other start over."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener

from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends_mongo import MongoDriver
from stm_backends_mongo.turns import Turns
from tests.mutants.mongo import EndsTheTurnOfCancelledWrites
from tests.support.contract import opened

ENTRIES = 5_000


@pytest.fixture
def key(request):
    """A key of the test's own."""
    return Key(f"acme:{request.node.name}:memory", "chat")


def large(key: Key) -> dict[str, object]:
    """Return a record with many entries, as it is stored."""
    return {
        "_id": key._asdict(),
        "version": "v",
        "expires": None,
        "size": 400 * ENTRIES,
        "body": None,
        "tail": [bytes(400)] * ENTRIES,
    }


async def test_appends_at_once_to_a_large_record_cause_no_write_conflict(single, single_place, key):
    def conflicts() -> int:
        return single.ask("serverStatus")["metrics"]["operation"]["writeConflicts"]

    single_place.past.records.insert_one(large(key))
    async with opened(single_place.options(deadline_s=60)) as driver:
        before = conflicts()
        lengths = await asyncio.gather(
            *(driver.append(key, b"%d" % n, initial_version="x", ttl=None) for n in range(64))
        )
        assert conflicts() == before
        assert lengths == [ENTRIES + n for n in range(1, 65)], "not in the order asked for"
        record = await driver.load(key)
        assert record is not None
        assert record.tail[ENTRIES:] == tuple(b"%d" % n for n in range(64))


async def test_several_drivers_append_to_a_large_record_without_unknowns(place, key):
    """Each driver has its own queue, as each process has."""
    place.past.records.insert_one(large(key))
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(opened(place.options(deadline_s=60))) for _ in range(4)]
        lengths = await asyncio.gather(
            *(driver.append(key, b"x", initial_version="x", ttl=None) for driver in drivers for _ in range(8))
        )
    assert sorted(lengths) == [ENTRIES + n for n in range(1, 33)]


async def test_a_write_behind_one_that_hangs_is_unavailable_and_not_sent(single, single_place, key):
    async with opened(single_place.options(deadline_s=4.0)) as driver:
        await driver.append(key, b"a", initial_version="v", ttl=None)
        single.pause()
        try:
            writes = (
                driver.append(key, b"sent", initial_version="v", ttl=None),
                driver.append(key, b"b", initial_version="v", ttl=None),
                driver.replace(key, b"c", version="w", expect=ANY, ttl=None),
                driver.delete(key),
            )
            sent, *waited = await asyncio.gather(*writes, return_exceptions=True)
        finally:
            single.go_on()
        assert isinstance(sent, OutcomeUnknown)
        for error, operation in zip(waited, ("append", "replace", "delete"), strict=True):
            assert isinstance(error, Unavailable)
            assert f"mongo.{operation}: earlier writes to the same record" in str(error)
    async with opened(single_place.url) as patient:
        record = await patient.load(key)
        assert record in (Record("v", None, (b"a",)), Record("v", None, (b"a", b"sent")))


class Sent(CommandListener):
    """The writes that a client has sent."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.first = asyncio.Event()

    def started(self, event) -> None:
        if event.command_name == "findAndModify":
            self.writes.append("delete" if event.command.get("remove") else "update")
            self.first.set()

    def succeeded(self, event) -> None: ...
    def failed(self, event) -> None: ...


@contextlib.asynccontextmanager
async def cancelled_on_its_way(single, place, settings, key, kind=MongoDriver):
    """Yield a driver one of whose appends was cancelled when it was sent; the server hangs meanwhile."""
    sent = Sent()
    async with AsyncMongoClient(place.url, event_listeners=[sent]) as client:
        driver = kind(settings, client=client)
        assert await driver.load(key) is None  # connects
        single.pause()
        try:
            append = asyncio.ensure_future(driver.append(key, b"a", initial_version="v", ttl=None))
            async with asyncio.timeout(30):
                await sent.first.wait()
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            yield driver, sent.writes
        finally:
            single.go_on()
        await driver.close()


async def overtakes_none(single, place, settings, key, kind=MongoDriver):
    """Delete a record while an append to it that was cancelled is on its way."""
    async with cancelled_on_its_way(single, place, settings, key, kind) as (driver, sent):
        replace = asyncio.ensure_future(driver.replace(key, b"", version="w", expect=ANY, ttl=None))
        delete = asyncio.ensure_future(driver.delete(key))
        await asyncio.sleep(0.2)
        replace.cancel()
        single.go_on()
        was_there = await delete
        await driver._calls.ended(within=30)  # noqa: SLF001
        assert sent == ["update", "delete"], "the one between was cancelled before its turn"
        assert was_there, "the cancelled append was done later"
        assert await driver.load(key) is None
        assert len(driver._turns) == 0  # noqa: SLF001


async def test_a_write_does_not_overtake_a_cancelled_one(single, single_place, settings_of, key):
    await overtakes_none(single, single_place, settings_of(single_place), key)


async def test_a_driver_that_ends_a_turn_too_early_is_found(single, single_place, settings_of, key):
    with pytest.raises(AssertionError, match="before its turn"):
        await overtakes_none(
            single, single_place, settings_of(single_place), key, EndsTheTurnOfCancelledWrites
        )


async def test_a_write_behind_a_cancelled_one_that_hangs_is_not_sent(single, single_place, settings_of, key):
    settings = settings_of(single_place, deadline_s=2.0)
    async with cancelled_on_its_way(single, single_place, settings, key) as (driver, sent):
        with pytest.raises(Unavailable, match="earlier writes to the same record"):
            await driver.delete(key)
        await driver._calls.ended(within=30)  # noqa: SLF001
        assert len(driver._turns) == 0, "the turn outlived its request"  # noqa: SLF001
        assert sent == ["update"]


async def test_other_records_do_not_wait(single_place, key):
    other = Key(key.scope, "other")
    async with opened(single_place.url) as driver, driver._turns.turn(key):  # noqa: SLF001 -- as a write that hangs would
        waiting = asyncio.ensure_future(driver.append(key, b"a", initial_version="v", ttl=None))
        assert await driver.append(other, b"a", initial_version="v", ttl=None) == 1
        assert not waiting.done()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


async def test_turns_come_in_order_and_one_at_a_time_and_leave_nothing_behind():
    turns, done = Turns(patience_s=60), []

    async def take(n: int) -> None:
        async with turns.turn("key"):
            done.append(n)
            await asyncio.sleep(0)
            assert done[-1] == n, "another came in between"

    async with turns.turn("key"):
        tasks = [asyncio.ensure_future(take(n)) for n in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        assert len(turns) == 1
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [n for n in range(20) if n % 3]
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 7
    assert len(turns) == 0


async def test_a_turn_that_is_cancelled_while_it_is_taken_goes_to_the_next():
    turns = Turns(patience_s=60)

    async def take() -> None:
        async with turns.turn("key"):
            await asyncio.Event().wait()

    first = asyncio.ensure_future(take())
    second = asyncio.ensure_future(take())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    async with asyncio.timeout(5), turns.turn("key"):
        pass


async def test_a_turn_that_was_handed_over_ends_with_the_request():
    turns, request = Turns(patience_s=0.01), asyncio.get_running_loop().create_future()

    async def give_up() -> None:
        async with turns.turn("key") as hand_over:
            hand_over(request)
            await asyncio.Event().wait()

    task = asyncio.ensure_future(give_up())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(Unavailable):
        async with turns.turn("key"):
            raise AssertionError("two at once")
    request.set_exception(OSError())
    assert isinstance(request.exception(), OSError)
    await asyncio.sleep(0)
    assert len(turns) == 0


async def test_a_turn_that_does_not_come_is_unavailable():
    turns = Turns(patience_s=0.01)
    async with turns.turn("key"):
        with pytest.raises(Unavailable, match="this one was not sent"):
            async with turns.turn("key"):
                raise AssertionError("two at once")
    async with turns.turn("key"):
        pass

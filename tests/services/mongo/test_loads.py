"""Loads at once share a find: each caller gets its own record, or its own error."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import pymongo
import pytest
from pymongo import AsyncMongoClient, monitoring
from pymongo.errors import AutoReconnect, OperationFailure

from stm_backends.drivers.coalesced import LARGE_BYTES
from stm_backends.drivers.contract import ANY, NO_LIMIT, Key, Record
from stm_backends.errors import Corrupt, Denied, Unavailable
from stm_backends_mongo import MongoDriver, MongoSettings, statements
from tests.mutants.mongo import AnswersInTheOrderAsked, OneBadDocumentFailsAll, ReadsForTheFirst, WritesTwice

COUNT = 40

Document: TypeAlias = dict[str, Any]


class Sent(monitoring.CommandListener):
    """Notes the commands of a client, by their names."""

    def __init__(self) -> None:
        self.commands: list[Document] = []

    def named(self, name: str) -> list[Document]:
        return [command for command in self.commands if name in command]

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.commands.append(dict(event.command))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...
    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


@pytest.fixture
def keys(request):
    """Keys of the test's own."""
    return [Key(f"acme:{request.node.name}:memory", f"chat {n}") for n in range(COUNT)]


# on a real server ----------------------------------------------------------------------------------------


async def loads_share(place, settings_of, keys, kind=MongoDriver):
    """Load records of which some are absent and some have expired."""
    sent = Sent()
    async with AsyncMongoClient(place.url, event_listeners=[sent]) as client:
        driver = kind(settings_of(place), client=client)
        for n, key in enumerate(keys):
            if n % 3:
                await driver.append(
                    key, b"%d" % n, initial_version=f"v{n}", ttl=0.001 if n % 3 == 2 else None
                )
        await asyncio.sleep(0.01)
        sent.commands.clear()
        records = await asyncio.gather(*(driver.load(key) for key in keys))
    expected = [Record(f"v{n}", None, (b"%d" % n,)) if n % 3 == 1 else None for n in range(COUNT)]
    finds = sent.named("find")
    assert records == expected
    assert [len(find["filter"]["_id"].get("$in", [1])) for find in finds] == [1, COUNT - 1]
    assert all(find["readConcern"]["level"] == "majority" and find["maxTimeMS"] for find in finds)


async def test_loads_at_once_share_a_find_and_get_their_own_records(place, settings_of, keys):
    await loads_share(place, settings_of, keys)


async def newest_share(place, settings_of, keys, kind=MongoDriver):
    """Load different numbers of entries of records of different lengths."""
    sent, wanted = Sent(), [(key, last) for last in (1, None, 0, 2, 1, NO_LIMIT) for key in keys[:6]]
    async with AsyncMongoClient(place.url, event_listeners=[sent]) as client:
        driver = kind(settings_of(place), client=client)
        for n, key in enumerate(keys[:6]):
            for entry in range(n):
                await driver.append(key, b"%d" % entry, initial_version="v", ttl=None)
        alone = [await driver.load(key, last=last) for key, last in wanted]
        sent.commands.clear()
        records = await asyncio.gather(*(driver.load(key, last=last) for key, last in wanted))
    assert records == alone
    assert [record and record.length for record in records] == [None, 1, 2, 3, 4, 5] * 6
    assert len(sent.named("find")) == 2


async def test_loads_of_different_numbers_of_entries_share_a_find(place, settings_of, keys):
    await newest_share(place, settings_of, keys)


async def test_what_is_large_of_the_newest_comes_alone(place, settings_of, keys):
    """The newest entries of a large record come with the others if they are small."""
    entry, sent, (other, small, large, *_) = bytes(LARGE_BYTES // 4), Sent(), keys
    async with AsyncMongoClient(place.url, event_listeners=[sent]) as client:
        driver = MongoDriver(settings_of(place), client=client)
        for key, entries in (
            (other, [b"b"]),
            (small, [entry] * 9 + [b"a"] * 9),
            (large, [b"a", *[entry] * 9]),
        ):
            for one in entries:
                await driver.append(key, one, initial_version="v", ttl=None)
        asked = [(other, 1), (small, 2), (large, 9), (other, 2), (small, 0)]
        for finds in (3, 3):
            sent.commands.clear()
            loaded = await asyncio.gather(*(driver.load(key, last=last) for key, last in asked))
            assert [(record.tail, record.skipped) for record in loaded] == [
                ((b"b",), 0),
                ((b"a", b"a"), 16),
                ((entry,) * 9, 1),
                ((b"b",), 0),
                ((), 18),
            ]
            assert len(sent.named("find")) == finds


def test_the_driver_and_the_server_agree_on_what_is_large(place):
    """Else a load would share a request each time, and be sent again."""
    records = place.past.records.database.weights
    sizes = [LARGE_BYTES + more for more in (-1, 0, 1, 2, 1_000, 5 * LARGE_BYTES, 7 * LARGE_BYTES)]
    lengths = [(length, last) for length in (1, 2, 3, 7, 50) for last in (0, 1, 2, 6, 49) if last < length]
    for size in sizes:
        for length, last in lengths:
            records.insert_one({"_id": f"{size}", "expires": None, "size": size, "tail": [b""] * length})
            (found,) = records.find({}, statements.LOADED_TOGETHER, let=statements.values(last=last))
            is_light = "tail" in found["newest"]
            assert is_light == (statements.weight(size, length, last) <= LARGE_BYTES), (size, length, last)
            records.delete_many({})


async def damage_stays_alone(place, settings_of, keys, kind=MongoDriver):
    async with AsyncMongoClient(place.url) as client:
        driver = kind(settings_of(place), client=client)
        for key in keys:
            await driver.append(key, b"a", initial_version="v", ttl=None)
        await place.past.damage(keys[5])
        for key, change in zip(keys[6:], DAMAGES, strict=False):
            place.past.records.update_one({"_id": key._asdict()}, change)
        for lasts in ([None], [1], [1, 2, None]):
            loads = (
                driver.load(key, last=last) for key, last in zip(keys, itertools.cycle(lasts), strict=False)
            )
            answers = await asyncio.gather(*loads, return_exceptions=True)
            corrupt = [n for n, answer in enumerate(answers) if isinstance(answer, Corrupt)]
            assert corrupt == [5, *range(6, 6 + len(DAMAGES))]
            whole = [answer for n, answer in enumerate(answers) if n not in corrupt]
            assert whole == [Record("v", None, (b"a",))] * len(whole)


DAMAGES = (
    {"$unset": {"size": 1}},
    {"$set": {"size": "one"}},
    {"$unset": {"tail": 1}},
    {"$set": {"tail": "a"}},
    {"$set": {"tail": [1]}},
    {"$set": {"body": 1}},
)


async def test_a_damaged_record_fails_its_own_load_and_no_other(place, settings_of, keys):
    await damage_stays_alone(place, settings_of, keys)


async def test_records_beyond_one_answer_are_loaded_at_once_too(place, settings_of, keys):
    async with AsyncMongoClient(place.url) as client:
        driver = MongoDriver(settings_of(place, deadline_s=30), client=client)
        bodies = [bytes([n]) * (7 * 1024 * 1024) for n in range(5)]
        for key, body in zip(keys, bodies, strict=False):
            await driver.replace(key, body, version="v", expect=ANY, ttl=None)
        records = await asyncio.gather(*(driver.load(key) for key in keys[:5]))
        assert [record and record.body for record in records] == bodies
        for key in keys[:5]:
            await driver.delete(key)


async def test_linearizable_loads_are_a_find_each(replica_place, settings_of, keys):
    """MongoDB promises linearizable reads for filters of one document alone."""
    sent = Sent()
    async with AsyncMongoClient(replica_place.url, event_listeners=[sent]) as client:
        driver = MongoDriver(settings_of(replica_place, linearizable=True), client=client)
        await driver.append(keys[0], b"a", initial_version="v", ttl=None)
        records = await asyncio.gather(*(driver.load(key) for key in keys[:8]))
    assert records == [Record("v", None, (b"a",)), *[None] * 7]
    finds = sent.named("find")
    assert sorted(find["filter"]["_id"]["name"] for find in finds) == [key.name for key in keys[:8]]
    assert all(find["readConcern"] == {"level": "linearizable"} for find in finds)


async def writes_are_sent_once(place, settings_of, keys, kind=MongoDriver):
    sent, (busy, *others) = Sent(), keys
    async with AsyncMongoClient(place.url, event_listeners=[sent]) as client:
        driver = kind(settings_of(place), client=client)
        writing = [driver.append(busy, b"%d" % n, initial_version="v", ttl=None) for n in range(COUNT)]
        writing += [driver.append(key, b"a", initial_version="v", ttl=None) for key in others]
        lengths = await asyncio.gather(*writing)
        tails = [record and record.tail for record in await asyncio.gather(*map(driver.load, keys))]
    assert len(sent.named("findAndModify")) == len(writing)
    assert lengths == [*range(1, COUNT + 1), *[1] * len(others)]
    assert tails == [tuple(b"%d" % n for n in range(COUNT)), *[(b"a",)] * len(others)]


async def test_writes_and_loads_at_once_are_each_sent_once(place, settings_of, keys):
    await writes_are_sent_once(place, settings_of, keys)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (AnswersInTheOrderAsked, loads_share),
        (OneBadDocumentFailsAll, damage_stays_alone),
        (ReadsForTheFirst, newest_share),
        (WritesTwice, writes_are_sent_once),
    ],
)
async def test_each_mutant_is_killed_by_its_test(mutant, check, place, settings_of, keys):
    with pytest.raises(AssertionError):
        await check(place, settings_of, keys, mutant)


# on a collection whose answers the test gives ------------------------------------------------------------


class Collection:
    """A collection whose finds wait until the test answers them."""

    def __init__(self) -> None:
        self.finds: list[tuple[list[str], asyncio.Future[list[Document]], float | None]] = []

    def get_database(self, _: str) -> Collection:
        return self

    __getitem__ = get_database

    def get_collection(self, *_: object, **__: object) -> Collection:
        return self

    def find(self, query: Document, *_: object, **__: object) -> Collection:
        ids = query["_id"].get("$in", [query["_id"]])
        answer = asyncio.get_running_loop().create_future()
        self.finds.append(([one["name"] for one in ids], answer, pymongo._csot.get_timeout()))  # noqa: SLF001 -- there is no other way to ask
        return self

    async def to_list(self, _: int) -> list[Document]:
        return await self.finds[-1][1]

    def answer(self, find: int) -> None:
        names, answer, _ = self.finds[find]
        answer.set_result([document(name) for name in reversed(names)])


def document(name: str) -> Document:
    entry = name.encode()
    return {
        "_id": {"scope": "s", "name": name},
        "version": "v",
        "size": len(entry),
        "tail": [entry],
        "body": None,
    }


async def settle(until: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not until():  # noqa: ASYNC110 -- a number is no event
            await asyncio.sleep(0)


def driver_on(collection: Collection, **settings: Any) -> MongoDriver:
    client: Any = collection
    return MongoDriver(MongoSettings.from_options(**settings), client=client)


async def test_a_cancelled_load_ends_alone_and_the_last_leaves_its_find():
    collection = Collection()
    driver = driver_on(collection)
    first, *loads = (asyncio.ensure_future(driver.load(Key("s", name))) for name in "abcd")
    await settle(lambda: len(collection.finds) == 2)
    assert [names for names, *_ in collection.finds] == [["a"], ["b", "c", "d"]]
    loads[1].cancel()
    collection.answer(1)
    answers = await asyncio.gather(*loads, return_exceptions=True)
    assert isinstance(answers.pop(1), asyncio.CancelledError)
    assert answers == [Record("v", None, (b"b",)), Record("v", None, (b"d",))]
    last = asyncio.ensure_future(driver.load(Key("s", "e")))
    await settle(lambda: len(collection.finds) == 3)
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    # PyMongo's own timeout ends a find whose callers were cancelled.
    assert not collection.finds[2][1].done()
    collection.answer(2)
    collection.answer(0)
    assert await first == Record("v", None, (b"a",))


async def test_a_find_that_fails_in_passing_is_repeated_for_all_its_callers():
    collection = Collection()
    driver = driver_on(collection)
    loads = [asyncio.ensure_future(driver.load(Key("s", name))) for name in "abc"]
    await settle(lambda: len(collection.finds) == 2)
    collection.finds[1][1].set_exception(AutoReconnect("gone"))
    collection.answer(0)
    answered: set[int] = {0, 1}
    while not all(load.done() for load in loads):
        await settle(lambda: len(collection.finds) > len(answered) or all(load.done() for load in loads))
        for find in set(range(len(collection.finds))) - answered:
            collection.answer(find)
            answered.add(find)
    assert [load.result().tail for load in loads] == [(b"a",), (b"b",), (b"c",)]


async def test_a_find_that_is_denied_is_denied_to_all_its_callers():
    collection = Collection()
    driver = driver_on(collection)
    loads = [asyncio.ensure_future(driver.load(Key("s", name))) for name in "abc"]
    await settle(lambda: len(collection.finds) == 2)
    collection.finds[1][1].set_exception(OperationFailure("not allowed", 13))
    collection.answer(0)
    answers = await asyncio.gather(*loads, return_exceptions=True)
    assert answers[0] == Record("v", None, (b"a",))
    assert all(isinstance(answer, Denied) for answer in answers[1:])
    assert len(collection.finds) == 2


async def test_a_timeout_of_one_caller_is_not_that_of_others():
    collection = Collection()
    driver = driver_on(collection, deadline_s=30.0)

    async def hurried() -> Record | None:
        with pymongo.timeout(0.001):
            return await driver.load(Key("s", "b"))

    loads = [
        asyncio.ensure_future(one)
        for one in (driver.load(Key("s", "a")), hurried(), driver.load(Key("s", "c")))
    ]
    await settle(lambda: len(collection.finds) == 2)
    names, _, timeout = collection.finds[1]
    assert (names, timeout) == (["b", "c"], 29.4)
    collection.answer(0)
    collection.answer(1)
    assert None not in await asyncio.gather(*loads)


async def test_closing_ends_loads_that_wait_for_a_find():
    collection = Collection()
    driver = driver_on(collection)
    first, *waiting = (asyncio.ensure_future(driver.load(Key("s", name))) for name in "abcd")
    await settle(lambda: len(collection.finds) == 2)
    closing = asyncio.ensure_future(driver.close())
    for load in waiting:
        with pytest.raises(Unavailable):
            await load
    assert not closing.done()
    for find in (0, 1):
        collection.answer(find)
    assert await first == Record("v", None, (b"a",))
    await closing

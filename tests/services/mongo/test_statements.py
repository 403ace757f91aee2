"""What is sent to MongoDB: constants, literal values, one instant, and the concerns that are promised."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import bson
import pytest
from pymongo import AsyncMongoClient, monitoring

from stm_backends import ShortTermMemoryConfig
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Key, Record
from stm_backends.errors import TooLarge, Unavailable
from stm_backends_mongo import open_driver, statements
from tests.support.contract import opened

EXPRESSIONS = (
    "$expires",
    "$version",
    "$$version",
    "$$NOW",
    "$$ROOT",
    "$_id",
    "$",
    "$$",
    "$$REMOVE",
    "a.$b",
    "",
)


@pytest.mark.parametrize("text", [text for text in EXPRESSIONS if text])
async def test_text_that_looks_like_an_expression_is_text(place, text):
    key = Key(f"{text}:{text}", text)
    async with opened(place.url) as driver:
        assert await driver.append(key, text.encode(), initial_version=text, ttl=60) == 1
        assert await driver.load(key) == Record(text, None, (text.encode(),))
        assert await driver.scan(key.scope, after="", limit=5) == ((text,), None)
        assert await driver.replace(key, b"x", version="other", expect=f"{text}x", drop=1, ttl=None) is False
        entries, version = (text.encode(),), f"{text}1"
        assert (
            await driver.replace(key, b"x", version=version, expect=text, rewrite=entries, ttl=KEEP) is True
        )
        assert await driver.load(key) == Record(version, b"x", entries)
        assert await driver.replace(key, b"x", version=f"{text}2", expect=version, drop=1, ttl=KEEP) is True
        assert await driver.load(key) == Record(f"{text}2", b"x", ())
        assert await driver.delete(key, expect=text) is False
        assert await driver.delete(key, expect=f"{text}2") is True


@pytest.mark.parametrize("text", EXPRESSIONS)
async def test_a_version_that_looks_like_an_expression_matches_no_other(place, text):
    key = Key("acme:versions:memory", "chat")
    async with opened(place.url) as driver:
        await driver.replace(key, b"body", version="stored", expect=ANY, ttl=None)
        assert await driver.replace(key, b"x", version="new", expect=text, ttl=None) is False
        assert await driver.delete(key, expect=text) is False
        assert await driver.replace(key, b"x", version=text, expect=ABSENT, ttl=None) is False
        assert await driver.load(key) == Record("stored", b"body", ())


def test_now_is_one_instant_in_a_command_however_long_it_takes(place):
    """The answer of an append checks expiry again after the update, and must come to the same result."""
    records = place.past.records.database.slow
    waits = {"$function": {"body": "function() { sleep(50); return 1; }", "args": [], "lang": "js"}}
    records.insert_one({"_id": 1})
    answer = records.find_one_and_update(
        {"_id": 1},
        [{"$set": {"early": "$$NOW"}}, {"$set": {"waited": waits}}, {"$set": {"late": "$$NOW"}}],
        projection={"early": 1, "late": 1, "answered": "$$NOW"},
        return_document=True,
    )
    assert answer["early"] == answer["late"] == answer["answered"]


TRUNCATION = ShortTermMemoryConfig(strategy="truncation")


class Commands(monitoring.CommandListener):
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.sent.append(dict(event.command))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...
    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


@pytest.mark.parametrize(
    ("settings", "write", "read"),
    [
        ({}, {"w": "majority", "j": True}, {"level": "majority"}),
        ({"linearizable": True}, {"w": "majority", "j": True}, {"level": "linearizable"}),
        ({"durability": "primary"}, {"w": 1, "j": True}, {"level": "local"}),
    ],
)
async def test_each_operation_carries_its_concern_and_its_deadline(replica_place, settings, write, read):
    commands, key = Commands(), Key("acme:concerns:memory", "chat")
    async with AsyncMongoClient(replica_place.url, event_listeners=[commands]) as client:
        driver = open_driver(None, client=client, database=replica_place.database, deadline_s=3.0, **settings)
        assert await driver.append(key, b"a", initial_version="v", ttl=None) == 1
        assert await driver.load(key) == Record("v", None, (b"a",))
        assert (await driver.scan(key.scope, limit=1)).names == ("chat",)
        assert await driver.replace(key, b"b", version="w", expect="v", drop=1, ttl=None) is True
        assert await driver.delete(key) is True
    sent = [command for command in commands.sent if "endSessions" not in command]
    assert [next(iter(command)) for command in sent] == [
        *("findAndModify", "find", "find", "findAndModify", "findAndModify"),
    ]
    for command in sent:
        assert 0 < command["maxTimeMS"] <= 3000
        assert command.get("writeConcern", write) == write
        assert command.get("readConcern", read) == read
        assert "writeConcern" in command or "readConcern" in command


async def test_linearizable_reads_on_a_single_server_are_refused(single_place):
    async with opened(single_place.options(linearizable="true")) as driver:
        with pytest.raises(Unavailable, match="need a replica set"):
            await driver.load(Key("s", "n"))


async def test_a_page_is_one_answer_however_long_it_is(place):
    scope = "acme:pages:memory"
    place.past.records.insert_many(
        {"_id": {"scope": scope, "name": f"{n:04}{'x' * 900}"}, "expires": None} for n in range(3000)
    )
    commands = Commands()
    async with AsyncMongoClient(place.url, event_listeners=[commands]) as client:
        driver = open_driver(None, client=client, database=place.database)
        page = await driver.scan(scope, limit=2500)
        assert (len(page.names), page.after) == (2500, page.names[-1])
        assert [next(iter(command)) for command in commands.sent] == ["find"]
        assert len((await driver.scan(scope, after=page.after, limit=2500)).names) == 500


async def test_a_listing_reads_a_range_of_the_index_and_nothing_else(place):
    scope = "acme:range:memory"
    async with opened(place.url) as driver:
        for name, other in itertools.product(("a", "b", "c"), ("", "x")):
            await driver.append(Key(scope + other, name), b"a", initial_version="v", ttl=None)
    plan = place.past.records.find(statements.names_after(scope, "a"), statements.LISTED).sort("_id", 1)
    stats = plan.explain()["executionStats"]
    assert (stats["totalKeysExamined"], stats["totalDocsExamined"], stats["nReturned"]) == (2, 2, 2)


async def test_the_next_scope_is_found_by_one_key_of_the_index(empty_place):
    async with opened(empty_place.url) as driver:
        for scope, name in itertools.product(("acme:a:memory", "acme:b:memory", "bolt:a:memory"), "abc"):
            await driver.append(Key(scope, name), b"a", initial_version="v", ttl=None)
        found = [await driver.next_scope(after) for after in ("", "acme:a:memory", "acme;", "bolt;")]
        assert found == ["acme:a:memory", "acme:b:memory", "bolt:a:memory", None]
    records = empty_place.past.records
    plan = records.find(statements.scopes_after("acme;"), statements.SCOPE).sort("_id", 1).limit(1)
    stats = plan.explain()["executionStats"]
    assert (stats["totalKeysExamined"], stats["nReturned"]) == (1, 1)


async def test_a_document_full_of_empty_entries_is_too_large(place):
    key = Key("acme:full:memory", "chat")
    document = {
        "_id": key._asdict(),
        "version": "v",
        "expires": None,
        "size": 0,
        "body": None,
        "tail": [b""] * 1_190_000,
    }
    room = statements.LARGEST_DOCUMENT - len(bson.encode(document))
    assert room > 0
    place.past.records.insert_one(document)
    async with opened(place.options(deadline_s=20)) as driver:
        with pytest.raises(TooLarge, match=r"mongo\.append: the record") as caught:
            await driver.append(key, b"x" * room, initial_version="v", ttl=None)
        assert caught.value.what == "record"
        assert (await driver.scan(key.scope, limit=1)).names == ("chat",)
        assert await driver.append(key, b"x", initial_version="v", ttl=None) == 1_190_001


@pytest.mark.parametrize("ttl", [0.0001, 0.001, 1e12, 1e300])
async def test_a_time_to_live_of_any_length_is_kept_or_cut_to_what_a_date_holds(place, ttl):
    key = Key("acme:ttl:memory", "chat")
    async with opened(place.url) as driver:
        await driver.append(key, b"a", initial_version="v", ttl=ttl)
        await asyncio.sleep(0.01)
        assert (await driver.load(key) is not None) is (ttl > 1)
        await driver.delete(key)

"""What a collection says of its layout decides who can use it; older ones are brought up to date."""

from __future__ import annotations

import json
import uuid

import pytest

from stm_backends.drivers import plugins
from stm_backends.drivers.contract import KEEP, Key, Record
from stm_backends.drivers.layouts import Layout
from stm_backends.errors import ConfigurationError
from stm_backends_mongo import statements
from tests.support.contract import opened

KEY = Key("acme:u1:memory", "chat")

LATER = {"indexes": [{"key": {"later": 1}, "name": "stm_later"}]}
"""What a layout of the future might add."""


@pytest.fixture
def collection(place):
    """A collection that the first version of the driver set up, without a word about its layout."""
    collection = place.past.records.database[f"stm_{uuid.uuid4().hex[:12]}"]
    collection.database.command({"createIndexes": collection.name, "indexes": [statements.EXPIRY_INDEX]})
    return collection


@pytest.fixture
def url(place, collection):
    return place.options(collection=collection.name)


def noted(collection):
    found = collection.find_one(statements.layout())
    return found and Layout(found["version"], found["readable_since"])


async def test_a_collection_without_a_layout_works_and_create_labels_it(url, collection):
    async with opened(url) as driver:
        assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == 1
    assert noted(collection) is None
    async with opened(url, create=True) as driver:
        assert await driver.append(KEY, b"b", initial_version="v", ttl=None) == 2
    assert noted(collection) == statements.LAYOUT


async def test_a_collection_is_upgraded_while_an_old_process_runs_on(url, collection, monkeypatch):
    async with opened(url) as old:
        await old.append(KEY, b"a", initial_version="v", ttl=None)
        with monkeypatch.context() as newer:
            newer.setattr(statements, "LAYOUT", Layout(version=2, readable_since=1))
            newer.setitem(statements.STEPS, 2, ("createIndexes", LATER))
            async with opened(url) as not_told:
                assert await not_told.append(KEY, b"b", initial_version="v", ttl=None) == 2
            assert "stm_later" not in collection.index_information()
            async with opened(url, create=True) as new:
                assert "stm_later" in collection.index_information()
                assert await new.append(KEY, b"c", initial_version="v", ttl=60) == 3
                assert await old.append(KEY, b"d", initial_version="v", ttl=60) == 4
                assert await old.replace(KEY, b"A", version="w", expect="v", drop=1, ttl=KEEP) is True
                assert await new.load(KEY) == Record("w", b"A", (b"b", b"c", b"d"))
        async with opened(url, create=True) as old_again:
            assert await old_again.append(KEY, b"e", initial_version="v", ttl=60) == 4
            assert await old.load(KEY) == await old_again.load(KEY)
    assert noted(collection) == Layout(version=2, readable_since=1), "old code leaves the numbers alone"


async def test_steps_that_are_done_are_not_done_again(url, collection, monkeypatch):
    async with opened(url, create=True):
        pass
    monkeypatch.setattr(statements, "LAYOUT", Layout(version=2, readable_since=1))
    monkeypatch.setitem(statements.STEPS, 1, ("no such command", {}))
    monkeypatch.setitem(statements.STEPS, 2, ("createIndexes", LATER))
    async with opened(url, create=True):
        pass
    assert noted(collection) == Layout(version=2, readable_since=1)


@pytest.mark.parametrize("create", [False, True])
async def test_a_layout_that_this_code_cannot_use_is_refused_and_left_as_it_is(url, collection, create):
    collection.insert_one({**statements.layout(), "version": 3, "readable_since": 2})
    with pytest.raises(ConfigurationError, match="upgrade stm-backends"):
        async with opened(url, create=create):
            pass
    assert noted(collection) == Layout(version=3, readable_since=2)


async def test_a_layout_too_old_to_be_used_as_it_is_needs_create(url, collection, monkeypatch):
    async with opened(url, create=True):
        pass
    collection.update_one(statements.layout(), {"$set": {"version": 0}})
    with pytest.raises(ConfigurationError, match="create=True"):
        async with opened(url):
            pass
    async with opened(url, create=True):
        pass
    assert noted(collection) == statements.LAYOUT


async def test_the_document_that_holds_the_layout_is_no_record(url, collection):
    odd = (Key("stm_layout", "stm_layout"), Key("_id", "stm_layout"), Key("version", "readable_since"))
    async with opened(url, create=True) as driver:
        for key in odd:
            assert (await driver.scan(key.scope, limit=5)).names == ()
            assert await driver.load(key) is None
            assert await driver.delete(key) is False
            assert await driver.append(key, b"a", initial_version="v", ttl=60) == 1
            assert (await driver.scan(key.scope, limit=5)).names == (key.name,)
    assert noted(collection) == statements.LAYOUT


async def test_the_printed_schema_does_what_create_does(url, collection):
    collection.drop()
    text = plugins.schema(url)
    for command in text.split(";\n"):
        address, _, argument = command.removesuffix(";").partition(".runCommand(")
        assert address == f"db.getSiblingDB({json.dumps(collection.database.name)})"
        collection.database.command(json.loads(argument.removesuffix(")")))
    assert noted(collection) == statements.LAYOUT
    async with opened(url) as driver:
        assert await driver.append(KEY, b"a", initial_version="v", ttl=60) == 1

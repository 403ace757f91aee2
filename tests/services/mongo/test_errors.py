"""What each error of PyMongo means to a caller, and documents that another program has changed."""

from __future__ import annotations

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import (
    AutoReconnect,
    ConfigurationError,
    DuplicateKeyError,
    ExecutionTimeout,
    InvalidOperation,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
    WTimeoutError,
)

from stm_backends.drivers.contract import ANY, Key
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, Unavailable
from stm_backends_mongo.client import make_client, retries_writes
from stm_backends_mongo.errors import meaning, meaning_of_last
from stm_backends_mongo.settings import MongoSettings
from tests.support.contract import opened


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerSelectionTimeoutError("x"), Unavailable),
        (WaitQueueTimeoutError("x"), Unavailable),
        (NetworkTimeout("x"), OutcomeUnknown),
        (AutoReconnect("x"), OutcomeUnknown),
        (NotPrimaryError("x", {"code": 10107}), Unavailable),
        (NotPrimaryError("x", {"code": 13435}), Unavailable),
        (NotPrimaryError("x", {"code": 189}), OutcomeUnknown),
        (NotPrimaryError("x", {"code": 11600}), OutcomeUnknown),
        (NotPrimaryError("x", {"code": 91}), OutcomeUnknown),
        (NotPrimaryError("x"), OutcomeUnknown),
        (WriteConcernError("x", 64), OutcomeUnknown),
        (WTimeoutError("x", 50), OutcomeUnknown),
        (WriteConcernError("x", 10107), OutcomeUnknown),
        (ExecutionTimeout("x", 50), OutcomeUnknown),
        (OperationFailure("x", 13), Denied),
        (OperationFailure("x", 18), Denied),
        (OperationFailure("x", 14031), Unavailable),
        (OperationFailure("x", 17124), Corrupt),
        (DuplicateKeyError("x", 11000), Unavailable),
        (OperationFailure("x", 999), OutcomeUnknown),
        (InvalidOperation("x"), Unavailable),
        (ConfigurationError("x"), Unavailable),
        (PyMongoError("x"), OutcomeUnknown),
        # What PyMongo's lock raises after the application cancelled its own call of a client it handed in.
        (RuntimeError("cannot wait on un-acquired lock"), OutcomeUnknown),
        (RuntimeError("Lock is not acquired"), OutcomeUnknown),
    ],
    ids=repr,
)
def test_every_error_has_a_meaning(error, kind):
    found = meaning(error)
    assert found is not None
    assert found[0] is kind


@pytest.mark.parametrize(
    "error", [WaitQueueTimeoutError("x"), NotPrimaryError("x", {"code": 10107})], ids=repr
)
def test_what_refuses_the_last_of_several_attempts_says_nothing_of_those_before(error):
    found = meaning_of_last(error)
    assert found is not None
    assert found[0] is OutcomeUnknown


def test_the_server_says_that_no_attempt_has_written_anything():
    error = NotPrimaryError("x", {"code": 10107, "errorLabels": ["NoWritesPerformed"]})
    error._add_error_label("NoWritesPerformed")  # noqa: SLF001 -- as PyMongo does with what the server sends
    found = meaning_of_last(error)
    assert found is not None
    assert found[0] is Unavailable


def test_a_client_retries_writes_unless_it_is_told_not_to():
    assert retries_writes(AsyncMongoClient("mongodb://localhost", connect=False))
    assert not retries_writes(AsyncMongoClient("mongodb://localhost/?retryWrites=false", connect=False))
    assert not retries_writes(make_client(MongoSettings.from_url("mongodb://localhost/stm")))


def test_addresses_of_members_that_cannot_be_reached_are_told():
    said = "Could not reach any servers in []. Replica set is configured with internal hostnames or IPs?"
    kind, message = meaning(ServerSelectionTimeoutError(said))
    assert kind is Unavailable
    assert "addresses that the members of the set announce" in message
    assert "directConnection=true" in message


def test_a_mistake_of_ours_is_not_blamed_on_the_datastore():
    assert meaning(TypeError("x")) is None
    assert meaning(RuntimeError("another event loop")) is None


@pytest.mark.parametrize(
    "damage", [{"$set": {"tail": "text"}}, {"$set": {"tail": None}}, {"$unset": {"tail": 1}}]
)
async def test_nothing_is_written_to_a_document_without_a_tail(place, damage):
    key = Key("acme:tailless:memory", "chat")
    async with opened(place.url) as driver:
        await driver.delete(key)
        await driver.append(key, b"a", initial_version="v", ttl=None)
        place.past.records.update_one({"_id": key._asdict()}, damage)
        before = place.past.records.find_one({"_id": key._asdict()})
        with pytest.raises(Corrupt):
            await driver.load(key)
        with pytest.raises(Corrupt):
            await driver.append(key, b"b", initial_version="v", ttl=None)
        with pytest.raises(Corrupt):
            await driver.replace(key, b"b", version="w", expect="v", drop=1, ttl=None)
        assert place.past.records.find_one({"_id": key._asdict()}) == before
        assert await driver.delete(key) is True


@pytest.mark.parametrize(
    "damage",
    [
        *(
            {"$set": {"tail": ["text"]}},
            {"$set": {"size": 7}},
            {"$set": {"version": 5}},
            {"$set": {"body": 5}},
        ),
        *({"$unset": {"size": 1}}, {"$unset": {"version": 1}}, {"$unset": {"body": 1}}),
    ],
    ids=repr,
)
async def test_a_document_that_was_altered_is_corrupt_and_can_be_erased(place, damage):
    key = Key("acme:altered:memory", "chat")
    async with opened(place.url) as driver:
        await driver.replace(key, b"", version="v", expect=ANY, ttl=None)
        place.past.records.update_one({"_id": key._asdict()}, damage)
        with pytest.raises(Corrupt):
            await driver.load(key)
        assert await driver.delete(key) is True

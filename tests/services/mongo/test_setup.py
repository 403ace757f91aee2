"""How a collection is set up, who may do it, and what is refused."""

from __future__ import annotations

import asyncio
import socket
import uuid

import pytest

from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import ConfigurationError, Unavailable
from tests.support.contract import opened
from tests.support.mongod import until

QUICK = "deadline_s=2"


@pytest.fixture
def fresh(place):
    """The name of a collection that is not there yet."""
    return f"stm_{uuid.uuid4().hex[:12]}"


async def test_a_collection_that_was_not_set_up_is_refused_with_the_remedy(place, fresh):
    with pytest.raises(Unavailable, match="open it once with create=True"):
        async with opened(place.options(collection=fresh)):
            pass
    async with opened(place.options(collection=fresh), create=True):
        pass
    async with opened(place.options(collection=fresh)) as driver:
        assert await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None) == 1
    assert set(place.past.records.database[fresh].index_information()) == {"_id_", "stm_expires"}


async def test_a_collection_from_which_nothing_would_be_removed_is_refused(place, fresh):
    place.past.records.database[fresh].insert_one({"_id": 1})
    with pytest.raises(Unavailable, match="no index that removes expired records"):
        async with opened(place.options(collection=fresh)):
            pass


async def test_an_index_that_was_dropped_is_made_again_with_create(place, fresh):
    async with opened(place.options(collection=fresh), create=True):
        pass
    place.past.records.database[fresh].drop_indexes()
    with pytest.raises(Unavailable, match="open it once with create=True"):
        async with opened(place.options(collection=fresh)):
            pass
    async with opened(place.options(collection=fresh), create=True):
        pass
    assert "stm_expires" in place.past.records.database[fresh].index_information()


async def test_a_collection_to_which_different_keys_are_one_is_refused(place, fresh):
    place.past.records.database.create_collection(fresh, collation={"locale": "en", "strength": 1})
    with pytest.raises(ConfigurationError, match="has a collation"):
        async with opened(place.options(collection=fresh), create=True):
            pass


@pytest.mark.parametrize(
    "kind",
    [
        {"capped": True, "size": 100_000},
        {"timeseries": {"timeField": "at"}},
        {"viewOn": "stm_records", "pipeline": []},
        {},
    ],
    ids=["capped", "a time series", "a view", "an index in the way"],
)
async def test_a_collection_of_another_kind_is_refused_and_left_as_it_is(place, fresh, kind):
    collection = place.past.records.database.create_collection(fresh, **kind)
    if not kind:
        collection.create_index("other", name="stm_expires")
    before = collection.options()
    with pytest.raises(ConfigurationError, match="choose another collection"):
        async with opened(place.options(collection=fresh), create=True):
            pass
    assert collection.options() == before


async def test_expired_records_are_removed_by_mongodb_and_lasting_ones_stay(single_place):
    records = single_place.past.records
    records.delete_many({})
    async with opened(single_place.url) as driver:
        await driver.append(Key("s", "mortal"), b"a", initial_version="v", ttl=0.5)
        await driver.append(Key("s", "lasting"), b"a", initial_version="v", ttl=None)
        await driver.append(Key("s", "later"), b"a", initial_version="v", ttl=3600)
    await asyncio.to_thread(until, lambda: records.count_documents({}) == 2)
    assert sorted(record["_id"]["name"] for record in records.find()) == ["lasting", "later"]


async def test_a_secondary_takes_no_writes_and_says_what_it_is(replica_set, replica_place, fresh):
    async with opened(replica_place.options(collection=fresh), create=True) as driver:
        await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
    primary = await asyncio.to_thread(replica_set.primary)
    secondary = next(member for member in replica_set.members if member is not primary)
    alone = f"mongodb://{secondary.address}/{replica_place.database}?directConnection=true"
    async with opened(f"{alone}&collection={fresh}&deadline_s=3") as driver:
        for write in (
            lambda: driver.append(Key("s", "n"), b"b", initial_version="v", ttl=None),
            lambda: driver.replace(Key("s", "n"), b"b", version="w", expect=ANY, ttl=None),
            lambda: driver.delete(Key("s", "n")),
        ):
            with pytest.raises(Unavailable, match="not the primary"):
                await write()
    async with opened(replica_place.options(collection=fresh)) as driver:
        assert await driver.load(Key("s", "n")) == Record("v", None, (b"a",))


async def reason(url: str) -> str:
    with pytest.raises(Unavailable, match=r"no suitable server was found .* \(.*\)$") as caught:
        async with opened(url):
            pass
    return str(caught.value).rpartition("(")[2].rstrip(")")


@pytest.mark.full
async def test_the_error_says_why_no_server_was_found(single, single_place):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        assert "nothing listens there" in await reason(
            f"mongodb://127.0.0.1:{deaf.getsockname()[1]}/?{QUICK}"
        )
        deaf.listen()
        hangs = await reason(f"mongodb://127.0.0.1:{deaf.getsockname()[1]}/?{QUICK}")
        assert hangs.startswith("no answer: the server is frozen or overloaded")
    assert "host name is unknown" in await reason(f"mongodb://no-such-host.invalid/?{QUICK}")
    assert "TLS" in await reason(f"mongodb://{single.address}/?tls=true&{QUICK}")
    assert "not a member" in await reason(f"mongodb://{single.address}/?replicaSet=another&{QUICK}")

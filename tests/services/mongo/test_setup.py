"""How a collection is set up, who may do it, and what is refused."""

from __future__ import annotations

import asyncio
import socket
import uuid
from urllib.parse import quote_plus

import pytest
from pymongo import MongoClient

from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import ConfigurationError, Denied, Unavailable
from stm_backends_mongo import open_driver
from tests.support.contract import opened
from tests.support.mongod import Mongod, until

WORD = "p/s3cret"

QUICK = "deadline_s=2"

NARROW = "find insert update remove listIndexes"


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
    with pytest.raises(Unavailable, match="nothing would remove what has expired"):
        async with opened(place.options(collection=fresh)):
            pass


async def test_a_collection_to_which_different_keys_are_one_is_refused(place, fresh):
    place.past.records.database.create_collection(fresh, collation={"locale": "en", "strength": 1})
    with pytest.raises(ConfigurationError, match="a collation of its own"):
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


@pytest.fixture(scope="module")
def guarded(mongod_program, ca, tmp_path_factory):
    """A server with users, and with TLS for those who ask for it."""
    both = tmp_path_factory.mktemp("certificate") / "both.pem"
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
    tls = "--tlsMode", "preferTLS", "--tlsCertificateKeyFile", str(both)
    server = Mongod(mongod_program, tmp_path_factory.mktemp("guarded") / "data", "--auth", *tls)
    server.start()
    with MongoClient(f"mongodb://{server.address}/?directConnection=true") as client:
        roles = [{"role": "root", "db": "admin"}]
        client.admin.command("createUser", "root", pwd=WORD, roles=roles)
    with MongoClient(f"mongodb://root:{quote_plus(WORD)}@{server.address}/?directConnection=true") as client:
        privileges = [
            {"resource": {"db": "chats", "collection": "stm_records"}, "actions": NARROW.split()},
        ]
        client.chats.command("createRole", "narrow", privileges=privileges, roles=[])
        for name, role in (("writer", "readWrite"), ("reader", "read"), ("narrow", "narrow")):
            client.chats.command("createUser", name, pwd=WORD, roles=[{"role": role, "db": "chats"}])
    yield server
    server.kill()


def url_for(server: Mongod, user: str, secret: str = WORD) -> str:
    return f"mongodb://{user}:{quote_plus(secret)}@{server.address}/chats?deadline_s=3"


@pytest.mark.parametrize("user", ["writer", "narrow"])
async def test_the_permissions_that_the_readme_names_are_all_that_is_needed(guarded, user):
    async with opened(url_for(guarded, "writer"), create=True):
        pass
    async with opened(url_for(guarded, user)) as driver:
        assert await driver.append(Key("s", user), b"a", initial_version="v", ttl=None) == 1
        assert (await driver.scan("s", limit=1)).names == (user,)
        assert await driver.replace(Key("s", user), b"b", version="w", expect=ANY, ttl=None) is True
        assert await driver.delete(Key("s", user)) is True


async def test_a_connection_by_tls_is_made_only_with_a_certificate_that_is_trusted(guarded, authority):
    url = f"{url_for(guarded, 'writer')}&tls=true"
    async with opened(f"{url}&tlsCAFile={quote_plus(str(authority))}", create=True) as driver:
        assert await driver.load(Key("s", "tls")) is None
    with pytest.raises(Unavailable):
        async with opened(url):
            pass


async def test_whoever_may_not_is_denied_and_no_secret_shows(guarded):
    async with opened(url_for(guarded, "writer"), create=True) as driver:
        await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
    async with opened(url_for(guarded, "reader")) as driver:
        assert await driver.load(Key("s", "n")) is not None
        with pytest.raises(Denied, match=r"mongo\.append: this user may not do that"):
            await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
        with pytest.raises(Denied):
            await driver.delete(Key("s", "n"))
    driver = open_driver(url_for(guarded, "writer", "wr0ng"))
    with pytest.raises(Denied, match=r"mongo\.open: MongoDB does not accept these credentials") as caught:
        await driver.open()
    assert "wr0ng" not in f"{caught.value!r} {caught.value.__cause__!r}"
    with pytest.raises(Denied):
        async with opened(f"mongodb://{guarded.address}/chats"):
            pass


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
    with pytest.raises(Unavailable, match=r"no server that could do this was found .* \(.*\)$") as caught:
        async with opened(url):
            pass
    return str(caught.value).rpartition("(")[2].rstrip(")")


async def test_a_server_that_is_not_there_hangs_or_is_another_one_reads_differently(single, single_place):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        assert "nothing listens there" in await reason(
            f"mongodb://127.0.0.1:{deaf.getsockname()[1]}/?{QUICK}"
        )
        deaf.listen()
        hangs = await reason(f"mongodb://127.0.0.1:{deaf.getsockname()[1]}/?{QUICK}")
        assert hangs.startswith("no answer: the server is frozen or overloaded")
    assert "name of the host" in await reason(f"mongodb://no-such-host.invalid/?{QUICK}")
    assert "TLS" in await reason(f"mongodb://{single.address}/?tls=true&{QUICK}")
    assert "no member" in await reason(f"mongodb://{single.address}/?replicaSet=another&{QUICK}")

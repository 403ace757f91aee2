"""A replica set of three and a single server, or the server that STM_TEST_MONGO_URL names."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from stm_backends.testing.faults import Proxy

pytest.importorskip("pymongo")
pytest.importorskip("motor")

from pymongo import MongoClient

from stm_backends_mongo import MongoSettings, statements
from tests.services.mongo.support import Past
from tests.support import mongod
from tests.support.places import with_query


@pytest.fixture(scope="package", autouse=True)
def no_socket_left_to_others():
    """Collect the sockets that PyMongo leaves here, and not during the tests of another directory."""
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
        return with_query(self.url, **more)


def place_in(url: str) -> Iterator[Place]:
    """Set a new database up, and remove it in the end."""
    database = f"stm_test_{uuid.uuid4().hex[:12]}"
    with MongoClient(url) as client:
        for command in statements.setup("stm_records"):
            client[database].command(command)
        yield Place(url=mongod.in_database(url, database), database=database, past=Past(client, database))
        client.drop_database(database)


@pytest.fixture(scope="session")
def single(mongod_program, tmp_path_factory):
    """A server that is no member of a replica set, and removes at once what has expired."""
    quick = "--setParameter", "ttlMonitorSleepSecs=1"
    server = mongod.Mongod(mongod_program, tmp_path_factory.mktemp("single") / "data", *quick)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def replica_place(replica_set):
    """A database on the replica set."""
    yield from place_in(replica_set.url)


@pytest.fixture(scope="session")
def place(mongo_url):
    """The database that most tests work in."""
    yield from place_in(mongo_url)


@pytest.fixture
def empty_place(mongo_url):
    """A database without the records of other tests."""
    yield from place_in(mongo_url)


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
    with Proxy("{}:{}".format(*address)) as proxy:
        yield proxy


@pytest.fixture
def proxied(place, proxy):
    """The database behind the proxy, which is all that a client sees of the replica set."""
    url = mongod.in_database(place.url, place.database, port=proxy.port)
    return Place(url=url, database=place.database, past=place.past)


@pytest.fixture
def settings_of():
    """How the settings of a place are made for a client that is handed in.

    The deadline only ends a test that hangs: forty writes to one record wait for forty flushes of a disk.
    """

    def make(place: Place, *, deadline_s: float = 60.0, **more) -> MongoSettings:
        return MongoSettings.from_options(database=place.database, deadline_s=deadline_s, **more)

    return make

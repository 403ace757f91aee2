"""Behind a real PgBouncer in transaction pooling."""

import asyncio
import functools
import shutil
from typing import ClassVar
from urllib.parse import urlsplit

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import Key
from stm_backends.errors import Unavailable
from stm_backends.testing import Datastore, DriverContract, open_at
from tests.services.postgres.support import drop, fresh_schema, run
from tests.support import apt
from tests.support.contract import slow_checks
from tests.support.postgresql import run_as
from tests.support.servers import Server, free_port

pytestmark = pytest.mark.full

KEY = Key("scope", "name")
LIBRARIES = (
    *("libaudit1", "libcap-ng0", "libcap2", "libcares2", "libevent-2.1-7t64", "libpam0g", "libssl3t64"),
    *("libsystemd0", "libzstd1", "zlib1g"),
)


@pytest.fixture(scope="module")
def pooled(url, postgres_folder):
    """The URL of the shared server by way of a PgBouncer in transaction pooling."""
    try:
        program = apt.find_in_debian("trixie", "pgbouncer", "pgbouncer", *LIBRARIES, copy_to=postgres_folder)
    except apt.NotAtHand as error:
        # It is not in the package index, so its absence is never a failure.
        pytest.skip(str(error))
    port, place = free_port(), postgres_folder / "pgbouncer"
    place.mkdir()
    (place / "pgbouncer.ini").write_text(
        f"""[databases]
postgres = {_connection_string(url)}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
max_client_conn = 200
"""
    )
    through = f"postgresql://postgres@127.0.0.1:{port}/postgres"

    def answers():
        asyncio.run(_ask(through))

    user = run_as()
    if user:
        shutil.chown(place, user)
    command = [program.path, place / "pgbouncer.ini"]
    server = Server(command, place, answers, environment=program.environment, user=user)
    server.start()
    yield through
    ended = server.last_words()
    server.stop()
    assert ended is None, ended


def _connection_string(url):
    host, port, name, user, password = _parts(url)
    secret = f" password={password}" if password else ""
    return f"host={host} port={port} dbname={name} user={user}{secret}"


def _parts(url):
    parts = urlsplit(url)
    return parts.hostname, parts.port or 5432, parts.path[1:], parts.username or "postgres", parts.password


async def _ask(url):
    connection = await asyncpg.connect(url, statement_cache_size=0, timeout=5)
    await connection.fetchval("SELECT 1")
    await connection.close()


@pytest.fixture(scope="module")
def tables(pooled):
    """The tables, set up through the pooler."""
    schema = fresh_schema()
    run(_set_up(pooled, schema))
    yield schema
    run(drop(pooled, schema))


async def _set_up(pooled, schema):
    await (await open_at(pooled, schema=schema, pgbouncer=True, create=True)).close()


class TestPostgresDriverBehindPgBouncer(DriverContract):
    opted_out: ClassVar = slow_checks("asked of the same driver without a pooler")

    @pytest.fixture
    def datastore(self, pooled, tables):
        opening = functools.partial(open_at, pooled, schema=tables, pgbouncer=True)
        return Datastore(open=opening, tick=0.5, histories=3)


async def test_writers_on_connections_that_change_all_the_time_lose_nothing(pooled, tables):
    drivers = [await open_at(pooled, schema=tables, pgbouncer=True) for _ in range(4)]

    async def write(label):
        for number in range(25):
            entry = f"{label}:{number}".encode()
            await drivers[label % 4].append(KEY, entry, initial_version="initial", ttl=None)

    await asyncio.gather(*(write(label) for label in range(12)))
    tail = (await drivers[0].load(KEY)).tail
    assert len(set(tail)) == len(tail) == 300
    await drivers[0].delete(KEY)
    for driver in drivers:
        await driver.close()


async def test_without_the_setting_the_error_names_it(pooled, tables):
    with pytest.raises(Unavailable, match="pgbouncer=True"):
        await open_at(pooled, schema=tables)


async def test_a_pool_of_ones_own_works_too(pooled, tables):
    pool = await asyncpg.create_pool(pooled, statement_cache_size=0, min_size=0)
    driver = open_backend("postgres", client=pool, schema=tables).driver
    assert await driver.load(KEY) is None
    await pool.close()

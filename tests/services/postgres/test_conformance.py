"""The PostgreSQL driver keeps the contract, on a real server."""

import contextlib
import functools
from urllib.parse import urlsplit

import asyncpg
import pytest

from stm_backends.drivers.contract import Record
from stm_backends.testing import (
    Datastore,
    DriverContract,
    GraphContract,
    HandedIn,
    PodsContract,
    StoreContract,
    graphs_on,
    memories_on,
    open_at,
    stores_on,
)
from stm_backends_postgres import PostgresDriver, PostgresSettings
from tests.services.postgres.support import drop, fresh_schema, purging, run, warm
from tests.support.contract import deadline_of, reached
from tests.support.places import at_port
from tests.support.sealed import open_sealed

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}

VERSION = "SELECT version, body FROM {schema}.stm_record WHERE scope = $1 AND name = $2"
TAIL = """
    SELECT entry FROM {schema}.stm_entry JOIN {schema}.stm_record ON record = id
    WHERE scope = $1 AND name = $2 ORDER BY seq"""
LOCK = "SELECT FROM {schema}.stm_record WHERE scope = $1 AND name = $2 FOR UPDATE"
# The last statement of a session tells whose it is.
OPEN = """
    SELECT count(*) FROM pg_stat_activity
    WHERE state LIKE 'idle in transaction%' AND query LIKE '%{schema}%'"""
DAMAGE = """
    DELETE FROM {schema}.stm_entry USING {schema}.stm_record
    WHERE record = id AND scope = $1 AND name = $2 AND seq % 2 = 0"""
CUT = """
    UPDATE {schema}.stm_entry SET entry = substring(entry FROM 1 FOR octet_length(entry) - 1)
    WHERE (record, seq) IN (
        SELECT record, max(seq) FROM {schema}.stm_entry JOIN {schema}.stm_record ON record = id
        WHERE scope = $1 AND name = $2 GROUP BY record)"""
# The row of a record, and entries of which no record knows.
STORED = """
    SELECT 'record', id FROM {schema}.stm_record WHERE scope = $1 AND name = $2
    UNION ALL SELECT 'entry', record FROM {schema}.stm_entry
    WHERE record NOT IN (SELECT id FROM {schema}.stm_record)"""


@pytest.fixture(scope="module")
def tables(url):
    """A schema in which the tables are."""
    schema = fresh_schema()
    run(_create(url, schema))
    yield schema
    run(drop(url, schema))


async def _create(url, schema):
    await (await open_at(url, schema=schema, create=True)).close()


async def open_warm(url, **options):
    """Return a driver whose connection knows every statement; see `test_statements.py`."""
    driver = await open_at(url, **options)
    await warm(driver)
    return driver


class TestPostgresDriver(DriverContract):
    @pytest.fixture
    def datastore(self, request, url, through_proxy, proxy, tables):
        # What follows writes by chance would be counted with the round trips of operations.
        with purging(after_writes=False):
            yield self.place(deadline_of(request), url, through_proxy, proxy, tables)

    def place(self, deadline_s, url, through_proxy, proxy, tables):
        parts = urlsplit(url)

        async def ask(statement, key):
            connection = await asyncpg.connect(url)
            try:
                return await connection.fetch(statement.format(schema=tables), *key)
            finally:
                await connection.close()

        async def damage(key):
            await ask(DAMAGE, key)

        async def cut(key):
            await ask(CUT, key)

        async def stored(key):
            return await ask(STORED, key)

        async def peek(key):
            found, tail = await ask(VERSION, key), await ask(TAIL, key)
            return Record(*found[0], tuple(entry for (entry,) in tail)) if found else None

        @contextlib.asynccontextmanager
        async def hold(key):
            connection = await asyncpg.connect(url)
            try:
                async with connection.transaction():
                    await connection.fetch(LOCK.format(schema=tables), *key)
                    yield
            finally:
                await connection.close()

        async def transactions():
            ((count,),) = await ask(OPEN, ())
            return count

        async def handed_in():
            pool = await asyncpg.create_pool(url, min_size=1)

            async def is_open():
                return await pool.fetchval("SELECT 1") == 1

            settings = PostgresSettings(schema=tables)
            return HandedIn(driver=PostgresDriver(settings, client=pool), is_open=is_open, close=pool.close)

        return Datastore(
            open=functools.partial(open_warm, through_proxy, schema=tables, deadline_s=deadline_s, **SMALL),
            histories=10,
            damage=damage,
            cut=cut,
            stored=stored,
            peek=peek,
            **reached(
                (parts.hostname, parts.port or 5432),
                functools.partial(at_port, through_proxy),
                open_warm,
                schema=tables,
                **SMALL,
            ),
            outage=proxy.cut,
            hold=hold,
            transactions=transactions,
            handed_in=handed_in,
            round_trips=lambda: proxy.round_trips,
            server=run(version(url)),
        )


@pytest.mark.full
class TestPostgresDriverAsUsersHaveIt(DriverContract):
    """The default settings."""

    @pytest.fixture
    def datastore(self, url, tables):
        return Datastore(open=functools.partial(open_at, url, schema=tables), histories=3)


@pytest.mark.full
class TestSealedPostgres(DriverContract):
    """Sealing does not hide an outage."""

    @pytest.fixture
    def datastore(self, request, through_proxy, proxy, tables):
        deadline_s = deadline_of(request)
        opening = functools.partial(open_sealed, through_proxy, schema=tables, deadline_s=deadline_s, **SMALL)
        return Datastore(open=opening, histories=3, outage=proxy.cut)


@pytest.mark.full
class TestPodsOnPostgres(PodsContract):
    @pytest.fixture
    def memories(self, request, through_proxy, proxy, tables):
        deadline_s = deadline_of(request)
        opening = functools.partial(open_warm, through_proxy, schema=tables, deadline_s=deadline_s)
        return memories_on(Datastore(open=opening, outage=proxy.cut), deadline_s=deadline_s)


@pytest.mark.full
class TestStoresOnPostgres(StoreContract):
    @pytest.fixture
    def stores(self, request, through_proxy, proxy, tables):
        opening = functools.partial(open_warm, through_proxy, schema=tables, deadline_s=deadline_of(request))
        return stores_on(Datastore(open=opening, outage=proxy.cut))


@pytest.mark.full
class TestGraphsOnPostgres(GraphContract):
    @pytest.fixture
    def graphs(self, request, through_proxy, proxy, tables):
        opening = functools.partial(open_warm, through_proxy, schema=tables, deadline_s=deadline_of(request))
        return graphs_on(Datastore(open=opening, outage=proxy.cut))


async def version(url):
    connection = await asyncpg.connect(url)
    try:
        return "PostgreSQL " + ".".join(map(str, connection.get_server_version()[:2]))
    finally:
        with contextlib.suppress(OSError):
            await connection.close()

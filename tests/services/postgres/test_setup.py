"""Setting the tables up: explicit, idempotent, by many at once, and refused where something else is there."""

import asyncio

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import Key
from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends.testing import open_at
from stm_backends_postgres.plugin import schema as schema_text
from tests.services.postgres.support import drop, fresh_schema, nothing_follows_writes

KEY = Key("scope", "name")

OPEN = """
import asyncio, sys
from stm_backends import open_backend
from stm_backends.drivers.contract import Key
async def main():
    async with open_backend(sys.argv[1], schema=sys.argv[2], create=True, deadline_s=60) as backend:
        print(await backend.driver.append(Key("scope", "name"), b"", initial_version="initial", ttl=None))
asyncio.run(main())
"""


async def test_tables_are_not_created_unless_asked_for(url, schema):
    with pytest.raises(Unavailable, match="create=True"):
        await open_at(url, schema=schema)


async def test_creating_again_changes_nothing(url, schema):
    for length in (1, 2):
        async with open_backend(url, schema=schema, create=True) as backend:
            assert await backend.driver.append(KEY, b"", initial_version="initial", ttl=None) == length


async def test_what_schema_prints_is_what_create_does(url, schema, admin):
    await admin.execute(schema_text(url, schema=schema))
    async with open_backend(url, schema=schema) as backend:
        assert await backend.driver.append(KEY, b"", initial_version="initial", ttl=None) == 1


async def test_a_schema_with_capitals_is_quoted(url):
    name = fresh_schema().upper()
    try:
        async with open_backend(url, schema=name, create=True) as backend:
            assert await backend.driver.append(KEY, b"", initial_version="initial", ttl=None) == 1
    finally:
        await drop(url, name)


async def test_a_table_of_another_program_is_refused_and_left_alone(url, schema, admin):
    await admin.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.stm_record (mine int)")
    for create in (False, True):
        with pytest.raises(ConfigurationError, match="was not set up by this library"):
            await open_at(url, schema=schema, create=create)
    columns = await admin.fetch(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = $1", schema
    )
    assert [column for (column,) in columns] == ["mine"]


async def test_a_database_that_is_not_there_is_unavailable(url):
    with pytest.raises(Unavailable, match="the database does not exist"):
        await open_at(url.rpartition("/")[0] + "/not_there")


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
async def test_a_pool_of_another_isolation_level_is_refused_with_the_reason(url, schema, driver, level):
    settings = {"default_transaction_isolation": level}
    pool = await asyncpg.create_pool(url, min_size=0, server_settings=settings)
    for opened in (True, False):
        theirs = open_backend("postgres", client=pool, schema=schema).driver
        with pytest.raises(ConfigurationError, match=f"{level} by default.*default_transaction_isolation"):
            await (theirs.open() if opened else theirs.append(KEY, b"a", initial_version="initial", ttl=None))
    await pool.close()
    ours = await open_at(url, schema=schema)
    assert await ours.load(KEY) is None
    await ours.close()


async def test_a_pool_that_discards_statements_works_and_the_log_says_why(url, schema, driver, caplog):
    async def discard(connection):
        await connection.execute("DISCARD ALL")

    pool = await asyncpg.create_pool(url, min_size=1, reset=discard)
    theirs = open_backend("postgres", client=pool, schema=schema).driver
    for length in range(1, 6):
        assert await theirs.append(KEY, b"a", initial_version="initial", ttl=None) == length
        assert len((await theirs.load(KEY)).tail) == length
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1, "once for each driver"
    assert "statement_cache_size=0" in said[0].getMessage()
    await pool.close()


async def test_a_database_that_is_not_utf8_is_refused(url, admin):
    name = fresh_schema()
    await admin.execute(f"CREATE DATABASE {name} ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
    try:
        with pytest.raises(ConfigurationError, match="LATIN1"):
            await open_at(url.rpartition("/")[0] + f"/{name}", create=True)
    finally:
        await admin.execute(f"DROP DATABASE {name}")


async def test_an_unreachable_server_is_unavailable():
    with pytest.raises(Unavailable, match="cannot be reached"):
        await open_at("postgresql://127.0.0.1:1/db")


async def test_unix_sockets_are_written_as_libpq_writes_them(server):
    folder = str(server.directory)
    for url in (
        f"postgresql://postgres@/postgres?host={folder}&port={server.port}",
        f"postgresql://postgres@{folder.replace('/', '%2F')}:{server.port}/postgres",
    ):
        async with open_backend(url, create=True) as backend:
            assert await backend.driver.load(KEY) is None


async def test_what_asyncpg_cannot_make_sense_of_is_a_configuration_error(url, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="asyncpg cannot connect with these settings"):
        await open_at(f"{url}?sslmode=verify-full")


async def test_a_password_may_be_a_function(url, schema):
    asked = []

    async def password():
        asked.append(True)
        return "not looked at"

    async with open_backend(url, schema=schema, create=True, password=password) as backend:
        await backend.ping()
    assert asked


async def test_a_pool_is_used_in_its_own_event_loop_only(url, schema, driver):
    pool = await asyncpg.create_pool(url, min_size=1)
    mine = open_backend("postgres", client=pool, schema=schema).driver
    assert await mine.load(KEY) is None

    def elsewhere():
        with pytest.raises(ConfigurationError, match="belongs to another event loop"):
            asyncio.run(mine.load(KEY))

    await asyncio.to_thread(elsewhere)
    await pool.close()


async def test_only_a_pool_can_be_handed_in(admin):
    with pytest.raises(ConfigurationError, match=r"pass an asyncpg\.Pool"):
        open_backend("postgres", client=admin)
    with pytest.raises(ConfigurationError, match="not object"):
        open_backend("postgres", client=object())


@pytest.mark.parametrize("kind", ["int4", "int8", "bool", "text", "bytea"])
async def test_a_pool_with_codecs_of_its_own_is_refused_by_the_type(url, schema, driver, kind):
    async def read_in_a_way_of_its_own(connection):
        await connection.set_type_codec(
            kind, schema="pg_catalog", encoder=str, decoder=lambda text: [text], format="text"
        )

    async with asyncpg.create_pool(url, min_size=1, init=read_in_a_way_of_its_own) as pool:
        with pytest.raises(ConfigurationError, match=f"custom codec for {kind} .*pass a pool"):
            async with open_backend("postgres", client=pool, schema=schema):
                pass


@pytest.mark.parametrize("option", [{"pool_size": 3}, {"synchronous_commit": "off"}, {"pgbouncer": True}])
async def test_what_a_pool_handed_in_decides_cannot_be_set(url, option):
    pool = await asyncpg.create_pool(url, min_size=0)
    with pytest.raises(ConfigurationError, match="leave out"):
        open_backend("postgres", client=pool, **option)
    await pool.close()


async def test_waiting_for_the_first_look_counts_against_each_deadline():
    met = set()
    over = asyncio.Event()

    async def freeze(_, writer):
        met.add(asyncio.current_task())
        await over.wait()
        writer.close()

    frozen = await asyncio.start_server(freeze, "127.0.0.1", 0)
    port = frozen.sockets[0].getsockname()[1]
    pool = await asyncpg.create_pool(f"postgresql://u:p@127.0.0.1:{port}/d", min_size=0)
    driver = open_backend("postgres", client=pool, deadline_s=0.5).driver
    answers = await asyncio.gather(*(driver.load(KEY) for _ in range(12)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {Unavailable}
    assert len(met) < 6, "they did not wait in a row, each until another one had given up"
    over.set()
    await asyncio.gather(*met)
    pool.terminate()
    frozen.close()


async def test_a_pool_that_was_never_made_ready_is_unavailable_and_says_so(url):
    pool = asyncpg.create_pool(url, min_size=0)
    with pytest.raises(Unavailable, match="never initialized"):
        await open_backend("postgres", client=pool).driver.load(KEY)


async def test_tables_that_vanish_are_unavailable_and_never_no_data(schema, driver, admin):
    with nothing_follows_writes():  # A purge would lock the tables in the other order.
        await driver.append(KEY, b"a", initial_version="initial", ttl=None)
    await admin.execute(f"DROP TABLE {schema}.stm_entry, {schema}.stm_record CASCADE")
    for work in (
        lambda: driver.load(KEY),
        lambda: driver.append(KEY, b"b", initial_version="initial", ttl=None),
        lambda: driver.scan(KEY.scope, limit=1),
    ):
        with pytest.raises(Unavailable, match="create=True"):
            await work()

"""What is stored says which layout it has, old layouts are brought up to date, and old processes go on."""

import asyncio
import logging

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import ConfigurationError, Denied
from stm_backends.testing import open_at
from stm_backends_postgres.plugin import schema as schema_text
from stm_backends_postgres.statements import OURS
from tests.services.postgres import layout_1
from tests.services.postgres.support import as_user, until
from tests.support.places import quick_on

KEY = Key("scope", "name")
OLD = Key("scope", "old")
OTHER = Key("scope", "other")

NUMBERS = "SELECT version, readable_since FROM {schema}.stm_layout"
NEWER = "UPDATE {schema}.stm_layout SET (version, readable_since) = ({version}, {readable_since})"
FOREIGN_KEY = """
    SELECT pg_get_constraintdef(oid) FROM pg_constraint
    WHERE conrelid = '{schema}.stm_entry'::regclass AND contype = 'f'"""
EXPIRE = "UPDATE {schema}.stm_record SET expires = clock_timestamp() WHERE name = 'other'"
ADD_COLUMN = (
    "ALTER TABLE {schema}.stm_record ADD COLUMN later text; ALTER TABLE {schema}.stm_entry ADD later int"
)


class OldProcess:
    """A process of layout 1: its statements, on a separate connection."""

    def __init__(self, url, schema, **settings):
        self._url, self._schema, self._settings = url, schema, settings

    async def __aenter__(self):
        self._connection = await asyncpg.connect(self._url, server_settings=self._settings)
        return self

    async def __aexit__(self, *_):
        await self._connection.close()

    async def ask(self, statement, *arguments):
        return await self._connection.fetch(statement.format(schema=self._schema), *arguments)

    async def opens(self):
        """Return whether it would open these tables."""
        (found,) = await self.ask(layout_1.LOOK, f"{self._schema}.stm_record")
        return found["comment"] == "stm-backends, schema 1"

    async def append(self, key, entry):
        (row,) = await self.ask(layout_1.APPEND, *key, "initial", entry, None, 1_000_000)
        return row["length"]

    async def fold(self, key, body, version, expect, drop):
        rows = await self.ask(layout_1.FOLD, *key, version, body, None, drop, True, expect, 1_000_000)
        return rows[0]["stored"]

    async def store(self, key, body, version):
        (row,) = await self.ask(layout_1.STORE, *key, version, body, 60.0, True, False)
        return row["stored"]

    async def tail(self, key):
        return tuple(row["entry"] for row in await self.ask(layout_1.LOAD, *key) if row["entry"] is not None)

    async def delete(self, key):
        return bool(await self.ask(layout_1.DELETE, *key, None))


@pytest.fixture(params=quick_on("off", ["off", "role", "setting"]))
async def old(request, url, schema, admin, role):
    """A store of layout 1: its options for a driver, and a process that uses it."""
    how = request.param
    scripts = {"off": "SETUP", "role": "SETUP_BY_ROLE", "setting": "SETUP_BY_SETTING"}
    await admin.execute(getattr(layout_1, scripts[how]).format(schema=schema))
    options = {"url": as_user(url, await role("app")), "schema": schema}
    settings = {}
    if how != "off":
        options["row_security"] = how
    if how == "setting":
        options["tenant"] = settings["stm.tenant"] = "acme"
    async with OldProcess(options["url"], schema, **settings) as process:
        await process.append(OLD, b"old")
        yield options, process


async def test_a_store_is_brought_up_to_date_while_an_old_process_goes_on(old, url, schema, admin):
    options, process = old
    going_on = asyncio.Event()
    over = asyncio.Event()
    appended = []

    async def go_on():
        while not over.is_set():
            length = await process.append(KEY, b"%d" % len(appended))
            appended.append(b"%d" % len(appended))
            assert length == len(appended)
            assert await process.store(Key("scope", "blob"), b"b", f"v{length}") is True
            if length == 20:
                going_on.set()

    running = asyncio.ensure_future(go_on())
    await going_on.wait()
    how = options.get("row_security", "off")
    await admin.execute(schema_text(url, schema=schema, row_security=how))
    assert await admin.fetchrow(NUMBERS.format(schema=schema)) == OURS
    so_far = len(appended)
    new = await open_at("postgres", **options)
    assert await new.load(OLD) == Record("initial", None, (b"old",))
    assert await new.append(OLD, b"new", initial_version="no", ttl=None) == 2

    async def has_gone_on():
        return len(appended) >= so_far + 20

    await until(has_gone_on)
    over.set()
    await running
    # Both see what the other writes, and fold, save and delete it.
    assert (await new.load(KEY)).tail == tuple(appended)
    assert await process.fold(KEY, b"folded", "v2", "initial", len(appended) - 1) is True
    assert await new.load(KEY) == Record("v2", b"folded", (appended[-1],))
    assert await new.replace(KEY, b"", version="v3", expect="v2", drop=1, ttl=None) is True
    assert await process.tail(OLD) == (b"old", b"new")
    # The server calculates the column of the purge's index for old processes too.
    await process.store(OTHER, b"", "v1")
    await admin.execute(EXPIRE.format(schema=schema))
    assert await new.purge(10) == 1
    assert await process.delete(OLD) is True
    assert await new.load(OLD) is None
    assert await process.opens() is True, "another old process that starts now"
    key = "(tenant, record)" if how != "off" else "(record)"
    assert f"FOREIGN KEY {key}" in await admin.fetchval(FOREIGN_KEY.format(schema=schema))
    await new.close()


async def test_an_old_store_is_used_as_it_is_by_who_may_not_change_it(old, schema, admin, caplog):
    options, _ = old
    caplog.set_level(logging.WARNING, "stm_backends")
    for create in (False, True):
        driver = await open_at("postgres", **options, create=create)
        assert await driver.append(OLD, b"new", initial_version="no", ttl=None) == 2 + create
        assert await driver.purge(1) == 0
        await driver.close()
    assert await admin.fetchval("SELECT to_regclass($1)", f"{schema}.stm_layout") is None
    assert [record for record in caplog.records if "stay at layout 1" in record.getMessage()]


async def test_create_brings_a_store_up_to_date_and_many_may_do_so_at_once(url, schema, admin):
    await admin.execute(layout_1.SETUP.format(schema=schema))
    drivers = await asyncio.gather(*(open_at(url, schema=schema, create=True) for _ in range(8)))
    assert await admin.fetchrow(NUMBERS.format(schema=schema)) == OURS
    for length, driver in enumerate(drivers, 1):
        assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == length
        await driver.close()


async def test_new_tables_and_those_brought_up_to_date_are_the_same(url, schema, admin):
    """Else a test of the one would say nothing of the other."""

    async def described():
        columns = await admin.fetch(
            "SELECT table_name, column_name, data_type, is_nullable, column_default "
            "FROM information_schema.columns WHERE table_schema = $1 ORDER BY 1, 2",
            schema,
        )
        indexes = await admin.fetch(
            "SELECT indexdef FROM pg_indexes WHERE schemaname = $1 ORDER BY 1", schema
        )
        policies = await admin.fetch("SELECT * FROM pg_policies WHERE schemaname = $1 ORDER BY 2, 3", schema)
        return columns, indexes, policies, await admin.fetch(FOREIGN_KEY.format(schema=schema))

    script = schema_text(url, schema=schema, row_security="role")
    await admin.execute(script)
    new = await described()
    await admin.execute(script)
    assert await described() == new, "again changes nothing"
    await admin.execute(f"DROP SCHEMA {schema} CASCADE")
    await admin.execute(layout_1.SETUP_BY_ROLE.format(schema=schema))
    # Whose rows are whose was decided when the tables were made.
    await admin.execute(schema_text(url, schema=schema))
    assert await described() == new


async def test_columns_that_were_added_later_are_tolerated(url, schema, driver, admin):
    await driver.append(KEY, b"a", initial_version="v", ttl=None)
    await admin.execute(ADD_COLUMN.format(schema=schema))
    await admin.execute(NEWER.format(schema=schema, version=OURS.version + 1, readable_since=1))
    for create in (False, True):
        async with open_backend(url, schema=schema, create=create) as backend:
            assert await backend.driver.append(KEY, b"b", initial_version="v", ttl=None) == 2 + create
    assert await admin.fetchrow(NUMBERS.format(schema=schema)) == (OURS.version + 1, 1)


async def test_a_layout_that_is_too_new_is_refused_and_left_as_it_is(url, schema, driver, admin):
    await admin.execute(NEWER.format(schema=schema, version=9, readable_since=9))
    for create in (False, True):
        with pytest.raises(ConfigurationError, match="upgrade stm-backends"):
            await open_at(url, schema=schema, create=create)
    pool = await asyncpg.create_pool(url, min_size=0)
    with pytest.raises(ConfigurationError, match="upgrade stm-backends"):
        await open_backend("postgres", client=pool, schema=schema).driver.load(KEY)
    await pool.close()
    assert await admin.fetchrow(NUMBERS.format(schema=schema)) == (9, 9)


@pytest.mark.parametrize(
    "lost", ["COMMENT ON TABLE {schema}.stm_record IS NULL", "DELETE FROM {schema}.stm_layout"]
)
async def test_what_a_dump_may_leave_out_is_not_needed(url, schema, driver, admin, lost):
    """Comments are left out by `pg_dump --no-comments`, and rows by `--schema-only`."""
    await driver.append(KEY, b"a", initial_version="v", ttl=None)
    await admin.execute(lost.format(schema=schema))
    for create in (False, True):
        async with open_backend(url, schema=schema, create=create) as backend:
            assert await backend.driver.append(KEY, b"b", initial_version="v", ttl=None) == 2 + create
    assert await admin.fetchrow(NUMBERS.format(schema=schema)) == OURS


async def test_no_role_but_the_owner_changes_the_layout(url, schema, driver, role):
    name = await role("reader", "")
    connection = await asyncpg.connect(as_user(url, name))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute(NEWER.format(schema=schema, version=9, readable_since=9))
    await connection.close()
    with pytest.raises(Denied):
        await open_at(as_user(url, await role("other", "")), schema=f"{schema}_none", create=True)

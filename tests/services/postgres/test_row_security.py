"""Row security: a tenant's backend reads and writes its own rows only."""

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import ConfigurationError, Denied
from stm_backends.testing import open_at
from stm_backends_postgres.plugin import schema as schema_text
from stm_backends_postgres.statements import Statements
from tests.services.postgres.support import as_user, together

pytestmark = pytest.mark.full

KEY = Key("scope", "name")

READ = "SELECT * FROM {schema}.{table}"
ID = "SELECT id FROM {schema}.stm_record"
PUT_UNDER = "INSERT INTO {schema}.stm_entry VALUES (DEFAULT, $1, 77, '')"
ERASE = "DELETE FROM {schema}.{table}"
FORGE = """
    INSERT INTO {schema}.stm_record (tenant, scope, name, version, first, next, size)
    VALUES ('{tenant}', 'scope', 'forged', 'v', 1, 1, 0)"""


@pytest.fixture(params=["role", "setting"])
async def tenants(request, url, schema, admin, role):
    """Functions that open the backends of two tenants, by each of the two ways to tell them apart."""
    how = request.param
    await admin.execute(schema_text(url, schema=schema, row_security=how))
    if how == "role":
        users = [await role("one"), await role("two")]
        return [{"url": as_user(url, user), "schema": schema, "row_security": how} for user in users]
    url = as_user(url, await role("app"))
    return [
        {"url": url, "schema": schema, "row_security": how, "tenant": tenant} for tenant in ("one", "two")
    ]


async def test_a_tenant_never_reads_or_changes_anothers_record(tenants):
    one, two = [(await open_at("postgres", **options)) for options in tenants]
    await one.append(KEY, b"mine", initial_version="one", ttl=None)
    assert await two.load(KEY) is None
    assert await two.scan("scope", limit=10) == ((), None)
    assert (await one.next_scope(""), await two.next_scope("")) == ("scope", None)
    assert await two.delete(KEY) is False
    assert await two.replace(KEY, b"", version="v", expect="one", ttl=None) is False
    assert await two.replace(KEY, b"", version="v", expect="one", rewrite=(b"x",), ttl=None) is False
    assert await two.append(KEY, b"yours", initial_version="two", ttl=60) == 1
    assert await two.replace(KEY, b"", version="v2", expect="two", rewrite=(b"x",), ttl=60) is True
    assert await two.load(KEY) == Record("v2", b"", (b"x",))
    assert await two.replace(KEY, b"yours", version="v", expect=ANY, ttl=0.001) is True
    assert await one.load(KEY) == Record("one", None, (b"mine",))
    assert await one.purge(10) == 0
    await one.close()
    await two.close()


async def test_appends_that_share_a_statement_stay_with_their_tenant(tenants):
    keys = [Key("scope", f"{number}") for number in range(5)]
    one, two = [(await open_at("postgres", **options)) for options in tenants]
    for driver, length in ((one, 1), (two, 1), (two, 2), (one, 2)):
        appends = [driver.append(key, b"a", initial_version=f"{id(driver)}", ttl=60) for key in keys]
        assert await together(driver, *appends) == [length] * 5
    for driver in (one, two):
        for key in keys:
            assert await driver.load(key) == Record(f"{id(driver)}", None, (b"a", b"a"))
        await driver.close()


async def test_sql_of_a_tenants_own_does_not_reach_across_either(tenants, schema, admin):
    one, two = [(await open_at("postgres", **options)) for options in tenants]
    await one.append(KEY, b"mine", initial_version="one", ttl=None)
    settings = {"stm.tenant": tenants[1]["tenant"]} if "tenant" in tenants[1] else {}
    connection = await asyncpg.connect(tenants[1]["url"], server_settings=settings)
    for table in ("stm_record", "stm_entry"):
        where = {"schema": schema, "table": table}
        assert await connection.fetch(READ.format(**where)) == []
        assert await connection.execute(ERASE.format(**where)) == "DELETE 0"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(f"TRUNCATE {schema}.{table} CASCADE")
    whose = await admin.fetchval(READ.format(schema=schema, table="stm_record"))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute(FORGE.format(schema=schema, tenant=whose))
    await connection.close()
    assert (await one.load(KEY)).tail == (b"mine",)
    await one.close()
    await two.close()


async def test_a_tenant_cannot_put_entries_under_anothers_record(tenants, schema, admin):
    """Its transaction would hold the lock of that record, and folds of the other tenant would wait for it."""
    one, two = [(await open_at("postgres", **options)) for options in tenants]
    await one.append(KEY, b"mine", initial_version="one", ttl=None)
    record = await admin.fetchval(ID.format(schema=schema))
    settings = {"stm.tenant": tenants[1]["tenant"]} if "tenant" in tenants[1] else {}
    connection = await asyncpg.connect(tenants[1]["url"], server_settings=settings)
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await connection.execute(PUT_UNDER.format(schema=schema), record)
    await connection.close()
    await one.close()
    await two.close()


async def test_no_tenant_looks_through_what_belongs_to_others(tenants, schema, admin):
    """Else the time that an operation of one takes would grow with the others."""
    one, two = [(await open_at("postgres", **options)) for options in tenants]
    settings = {"stm.tenant": tenants[0]["tenant"]} if "tenant" in tenants[0] else {}
    connection = await asyncpg.connect(tenants[0]["url"], server_settings=settings)
    await connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
    here = Statements(schema)

    async def plan(statement, types, *values):
        await connection.execute(f"PREPARE statement {types} AS {statement}")
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        lines = await connection.fetch(f"EXPLAIN EXECUTE statement ({', '.join(map(repr, values))})")
        await connection.execute("DEALLOCATE statement")
        return [line for (line,) in lines]

    scanned = await plan(here.scan, "(text, text, bigint)", "scope", "", 10)
    assert not any("Sort" in line for line in scanned), scanned
    found = await plan(here.next_scope, "(text)", "scope")
    assert not any("Sort" in line for line in found), found
    for lines in (scanned, found, await plan(here.purge, "(double precision)", 0)):
        conditions = [line for line in lines if "Index Cond" in line]
        assert conditions
        assert all("tenant = " in line for line in conditions if "id = " not in line), lines
    assert "FOREIGN KEY (tenant, record)" in await admin.fetchval(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = $1::regclass AND contype = 'f'",
        f"{schema}.stm_entry",
    )
    await connection.close()
    await one.close()
    await two.close()


async def test_a_role_that_the_policies_do_not_bind_is_refused(url, schema, tenants):
    with pytest.raises(ConfigurationError, match="does not bind"):
        await open_at(url, schema=schema)


async def test_a_pool_of_such_a_role_is_refused_at_its_first_operation(url, schema, tenants):
    one = await open_at("postgres", **tenants[0])
    await one.append(KEY, b"mine", initial_version="one", ttl=None)
    pool = await asyncpg.create_pool(url, min_size=0)
    theirs = open_backend("postgres", client=pool, schema=schema).driver
    for work in (lambda: theirs.load(KEY), lambda: theirs.append(KEY, b"", initial_version="v", ttl=None)):
        with pytest.raises(ConfigurationError, match="does not bind"):
            await work()
    assert (await one.load(KEY)).tail == (b"mine",)
    await pool.close()
    await one.close()


async def test_the_owner_of_the_tables_is_bound_too(url, schema, admin, role):
    owner = await role("owner", "")
    await admin.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {owner}")
    options = {"schema": schema, "row_security": "setting"}
    async with open_backend(as_user(url, owner), create=True, tenant="one", **options) as backend:
        await backend.driver.append(KEY, b"mine", initial_version="one", ttl=None)
    async with open_backend(as_user(url, owner), create=True, tenant="two", **options) as backend:
        assert await backend.driver.load(KEY) is None


@pytest.mark.parametrize("handed_in", [False, True], ids=["by URL", "on a pool"])
@pytest.mark.parametrize("table", ["stm_record", "stm_entry"])
async def test_row_security_of_one_table_alone_is_refused(
    tenants, url, schema, admin, role, table, handed_in
):
    """The other table would show the turns, or the keys, of all tenants."""
    one = await open_at("postgres", **tenants[0])
    await one.append(KEY, b"mine", initial_version="one", ttl=None)
    await one.close()
    await admin.execute(f"ALTER TABLE {schema}.{table} DISABLE ROW LEVEL SECURITY")
    with pytest.raises(ConfigurationError, match="only one of the tables"):
        await open_at("postgres", **tenants[1])
    if handed_in:
        pool = await asyncpg.create_pool(tenants[1]["url"], min_size=0)
        with pytest.raises(ConfigurationError, match="only one of the tables"):
            await open_backend("postgres", client=pool, schema=schema).driver.load(KEY)
        await pool.close()


@pytest.mark.parametrize("table", ["stm_record", "stm_entry"])
async def test_an_owner_whom_one_table_does_not_bind_is_refused(url, schema, admin, role, table):
    owner = await role("owner", "")
    await admin.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {owner}")
    options = {"schema": schema, "row_security": "role", "create": True}
    await (await open_at(as_user(url, owner), **options)).close()
    await admin.execute(f"ALTER TABLE {schema}.{table} NO FORCE ROW LEVEL SECURITY")
    with pytest.raises(ConfigurationError, match="does not bind"):
        await open_at(as_user(url, owner), **options)


async def test_tables_without_row_security_are_refused_by_who_asks_for_it(url, schema, driver, role):
    with pytest.raises(ConfigurationError, match="without row security"):
        await open_at(as_user(url, await role("app")), schema=schema, row_security="role")


async def test_a_connection_without_a_tenant_is_refused_and_never_finds_nothing(url, schema, admin, role):
    await admin.execute(schema_text(url, schema=schema, row_security="setting"))
    pool = await asyncpg.create_pool(as_user(url, await role("app")), min_size=0)
    driver = open_backend("postgres", client=pool, schema=schema, row_security="setting").driver
    with pytest.raises(ConfigurationError, match="needs a tenant"):
        await driver.open()
    driver = open_backend("postgres", client=pool, schema=schema).driver
    with pytest.raises(Denied, match=r"stm\.tenant"):
        await driver.load(KEY)
    await pool.close()

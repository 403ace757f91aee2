"""One operation is one round trip, exceptions are counted, and every statement uses the indexes."""

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import ANY, Key
from stm_backends.testing import open_at
from stm_backends_postgres.statements import Statements
from tests.services.postgres.support import together, until

KEY = Key("scope", "name")

HOT = """
    SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
    WHERE schemaname = $1 AND relname = 'stm_record'"""
VACUUM = "VACUUM ANALYZE {schema}.stm_record"
EMPTY = "DELETE FROM {schema}.stm_record WHERE name <> '1'"
FILL = """
    INSERT INTO {schema}.stm_record (scope, name, version, first, next, size)
    SELECT 'scope', number, 'v', 1, 1, 0 FROM generate_series(1, 3000) AS number"""
SCANS = "SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE schemaname = $1"
PLANNED = "SELECT custom_plans FROM pg_prepared_statements WHERE statement = $1"
GONE = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND query LIKE $1"


@pytest.fixture
def count(proxy):
    """Returns how many round trips something takes."""

    async def counted(work):
        before = proxy.round_trips
        await work
        return proxy.round_trips - before

    return counted


async def test_a_new_statement_takes_two_round_trips_and_then_one(through_proxy, schema, driver, count):
    """Asyncpg asks for a statement's description first. To do so when connecting would cost more."""
    far = await open_at(through_proxy, schema=schema)
    assert [await count(far.load(KEY)) for _ in range(4)] == [2, 1, 1, 1]
    await far.close()


async def test_behind_pgbouncer_each_operation_takes_two(through_proxy, schema, driver, count):
    """Nothing is kept on a connection, so each statement is described, and then executed, at once."""
    far = await open_at(through_proxy, schema=schema, pgbouncer=True)
    assert [await count(far.load(KEY)) for _ in range(3)] == [2, 2, 2]
    await far.close()


async def test_a_pool_handed_in_adds_a_round_trip_unless_it_does_not_reset(
    through_proxy, schema, driver, count
):
    async def leave(connection):
        pass

    for reset, trips in ((None, 2), (leave, 1)):
        pool = await asyncpg.create_pool(through_proxy, min_size=1, reset=reset)
        far = open_backend("postgres", client=pool, schema=schema).driver
        await far.load(KEY)
        assert await count(far.load(KEY)) == trips
        await pool.close()


async def test_the_first_operation_on_a_pool_handed_in_looks_at_the_tables(
    through_proxy, schema, driver, count
):
    """Two round trips more, once for each driver: the server, role and tables; and their layout."""

    async def leave(connection):
        pass

    pool = await asyncpg.create_pool(through_proxy, min_size=1, max_size=1, reset=leave)
    await open_backend("postgres", client=pool, schema=schema).driver.load(KEY)
    second = open_backend("postgres", client=pool, schema=schema).driver
    assert [await count(second.load(KEY)) for _ in range(3)] == [3, 1, 1]
    await pool.close()


async def test_plans_made_on_empty_tables_never_scan_a_whole_table(url, schema, driver, admin):
    await driver.close()
    for table in ("stm_record", "stm_entry"):
        # As after a night in which everything expired: the server has seen that the tables are empty.
        await admin.execute(f"ALTER TABLE {schema}.{table} SET (autovacuum_enabled = off)")
        await admin.execute(f"VACUUM ANALYZE {schema}.{table}")
    before = await admin.fetchval(SCANS, schema)
    ours = await open_at(url, schema=schema, pool_size=1)
    # A statement is planned for good at its sixth execution on a connection.
    for number in range(12):
        await ours.append(KEY, b"a", initial_version="v", ttl=60)
        new = [Key("scope", f"{number} {one}") for one in range(3)]
        await together(ours, *(ours.append(one, b"a", initial_version="v", ttl=60) for one in (KEY, *new)))
        record = await ours.load(KEY)
        await ours.load(KEY, last=1)
        await ours.replace(KEY, b"b", version=f"r{number}", expect=record.version, rewrite=(b"b",), ttl=60)
        await ours.replace(KEY, b"b", version=f"v{number}", expect=f"r{number}", drop=1, ttl=60)
        await ours.replace(Key("scope", "blob"), b"b", version=f"v{number}", expect=ANY, ttl=60)
        await ours.scan("scope", limit=10)
        await ours.delete(Key("scope", "blob"))
        await ours.purge(1)
    await ours.close()
    # The server counts for good when the connection has ended.
    await until(lambda: admin.fetchval(GONE, f"%{schema}%"))
    assert await admin.fetchval(SCANS, schema) == before


async def test_loads_at_once_read_no_entry_that_nobody_wants(driver, admin, schema):
    """The bounds of a tail are those of the index, and no filter of what it finds."""
    for name in ("one", "two"):
        await driver.append(Key("scope", name), b"a", initial_version="v", ttl=None)
    load = Statements(schema).load_many
    await admin.execute("SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off")
    await admin.execute(f"PREPARE many (text[], text[], bigint[], bigint) AS {load}")
    asked = "'{scope,scope}', '{one,two}', '{1,2147483647}', 1000"
    plan = [line for (line,) in await admin.fetch(f"EXPLAIN EXECUTE many ({asked})")]
    (bounds,) = [line for line in plan if "Index Cond" in line and "seq" in line]
    assert "seq >= GREATEST" in bounds, plan
    assert "seq < stm_record.next" in bounds, plan


async def test_appends_at_once_find_each_record_by_its_key_and_its_id(driver, admin, schema):
    """Whatever the server knows of the tables: a plan that reads a whole index would be kept for long."""
    many = Statements(schema).append_many
    await admin.execute("SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET jit = off")
    types = ", ".join(["text[]"] * 3 + ["text"] * 3 + ["bytea"] + ["text"] * 4 + ["bigint"])
    given = "'{scope}', '{name}', '{v}', '-', '1', '1', 'a', '1', '1', '1', '0', 1000"
    for change in ("SELECT", VACUUM, FILL, VACUUM, EMPTY, VACUUM):
        await admin.execute(change.format(schema=schema))
        await admin.execute(f"PREPARE many ({types}) AS {many}")
        plan = [line for (line,) in await admin.fetch(f"EXPLAIN EXECUTE many ({given})")]
        await admin.execute("DEALLOCATE many")
        bounds = [line.strip() for line in plan if "Index Cond" in line]
        assert sorted(bound.partition(" = ")[0] for bound in bounds) == [
            "Index Cond: ((scope",
            "Index Cond: ((scope",
            "Index Cond: (id",
        ], plan
        assert all("name = " in bound for bound in bounds if "scope" in bound), plan
        assert not [line for line in plan if "Seq Scan" in line], plan


async def test_statements_for_two_records_are_not_planned_each_time(driver, admin, schema):
    """A plan for two looks cheaper than the one for any number, which is kept, and planning takes longest."""
    here, keys = Statements(schema), (["scope"] * 2, ["a", "b"])
    appends = (*keys, ["v", "v"], "- 60.0", "1 1", "1 1", b"ab", "1 2", "1 1", "1 2", "0 0", 1000)
    await admin.execute("SET enable_seqscan = off; SET jit = off")
    for statement, given in ((here.append_many, appends), (here.load_many, (*keys, [9, 9], 1000))):
        for _ in range(8):
            await admin.fetch(statement, *given)
        # The first five times, the server has no other plan to compare with.
        assert await admin.fetchval(PLANNED, statement) == 5


async def test_appends_under_a_time_to_live_change_no_index(url, schema, driver, admin):
    """Such updates are HOT updates; one in so many, on the quarter of an hour, is not."""
    await driver.close()
    ours = await open_at(url, schema=schema, pool_size=1)
    for _ in range(41):
        await ours.append(KEY, b"a", initial_version="v", ttl=86_400)
    await ours.close()
    await until(lambda: admin.fetchval(GONE, f"%{schema}%"))
    updates, hot = await admin.fetchrow(HOT, schema)
    assert updates == 40
    assert hot >= 39

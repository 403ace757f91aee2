"""Statements use the indexes, whatever the tables were like when the server planned them."""

from stm_backends.drivers.contract import ANY, Key
from stm_backends.testing import open_at
from tests.services.postgres.support import until

KEY = Key("scope", "name")

SCANS = "SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE schemaname = $1"
GONE = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND query LIKE $1"


async def test_plans_that_were_made_on_empty_tables_read_no_table_from_end_to_end(url, schema, driver, admin):
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
        record = await ours.load(KEY)
        await ours.replace(KEY, b"b", version=f"v{number}", expect=record.version, drop=1, ttl=60)
        await ours.replace(Key("scope", "blob"), b"b", version=f"v{number}", expect=ANY, ttl=60)
        await ours.scan("scope", limit=10)
        await ours.delete(Key("scope", "blob"))
        await ours.purge(1)
    await ours.close()
    # The server counts for good when the connection has ended.
    await until(lambda: admin.fetchval(GONE, f"%{schema}%"))
    assert await admin.fetchval(SCANS, schema) == before

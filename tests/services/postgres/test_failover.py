"""A primary that becomes read-only and a standby that becomes the primary, under connections that stay."""

import asyncio
import uuid

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.errors import Unavailable
from stm_backends.testing import open_at
from stm_backends.testing.faults import Proxy
from tests.services.postgres.support import until
from tests.support.outliving import outlives
from tests.support.postgresql import Postgres

pytestmark = pytest.mark.full

KEY = Key("scope", "name")


@pytest.fixture
def pair(postgres_binaries, postgres_folder):
    """A primary with the tables, and its standby; what one has acknowledged the other has."""
    primary = Postgres(postgres_binaries, postgres_folder / uuid.uuid4().hex, durable=False)
    primary.start()
    standby = Postgres(postgres_binaries, postgres_folder / uuid.uuid4().hex, durable=False, of=primary)
    standby.start()
    yield primary, standby
    standby.kill()
    primary.kill()


@pytest.fixture
def switch(pair):
    """A proxy to the primary, until it is switched to the standby."""
    with Proxy(f"127.0.0.1:{pair[0].port}") as proxy:
        yield proxy


async def catch_up(primary, standby):
    """Wait until the standby shows all that the primary has."""
    at_primary, at_standby = await asyncpg.connect(primary.url), await asyncpg.connect(standby.url)
    place = await at_primary.fetchval("SELECT pg_current_wal_lsn()::text")
    shown = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn"
    await until(lambda: at_standby.fetchval(shown, place))
    await at_primary.close()
    await at_standby.close()


async def demote(server):
    """Have a server refuse writes on the connections that are there and on new ones."""
    connection = await asyncpg.connect(server.url)
    await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()


async def promote(server):
    connection = await asyncpg.connect(server.url)
    assert await connection.fetchval("SELECT pg_promote()") is True
    await connection.close()


@pytest.mark.parametrize("handed_in", [False, True], ids=["pool of ours", "pool handed in"])
async def test_after_a_failover_connections_to_the_former_primary_are_given_up(pair, switch, handed_in):
    primary, standby = pair
    url = f"postgresql://postgres@127.0.0.1:{switch.port}/postgres?sslmode=disable"
    await (await open_at(primary.url, create=True)).close()
    pool = await asyncpg.create_pool(url, min_size=0, max_size=10) if handed_in else None
    driver = open_backend("postgres", client=pool).driver if pool else await open_at(url)
    keys = [Key("scope", f"{number}") for number in range(8)]

    async def append(entry):
        return await asyncio.gather(
            *(driver.append(key, entry, initial_version="v", ttl=None) for key in keys)
        )

    assert await append(b"before") == [1] * 8
    await catch_up(primary, standby)
    await demote(primary)

    async def is_refused():
        try:
            return not await driver.replace(KEY, b"", version="v", expect=ANY, ttl=None)
        except Unavailable as error:
            return "read-only" in str(error)

    # A server process that has not read the new setting yet still writes.
    await until(is_refused)
    # Reads on as many connections, all to the former primary.
    assert [record.tail for record in await asyncio.gather(*map(driver.load, keys))] == [(b"before",)] * 8
    await promote(standby)
    switch.lead_to(f"127.0.0.1:{standby.port}")
    assert await append(b"after") == [2] * 8
    there = await open_at(standby.url)
    assert [await there.load(key) for key in keys] == [Record("v", None, (b"before", b"after"))] * 8
    await there.close()
    await driver.close()
    if pool:
        await pool.close()


async def test_a_standby_is_refused_and_the_primary_is_found_among_hosts(pair):
    primary, standby = pair
    driver = await open_at(primary.url, create=True)
    await driver.replace(KEY, b"a", version="v1", expect=ANY, ttl=None)
    await catch_up(primary, standby)
    for create in (False, True):
        with pytest.raises(Unavailable, match=r"is a standby.*target_session_attrs=primary"):
            await open_at(standby.url, create=create)
    pool = await asyncpg.create_pool(standby.url, min_size=0)
    with pytest.raises(Unavailable, match="is a standby"):
        await open_backend("postgres", client=pool).driver.load(KEY)
    await pool.close()
    both = f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres"
    writer = await open_at(f"{both}?target_session_attrs=primary")
    assert await writer.append(KEY, b"b", initial_version="v", ttl=None) == 1
    await writer.close()
    await driver.close()


async def test_a_conversation_that_folds_outlives_its_primary(pair, switch):
    primary, standby = pair

    async def fail_over() -> None:
        await demote(primary)
        await asyncio.sleep(1.0)  # until each server process has read the new setting
        await catch_up(primary, standby)
        await promote(standby)
        switch.lead_to(f"127.0.0.1:{standby.port}")

    await (await open_at(primary.url, create=True)).close()
    url = f"postgresql://postgres@127.0.0.1:{switch.port}/postgres?sslmode=disable"
    async with open_backend(url) as backend:
        await outlives(backend, fail_over)

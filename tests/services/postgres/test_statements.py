"""One operation is one round trip; where it is more, how many more and why."""

import asyncpg
import pytest

from stm_backends import open_backend
from stm_backends.drivers.contract import Key
from stm_backends.testing import open_at

KEY = Key("scope", "name")


@pytest.fixture
def count(proxy):
    """Returns how many round trips something takes."""

    async def counted(work):
        before = proxy.round_trips
        await work
        return proxy.round_trips - before

    return counted


async def test_a_statement_that_a_connection_does_not_know_takes_two_and_one_ever_after(
    through_proxy, schema, driver, count
):
    """Asyncpg asks for a statement's description first. To do so when connecting would cost more."""
    far = await open_at(through_proxy, schema=schema)
    assert [await count(far.load(KEY)) for _ in range(4)] == [2, 1, 1, 1]
    await far.close()


async def test_behind_pgbouncer_each_operation_takes_two(through_proxy, schema, driver, count):
    """Nothing is kept on a connection, so each statement is described, and then executed, at once."""
    far = await open_at(through_proxy, schema=schema, pgbouncer=True)
    assert [await count(far.load(KEY)) for _ in range(3)] == [2, 2, 2]
    await far.close()


async def test_a_pool_handed_in_adds_a_round_trip_unless_it_is_told_not_to_reset(
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


async def test_the_first_operation_on_a_pool_handed_in_looks_at_the_tables_first(
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

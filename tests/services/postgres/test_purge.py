"""Removing what has expired, and what is too much for one statement: in steps, and never within a write."""

import asyncio
import logging
from unittest import mock

import pytest

from stm_backends.drivers.contract import ANY, KEEP, Key, Record
from stm_backends.testing import open_at
from stm_backends_postgres.statements import DUE_S, STEP_ENTRIES, Statements
from tests.services.postgres.support import nothing_follows_writes, purging, until, waiting

KEY = Key("scope", "name")
OTHER = Key("scope", "other")

FILL = """
    WITH record AS (
        INSERT INTO {schema}.stm_record (scope, name, version, expires, first, next, size)
        VALUES (
            'scope', $1, 'old', now() + $2::text::interval, 1, $3::bigint + 1, $3::bigint * length($4::bytea)
        ) RETURNING id
    ) INSERT INTO {schema}.stm_entry SELECT id, seq, $4 FROM record, generate_series(1, $3::bigint) AS seq"""
RECORDS = "SELECT count(*) FROM {schema}.stm_record"
ENTRIES = "SELECT count(*) FROM {schema}.stm_entry"
IS_OVER = "SELECT expires = '-infinity' FROM {schema}.stm_record"
HOLD = "SELECT FROM {schema}.stm_entry FOR UPDATE"

YESTERDAY = "-1 day"
LARGE = 2 * STEP_ENTRIES + 500
MIB = 1024 * 1024


@pytest.fixture
def fill(driver, admin, schema):
    """Inserts a record with so many entries; `expired` says when it expired, if it has."""

    async def put(key, entries, *, expired=None, entry=b"old"):
        await admin.execute(FILL.format(schema=schema), key.name, expired, entries, entry)

    return put


@pytest.fixture
def count(admin, schema):
    """Counts the rows of records and entries."""

    async def counted():
        statements = [statement.format(schema=schema) for statement in (RECORDS, ENTRIES)]
        return tuple([await admin.fetchval(statement) for statement in statements])

    return counted


@pytest.fixture
def step(admin, schema):
    """Does one step of a purge and returns how many records it removed, or `None` if there was nothing."""

    async def purge():
        rows = await admin.fetch(Statements(schema).purge, 0)
        return rows[0]["purged"] if rows else None

    return purge


async def test_a_large_record_is_removed_in_steps_and_its_row_goes_last(driver, fill, count, step):
    await fill(KEY, LARGE, expired=YESTERDAY)
    seen = []
    while (purged := await step()) is not None:
        seen.append((purged, *await count()))
        assert await driver.load(KEY) is None
    assert seen == [(0, 1, LARGE - STEP_ENTRIES), (0, 1, LARGE - 2 * STEP_ENTRIES), (1, 0, 0)]


async def test_a_step_removes_so_many_bytes_at_most_and_one_entry_at_least(fill, count, step):
    await fill(KEY, 4, expired="-2 days", entry=bytes(6 * MIB))
    await fill(OTHER, 2, expired=YESTERDAY, entry=bytes(20 * MIB))
    entries = []
    while await step() is not None:
        entries.append((await count())[1])
    assert entries == [4, 2, 1, 0]


async def test_a_half_removed_record_is_absent_and_can_be_created_again(
    driver, fill, count, step, admin, schema
):
    await fill(KEY, LARGE, expired=YESTERDAY)
    assert await step() == 0
    # A clock that is set back does not bring it back.
    assert await admin.fetchval(IS_OVER.format(schema=schema)) is True
    assert await driver.delete(KEY) is False
    await fill(OTHER, LARGE, expired=YESTERDAY)
    while (await count())[1] == LARGE:
        await step()
    assert await driver.append(OTHER, b"new", initial_version="new", ttl=None) == 1
    assert await driver.load(OTHER) == Record("new", None, (b"new",))
    await driver.close()
    assert await count() == (1, 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda driver: driver.append(KEY, b"new", initial_version="new", ttl=None),
        lambda driver: driver.replace(KEY, b"new", version="new", expect=ANY, ttl=None),
    ],
    ids=["append", "replace"],
)
async def test_a_write_to_an_expired_record_removes_one_step_at_once(driver, fill, count, write, url, schema):
    await fill(KEY, LARGE, expired=YESTERDAY)
    with nothing_follows_writes():
        await write(driver)
    record = await driver.load(KEY)
    assert record.version == "new"
    assert await count() == (1, LARGE - STEP_ENTRIES + len(record.tail))
    # What a process that died has left, the folds of any other remove.
    other = await open_at(url, schema=schema)
    await other.append(KEY, b"fold me", initial_version="no", ttl=None)
    await other.replace(KEY, b"", version="v3", expect="new", drop=1, ttl=KEEP)
    await other.close()
    assert await count() == (1, len(record.tail))


@pytest.mark.parametrize(("expect", "drop"), [("old", LARGE - 1), (ANY, 0)], ids=["fold", "save"])
async def test_a_replace_of_many_entries_removes_one_step_at_once(driver, fill, count, expect, drop):
    await fill(KEY, LARGE)
    with nothing_follows_writes():
        assert await driver.replace(KEY, b"b", version="new", expect=expect, drop=drop, ttl=KEEP) is True
    tail = (b"old",) if drop else ()
    assert await driver.load(KEY) == Record("new", b"b", tail)
    assert (await count())[1] == LARGE - STEP_ENTRIES
    # With what follows, both are swept: the driver was still to do the first one.
    await fill(OTHER, LARGE)
    await driver.replace(OTHER, b"b", version="new", expect=expect, drop=drop, ttl=KEEP)
    await driver.close()
    assert await count() == (2, 2 * len(tail))


async def test_a_large_deleted_record_is_absent_at_once_and_goes_in_steps(driver, fill, count):
    await fill(KEY, LARGE)
    assert await driver.delete(KEY, expect="not this") is False
    assert await driver.delete(KEY, expect="old") is True
    assert await driver.load(KEY) is None
    assert await driver.scan("scope", limit=10) == ((), None)
    assert await driver.delete(KEY) is False
    await driver.close()
    assert await count() == (0, 0)


async def test_what_an_interrupted_delete_has_left_is_purged_first(driver, fill, count, url, schema):
    await fill(KEY, LARGE)
    await fill(OTHER, 1, expired=YESTERDAY)
    with nothing_follows_writes():
        assert await driver.delete(KEY) is True
    assert await count() == (2, LARGE + 1)
    other = await open_at(url, schema=schema)
    assert await other.purge(1) == 1
    assert await count() == (1, 1), "not the one that expired yesterday"
    await other.close()


async def test_writes_neither_wait_for_a_purge_nor_fail_with_it(fill, count, admin, url, schema, caplog):
    await fill(OTHER, 3, expired=YESTERDAY)
    driver = await open_at(url, schema=schema, deadline_s=3)
    caplog.set_level(logging.DEBUG, "stm_backends")

    async def put_off():
        return "could not remove expired records: Unavailable" in caplog.text

    with purging(after_writes=True):
        async with admin.transaction():
            await admin.execute(HOLD.format(schema=schema))
            assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == 1
            await until(lambda: waiting(admin, schema))
            for length in range(2, 20):
                assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == length
            assert await waiting(admin, schema) <= 1, "one at a time"
            await until(put_off)
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
    await driver.close()
    assert await count() == (1, 20)


async def test_processes_that_write_once_and_end_purge_too(fill, count, url, schema):
    for number in range(3):
        await fill(Key("scope", f"{number}"), 3, expired=YESTERDAY)
    with purging(after_writes=True):
        driver = await open_at(url, schema=schema)
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.close()
    assert await count() == (1, 1)


async def test_closing_ends_a_purge_that_waits(fill, count, admin, url, schema):
    await fill(OTHER, 3, expired=YESTERDAY)
    driver = await open_at(url, schema=schema, deadline_s=3)
    async with admin.transaction():
        await admin.execute(HOLD.format(schema=schema))
        with purging(after_writes=True):
            await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("stm-postgres")]
    assert await count() == (2, 4)


async def test_purges_after_writes_wait_for_a_quarter_of_an_hour(fill, count, url, schema):
    """The column of their index is rounded down, so that appends do not move it."""
    await fill(KEY, 1, expired=YESTERDAY)
    await fill(OTHER, 1, expired="-1 second")
    # Three of them here, because one may end during the test.
    with purging(after_writes=True), mock.patch("stm_backends_postgres.driver.DUE_S", 3 * DUE_S):
        driver = await open_at(url, schema=schema)
        await driver.append(Key("scope", "third"), b"a", initial_version="v", ttl=None)
        await driver.close()
    assert await count() == (2, 2)
    other = await open_at(url, schema=schema)
    assert await other.load(OTHER) is None
    assert await other.purge(10) == 1, "on demand at once"
    await other.close()


async def test_a_purge_on_demand_removes_small_records_together(driver, fill, count, admin, schema):
    small = Statements(schema).purge_small
    for number in range(5):
        await fill(Key("scope", f"small{number}"), 400, expired=YESTERDAY)
    await fill(KEY, LARGE, expired=YESTERDAY)
    await fill(OTHER, 1)
    # 400 entries each, and at most 1,000 in one statement; the large record is left to the other one.
    assert [(await admin.fetchrow(small, 64))["purged"] for _ in range(4)] == [2, 2, 1, 0]
    assert await count() == (2, LARGE + 1)
    for number in range(150):
        await fill(Key("scope", f"tiny{number}"), 1, expired=YESTERDAY)
    assert (await admin.fetchrow(small, 10))["purged"] == 10
    assert (await admin.fetchrow(small, 64))["purged"] == 64
    assert await driver.expired() == 77
    assert [await driver.purge(limit) for limit in (70, 100)] == [70, 7]
    assert await count() == (1, 1)

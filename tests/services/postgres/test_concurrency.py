"""What a statement sees that had to wait for another transaction.

A connection past the driver holds a record's row, so that the driver's statement waits for it. What the
other transaction does is committed while the statement waits, which is after the statement's snapshot.
"""

import asyncio

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Key, Record
from stm_backends.errors import Unavailable
from stm_backends.testing import open_at
from tests.services.postgres.support import purging, purging_at_once, waiting

KEY = Key("scope", "name")

HOLD = "SELECT FROM {schema}.stm_record FOR UPDATE"
APPEND = """
    WITH record AS (
        UPDATE {schema}.stm_record SET next = next + 1, size = size + 5 RETURNING id, next - 1 AS seq
    ) INSERT INTO {schema}.stm_entry SELECT id, seq, 'other'::bytea FROM record"""
FOLD = """
    WITH record AS (
        UPDATE {schema}.stm_record SET version = 'theirs', body = 'b', first = first + 1, size = 1
        RETURNING id, first
    ) DELETE FROM {schema}.stm_entry USING record WHERE record = id AND seq < first"""
REWRITE = """
    WITH record AS (
        UPDATE {schema}.stm_record SET version = 'theirs', body = 'b', size = size + 8 RETURNING id, first
    ) UPDATE {schema}.stm_entry SET entry = 'rewrite'::bytea || entry FROM record
    WHERE record = id AND seq = first"""
ERASE = "DELETE FROM {schema}.stm_record"
EXPIRE_SOON = "UPDATE {schema}.stm_record SET expires = clock_timestamp() + interval '1 s'"
EXPIRE = "UPDATE {schema}.stm_record SET expires = clock_timestamp()"
ENTRIES = "SELECT count(*) FROM {schema}.stm_entry"
RECORDS = "SELECT count(*) FROM {schema}.stm_record"


@pytest.fixture
def while_waiting(admin, schema, url):
    """Starts an operation, does something else while it waits for the row, and returns its answer."""

    async def run(work, *statements):
        transaction = admin.transaction()
        await transaction.start()
        try:
            await admin.execute(HOLD.format(schema=schema))
            task = asyncio.ensure_future(work)
            await asyncio.sleep(0)
            while not await waiting(admin, schema):
                assert not task.done(), "it did not wait"
                await asyncio.sleep(0.01)
            for statement in statements:
                await admin.execute(statement.format(schema=schema))
        except BaseException:
            await transaction.rollback()
            raise
        await transaction.commit()
        return await task

    return run


async def test_an_append_that_waited_comes_after_what_it_waited_for(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    waited = driver.append(KEY, b"mine", initial_version="no", ttl=None)
    assert await while_waiting(waited, APPEND) == 3
    assert await driver.load(KEY) == Record("initial", None, (b"first", b"other", b"mine"))


async def test_an_append_that_waited_for_a_delete_creates_the_record(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    assert await while_waiting(driver.append(KEY, b"mine", initial_version="again", ttl=None), ERASE) == 1
    assert await driver.load(KEY) == Record("again", None, (b"mine",))


async def test_a_record_that_expired_while_an_append_waited_is_absent(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=60)
    assert await while_waiting(driver.append(KEY, b"mine", initial_version="again", ttl=None), EXPIRE) == 1
    assert await driver.load(KEY) == Record("again", None, (b"mine",))


async def test_a_record_that_expired_behind_a_mere_lock_is_absent(driver, while_waiting, admin, schema):
    """An update that waited for a row that did not change does not judge it again."""
    await driver.append(KEY, b"first", initial_version="initial", ttl=60)
    await admin.execute(EXPIRE_SOON.format(schema=schema))
    waited = driver.append(KEY, b"mine", initial_version="again", ttl=60)
    assert await while_waiting(waited, "SELECT pg_sleep(1)") == 1
    assert await driver.load(KEY) == Record("again", None, (b"mine",))


async def test_a_known_record_that_another_driver_deleted_is_created(driver, url, schema):
    other = await open_at(url, schema=schema)
    for version in ("one", "two"):
        assert await driver.append(KEY, b"a", initial_version=version, ttl=None) == 1
        assert await driver.append(KEY, b"b", initial_version="no", ttl=None) == 2
        assert await other.load(KEY) == Record(version, None, (b"a", b"b"))
        assert await other.delete(KEY) is True
    await other.close()


async def test_appends_racing_with_deletes_are_each_stored_once_or_deleted(driver, url, schema, admin):
    other = await open_at(url, schema=schema)
    over = False
    deleted = 0

    async def delete():
        nonlocal deleted
        while not over:
            record = await other.load(KEY)
            if record and await other.delete(KEY, expect=record.version):
                deleted += 1

    deleting = asyncio.ensure_future(delete())
    created = 0
    for number in range(200):
        length = await driver.append(KEY, b"a", initial_version=f"{number}", ttl=None)
        created += length == 1
    over = True
    await deleting
    record = await other.load(KEY)
    assert created == deleted + (record is not None), "an append creates a record only after a delete"
    assert await admin.fetchval(ENTRIES.format(schema=schema)) == (len(record.tail) if record else 0)
    await other.close()


async def test_entries_appended_before_an_expiry_are_removed(driver, while_waiting, admin, schema):
    await driver.append(KEY, b"first", initial_version="initial", ttl=60)
    waited = driver.append(KEY, b"mine", initial_version="again", ttl=None)
    assert await while_waiting(waited, APPEND, EXPIRE) == 1
    assert await driver.load(KEY) == Record("again", None, (b"mine",))
    assert await driver.replace(KEY, b"", version="v2", expect="again", drop=1, ttl=None) is True
    assert await admin.fetchval(ENTRIES.format(schema=schema)) == 0


async def test_a_fold_that_waited_keeps_what_was_appended(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    fold = driver.replace(KEY, b"first", version="v2", expect="initial", drop=1, ttl=KEEP)
    assert await while_waiting(fold, APPEND) is True
    assert await driver.load(KEY) == Record("v2", b"first", (b"other",))


async def test_of_two_folds_the_one_that_waited_loses(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    fold = driver.replace(KEY, b"first", version="v2", expect="initial", drop=1, ttl=KEEP)
    assert await while_waiting(fold, FOLD) is False
    assert await driver.load(KEY) == Record("theirs", b"b", ())


async def test_a_rewrite_that_waited_keeps_what_was_appended(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    rewrite = driver.replace(KEY, b"", version="v2", expect="initial", rewrite=(b"F",), ttl=KEEP)
    assert await while_waiting(rewrite, APPEND) is True
    assert await driver.load(KEY) == Record("v2", b"", (b"F", b"other"))


@pytest.mark.parametrize("expect", ["initial", "theirs"])
async def test_of_two_rewrites_the_one_that_waited_loses(driver, while_waiting, expect):
    """Also if it expects the version of the other: its snapshot has the entries from before."""
    await driver.append(KEY, b"123", initial_version="initial", ttl=None)
    await driver.append(KEY, b"45", initial_version="initial", ttl=None)
    rewrite = driver.replace(KEY, b"", version="mine", expect=expect, rewrite=(b"F",), ttl=KEEP)
    assert await while_waiting(rewrite, REWRITE) is False
    assert await driver.load(KEY) == Record("theirs", b"b", (b"rewrite123", b"45"))


async def test_a_rewrite_that_waited_for_itself_was_done(driver):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    rewrites = [
        driver.replace(KEY, b"b", version="v2", expect="initial", rewrite=(b"other",), ttl=KEEP)
        for _ in range(8)
    ]
    assert await asyncio.gather(*rewrites) == [True] * 8
    assert await driver.load(KEY) == Record("v2", b"b", (b"other",))


async def test_a_fold_that_waited_for_itself_was_done(driver):
    """A client's own retry: the same write twice at once, the second waiting for the first."""
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    folds = [driver.replace(KEY, b"b", version="v2", expect="initial", drop=1, ttl=KEEP) for _ in range(8)]
    assert await asyncio.gather(*folds) == [True] * 8
    assert await driver.load(KEY) == Record("v2", b"b", ())


@pytest.mark.parametrize("expect", [ABSENT, ANY])
async def test_a_store_that_waited_for_itself_was_done(driver, expect):
    stores = [driver.replace(KEY, b"b", version="v1", expect=expect, ttl=60) for _ in range(8)]
    assert await asyncio.gather(*stores) == [True] * 8
    assert await driver.load(KEY) == Record("v1", b"b", ())


async def test_a_lease_that_expired_during_the_wait_is_free(driver, while_waiting):
    await driver.replace(KEY, b"", version="theirs", expect=ABSENT, ttl=60)
    taking = driver.replace(KEY, b"", version="mine", expect=ABSENT, ttl=60)
    assert await while_waiting(taking, EXPIRE) is True


async def test_a_save_that_waited_empties_the_tail_of_new_entries_too(driver, while_waiting):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    saving = driver.replace(KEY, b"saved", version="v2", expect=ANY, ttl=None)
    assert await while_waiting(saving, APPEND) is True
    assert await driver.load(KEY) == Record("v2", b"saved", ())
    assert await driver.append(KEY, b"next", initial_version="no", ttl=None) == 1
    assert await driver.load(KEY) == Record("v2", b"saved", (b"next",))


async def test_a_delete_that_waited_removes_new_entries_too(driver, while_waiting, admin, schema):
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    assert await while_waiting(driver.delete(KEY), APPEND) is True
    assert await driver.load(KEY) is None
    assert await admin.fetchval(ENTRIES.format(schema=schema)) == 0


async def test_a_record_created_after_expiry_has_nothing_of_the_old_one(driver, admin, schema):
    for _ in range(3):
        await driver.append(KEY, b"old", initial_version="old", ttl=0.05)
    await asyncio.sleep(0.1)
    assert await driver.append(KEY, b"new", initial_version="new", ttl=None) == 1
    assert await driver.load(KEY) == Record("new", None, (b"new",))
    assert await admin.fetchval(ENTRIES.format(schema=schema)) == 1


async def test_a_purge_keeps_its_limit_and_waits_for_no_lock(driver, admin, schema):
    # A write may be followed by a purge of its own.
    with purging(after_writes=False):
        for number in range(5):
            await driver.replace(Key("scope", f"{number}"), b"", version="v", expect=ANY, ttl=0.05)
        await driver.append(Key("scope", "lasting"), b"", initial_version="v", ttl=None)
    await asyncio.sleep(0.1)
    assert [await driver.purge(2) for _ in range(4)] == [2, 2, 1, 0]
    assert await admin.fetchval(RECORDS.format(schema=schema)) == 1
    with purging(after_writes=False):
        await driver.append(KEY, b"", initial_version="v", ttl=0.001)
    async with admin.transaction():
        await admin.execute(HOLD.format(schema=schema))
        assert await driver.purge(10) == 0


async def test_writers_remove_what_has_expired_as_they_pass(driver, admin, schema):
    for number in range(40):
        await driver.replace(Key("scope", f"{number}"), b"", version="v", expect=ANY, ttl=0.001)
    with purging_at_once():
        for _ in range(400):
            await driver.append(KEY, b"", initial_version="v", ttl=None)
            if await admin.fetchval(RECORDS.format(schema=schema)) == 1:
                break
    assert (await driver.load(KEY)).version == "v"
    assert await admin.fetchval(RECORDS.format(schema=schema)) == 1


async def test_writers_that_revive_and_purge_the_same_records_never_deadlock(url, schema, driver):
    """Every write here finds the records expired, and purges the others."""
    drivers = [driver, await open_at(url, schema=schema)]
    keys = [Key("scope", f"{number}") for number in range(4)]

    async def write(number):
        for turn in range(60):
            await drivers[number % 2].append(keys[(number + turn) % 4], b"", initial_version="v", ttl=0.001)

    with purging(after_writes=True), purging_at_once():
        await asyncio.gather(*(write(number) for number in range(8)))
    await drivers[1].close()


async def test_a_statement_that_waits_too_long_was_not_done(url, schema, driver, admin):
    impatient = await open_at(url, schema=schema, deadline_s=0.6)
    await driver.append(KEY, b"first", initial_version="initial", ttl=None)
    async with admin.transaction():
        await admin.execute(HOLD.format(schema=schema))
        with pytest.raises(Unavailable, match="nothing was done"):
            await impatient.append(KEY, b"late", initial_version="no", ttl=None)
    assert (await driver.load(KEY)).tail == (b"first",)
    await impatient.close()

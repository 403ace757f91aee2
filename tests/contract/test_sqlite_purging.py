"""What has expired leaves an SQLite file in short steps, after writes and never at their cost."""

import contextlib
import random

import pytest

from stm_backends.drivers.contract import ABSENT, Key, Record
from stm_backends.drivers.sqlite import purging
from stm_backends.errors import StorageError
from stm_backends.testing import FakeClock
from tests.contract.test_sqlite_faults import KEY, opened, other_connection

LARGE = Key("s", "large")

MIB = 1024 * 1024


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stm.db"


@pytest.fixture
def steps(monkeypatch):
    """How many steps follow each write: none, until a test says otherwise."""
    count = [0]
    monkeypatch.setattr(purging, "steps_after", lambda size, writes: count[0])
    return count


def stored(path):
    """Return how many records and entries the file holds, and the bytes of the entries."""
    with other_connection(path) as connection:
        (records,) = connection.execute("SELECT count(*) FROM stm_record").fetchone()
        entries = connection.execute("SELECT count(*), total(length(entry)) FROM stm_entry").fetchone()
    return records, entries[0], int(entries[1])


@contextlib.contextmanager
def removing_fails(path):
    """Nothing can be removed from the file, whoever tries it."""
    with other_connection(path) as connection:
        connection.execute(
            "CREATE TRIGGER no BEFORE DELETE ON stm_entry BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        yield
        connection.execute("DROP TRIGGER no")


async def large_and_expired(driver, clock, *, entries, size):
    for _ in range(entries):
        await driver.append(LARGE, bytes(size), initial_version="old", ttl=1.0)
    await clock.pass_time(2.0)


async def test_a_write_is_done_before_anything_is_removed_and_that_is_a_transaction_of_its_own(path, steps):
    clock, seen = FakeClock(), []
    async with opened(path, clock=clock) as driver:
        await large_and_expired(driver, clock, entries=1, size=1)
        steps[0] = 1
        await driver.run(lambda connection: connection.set_trace_callback(seen.append))
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.load(KEY)  # waits its turn behind what follows the write
        assert stored(path) == (1, 1, 1)
    verbs = [statement.split()[0] for statement in seen if not statement.startswith("--")]
    writing = [verbs.index("BEGIN"), verbs.index("COMMIT")]
    assert "DELETE" not in verbs[: writing[1]]
    rest = verbs[writing[1] + 1 :]
    assert rest.index("BEGIN") < rest.index("DELETE") < rest.index("COMMIT")


async def test_nothing_that_stops_a_purge_fails_a_write(path, steps):
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        await large_and_expired(driver, clock, entries=1, size=1)
        steps[0] = 1
        with removing_fails(path):
            for length in (1, 2, 3):
                assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == length
            assert stored(path) == (2, 4, 4)
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.load(KEY)
        assert stored(path) == (1, 4, 4)


@pytest.mark.parametrize(("entries", "size"), [(2_500, 1), (24, MIB // 4), (3, 2 * MIB)])
async def test_a_step_is_bounded_by_entries_and_bytes_and_the_row_goes_last(path, steps, entries, size):
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        await large_and_expired(driver, clock, entries=entries, size=size)
        before = stored(path)
        steps[0] = 1
        for _ in range(100):
            await driver.replace(KEY, b"", version="v", expect=ABSENT, ttl=None)
            assert await driver.load(LARGE) is None
            now = stored(path)
            assert before[1] - now[1] <= purging.STEP_ENTRIES
            assert before[2] - now[2] < purging.STEP_BYTES + size, "an entry goes in one piece"
            if now == (1, 1, 0):
                break
            assert now[0] == 2, "what is left of it would be found by nobody"
            assert now[1:] < before[1:], "no progress"
            before = now
        assert stored(path) == (1, 1, 0)


async def test_a_new_record_of_the_same_key_does_not_wait_for_what_is_left_of_the_old_one(path, steps):
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        await large_and_expired(driver, clock, entries=2_500, size=1)
        assert await driver.append(LARGE, b"new", initial_version="new", ttl=None) == 1
        assert stored(path)[1] == 2_501, "its entries were not removed within the write"
        assert await driver.load(LARGE) == Record("new", None, (b"new",))
        assert (await driver.scan(LARGE.scope, limit=5)).names == (LARGE.name,)
        assert await driver.purge(5) == 1
        assert await driver.load(LARGE) == Record("new", None, (b"new",))
        assert stored(path) == (1, 1, 3)


async def test_a_record_of_which_a_part_is_removed_stays_gone_when_the_clock_is_set_back(path, steps):
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        await large_and_expired(driver, clock, entries=2_500, size=1)
        steps[0] = 1
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.load(KEY)
        assert stored(path) == (2, 1_501, 1_501)
    async with opened(path, clock=lambda: clock() - 2.0) as driver:
        assert await driver.load(LARGE) is None
        assert (await driver.scan(LARGE.scope, limit=5)).names == ()
        assert await driver.append(LARGE, b"new", initial_version="new", ttl=None) == 1


async def test_a_record_without_its_entries_does_not_hold_up_the_purge(path, steps):
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        await large_and_expired(driver, clock, entries=2_500, size=1)
        await driver.append(Key("s", "other"), b"a", initial_version="v", ttl=1.0)
        await clock.pass_time(2.0)
        with other_connection(path) as connection:
            connection.execute("DELETE FROM stm_entry WHERE seq > 1")
        assert await driver.purge(10) == 2
        assert stored(path) == (0, 0, 0)


async def test_processes_that_write_five_times_each_remove_what_has_expired(path, monkeypatch):
    """A count of writes that each instance kept for itself would never be reached."""
    monkeypatch.setattr(purging, "random", random.Random(7))
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        for number in range(300):
            await driver.append(Key("s", f"old{number}"), b"a", initial_version="v", ttl=1.0)
        await clock.pass_time(2.0)
    for opener in range(30):
        async with opened(path, clock=clock) as driver:
            for number in range(5):
                await driver.append(Key("new", f"{opener}.{number}"), b"a", initial_version="v", ttl=None)
    assert stored(path) == (150, 150, 150)


def test_more_is_removed_on_average_than_is_written(monkeypatch):
    monkeypatch.setattr(purging, "random", random.Random(7))
    for size in (0, 1000, MIB, 16 * MIB):
        steps = sum(purging.steps_after(size) for _ in range(2_000)) / 2_000
        assert steps * purging.STEP_BYTES > size
        assert steps * purging.STEP_RECORDS > 1


async def test_a_purge_on_request_removes_no_more_than_its_limit(path, steps):
    clock = FakeClock()
    async with opened(path, clock=clock) as driver:
        for number in range(200):
            await driver.append(Key("s", f"old{number}"), b"a", initial_version="v", ttl=1.0)
        assert await driver.purge(5) == 0
        await clock.pass_time(2.0)
        assert [await driver.purge(limit) for limit in (5, 150, 100, 100)] == [5, 150, 45, 0]
        assert stored(path) == (0, 0, 0)


async def test_deleting_a_large_record_leaves_nothing_behind_and_takes_short_transactions(path, steps):
    seen = []
    async with opened(path) as driver:
        for _ in range(8):
            await driver.append(LARGE, bytes(MIB // 2), initial_version="v", ttl=None)
        await driver.run(lambda connection: connection.set_trace_callback(seen.append))
        assert await driver.delete(LARGE) is True
        assert stored(path) == (0, 0, 0)
        assert await driver.delete(LARGE) is False
    assert sum(statement.startswith("COMMIT") for statement in seen) > 4


async def test_a_large_record_is_deleted_even_if_its_entries_cannot_be_removed_yet(path, steps):
    async with opened(path) as driver:
        for _ in range(4):
            await driver.append(LARGE, bytes(MIB // 2), initial_version="v", ttl=None)
        with removing_fails(path):
            assert await driver.delete(LARGE) is True
            assert await driver.load(LARGE) is None
            assert stored(path)[1] == 4
            with pytest.raises(StorageError):
                await driver.purge(1)
        assert await driver.purge(1) == 1
        assert stored(path) == (0, 0, 0)

"""A clock that is set back ends no record early, and lengthens no lease by more than its time."""

import pytest

from stm_backends.drivers.contract import ABSENT, KEEP, Key, Record
from tests.contract.test_sqlite_faults import KEY, opened, other_connection

HOUR = 3600.0

LEASE = Key("acme:u1:lease", "chat")


class Clock:
    """A host's clock, which a test sets forward and back."""

    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def driver(tmp_path, clock):
    async with opened(tmp_path / "stm.db", clock=clock) as driver:
        yield driver


async def take(driver, version):
    return await driver.replace(LEASE, b"", version=version, expect=ABSENT, ttl=30.0)


async def test_a_lease_lasts_its_own_time_at_most_once_more(driver, clock):
    assert await take(driver, "dead")
    clock.now -= HOUR
    assert not await take(driver, "a"), "it may have been taken a moment ago"
    clock.now += 29.0
    assert not await take(driver, "b"), "trying does not start it again"
    clock.now += 2.0
    assert await take(driver, "c")


async def test_a_lease_that_a_clock_sets_back_again_and_again_still_ends(driver, clock):
    assert await take(driver, "dead")
    for _ in range(3):
        clock.now -= HOUR
        assert not await take(driver, "a")
        clock.now += 20.0
    clock.now += 11.0
    assert await take(driver, "b")


async def test_a_lease_is_released_and_its_successor_lasts_as_on_any_day(driver, clock):
    assert await take(driver, "mine")
    clock.now -= HOUR
    assert await driver.delete(LEASE, expect="mine")
    assert await take(driver, "next")
    clock.now += 29.0
    assert not await take(driver, "a")
    clock.now += 2.0
    assert await take(driver, "b")


async def test_a_conversation_is_neither_lost_nor_kept_for_longer_than_its_time(driver, clock):
    await driver.append(KEY, b"a", initial_version="v", ttl=600.0)
    clock.now -= HOUR
    assert await driver.load(KEY) == Record("v", None, (b"a",))
    assert await driver.append(KEY, b"b", initial_version="x", ttl=600.0) == 2
    clock.now += 599.0
    assert await driver.load(KEY) == Record("v", None, (b"a", b"b"))
    clock.now += 2.0
    assert await driver.load(KEY) is None


async def test_a_fold_that_keeps_the_time_to_live_keeps_its_length(driver, clock):
    await driver.append(KEY, b"a", initial_version="v", ttl=600.0)
    clock.now -= HOUR
    assert await driver.replace(KEY, b"A", version="w", expect="v", drop=1, ttl=KEEP)
    clock.now += 599.0
    assert await driver.load(KEY) == Record("w", b"A", ())
    clock.now += 2.0
    assert await driver.load(KEY) is None


async def test_a_clock_that_is_right_leaves_the_end_where_it_is(driver, clock):
    await driver.append(KEY, b"a", initial_version="v", ttl=600.0)
    clock.now += 400.0
    assert await driver.replace(KEY, b"A", version="w", expect="v", drop=1, ttl=KEEP)
    assert not await driver.replace(KEY, b"B", version="x", expect="v", ttl=KEEP)
    clock.now += 201.0
    assert await driver.load(KEY) is None


async def test_what_older_code_wrote_is_taken_at_its_word(driver, clock, tmp_path):
    """It moves the end of a record and leaves alone when that was set."""
    await driver.append(KEY, b"a", initial_version="v", ttl=600.0)
    clock.now -= HOUR
    end = clock.now + 600.0
    with other_connection(tmp_path / "stm.db") as connection:
        connection.execute("UPDATE stm_record SET expires = ?", (end,))
    assert await driver.replace(KEY, b"A", version="w", expect="v", drop=1, ttl=KEEP)
    clock.now = end - 1.0
    assert await driver.load(KEY) == Record("w", b"A", ())
    clock.now = end + 1.0
    assert await driver.load(KEY) is None

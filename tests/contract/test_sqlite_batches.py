"""Writes that are queued at once share a transaction of the SQLite driver, and none of another's fate."""

import asyncio
import sqlite3
import threading

import pytest

from stm_backends.drivers import ABSENT, Key, Record
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings, statements
from stm_backends.drivers.sqlite.thread import MAX_JOBS, Kind
from stm_backends.errors import TooLarge, Unavailable

ENDLESS = """
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
    INSERT INTO stm_entry SELECT 1, count(*), x'00' FROM n
"""
"""A write that never ends; interrupted, it takes the whole transaction with it."""


class Watched(SqliteDriver):
    """A driver whose thread can be held, and whose statements are recorded."""

    def __init__(self, settings):
        super().__init__(settings)
        self.said = []

    async def hold(self):
        """Occupy the thread until the returned event is set; what is queued meanwhile is one batch."""
        held, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def work(connection):
            connection.set_trace_callback(self.said.append)
            loop.call_soon_threadsafe(held.set)
            go.wait(10)

        self._holding = asyncio.ensure_future(self._run("test", work))
        await held.wait()
        return go

    async def write(self, work):
        """Run a write of the test's own."""
        return await self._run("test", work, Kind.WRITE)

    def count(self, statement):
        return self.said.count(statement)


@pytest.fixture
async def driver(tmp_path):
    driver = Watched(SqliteSettings(path=str(tmp_path / "stm.db"), deadline_s=3))
    await driver.open()
    yield driver
    await driver.close()


@pytest.fixture
def other(driver, tmp_path):
    """Another process' connection, as far as SQLite's locks can tell."""
    connection = sqlite3.connect(tmp_path / "stm.db", isolation_level=None, timeout=0)
    yield connection
    connection.close()


def key(number):
    return Key("acme:u1:memory", f"chat{number}")


def append(driver, number, entry=b"a"):
    return asyncio.ensure_future(driver.append(key(number), entry, initial_version=f"v{number}", ttl=None))


async def begun(*coroutines):
    """Queue operations, so that the thread finds them together."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    await asyncio.sleep(0)
    return tasks


async def test_writes_that_are_queued_at_once_have_one_commit(driver):
    go = await driver.hold()
    tasks = await begun(*(append(driver, number % 5, b"%d" % number) for number in range(20)))
    go.set()
    assert [await task for task in tasks] == [number // 5 + 1 for number in range(20)]
    assert driver.count(statements.COMMIT) == driver.count(statements.BEGIN) == 1
    assert (await driver.load(key(3))).tail == (b"3", b"8", b"13", b"18")


async def test_a_transaction_has_a_bounded_number_of_writes(driver):
    go = await driver.hold()
    tasks = await begun(*(append(driver, 1) for _ in range(MAX_JOBS + 1)))
    go.set()
    assert [await task for task in tasks] == list(range(1, MAX_JOBS + 2))
    assert driver.count(statements.COMMIT) >= 2


async def test_a_write_alone_takes_no_savepoint(driver):
    (await driver.hold()).set()
    await driver.append(key(1), b"a", initial_version="v", ttl=None)
    assert driver.count(statements.SAVEPOINT) == 0
    assert driver.count(statements.COMMIT) == 1


async def test_a_write_that_is_refused_leaves_the_others_of_its_batch(driver):
    def fails(connection):
        connection.execute(statements.CREATE, (*key(2), "v", None, 0, 2, 1))
        raise TooLarge("the record is too large", size=2, limit=1)

    go = await driver.hold()
    first, refused, last = await begun(append(driver, 1), driver.write(fails), append(driver, 3))
    go.set()
    with pytest.raises(TooLarge):
        await refused
    assert (await first, await last) == (1, 1)
    assert await driver.load(key(2)) is None
    assert driver.count(statements.COMMIT) == 1


async def test_writes_beside_an_interrupted_one_are_done_once(driver):
    entered = threading.Event()

    def endless(connection):
        entered.set()
        return connection.execute(ENDLESS).fetchone()

    go = await driver.hold()
    before, late = await begun(append(driver, 1), driver.write(endless))
    await asyncio.sleep(2)
    (after,) = await begun(append(driver, 2))
    go.set()
    with pytest.raises(Unavailable, match="interrupted at the deadline and rolled back"):
        await late
    assert await after == 1
    assert (await driver.load(key(2))).tail == (b"a",)
    # The first one had the same deadline as the endless one.
    stored = await driver.load(key(1))
    try:
        assert await before == 1
        assert stored == Record("v1", None, (b"a",))
    except Unavailable:
        assert stored is None


async def test_a_commit_that_fails_is_the_failure_of_all_its_writes(driver, monkeypatch):
    go = await driver.hold()
    tasks = await begun(append(driver, 1), append(driver, 2))
    monkeypatch.setattr(statements, "COMMIT", "COMMIT AND MORE")
    go.set()
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    monkeypatch.undo()
    assert all(isinstance(failure, Exception) for failure in failures)
    assert failures[0] is not failures[1]
    assert [await driver.load(key(number)) for number in (1, 2)] == [None, None]
    assert await driver.append(key(1), b"a", initial_version="v", ttl=None) == 1


async def test_no_write_is_answered_before_the_commit(driver, monkeypatch):
    (await driver.hold()).set()
    entered, go, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def stalls(connection):
        loop.call_soon_threadsafe(entered.set)
        go.wait(10)

    holding = await driver.hold()
    first, last = await begun(append(driver, 1), driver.write(stalls))
    holding.set()
    await entered.wait()
    assert not first.done()
    go.set()
    assert await first == 1
    await last


async def test_a_write_cancelled_before_its_transaction_is_not_done(driver):
    go = await driver.hold()
    cancelled, kept = await begun(append(driver, 1), append(driver, 2))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    go.set()
    assert await kept == 1
    assert await driver.load(key(1)) is None


async def test_reads_go_on_while_writes_wait_for_another_process(driver, other):
    await driver.append(key(1), b"a", initial_version="v", ttl=None)
    other.execute("BEGIN IMMEDIATE")
    (waiting,) = await begun(append(driver, 1, b"b"))
    for _ in range(20):
        assert (await driver.load(key(1))).tail == (b"a",)
    assert not waiting.done()
    other.execute("ROLLBACK")
    assert await waiting == 2


async def test_all_writes_that_wait_for_another_process_end_at_their_deadline(driver, other):
    other.execute("BEGIN IMMEDIATE")
    tasks = await begun(*(append(driver, number) for number in range(3)))
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(failure) for failure in failures] == [
        "sqlite.append: the database is locked by another process"
    ] * 3
    other.execute("ROLLBACK")
    assert await driver.replace(key(1), b"b", version="w", expect=ABSENT, ttl=None) is True


async def test_writes_that_wait_when_the_driver_closes_are_done_first(driver, other):
    other.execute("BEGIN IMMEDIATE")
    (waiting,) = await begun(append(driver, 1))
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(driver.close())
    await asyncio.sleep(0.05)
    other.execute("ROLLBACK")
    await closing
    assert await waiting == 1

"""SQLite: large records are read in a thread of their own, for which no other operation waits."""

import asyncio
import threading

import pytest

from stm_backends.drivers.coalesced import LARGE_BYTES
from stm_backends.drivers.contract import ANY, Key, Record
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings
from stm_backends.drivers.sqlite.jobs import Kind
from stm_backends.errors import Corrupt, Unavailable
from tests.mutants.sqlite import ReadsInOneThread

LARGE, SMALL, MANY = (Key("acme:u1:memory", name) for name in ("large", "small", "many"))
BODY, ENTRY = b"b" * LARGE_BYTES, b"e" * 1_000


async def opened(path, kind=SqliteDriver):
    driver = kind(SqliteSettings(path=str(path), deadline_s=2))
    await driver.open()
    await driver.replace(LARGE, BODY, version="v", expect=ANY, ttl=None)
    assert await driver.append(LARGE, ENTRY, initial_version="v", ttl=None) == 1
    return driver


@pytest.fixture
async def driver(tmp_path):
    driver = await opened(tmp_path / "stm.db")
    yield driver
    await driver.close()


async def test_a_large_record_is_whole_whether_or_not_it_was_known(driver):
    for _ in range(2):
        assert await driver.load(LARGE) == Record("v", BODY, (ENTRY,))
    await driver.replace(LARGE, b"", version="w", expect="v", drop=1, ttl=None)
    for _ in range(2):
        assert await driver.load(LARGE) == Record("w", b"", ())
    await driver.delete(LARGE)
    assert await driver.load(LARGE) is None


async def test_newest_entries_are_whole_whether_or_not_they_are_large(driver):
    assert await driver.load(LARGE, last=1) == Record("v", BODY, (ENTRY,))
    assert await driver.load(LARGE, last=0) == Record("v", BODY, (), skipped=1)
    await driver.replace(LARGE, b"", version="w", expect="v", ttl=None)
    for number in range(3):
        await driver.append(LARGE, b"%d" % number + BODY, initial_version="w", ttl=None)
    newest = (b"1" + BODY, b"2" + BODY)
    assert await driver.load(LARGE, last=2) == Record("w", b"", newest, skipped=2)


async def test_small_operations_go_on_while_a_large_record_is_read(driver):
    loop, held, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def read(_):
        loop.call_soon_threadsafe(held.set)
        go.wait(20)

    reading = asyncio.ensure_future(driver._run("load", read, Kind.READ, large=True))  # noqa: SLF001 -- to hold it
    await held.wait()
    large = asyncio.ensure_future(driver.load(LARGE))
    try:
        assert await driver.append(SMALL, b"a", initial_version="v", ttl=None) == 1
        assert await driver.load(SMALL) == Record("v", None, (b"a",))
        # Of a large record, what is small.
        for _ in range(300):
            await driver.append(MANY, ENTRY, initial_version="v", ttl=None)
        assert await driver.load(MANY, last=2) == Record("v", None, (ENTRY, ENTRY), skipped=298)
        assert not large.done()
    finally:
        go.set()
        answers = await asyncio.gather(large, reading, return_exceptions=True)
    assert answers == [Record("v", BODY, (ENTRY,)), None]


async def test_a_driver_that_reads_in_one_thread_is_rejected(tmp_path):
    driver = await opened(tmp_path / "stm.db", ReadsInOneThread)
    try:
        with pytest.raises(Unavailable, match="not started"):
            await test_small_operations_go_on_while_a_large_record_is_read(driver)
    finally:
        await driver.close()


async def test_a_large_record_without_a_part_of_it_is_corrupt(driver):
    def damage(connection):
        connection.execute("DELETE FROM stm_entry WHERE seq = 1")

    await driver._run("test", damage)  # noqa: SLF001 -- past the driver
    for _ in range(2):
        with pytest.raises(Corrupt, match="a part of the record is missing"):
            await driver.load(LARGE)


async def test_closing_ends_both_threads_and_leaves_no_log(tmp_path):
    before = set(threading.enumerate())
    driver = await opened(tmp_path / "stm.db")
    await driver.load(LARGE)
    started = {*threading.enumerate()} - before
    assert {thread.name for thread in started} == {"stm-sqlite", "stm-sqlite-large"}
    await driver.close()
    assert not any(thread.is_alive() for thread in started)
    assert [file.name for file in tmp_path.iterdir()] == ["stm.db"]
    with pytest.raises(Unavailable, match="not open"):
        await driver.load(LARGE)


async def test_a_large_record_of_a_replaced_file_is_not_read(driver, tmp_path):
    await driver.load(LARGE)
    other = await opened(tmp_path / "other.db")
    await other.close()
    (tmp_path / "other.db").replace(tmp_path / "stm.db")
    with pytest.raises(Unavailable, match="was removed or replaced"):
        await driver.load(LARGE)

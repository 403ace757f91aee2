"""A process that was forked while its parent had the file open locks the file as any other does."""

import asyncio
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings
from stm_backends.drivers.sqlite.jobs import Kind
from stm_backends.drivers.sqlite.thread import ConnectionThread
from stm_backends.errors import Unavailable
from stm_backends.testing.workbench.forks import CAN_FORK, in_a_forked_process

KEY = Key("acme:u1:memory", "chat")

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="this system cannot fork")


async def append(driver: SqliteDriver) -> int:
    return await driver.append(KEY, b"a", initial_version="v", ttl=None)


async def test_a_forked_process_goes_on_when_its_parent_closes_the_file(tmp_path: Path) -> None:
    settings = SqliteSettings(path=str(tmp_path / "stm.db"))
    driver = SqliteDriver(settings)
    await driver.open()
    await append(driver)
    (is_open, opened), (is_closed, closed) = os.pipe(), os.pipe()

    async def use() -> None:
        own = SqliteDriver(settings)
        await own.open()
        assert await append(own) == 2
        os.write(opened, b"x")
        os.read(is_closed, 1)
        assert await append(own) == 3
        await own.close()

    child = asyncio.ensure_future(in_a_forked_process(use, within=30))
    await asyncio.to_thread(os.read, is_open, 1)
    await driver.close()
    os.write(closed, b"x")
    assert await child == ""
    await driver.open()
    assert await append(driver) == 4
    await driver.close()


async def nothing() -> None:
    pass


def _replace(path: Path) -> None:
    for file in path.parent.iterdir():
        file.unlink()
    path.touch()


async def test_large_records_can_be_loaded_before_anything_else_after_a_fork(tmp_path: Path) -> None:
    driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "stm.db")))
    await driver.open()
    await driver.append(KEY, bytes(1_000_000), initial_version="v", ttl=None)
    for _ in range(3):
        assert await driver.load(KEY) is not None
        assert await in_a_forked_process(nothing, within=30) == ""
    assert await driver.load(KEY) is not None
    assert await append(driver) == 2
    await driver.close()


async def test_a_file_that_was_replaced_before_a_fork_is_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "stm.db"
    driver = SqliteDriver(SqliteSettings(path=str(path)))
    await driver.open()
    await append(driver)
    _replace(path)
    assert await in_a_forked_process(nothing, within=30) == ""
    with pytest.raises(Unavailable, match="was removed or replaced"):
        await append(driver)
    await driver.close()
    assert not path.stat().st_size


async def test_operations_go_on_while_the_process_forks(tmp_path: Path) -> None:
    driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "stm.db")))
    await driver.open()

    async def append_some() -> None:
        for _ in range(200):
            await append(driver)

    writing = asyncio.ensure_future(append_some())
    for _ in range(5):
        assert await in_a_forked_process(nothing, within=30) == ""
    await writing
    found = await driver.load(KEY)
    assert found is not None
    assert len(found.tail) == 200
    await driver.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list open files")
async def test_a_connection_that_is_wanted_while_a_fork_waits_for_another_is_opened_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, forks, has_connected, is_over = (threading.Event() for _ in range(4))
    stand_aside = ConnectionThread.stand_aside

    def say_so(*given: object) -> None:
        stand_aside(*given)
        forks.set()

    monkeypatch.setattr(ConnectionThread, "stand_aside", say_so)
    path = tmp_path / "second.db"

    class Second(SqliteDriver):
        def _connect(self) -> sqlite3.Connection:
            connection = super()._connect()
            has_connected.set()
            return connection

    async def use_another() -> None:
        async with asyncio.timeout(30):
            driver = Second(SqliteSettings(path=str(path)))
            await driver.open()
            await append(driver)
            await asyncio.to_thread(is_over.wait, 30)
            await driver.close()

    def in_another_thread() -> None:
        forks.wait(30)
        asyncio.run(use_another())

    def work(_: sqlite3.Connection) -> None:
        has_begun.set()
        has_connected.wait(0.5)  # which it does only if it does not wait for the fork

    def opened() -> set[str]:
        return {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}

    async def look() -> None:
        assert str(path) not in opened()

    driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "first.db")))
    await driver.open()
    thread = threading.Thread(target=in_another_thread)
    thread.start()
    assert driver._thread is not None  # noqa: SLF001 -- a job that takes its time
    job = driver._thread.run(work, kind=Kind.READ, until=asyncio.get_running_loop().time() + 30)  # noqa: SLF001
    has_begun.wait(30)
    seen = await in_a_forked_process(look, within=30)
    is_over.set()
    assert seen == ""
    await job
    await asyncio.to_thread(thread.join, 30)
    assert has_connected.is_set()
    await driver.close()

"""A file that is restored while the SQLite driver has it open is not written to, not even by closing."""

import asyncio
import contextlib
import shutil
import sqlite3
import threading

import pytest

from stm_backends.drivers.contract import NO_LIMIT, Key
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings, files
from stm_backends.errors import Unavailable
from tests.contract.test_sqlite_faults import run_script
from tests.mutants.sqlite import CopiesAStaleLog, LooksBesideTheLink

KEY = Key("acme:u1:memory", "chat")
BESIDE = ("-wal", "-shm")


@pytest.fixture(params=[False, True], ids=["file", "link"])
def path(request, tmp_path):
    """The path that the driver is given: of the file, or of a link to it in another directory."""
    if not request.param:
        return tmp_path / "stm.db"
    (tmp_path / "there").mkdir()
    link = tmp_path / "stm.db"
    link.symlink_to(tmp_path / "there" / "real.db")
    return link


@pytest.fixture
def kind():
    """The driver; a mutant of it where a test is called for one."""
    return SqliteDriver


def beside(path):
    real = path.resolve()
    return [real.with_name(real.name + suffix) for suffix in BESIDE]


def stored(path):
    """Return how many entries another process finds, which sees the file as it is."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT count(*) FROM stm_entry WHERE seq > 0").fetchone()[0]


async def append(driver, count, *, name="chat"):
    for _ in range(count):
        await driver.append(KEY._replace(name=name), bytes(3_000), initial_version="v", ttl=None)


async def opened(path, kind=SqliteDriver):
    driver = kind(SqliteSettings(path=str(path)))
    await driver.open()
    return driver


async def backed_up(path, entries=20):
    """Store entries of many pages, and copy the file; returns the copy."""
    driver = await opened(path)
    await append(driver, entries)
    await driver.close()
    return shutil.copy(path, path.with_name("backup.db"))


def copied(backup, path):
    """Copy a backup into the file, which stays the same file for the operating system."""
    for file in beside(path):
        file.unlink()
    shutil.copyfile(backup, path)


def moved(backup, path):
    for file in beside(path):
        file.unlink()
    shutil.copy(backup, moving := path.with_name("moving.db"))
    moving.replace(path.resolve())


async def test_a_first_large_load_changes_nothing_in_a_file_that_was_restored(path):
    other = path.with_name("other.db")
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA user_version = 42")
    driver = await opened(path)
    await append(driver, 100)
    moved(other, path)
    with contextlib.closing(sqlite3.connect(path)) as connection:  # of a process that has it open
        assert connection.execute("PRAGMA user_version").fetchone() == (42,)
        driver._large.note(KEY, NO_LIMIT)  # noqa: SLF001 -- as after an earlier load
        with pytest.raises(Unavailable, match="was removed or replaced"):
            await driver.load(KEY)
        await driver.close()
        assert connection.execute("PRAGMA user_version").fetchone() == (42,)


async def test_a_first_large_load_leaves_a_log_that_was_restored_as_it_is(path):
    backup = await backed_up(path)
    driver = await opened(path)
    await append(driver, 7, name="in the log")
    log = beside(path)[0]
    saved = log.read_bytes()
    moved(backup, path)
    log.write_bytes(saved)
    driver._large.note(KEY, NO_LIMIT)  # noqa: SLF001 -- as after an earlier load
    with pytest.raises(Unavailable, match="was removed or replaced"):
        await driver.load(KEY)
    await driver.close()
    assert log.exists(), "what opens the file last copies its log and removes it"
    assert log.read_bytes() == saved


@pytest.mark.parametrize("restore", [copied, moved])
async def test_closing_leaves_a_file_that_was_restored_as_it_is(path, restore, kind):
    backup = await backed_up(path)
    driver = await opened(path, kind)
    await append(driver, 40, name="later")
    restore(backup, path)
    restored = path.read_bytes()
    await driver.close()
    assert path.read_bytes() == restored
    assert stored(path) == 20


async def test_closing_leaves_a_log_that_was_restored_as_it_is(path):
    backup = await backed_up(path)
    driver = await opened(path)
    await append(driver, 7, name="in the log")
    log = beside(path)[0]
    saved = log.with_name("saved")
    shutil.copyfile(log, saved)
    await append(driver, 40, name="later")
    copied(backup, path)
    shutil.copyfile(saved, log)
    await driver.close()
    assert log.read_bytes() == saved.read_bytes()
    assert stored(path) == 27


async def test_closing_keeps_a_restored_log_if_it_had_nothing_to_copy(path):
    backup = await backed_up(path)
    driver = await opened(path)
    await append(driver, 7, name="in the log")
    log = beside(path)[0]
    saved = log.with_name("saved")
    shutil.copyfile(log, saved)
    await driver.finish_erasure()
    copied(backup, path)
    shutil.copyfile(saved, log)
    await driver.close()
    assert stored(path) == 27


async def test_what_another_process_wrote_after_the_log_went_is_kept(path, kind):
    driver = await opened(path, kind)
    await append(driver, 20)
    for file in beside(path):
        file.unlink()
    await run_script(
        """
        from stm_backends.drivers.contract import Key
        from stm_backends.drivers.sqlite import open_driver
        async def main():
            driver = open_driver(None, path=sys.argv[2])
            await driver.open()
            for _ in range(3):
                await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
            await driver.close()
        asyncio.run(main())
        """,
        path,
    )
    with pytest.raises(Unavailable, match="was removed or replaced"):
        await append(driver, 1)
    await driver.close()
    assert stored(path) == 3


async def test_a_restored_file_is_used_once_the_driver_is_opened_again(path):
    backup = await backed_up(path)
    driver = await opened(path)
    await append(driver, 40, name="later")
    copied(backup, path)
    with pytest.raises(Unavailable, match="open it again"):
        await driver.load(KEY)
    await driver.close()
    await driver.open()
    assert len((await driver.load(KEY)).tail) == 20
    await append(driver, 3)
    await driver.close()
    assert stored(path) == 23


async def test_a_thread_that_was_left_behind_judges_by_its_own_files(path):
    backup = await backed_up(path)
    driver, go = SqliteDriver(SqliteSettings(path=str(path), deadline_s=0.2)), threading.Event()
    await driver.open()
    await append(driver, 10, name="later")
    thread = driver._thread  # noqa: SLF001 -- nothing public tells when it has ended
    hanging = asyncio.ensure_future(driver._run("test", lambda _: go.wait(20)))  # noqa: SLF001
    await asyncio.sleep(0)
    await driver.close()  # gives up to wait
    copied(backup, path)
    restored = path.read_bytes()
    driver._files = files.OpenFiles(path)  # noqa: SLF001 -- as an `open` in the meantime
    driver._files.note()  # noqa: SLF001
    go.set()
    await asyncio.gather(hanging, return_exceptions=True)
    await asyncio.to_thread(thread._thread.join, 20)  # noqa: SLF001
    assert path.read_bytes() == restored


async def test_a_link_that_leads_elsewhere_now_is_noticed(tmp_path):
    for name in ("a", "b"):
        await (await opened(tmp_path / name)).close()
    link = tmp_path / "link"
    link.symlink_to("a")
    driver = await opened(link)
    link.unlink()
    link.symlink_to("b")
    with pytest.raises(Unavailable, match="was removed or replaced"):
        await append(driver, 1)
    await driver.close()
    assert (stored(tmp_path / "a"), stored(tmp_path / "b")) == (0, 0)


async def test_a_driver_that_copies_a_stale_log_is_rejected(tmp_path):
    with pytest.raises((AssertionError, sqlite3.DatabaseError)):
        await test_closing_leaves_a_file_that_was_restored_as_it_is(
            tmp_path / "stm.db", copied, CopiesAStaleLog
        )


async def test_a_driver_that_looks_beside_the_link_is_rejected(tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "stm.db")
    with pytest.raises(pytest.fail.Exception):
        await test_what_another_process_wrote_after_the_log_went_is_kept(
            tmp_path / "link.db", LooksBesideTheLink
        )

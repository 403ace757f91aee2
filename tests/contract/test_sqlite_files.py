"""Who may read the files of a database: the owner only, unless `private=False`."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.drivers.sqlite import files, open_driver
from stm_backends.errors import Unavailable

KEY = Key("scope", "name")


@pytest.fixture(autouse=True)
def nothing_masked():
    """Let every file have the permissions that its creator asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def written(path: Path, **options):
    driver = open_driver(None, path=path, **options)
    await driver.open()
    await driver.append(KEY, b"text", initial_version="v", ttl=None)
    return driver


async def test_new_files_can_be_read_by_their_owner_only(tmp_path: Path):
    driver = await written(tmp_path / "a.db")
    assert modes(tmp_path) == {"a.db": 0o600, "a.db-wal": 0o600, "a.db-shm": 0o600}
    await driver.close()


async def test_a_new_file_is_private_before_sqlite_opens_it(tmp_path: Path, monkeypatch):
    seen, real = [], sqlite3.connect

    def connect(*args, **options):
        seen.append(modes(tmp_path))
        return real(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    await (await written(tmp_path / "a.db")).close()
    assert seen == [{"a.db": 0o600}]


async def test_a_rollback_journal_of_the_file_is_private_too(tmp_path: Path):
    await (await written(tmp_path / "a.db")).close()
    connection = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("BEGIN")
    connection.execute("UPDATE stm_record SET version = 'w'")
    assert modes(tmp_path) == {"a.db": 0o600, "a.db-journal": 0o600}
    connection.close()


async def test_a_file_that_a_link_leads_to_is_created_private(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "a.db").symlink_to(tmp_path / "there" / "b.db")
    await (await written(tmp_path / "a.db")).close()
    assert modes(tmp_path / "there") == {"b.db": 0o600}


@pytest.mark.parametrize("error", [PermissionError, OSError])
async def test_a_file_system_without_hard_links_has_private_files(tmp_path: Path, monkeypatch, error):
    def link(*_):
        raise error

    monkeypatch.setattr(files.os, "link", link)
    await (await written(tmp_path / "a.db")).close()
    assert modes(tmp_path) == {"a.db": 0o600}


async def test_a_file_that_was_created_by_another_process_is_kept(tmp_path: Path, monkeypatch):
    async def first():
        await (await written(tmp_path / "a.db")).close()

    await first()
    monkeypatch.setattr(files.Path, "exists", lambda _: False)  # as if created just after the look
    driver = await written(tmp_path / "a.db")
    assert (await driver.load(KEY)).tail == (b"text", b"text")
    await driver.close()
    assert modes(tmp_path) == {"a.db": 0o600}


async def test_the_umask_decides_if_files_are_to_be_shared(tmp_path: Path, caplog):
    os.umask(0o007)
    driver = await written(tmp_path / "a.db", private=False)
    assert set(modes(tmp_path).values()) <= {0o660, 0o640}
    await driver.close()
    assert not caplog.records


async def test_an_existing_file_keeps_its_permissions_and_is_warned_of(tmp_path: Path, caplog):
    (tmp_path / "a.db").touch(0o644)
    await (await written(tmp_path / "a.db")).close()
    assert modes(tmp_path) == {"a.db": 0o644}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "mode 0644" in record.getMessage()
    assert "private=False" in record.getMessage()
    caplog.clear()
    (tmp_path / "a.db").chmod(0o600)
    await (await written(tmp_path / "a.db", must_exist=True)).close()
    assert not caplog.records


async def test_a_missing_directory_is_named_and_not_created(tmp_path: Path):
    with pytest.raises(Unavailable, match="its directory must exist"):
        await open_driver(None, path=tmp_path / "missing" / "a.db").open()
    assert modes(tmp_path) == {}


CREATE = """
import asyncio, sys
from stm_backends.drivers.contract import Key
from stm_backends.drivers.sqlite import open_driver
async def main():
    driver = open_driver(None, path=sys.argv[1])
    await driver.open()
    for number in range(20):
        await driver.append(Key("s", "n"), b"x", initial_version="v", ttl=None)
    await driver.close()
asyncio.run(main())
"""


def test_processes_that_create_one_file_at_once_share_it(tmp_path: Path):
    path = tmp_path / "a.db"
    started = [subprocess.Popen([sys.executable, "-c", CREATE, path]) for _ in range(4)]
    assert [process.wait(100) for process in started] == [0] * 4
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM stm_entry").fetchone() == (80,)
    assert modes(tmp_path) == {"a.db": 0o600}

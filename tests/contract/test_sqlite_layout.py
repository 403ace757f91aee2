"""What stands beside the data in an SQLite file says who can use it; older files are brought up to date."""

import asyncio
import contextlib
import json
import sys
import time
from asyncio import subprocess

import pytest

from stm_backends.drivers import plugins
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Key, Record
from stm_backends.drivers.sqlite import statements
from stm_backends.errors import ConfigurationError, Corrupt
from tests.contract.test_sqlite_faults import KEY, opened, other_connection
from tests.support import sqlite_layout_1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stm.db"


def tables(path):
    """Return what is set up in a file, however its text is laid out, with or without rowids."""
    with other_connection(path) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        meta = connection.execute("SELECT name, value FROM stm_meta ORDER BY name").fetchall()
    texts = {(kind, name): " ".join((sql or "").split()) for kind, name, sql in rows}
    texts.pop(("index", "sqlite_autoindex_stm_entry_1"), None)
    return {(*one, text.removesuffix(" WITHOUT ROWID")) for one, text in texts.items()}, meta


@contextlib.asynccontextmanager
async def old_process(path):
    """Run a process that uses the file as the first version of the driver did; yields how to command it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, sqlite_layout_1.__file__, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    async def ask(command, *arguments):
        process.stdin.write(f"{json.dumps([command, *arguments])}\n".encode())
        return json.loads(await process.stdout.readline())

    yield ask
    process.stdin.close()
    assert await process.wait() == 0


async def test_a_file_of_the_first_layout_is_upgraded_while_an_old_process_runs_on(path):
    now = time.time()
    async with old_process(path) as old:
        assert await old("append", *KEY, "a", now, None) == 1
        assert await old("append", "s", "mortal", "a", now, 60) == 1
        async with opened(path) as driver:
            assert await driver.load(KEY) == Record("v", None, (b"a",))
            assert await driver.append(KEY, b"b", initial_version="x", ttl=3600) == 2
            assert await driver.replace(Key("s", "lease"), b"", version="l", expect=ABSENT, ttl=60) is True

            assert await old("append", *KEY, "c", now, 3600) == 3
            assert await old("fold", *KEY, "A", 1, now) is True
            assert await old("append", "s", "new", "n", now, 3600) == 1
            assert await old("load", *KEY, now) == ["A", "b", "c"]

            assert await driver.load(KEY) == Record("w", b"A", (b"b", b"c"))
            assert await driver.replace(KEY, b"AB", version="y", expect="w", drop=1, ttl=KEEP) is True
            assert await driver.append(Key("s", "new"), b"o", initial_version="x", ttl=3600) == 2
            assert await old("load", *KEY, now) == ["AB", "c"]
            assert await old("purge", now + 61) == 2
            assert (await driver.scan("s", limit=9)).names == ("new",)
            assert await old("layout") == 1, "old processes can still open it"
    fresh = path.with_name("fresh.db")
    async with opened(fresh):
        pass
    assert tables(path) == tables(fresh)
    assert tables(path)[1] == [("readable_since", 1), ("schema", 1), ("version", 2)]


async def test_ten_drivers_that_upgrade_a_file_at_once_all_succeed(path):
    sqlite_layout_1.Process(str(path)).connection.close()
    async with contextlib.AsyncExitStack() as stack:
        drivers = await asyncio.gather(*(stack.enter_async_context(opened(path)) for _ in range(10)))
        lengths = [await driver.append(KEY, b"a", initial_version="v", ttl=None) for driver in drivers]
    assert lengths == list(range(1, 11))


async def test_an_upgrade_that_fails_leaves_the_file_as_it_was_and_is_done_by_the_next(path, monkeypatch):
    sqlite_layout_1.Process(str(path)).connection.close()
    before = tables(path)
    with monkeypatch.context() as patched:
        patched.setitem(statements.STEPS, 2, (*statements.STEPS[2], "no SQL"))
        with pytest.raises(Corrupt):
            async with opened(path):
                pass
    assert tables(path) == before
    async with opened(path) as driver:
        assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == 1


async def test_the_printed_schema_brings_an_older_file_up_to_date_too(path):
    by_hand = path.with_name("by_hand.db")
    for file in (path, by_hand):
        sqlite_layout_1.Process(str(file)).connection.close()
    with other_connection(by_hand) as connection:
        connection.executescript(plugins.schema("sqlite"))
    async with opened(path):
        pass
    assert tables(by_hand) == tables(path)


async def test_a_newer_layout_that_this_code_can_use_is_used_and_left_as_it_is(path):
    async with opened(path):
        pass
    with other_connection(path) as connection:
        connection.execute("UPDATE stm_meta SET value = 9 WHERE name = 'version'")
        connection.execute("UPDATE stm_meta SET value = 2 WHERE name = 'readable_since'")
        connection.execute("ALTER TABLE stm_record ADD COLUMN later TEXT DEFAULT 'kept'")
        connection.execute("ALTER TABLE stm_entry ADD COLUMN later TEXT")
        connection.execute("CREATE TABLE stm_later (id)")
    before = tables(path)
    async with opened(path) as driver:
        assert await driver.append(KEY, b"a", initial_version="v", ttl=60) == 1
        assert await driver.replace(KEY, b"A", version="w", expect="v", drop=1, ttl=KEEP) is True
        assert await driver.load(KEY) == Record("w", b"A", ())
        assert await driver.replace(Key("s", "n"), b"", version="w", expect=ANY, ttl=None) is True
        assert await driver.delete(Key("s", "n")) is True
    assert tables(path) == before


@pytest.mark.parametrize("row", ["readable_since", "schema"])
async def test_a_newer_layout_that_this_code_cannot_use_is_refused_and_nothing_is_touched(path, row):
    async with opened(path):
        pass
    with other_connection(path) as connection:
        connection.execute("UPDATE stm_meta SET value = 3 WHERE name = ?", (row,))
        connection.execute("PRAGMA journal_mode = DELETE")
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="upgrade stm-backends"):
        async with opened(path):
            pass
    assert path.read_bytes() == before


def has_rowids(path):
    with other_connection(path) as connection:
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'stm_entry'").fetchone()
    return "WITHOUT ROWID" not in sql


async def test_a_new_file_stores_a_thousand_bytes_in_little_more(path):
    async with opened(path) as driver:
        for number in range(500):
            key = Key("s", str(number % 25))
            await driver.append(key, bytes([number % 256]) * 1_000, initial_version="v", ttl=None)
    assert has_rowids(path)
    assert path.stat().st_size < 1.2 * 500 * 1_000


async def test_compacting_converts_a_file_while_an_old_process_runs_on(path):
    now = time.time()
    async with old_process(path) as old:
        for number in range(50):
            await old("append", "s", str(number % 5), "x" * 1_000, now, None)
        async with opened(path) as driver:
            before = [await driver.load(Key("s", str(number))) for number in range(5)]
            assert not has_rowids(path)
            compacted = await driver.compact()
            assert has_rowids(path)
            assert compacted.after < compacted.before / 2
            assert [await driver.load(Key("s", str(number))) for number in range(5)] == before
            # The old process goes on with the new table, and so does the trigger that removes entries.
            assert await old("append", "s", "0", "y", now, None) == 11
            assert (await driver.load(Key("s", "0"))).tail[-1] == b"y"
            assert await driver.delete(Key("s", "0"))
            again = await driver.compact()
            assert again.after <= again.before
    with other_connection(path) as connection:
        assert connection.execute("SELECT count(*) FROM stm_entry").fetchone() == (40,)


async def test_a_conversion_that_fails_leaves_the_file_as_it_was(path, monkeypatch):
    sqlite_layout_1.Process(str(path)).connection.close()
    async with opened(path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        before = tables(path)
        for place in range(len(statements.CONVERT) + 1):
            failing = (*statements.CONVERT[:place], "no SQL", *statements.CONVERT[place:])
            with monkeypatch.context() as patched:
                patched.setattr(statements, "CONVERT", failing)
                with pytest.raises(Corrupt):
                    await driver.compact()
            assert tables(path) == before
            assert not has_rowids(path)
        assert await driver.append(KEY, b"b", initial_version="v", ttl=None) == 2

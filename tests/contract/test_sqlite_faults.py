"""What the SQLite driver does when the file, the disk, the clock or another process is against it."""

import asyncio
import contextlib
import shutil
import signal
import sqlite3
import sys
import tempfile
import textwrap
import threading
import time
from asyncio import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from stm_backends.drivers.contract import ANY, DEFAULT_DEADLINE_S, Key, Record
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings
from stm_backends.drivers.sqlite.jobs import Kind
from stm_backends.errors import ConfigurationError, Corrupt, OutcomeUnknown, StmError, Unavailable
from tests.support.command_line import without_coverage

KEY = Key("acme:u1:memory", "chat")

SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
"""A statement that never ends."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stm.db"


class OpenedUp(SqliteDriver):
    """A driver on whose connection a test runs statements of its own.

    It opens the file within the default deadline, because a busy machine may take longer than a test's own.
    """

    async def open(self):
        own = self._settings
        self._settings = replace(own, deadline_s=DEFAULT_DEADLINE_S)
        try:
            await super().open()
        finally:
            self._settings = own

    async def run(self, work, *, within=None):
        until = None if within is None else asyncio.get_running_loop().time() + within
        return await self._run("test", work, until=until)

    async def run_write(self, work, *, within):
        until = asyncio.get_running_loop().time() + within
        return await self._run("test", work, Kind.WRITE, until=until)


@contextlib.asynccontextmanager
async def opened(path, *, clock=time.time, **settings):
    driver = OpenedUp(SqliteSettings(path=str(path), **settings), clock=clock)
    await driver.open()
    try:
        yield driver
    finally:
        await driver.close()


@contextlib.contextmanager
def other_connection(path):
    """Another process' connection, as far as SQLite's locks can tell."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=5)
    try:
        yield connection
    finally:
        connection.close()


def files_beside(path):
    return sorted(file.name for file in path.parent.iterdir())


@pytest.fixture
def threads():
    """Return the threads of drivers that this test has opened, and no other test before it."""
    before = set(threading.enumerate())
    return lambda: [one for one in threading.enumerate() if one.name == "stm-sqlite" and one not in before]


async def start_script(body, *arguments):
    """Start a script in a process of its own, with this library in reach."""
    script = "import asyncio, sys\nsys.path[:0] = sys.argv[1].split(';')\n" + textwrap.dedent(body)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        ";".join(sys.path),
        *map(str, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A script that gives up its rights cannot write down what it covered.
        env=without_coverage(),
    )


async def run_script(body, *arguments):
    """Run a script to its end and return what it printed; it must not complain."""
    process = await start_script(body, *arguments)
    printed, complaints = await process.communicate()
    assert complaints == b""
    return printed.decode().strip()


# the file ------------------------------------------------------------------------------------------------


async def test_a_file_that_is_no_database_is_corrupt_and_left_as_it_is(path, threads):
    before = b"Dear diary, this is not a database.\n" * 200
    path.write_bytes(before)
    with pytest.raises(Corrupt, match=r"sqlite\.open: the file is not an SQLite database") as caught:
        async with opened(path):
            pass
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)
    assert path.read_bytes() == before
    assert threads() == []


async def test_a_missing_directory_is_unavailable_and_named_as_the_remedy(tmp_path, threads):
    with pytest.raises(Unavailable, match="its directory must exist"):
        async with opened(tmp_path / "missing" / "stm.db"):
            pass
    assert threads() == []


async def test_a_database_in_utf16_is_refused(path):
    with other_connection(path) as connection:
        connection.execute("PRAGMA encoding = 'UTF-16le'")
        connection.execute("CREATE TABLE theirs (id)")
    with pytest.raises(ConfigurationError, match="UTF-16le"):
        async with opened(path):
            pass


async def test_an_applications_own_database_keeps_its_tables(path):
    with other_connection(path) as connection:
        connection.execute("CREATE TABLE orders (id)")
        connection.execute("INSERT INTO orders VALUES (7)")
    async with opened(path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.delete(KEY)
    with other_connection(path) as connection:
        assert connection.execute("SELECT id FROM orders").fetchall() == [(7,)]
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    assert sorted(name for (name,) in tables) == ["orders", "stm_entry", "stm_meta", "stm_record"]


@pytest.fixture
def public_path():
    """A path that a process without root's rights can reach, too."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "stm.db"
        Path(directory).chmod(0o755)


async def test_a_read_only_file_is_denied_and_left_as_it_is(public_path):
    async with opened(public_path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
    public_path.chmod(0o444)
    public_path.parent.chmod(0o555)
    printed = await run_script(
        """
        import os
        from stm_backends.errors import StorageError
        from stm_backends.drivers.sqlite import open_driver
        async def main():
            driver = open_driver(None, path=sys.argv[2])
            if os.getuid() == 0:
                os.setuid(65534)  # root may write anywhere
            try:
                await driver.open()
            except StorageError as error:
                print(type(error).__name__, error)
        asyncio.run(main())
        """,
        public_path,
    )
    assert printed.startswith("Denied sqlite.open: the database file is read-only")
    async with opened(public_path) as driver:
        assert await driver.load(KEY) == Record("v", None, (b"a",))


async def test_a_record_of_which_a_part_is_missing_is_corrupt_and_not_a_smaller_one(path):
    async with opened(path) as driver:
        for entry in (b"a", b"b", b"c"):
            await driver.append(KEY, entry, initial_version="v", ttl=None)
        for damage in (
            "DELETE FROM stm_entry WHERE seq = 2",
            "UPDATE stm_entry SET entry = x'00ff00' WHERE seq = 2",
            "DELETE FROM stm_entry",
        ):
            with other_connection(path) as connection:
                connection.execute("BEGIN")
                saved = connection.execute("SELECT * FROM stm_entry").fetchall()
                connection.execute(damage)
                connection.execute("COMMIT")
                with pytest.raises(Corrupt, match="a part of the record is missing"):
                    await driver.load(KEY)
                connection.execute("DELETE FROM stm_entry")
                connection.executemany("INSERT INTO stm_entry VALUES (?, ?, ?)", saved)
        assert await driver.load(KEY) == Record("v", None, (b"a", b"b", b"c"))


async def test_altered_tables_are_corrupt_and_say_so(path):
    async with opened(path) as driver:
        with other_connection(path) as connection:
            connection.execute("ALTER TABLE stm_record RENAME COLUMN version TO revision")
        with pytest.raises(Corrupt, match="changed or removed"):
            await driver.load(KEY)


# the disk ------------------------------------------------------------------------------------------------


async def test_a_full_database_is_unavailable_and_harms_nothing(path):
    async with opened(path) as driver:
        await driver.replace(KEY, b"body", version="v1", expect=ANY, ttl=None)
        await driver.run(lambda connection: connection.execute("PRAGMA max_page_count = 20").close())
        for write in (
            driver.append(KEY, bytes(100_000), initial_version="v", ttl=None),
            driver.replace(KEY, bytes(100_000), version="v2", expect="v1", ttl=None),
            driver.append(Key("s", "new"), bytes(100_000), initial_version="v", ttl=None),
        ):
            with pytest.raises(Unavailable, match="the disk is full"):
                await write
        assert await driver.load(KEY) == Record("v1", b"body", ())
        assert await driver.load(Key("s", "new")) is None
        assert await driver.append(KEY, b"small", initial_version="v", ttl=None) == 1


async def test_a_disk_that_takes_no_more_harms_nothing_that_was_acknowledged(path):
    printed = await run_script(
        """
        import resource
        from stm_backends.drivers.contract import Key
        from stm_backends.errors import OutcomeUnknown, Unavailable
        from stm_backends.drivers.sqlite import open_driver
        async def main():
            driver = open_driver(None, path=sys.argv[2])
            await driver.open()
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
            done = 0
            try:
                while done < 1000:
                    await driver.append(Key("s", "n"), bytes(10_000), initial_version="v", ttl=None)
                    done += 1
            except (OutcomeUnknown, Unavailable):
                pass
            record = await driver.load(Key("s", "n"))
            print(done, len(record.tail))
            await driver.close()
        asyncio.run(main())
        """,
        path,
    )
    done, there = map(int, printed.split())
    assert 1 < done == there < 1000
    async with opened(path) as driver:
        record = await driver.load(Key("s", "n"))
        assert record
        assert len(record.tail) == done
        assert await driver.append(Key("s", "n"), b"more", initial_version="v", ttl=None) == done + 1


@pytest.mark.parametrize(("synchronous", "level"), [("normal", 1), ("full", 2)])
async def test_how_durable_a_commit_is_is_what_the_settings_say(path, synchronous, level):
    async with opened(path, synchronous=synchronous) as driver:
        assert await driver.append(KEY, b"a", initial_version="v", ttl=None) == 1
        pragma = await driver.run(lambda connection: connection.execute("PRAGMA synchronous").fetchone())
        journal = await driver.run(lambda connection: connection.execute("PRAGMA journal_mode").fetchone())
    assert (pragma, journal) == ((level,), ("wal",))


# other processes ---------------------------------------------------------------------------------------


async def test_a_lock_that_is_held_for_a_moment_is_waited_for(path):
    async with opened(path) as driver:
        with other_connection(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            append = asyncio.ensure_future(driver.append(KEY, b"a", initial_version="v", ttl=None))
            await asyncio.sleep(0.1)
            assert not append.done()
            assert await driver.load(KEY) is None, "a reader waited for a writer"
            connection.execute("COMMIT")
            assert await append == 1


async def test_a_lock_that_is_held_past_the_deadline_is_unavailable(path):
    async with opened(path, deadline_s=0.2) as driver:
        with other_connection(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            with pytest.raises(
                Unavailable, match=r"sqlite\.append: the database is locked by another process"
            ):
                await driver.append(KEY, b"a", initial_version="v", ttl=None)
            assert 0.1 < time.monotonic() - started < DEFAULT_DEADLINE_S
            connection.execute("ROLLBACK")
        async with opened(path) as patient:
            assert await patient.append(KEY, b"b", initial_version="v", ttl=None) == 1


async def test_ten_processes_that_create_the_file_at_once_all_succeed(path):
    script = """
        from stm_backends.drivers.contract import Key
        from stm_backends.drivers.sqlite import open_driver
        async def main():
            driver = open_driver(None, path=sys.argv[2])
            print("ready", flush=True)
            sys.stdin.readline()
            await driver.open()
            await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
            await driver.close()
        asyncio.run(main())
        """
    processes = [await start_script(script, path) for _ in range(10)]
    for process in processes:
        assert await process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")
    errors = [(await process.communicate())[1] for process in processes]
    assert errors == [b""] * 10
    async with opened(path) as driver:
        assert (await driver.load(Key("s", "n"))).tail == (b"a",) * 10


async def test_a_process_killed_in_mid_transaction_leaves_no_trace_of_it(path):
    async with opened(path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        victim = await start_script(
            """
            import os, signal, sqlite3
            connection = sqlite3.connect(sys.argv[2], isolation_level=None)
            connection.execute("PRAGMA cache_size = 1")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE stm_record SET next = next + 500")
            for n in range(500):
                connection.execute("INSERT INTO stm_entry VALUES (1, ?, zeroblob(5000))", (n + 2,))
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            path,
        )
        assert await victim.wait() == -signal.SIGKILL
        assert await driver.load(KEY) == Record("v", None, (b"a",))
        assert await driver.append(KEY, b"b", initial_version="v", ttl=None) == 2
    with other_connection(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# deadlines, cancellation, closing ----------------------------------------------------------------------


async def test_the_event_loop_goes_on_while_a_statement_runs(path):
    async with opened(path, deadline_s=0.3) as driver:
        slow = asyncio.ensure_future(driver.run(lambda c: c.execute(SLOW).fetchall()))
        longest, last = 0.0, time.monotonic()
        while not slow.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert isinstance(slow.exception(), Unavailable)
        assert longest < 0.25, "the loop stood still for as long as the statement ran"


async def test_a_statement_is_interrupted_at_its_deadline_and_rolled_back(path):
    def work(connection):
        connection.execute("DELETE FROM stm_record")
        connection.execute(SLOW)

    async with opened(path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        with pytest.raises(Unavailable, match="interrupted at the deadline and rolled back"):
            await driver.run_write(work, within=0.5)
        assert await driver.load(KEY) == Record("v", None, (b"a",))
        assert await driver.append(KEY, b"b", initial_version="v", ttl=None) == 2


async def test_what_waits_behind_a_slow_statement_gives_up_undone_at_its_own_deadline(path):
    release = threading.Event()
    async with opened(path, deadline_s=0.2) as driver:
        stuck = asyncio.ensure_future(driver.run(lambda _: release.wait(5)))
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="not started"):
            await driver.append(KEY, b"a", initial_version="v", ttl=None)
        with pytest.raises(OutcomeUnknown, match="still running"):
            await stuck
        release.set()
        async with opened(path) as patient:
            assert await patient.load(KEY) is None
            assert await patient.append(KEY, b"b", initial_version="v", ttl=None) == 1


async def test_an_interruption_never_hits_the_next_operation(path):
    async with opened(path) as driver:
        for _ in range(20):
            with pytest.raises(Unavailable):
                await driver.run(lambda c: c.execute(SLOW).fetchall(), within=0.02)
            async with opened(path) as patient:
                await patient.replace(KEY, b"body", version="v", expect=ANY, ttl=None)
            assert await driver.load(KEY) == Record("v", b"body", ())


async def test_closing_leaves_no_thread_and_no_journal(path, threads):
    async with opened(path) as driver:
        assert len(threads()) == 1
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
    assert threads() == []
    assert files_beside(path) == ["stm.db"]


async def test_closing_lets_what_was_sent_end(path):
    driver = SqliteDriver(SqliteSettings(path=str(path)))
    await driver.open()
    appends = [
        asyncio.ensure_future(driver.append(KEY, b"a", initial_version="v", ttl=None)) for _ in range(10)
    ]
    await asyncio.sleep(0)
    await asyncio.gather(driver.close(), driver.close())
    assert sorted(await asyncio.gather(*appends)) == list(range(1, 11))
    await driver.open()
    assert len((await driver.load(KEY)).tail) == 10
    await driver.close()


async def test_closing_lets_a_statement_in_progress_end(path):
    driver = OpenedUp(SqliteSettings(path=str(path), deadline_s=30))
    await driver.open()
    began, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait():
        loop.call_soon_threadsafe(began.set)
        return go.wait(20)

    def count(connection):
        connection.create_function("wait", 0, wait)
        return connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT wait() UNION ALL SELECT i + 1 FROM n WHERE i < 1000) "
            "SELECT count(*) FROM n"
        ).fetchone()

    counting = asyncio.ensure_future(driver.run(count))
    await began.wait()
    closing = asyncio.ensure_future(driver.close())
    await asyncio.sleep(0.1)  # an interruption would come now
    go.set()
    assert await counting == (1_000,)
    await closing


async def test_closing_is_bounded_when_sqlite_stalls_and_the_thread_ends_by_itself_later(path, threads):
    driver = OpenedUp(SqliteSettings(path=str(path), deadline_s=0.2))
    await driver.open()
    (thread,) = threads()
    go, stalls = threading.Event(), threading.Event()

    def stall(connection):
        stalls.set()
        go.wait(20)

    task = asyncio.ensure_future(driver.run(stall))
    while not stalls.is_set():  # noqa: ASYNC110 -- set in another thread
        await asyncio.sleep(0.001)
    task.cancel()
    start = time.monotonic()
    await driver.close()
    assert 0.2 <= time.monotonic() - start < 5
    assert thread.is_alive()
    assert thread.daemon
    with pytest.raises(Unavailable, match="not open"):
        await driver.load(KEY)
    go.set()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    async with opened(path) as again:
        await again.append(KEY, b"a", initial_version="v", ttl=None)
    assert files_beside(path) == ["stm.db"]


async def test_closing_interrupts_a_statement_that_nobody_waits_for_any_more(path, threads):
    driver = OpenedUp(SqliteSettings(path=str(path), deadline_s=0.2))
    await driver.open()
    task = asyncio.ensure_future(driver.run(lambda connection: connection.execute(SLOW).fetchall()))
    await asyncio.sleep(0.05)
    task.cancel()
    await driver.close()
    assert threads() == []


async def test_a_file_that_must_exist_and_does_not_is_unavailable_and_not_created(path, threads):
    with pytest.raises(Unavailable) as caught:
        async with opened(path, must_exist=True):
            pass
    assert str(caught.value) == f"sqlite.open: there is no database file at {path}"
    assert files_beside(path) == []
    assert threads() == []
    odd = path.parent / "odd ?#% name.db"
    for must_exist in (False, True):
        async with opened(odd, must_exist=must_exist) as driver:
            await driver.append(KEY, b"a", initial_version="v", ttl=None)
    assert files_beside(path) == [odd.name]
    odd.unlink()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
async def test_a_file_that_is_gone_while_it_is_open_is_noticed_by_every_operation(path, suffix, replaced):
    victim = path.with_name(path.name + suffix)
    async with opened(path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        kept = shutil.copytree(path.parent, path.parent / "kept")
        if replaced:
            (kept / victim.name).replace(victim)
        else:
            victim.unlink()
        before = victim.read_bytes() if replaced else None
        for operation in (
            lambda: driver.load(KEY),
            lambda: driver.append(KEY, b"b", initial_version="v", ttl=None),
            lambda: driver.replace(KEY, b"b", version="w", expect=ANY, ttl=None),
            lambda: driver.delete(KEY),
            lambda: driver.scan(KEY.scope, limit=1),
            lambda: driver.purge(1),
        ):
            with pytest.raises(
                Unavailable, match=r"sqlite\.\w+: the database file, .* was removed or replaced"
            ):
                await operation()
        assert (victim.read_bytes() if replaced else None) == before, "something was written there"


async def test_a_file_put_in_the_place_of_an_open_one_is_used_once_the_driver_is_opened_again(path):
    other = path.with_name("other.db")
    async with opened(other) as driver:
        await driver.append(KEY, b"other", initial_version="v", ttl=None)
    driver = SqliteDriver(SqliteSettings(path=str(path)))
    await driver.open()
    await driver.append(KEY, b"a", initial_version="v", ttl=None)
    other.replace(path)
    with pytest.raises(Unavailable, match="open it again"):
        await driver.load(KEY)
    await driver.close()
    for leftover in ("-wal", "-shm"):
        path.with_name(path.name + leftover).unlink(missing_ok=True)
    await driver.open()
    assert await driver.load(KEY) == Record("v", None, (b"other",))
    await driver.close()


async def test_another_process_that_closes_the_file_last_but_one_takes_nothing_away_from_it(path):
    async with opened(path) as driver:
        for _ in range(3):
            await run_script(
                """
                from stm_backends.drivers.contract import Key
                from stm_backends.drivers.sqlite import open_driver
                async def main():
                    driver = open_driver(None, path=sys.argv[2])
                    await driver.open()
                    await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
                    await driver.close()
                asyncio.run(main())
                """,
                path,
            )
            await driver.append(Key("s", "n"), b"b", initial_version="v", ttl=None)
        assert (await driver.load(Key("s", "n"))).tail == (b"a", b"b") * 3


async def test_opening_at_once_from_several_tasks_makes_one_thread(path, threads):
    driver = SqliteDriver(SqliteSettings(path=str(path)))
    await asyncio.gather(*(driver.open() for _ in range(5)))
    assert len(threads()) == 1
    await driver.close()


async def test_a_driver_that_was_never_opened_says_how_to_open_it(path):
    with pytest.raises(ConfigurationError, match="never opened; use `async with"):
        await SqliteDriver(SqliteSettings(path=str(path))).load(KEY)


# what is left behind -----------------------------------------------------------------------------------


async def test_a_deleted_record_leaves_no_entries_behind(path):
    async with opened(path) as driver:
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.replace(KEY, b"b", version="v2", expect="v", drop=1, ttl=None)
        await driver.delete(KEY)
    with other_connection(path) as connection:
        assert connection.execute("SELECT count(*) FROM stm_entry").fetchone() == (0,)


async def test_no_error_names_a_conversation(path):
    async with opened(path) as driver:
        with other_connection(path) as connection:
            connection.execute("DROP TABLE stm_entry")
        with pytest.raises(StmError) as caught:
            await driver.append(
                Key("secret-tenant", "secret-session"), b"secret-text", initial_version="v", ttl=None
            )
        assert "secret" not in str(caught.value)
        assert "secret" not in str(caught.value.__cause__)


@pytest.mark.usefixtures("writes_purge_nothing")
async def test_a_statement_ends_each_transaction_that_it_began(path, monkeypatch):
    seen = []
    async with opened(path) as driver:
        await driver.run(lambda connection: connection.set_trace_callback(seen.append))
        await driver.append(KEY, b"a", initial_version="v", ttl=None)
        await driver.load(KEY)
        await driver.replace(KEY, b"b", version="v2", expect="v", drop=1, ttl=None)
        await driver.replace(KEY, b"c", version="v3", expect="v", ttl=None)
        await driver.scan(KEY.scope, limit=1)
        await driver.delete(KEY)
    verbs = [statement.split()[0] for statement in seen if not statement.startswith("--")]
    assert verbs.count("BEGIN") == verbs.count("COMMIT") == 4
    outside = []
    inside = False
    for verb in verbs:
        if verb in ("BEGIN", "COMMIT"):
            inside = verb == "BEGIN"
        elif not inside:
            outside.append(verb)
    assert outside == ["SELECT", "SELECT"], "an operation took more than one transaction"

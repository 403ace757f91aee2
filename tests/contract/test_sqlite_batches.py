"""Writes that are queued at once share a transaction of the SQLite driver and keep their own outcomes."""

import asyncio
import contextlib
import heapq
import queue
import random
import sqlite3
import threading
import time

import pytest

from stm_backends.drivers import ABSENT, ANY, Key, Record
from stm_backends.drivers.sqlite import SqliteDriver, SqliteSettings, jobs, statements, thread
from stm_backends.drivers.sqlite import driver as driver_module
from stm_backends.drivers.sqlite.jobs import MAX_JOBS, Kind
from stm_backends.drivers.sqlite.thread import MAX_BYTES, MAX_SECONDS
from stm_backends.errors import OutcomeUnknown, TooLarge, Unavailable
from tests.contract.test_sqlite_faults import run_script, start_script
from tests.mutants.sqlite import (
    AnswersBeforeTheCommit,
    AnswersTheNextCaller,
    RunsAWriteTwice,
    WaitsInTheQueue,
)

ENDLESS = """
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
    INSERT INTO stm_entry SELECT 1, count(*), x'00' FROM n
"""
"""A write that never ends. When it is interrupted, SQLite rolls back the whole transaction."""


class Connection:
    """A connection whose next `COMMIT` rolls back and reports the error `fails_with`, if there is one."""

    fails_with = None

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *parameters):
        if statement == statements.COMMIT and self.fails_with is not None:
            self._connection.execute(statements.ROLLBACK)
            error = sqlite3.OperationalError()
            error.sqlite_errorcode, self.fails_with = self.fails_with, None
            raise error
        return self._connection.execute(statement, *parameters)


class Watched(SqliteDriver):
    """A driver whose thread can be held, and whose statements are recorded.

    `before_commit` is called in the thread before each `COMMIT`.
    """

    def __init__(self, settings):
        super().__init__(settings)
        self.said = []
        self.before_commit = lambda: None
        self._holds = []

    def _connect(self):
        connection = super()._connect()
        connection.set_trace_callback(self._note)
        self.connection = Connection(connection)
        return self.connection

    def _note(self, statement):
        self.said.append(statement.split()[0])
        if statement == "COMMIT":
            self.before_commit()

    async def hold(self):
        """Occupy the thread until the returned event is set; operations queued until then are one batch."""
        held, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def work(_):
            loop.call_soon_threadsafe(held.set)
            go.wait(20)

        self._holds.append(asyncio.ensure_future(self._run("test", work)))
        await held.wait()
        self.said.clear()
        return go

    async def read(self, work):
        """Run a read of the test's own."""
        return await self._run("test", work, Kind.READ)

    async def write(self, work, *, within=None):
        """Run a write of the test's own, with a deadline of its own."""
        until = None if within is None else asyncio.get_running_loop().time() + within
        return await self._run("test", work, Kind.WRITE, until=until)


async def opened(path):
    driver = Watched(SqliteSettings(path=str(path), deadline_s=3))
    await driver.open()
    return driver


@pytest.fixture
async def driver(tmp_path, writes_purge_nothing):
    driver = await opened(tmp_path / "stm.db")
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
    return driver.append(key(number), entry, initial_version=f"v{number}", ttl=None)


async def queued(*operations):
    """Queue operations, so that the thread finds them together."""
    tasks = [asyncio.ensure_future(one) for one in operations]
    await asyncio.sleep(0)
    return tasks


def signal():
    """Return a function for the thread to call, and an event that it sets."""
    happened, loop = asyncio.Event(), asyncio.get_running_loop()
    return lambda: loop.call_soon_threadsafe(happened.set), happened


# one transaction -----------------------------------------------------------------------------------------


async def test_writes_queued_at_once_have_one_commit_and_their_own_answers(driver):
    go = await driver.hold()
    tasks = await queued(*(append(driver, number % 5, b"%d" % number) for number in range(20)))
    go.set()
    assert [await task for task in tasks] == [number // 5 + 1 for number in range(20)]
    assert (await driver.load(key(3))).tail == (b"3", b"8", b"13", b"18")
    assert driver.said.count("BEGIN") == driver.said.count("COMMIT") == 1


async def test_tasks_that_were_woken_together_share_the_next_transaction_too(driver, monkeypatch):
    monkeypatch.setattr(thread, "MAX_SECONDS", 60)  # also on a busy machine

    async def twice(number):
        return await append(driver, number), await append(driver, number)

    go = await driver.hold()
    tasks = await queued(*map(twice, range(20)))
    go.set()
    assert [await task for task in tasks] == [(1, 2)] * 20
    assert driver.said.count("COMMIT") == 2


async def test_reads_of_a_batch_run_first_and_outside_the_transaction(driver):
    go = await driver.hold()
    write, read = await queued(append(driver, 1), driver.load(key(1)))
    go.set()
    assert (await read, await write) == (None, 1)
    assert driver.said[:2] == ["SELECT", "BEGIN"]


async def test_a_read_is_answered_while_a_later_one_of_its_batch_runs(driver):
    go, end = await driver.hold(), threading.Event()
    first, last = await queued(
        driver.read(lambda _: time.sleep(2 * MAX_SECONDS)), driver.read(lambda _: end.wait(20))
    )
    go.set()
    await first
    assert not last.done()
    end.set()
    await last


async def test_a_transaction_has_at_most_128_writes(driver):
    go = await driver.hold()
    tasks = await queued(*(append(driver, 1) for _ in range(2 * MAX_JOBS)))
    go.set()
    assert [await task for task in tasks] == list(range(1, 2 * MAX_JOBS + 1))
    assert driver.said.count("COMMIT") >= 2


async def test_a_transaction_takes_no_more_bytes_than_its_limit(driver):
    go = await driver.hold()
    tasks = await queued(*(append(driver, number, bytes(MAX_BYTES // 2 + 1)) for number in range(3)))
    go.set()
    assert [await task for task in tasks] == [1, 1, 1]
    assert driver.said.count("COMMIT") == 3


async def test_a_transaction_ends_after_a_few_milliseconds(driver):
    go = await driver.hold()
    slow, first, last = await queued(
        driver.write(lambda _: time.sleep(2 * MAX_SECONDS)), append(driver, 1), append(driver, 1)
    )
    go.set()
    assert [await slow, await first, await last] == [None, 1, 2]
    assert driver.said[:2] == ["BEGIN", "COMMIT"]
    assert driver.said.count("COMMIT") >= 2


async def test_a_write_alone_is_its_own_statements_and_a_transaction(driver):
    (await driver.hold()).set()
    await append(driver, 1)
    driver.said.clear()
    await append(driver, 1)
    assert driver.said[:4] == ["BEGIN", "UPDATE", "INSERT", "COMMIT"]


async def test_no_write_is_answered_before_the_commit(driver):
    at_commit, reached = signal()
    go = threading.Event()
    driver.before_commit = lambda: (at_commit(), go.wait(20))
    holding = await driver.hold()
    tasks = await queued(append(driver, 1), append(driver, 2))
    holding.set()
    await reached.wait()
    await asyncio.sleep(0)
    answered = [task.done() for task in tasks]
    go.set()
    assert (answered, [await task for task in tasks]) == ([False, False], [1, 1])


# what is not begun ---------------------------------------------------------------------------------------


async def test_a_write_cancelled_before_its_transaction_is_not_done(driver):
    go = await driver.hold()
    cancelled, kept = await queued(append(driver, 1), append(driver, 2))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    go.set()
    assert await kept == 1
    assert await driver.load(key(1)) is None


async def test_cancelled_writes_take_no_lock(driver):
    go = await driver.hold()
    tasks = await queued(append(driver, 1), append(driver, 2))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    go.set()
    assert await driver.load(key(1)) is None
    assert "BEGIN" not in driver.said


async def test_a_write_that_is_late_takes_no_lock_even_if_the_loop_was_busy(driver):
    go = await driver.hold()
    (late,) = await queued(driver.write(lambda _: None, within=0.05))
    # The loop's timer cannot run, so the thread itself has to see that the deadline is over.
    time.sleep(0.1)  # noqa: ASYNC251 -- the loop must not go on
    go.set()
    time.sleep(0.1)  # noqa: ASYNC251
    with pytest.raises(Unavailable, match="not started before the deadline"):
        await late
    await driver.load(key(1))
    assert "BEGIN" not in driver.said


# what fails ----------------------------------------------------------------------------------------------


async def test_a_write_that_is_refused_leaves_the_others_in_their_transaction(driver):
    limit = driver.traits.max_record
    await driver.write(lambda c: c.execute(statements.CREATE, (*key(2), "v", None, 0, 1, limit)).close())
    go = await driver.hold()
    first, refused, last = await queued(append(driver, 1), append(driver, 2), append(driver, 3))
    go.set()
    with pytest.raises(TooLarge):
        await refused
    assert (await first, await last) == (1, 1)
    assert (driver.said.count("COMMIT"), driver.said.count("ROLLBACK")) == (1, 0)


async def test_a_write_that_fails_halfway_leaves_nothing_and_the_others_run_alone(driver):
    def fails(connection):
        connection.execute(statements.CREATE, (*key(2), "v", None, 0, 2, 1))
        raise sqlite3.IntegrityError

    go = await driver.hold()
    first, failed, last = await queued(append(driver, 1), driver.write(fails), append(driver, 3))
    go.set()
    with pytest.raises(OutcomeUnknown):
        await failed
    assert (await first, await last) == (1, 1)
    stored = [await driver.load(key(number)) for number in (1, 2, 3)]
    assert stored == [Record("v1", None, (b"a",)), None, Record("v3", None, (b"a",))]
    ends = [verb for verb in driver.said if verb in ("BEGIN", "COMMIT", "ROLLBACK")]
    assert ends == ["BEGIN", "ROLLBACK", "BEGIN", "COMMIT", "BEGIN", "COMMIT"]


async def test_writes_beside_an_interrupted_one_are_done_once_each_alone(driver):
    entered, running = signal()

    def endless(connection):
        entered()
        return connection.execute(ENDLESS).fetchone()

    go = await driver.hold()
    tasks = await queued(
        append(driver, 1),
        append(driver, 1),
        driver.write(endless, within=0.3),
        append(driver, 2),
    )
    go.set()
    await running.wait()
    with pytest.raises(Unavailable, match="interrupted at the deadline and rolled back"):
        await tasks.pop(2)
    assert [await task for task in tasks] == [1, 2, 1]
    assert (await driver.load(key(1))).tail == (b"a", b"a")
    # The first two ran in the transaction that was rolled back, so each has one of its own.
    assert driver.said.count("COMMIT") == 3


async def test_a_write_whose_caller_gave_up_is_not_run_again(driver):
    entered, running = signal()

    def endless(connection):
        entered()
        return connection.execute(ENDLESS).fetchone()

    go = await driver.hold()
    cancelled, late = await queued(append(driver, 1), driver.write(endless, within=0.3))
    go.set()
    await running.wait()
    cancelled.cancel()
    failures = await asyncio.gather(cancelled, late, return_exceptions=True)
    assert [type(failure) for failure in failures] == [asyncio.CancelledError, Unavailable]
    assert await driver.load(key(1)) is None


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (sqlite3.SQLITE_FULL, Unavailable, "the disk is full; nothing was written"),
        (sqlite3.SQLITE_IOERR, OutcomeUnknown, "the disk or file system reported an error"),
    ],
    ids=["full", "broken"],
)
async def test_a_commit_that_fails_is_the_failure_of_all_its_writes(driver, code, kind, message):
    go = await driver.hold()
    driver.connection.fails_with = code
    tasks = await queued(append(driver, 1), append(driver, 2))
    go.set()
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(type(failure), str(failure)) for failure in failures] == [
        (kind, f"sqlite.append: {message}")
    ] * 2
    assert failures[0] is not failures[1]
    assert failures[0].__cause__ is not failures[1].__cause__
    assert [await driver.load(key(number)) for number in (1, 2)] == [None, None]
    assert await append(driver, 1) == 1


async def test_a_full_database_fails_the_write_that_does_not_fit_and_no_other(driver):
    await driver.write(lambda connection: connection.execute("PRAGMA max_page_count = 40").close())
    go = await driver.hold()
    small, large, last = await queued(append(driver, 1), append(driver, 2, bytes(500_000)), append(driver, 3))
    go.set()
    with pytest.raises(Unavailable, match="the disk is full; nothing was written"):
        await large
    assert (await small, await last) == (1, 1)
    stored = [await driver.load(key(number)) for number in (1, 2, 3)]
    assert [record and record.tail for record in stored] == [(b"a",), None, (b"a",)]


async def test_a_file_that_cannot_grow_keeps_every_acknowledged_write(tmp_path):
    """The limit on the size of files makes the operating system refuse a write during `COMMIT`."""
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
            keys = [Key("s", f"n{number}") for number in range(8)]
            async def add(number):
                done = 0
                try:
                    while done < 1000:
                        await driver.append(keys[number], bytes(5_000), initial_version="v", ttl=None)
                        done += 1
                except (OutcomeUnknown, Unavailable):
                    return done
            counts = await asyncio.gather(*map(add, range(8)))
            records = [await driver.load(key) for key in keys]
            print(*counts, *(len(record.tail) if record else 0 for record in records))
            await driver.close()
        asyncio.run(main())
        """,
        tmp_path / "stm.db",
    )
    counts = [int(number) for number in printed.split()]
    acknowledged, stored = counts[:8], counts[8:]
    # The outcome of the last write of each is unknown.
    assert all(there - done in (0, 1) for done, there in zip(acknowledged, stored, strict=True))
    assert 1 < sum(acknowledged) < 8_000


# another process -----------------------------------------------------------------------------------------


async def test_reads_go_on_while_writes_wait_for_another_process(driver, tmp_path):
    await append(driver, 1)
    holder = await start_script(
        """
        import sqlite3
        connection = sqlite3.connect(sys.argv[2], isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        print("locked", flush=True)
        sys.stdin.readline()
        """,
        tmp_path / "stm.db",
    )
    assert await holder.stdout.readline() == b"locked\n"
    tasks = await queued(append(driver, 1, b"b"), append(driver, 2))
    for _ in range(20):
        assert (await driver.load(key(1))).tail == (b"a",)
    assert not any(task.done() for task in tasks)
    await holder.communicate(b"end\n")
    assert [await task for task in tasks] == [2, 1]


async def test_writes_that_wait_for_another_process_end_at_their_deadline(driver, other):
    other.execute("BEGIN IMMEDIATE")
    tasks = await queued(*(append(driver, number) for number in range(3)))
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(failure) for failure in failures] == [
        "sqlite.append: the database is locked by another process"
    ] * 3
    other.execute("ROLLBACK")
    assert await driver.replace(key(1), b"b", version="w", expect=ABSENT, ttl=None) is True


async def test_writes_that_wait_when_the_driver_closes_are_done_first(driver, other):
    other.execute("BEGIN IMMEDIATE")
    tasks = await queued(append(driver, 1), driver.replace(key(2), b"b", version="w", expect=ANY, ttl=None))
    while "BEGIN" not in driver.said:  # noqa: ASYNC110 -- said in another thread
        await asyncio.sleep(0.001)
    closing = asyncio.ensure_future(driver.close())
    await asyncio.sleep(0)
    other.execute("ROLLBACK")
    await closing
    assert [await task for task in tasks] == [1, True]


class ForgetfulQueue(queue.SimpleQueue):
    """A queue that forgets a time limit, as that of CPython 3.11 and 3.12 may do if it is empty."""

    def get(self, block=True, timeout=None):
        del timeout
        return super().get(block)


async def test_a_refused_write_is_tried_again_though_no_other_job_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "SimpleQueue", ForgetfulQueue)
    driver = await opened(tmp_path / "stm.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "stm.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        task = asyncio.ensure_future(append(driver, 1))
        while "BEGIN" not in driver.said:  # noqa: ASYNC110 -- said in another thread
            await asyncio.sleep(0.001)
        other.execute("ROLLBACK")
        try:
            assert await task == 1
        finally:
            await driver.close()


# mutants -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (AnswersTheNextCaller, test_writes_queued_at_once_have_one_commit_and_their_own_answers),
        (RunsAWriteTwice, test_a_write_that_fails_halfway_leaves_nothing_and_the_others_run_alone),
        (AnswersBeforeTheCommit, test_no_write_is_answered_before_the_commit),
    ],
    ids=lambda one: one.__name__,
)
async def test_a_mutant_of_the_thread_is_rejected_by_its_check(mutant, check, monkeypatch, tmp_path):
    monkeypatch.setattr(driver_module, "ConnectionThread", mutant)
    driver = await opened(tmp_path / "stm.db")
    try:
        with pytest.raises(AssertionError):
            await check(driver)
    finally:
        await driver.close()


async def test_a_thread_that_waits_in_the_queue_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setattr(driver_module, "ConnectionThread", WaitsInTheQueue)
    with pytest.raises(Unavailable, match="locked by another process"):
        await test_a_refused_write_is_tried_again_though_no_other_job_comes(tmp_path, monkeypatch)


def test_a_writer_that_waits_long_asks_for_the_lock_often(monkeypatch):
    monkeypatch.setattr(jobs.random, "uniform", lambda _, longest: longest)
    assert max(map(jobs.pause, range(10_000))) <= 0.002


def test_four_busy_writers_pass_none_of_them_for_long(monkeypatch):
    """In virtual time, so that it does not depend on the machine: each asks, writes and asks again."""
    chance = random.Random(15)
    monkeypatch.setattr(jobs.random, "uniform", chance.uniform)
    writers, free_at, longest = [(0.0, 0.0, 0, n) for n in range(4)], 0.0, 0.0
    while writers[0][0] < 30:
        now, since, attempts, writer = heapq.heappop(writers)
        if now < free_at:
            heapq.heappush(writers, (now + jobs.pause(attempts), since, attempts + 1, writer))
            continue
        longest, free_at = max(longest, now - since), now + 0.0001
        back = free_at + chance.uniform(0.0001, 0.0003)
        heapq.heappush(writers, (back, back, 0, writer))
    assert longest < 0.04

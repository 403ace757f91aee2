"""The driver's own connections: each used by one operation at a time, from a clean start."""

import asyncio
import contextlib
import gc
import sys
from unittest import mock

import asyncpg
import pytest
from asyncpg import exceptions

from stm_backends.drivers.coalesced import LARGE_BYTES
from stm_backends.drivers.contract import NO_LIMIT, Key, Record
from stm_backends.errors import Corrupt, OutcomeUnknown, Unavailable
from stm_backends.testing import open_at
from stm_backends_postgres import PostgresDriver, PostgresSettings
from stm_backends_postgres.client import HandedIn
from stm_backends_postgres.connections import IDLE_S, LIFETIME_S, LONGEST_PAUSE_S, Connections
from stm_backends_postgres.statements import SAMPLES
from tests.mutants.postgres import (
    AnswersInOrder,
    CountsTheDeadTwice,
    FailsWhatWaits,
    KeepsTheOthers,
    LendsOneToAll,
    LendsToTwo,
    NeverGrows,
    ReadsAlikeForAll,
    ReplacesTheHealthy,
    RetriesLostWrites,
    ReusesWhatWasCancelled,
)
from tests.services.postgres.support import purging, until

KEY = Key("scope", "name")

DAMAGE = "UPDATE {schema}.stm_record SET next = next + 1 WHERE name = '5'"


class Wire:
    """A connection whose answers come in the order of its statements, when the test lets them."""

    def __init__(self, server):
        self.server, self.users, self.sent, self.answers = server, 0, [], asyncio.Queue()
        self.is_gone = False

    async def fetch(self, query, *arguments):
        self.users += 1
        assert self.users == 1, "two operations on one connection"
        try:
            self.sent.append((query, *arguments))
            self.server.sent.set()
            answer = await self.answers.get()
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.users -= 1

    def add_log_listener(self, callback): ...
    def remove_log_listener(self, callback): ...

    async def execute(self, query):
        await self.server.checked.wait()
        while not self.answers.empty():
            self.answers.get_nowait()
        return query

    def is_closed(self):
        return self.is_gone

    def terminate(self):
        self.is_gone = True

    async def close(self):
        self.is_gone = True


class Servers:
    """Opens such connections, which the test sees."""

    def __init__(self, kind=Connections, *, size=1, patience_s=30):
        self.wires, self.sent, self.checked = [], asyncio.Event(), asyncio.Event()
        self.may_open, self.opening = asyncio.Event(), 0
        self.may_open.set()
        self.checked.set()
        self.connections = kind(self.open, size=size, patience_s=patience_s)

    async def open(self):
        self.opening += 1
        await self.may_open.wait()
        self.wires.append(Wire(self))
        return self.wires[-1]

    async def ask(self, query):
        connection = await self.connections.take()
        try:
            answer = await connection.fetch(query)
        except BaseException as error:
            self.connections.give_up(connection, error)
            raise
        await self.connections.give_back(connection)
        return answer

    def start(self, *queries):
        return [asyncio.create_task(self.ask(query), name=query) for query in queries]


@pytest.fixture
def kind():
    """The connections; a mutant of them where a test is called for one."""
    return Connections


@pytest.fixture
def driver_kind():
    """The driver; a mutant of it where a test is called for one."""
    return PostgresDriver


@contextlib.contextmanager
def catching_unraisable():
    """Collect the exceptions that Python could only report."""
    caught = []
    with mock.patch.object(sys, "unraisablehook", lambda one: caught.append(one.exc_value)):
        yield caught


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_connection_is_never_shared_by_two_operations(kind):
    servers = Servers(kind, size=2)
    (first,) = servers.start("1")
    await settle()
    (second,) = servers.start("2")
    await settle()
    for wire in servers.wires:
        wire.answers.put_nowait(wire.sent[0][0])
    assert await asyncio.gather(first, second) == ["1", "2"]
    assert len(servers.wires) == 2


async def test_an_answer_to_a_cancelled_operation_reaches_no_other(kind):
    servers = Servers(kind)
    (first,) = servers.start("1")
    await settle()
    first.cancel()
    servers.checked.clear()
    await settle()
    (second,) = servers.start("2")
    await settle()
    (wire,) = servers.wires
    wire.answers.put_nowait("1")  # on its way when the caller gave up
    servers.checked.set()
    await settle()
    for later in servers.wires:
        later.answers.put_nowait("2")
    assert await second == "2"
    assert first.cancelled()


async def test_operations_get_connections_in_the_order_of_arrival():
    servers = Servers(size=1)
    tasks = servers.start(*"12345")
    await settle()
    tasks[2].cancel()
    for expected in "1245":
        (wire,) = servers.wires
        assert wire.sent[-1] == (expected,)
        wire.answers.put_nowait(expected)
        await settle()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, str)] == list("1245")


async def test_an_operation_cancelled_at_its_turn_passes_it_on():
    servers = Servers(size=1)
    first, second, third = servers.start("1", "2", "3")
    await settle()
    servers.wires[0].answers.put_nowait("1")
    await first  # the connection has been given to the second, which has not run yet
    second.cancel()
    await settle()
    assert servers.wires[0].sent[-1] == ("3",)
    servers.wires[0].answers.put_nowait("3")
    assert await third == "3"
    assert second.cancelled()


async def test_a_connection_whose_caller_gave_up_goes_to_the_next():
    servers = Servers(size=1)
    servers.may_open.clear()
    first, second = servers.start("1", "2")
    await settle()
    first.cancel()
    await settle()
    servers.may_open.set()
    await settle()
    assert servers.opening == 1
    servers.wires[0].answers.put_nowait("2")
    assert await second == "2"


async def test_a_connection_that_cannot_be_opened_leaves_its_place():
    servers = Servers(size=1)
    with mock.patch.object(servers.connections, "_connect", side_effect=ConnectionRefusedError):
        for task in servers.start("1", "2", "3"):
            with pytest.raises(ConnectionRefusedError):
                await task
    (task,) = servers.start("4")
    await settle()
    servers.wires[0].answers.put_nowait("4")
    assert await task == "4"


async def test_without_a_free_connection_an_operation_ends_unsent():
    servers = Servers(size=1, patience_s=0.05)
    (first,) = servers.start("1")
    await settle()
    with pytest.raises(TimeoutError):
        await servers.ask("2")
    servers.wires[0].answers.put_nowait("1")
    assert await first == "1"
    assert servers.wires[0].sent == [("1",)]


@pytest.mark.parametrize(
    ("error", "reused"),
    [
        (exceptions.UniqueViolationError("x"), True),
        (OSError(), False),
        (exceptions.InterfaceError("x"), False),
    ],
)
async def test_a_connection_is_reused_at_once_after_an_answer_only(error, reused):
    servers = Servers(size=1)
    servers.checked.clear()
    (first,) = servers.start("1")
    await settle()
    servers.wires[0].answers.put_nowait(error)
    with pytest.raises(type(error)):
        await first
    (second,) = servers.start("2")
    await settle()
    assert (servers.wires[0].sent[-1] == ("2",)) is reused
    servers.checked.set()
    await settle()
    servers.wires[0].answers.put_nowait("2")
    assert await second == "2"


async def test_a_connection_that_does_not_answer_its_check_is_replaced():
    servers = Servers(size=1)
    (first,) = servers.start("1")
    await settle()
    with mock.patch.object(servers.wires[0], "execute", side_effect=TimeoutError):
        first.cancel()
        await settle()
    assert servers.wires[0].is_gone
    (second,) = servers.start("2")
    await settle()
    servers.wires[1].answers.put_nowait("2")
    assert await second == "2"


async def test_a_check_that_never_ends_costs_no_connection():
    servers = Servers(size=1, patience_s=0.05)
    (first,) = servers.start("1")
    await settle()
    servers.checked.clear()
    first.cancel()
    await until(lambda: asyncio.sleep(0, servers.wires[0].is_gone))
    (second,) = servers.start("2")
    await settle()
    servers.wires[1].answers.put_nowait("2")
    assert await second == "2"


def test_a_check_ends_quietly_with_an_event_loop_that_was_closed():
    class Closing(Wire):
        def terminate(self):
            asyncio.get_running_loop()  # raises without one, as asyncpg does once its loop was closed
            super().terminate()

    async def leave():
        servers = Servers()
        with mock.patch(f"{__name__}.Wire", Closing):
            (first,) = servers.start("1")
            await settle()
        servers.checked.clear()
        first.cancel()
        await settle()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    with catching_unraisable() as caught:
        del loop
        gc.collect()
    assert not caught


async def test_connections_beside_one_that_died_unnoticed_are_replaced(kind):
    servers = Servers(kind, size=3, patience_s=0.05)
    tasks = servers.start("1", "2", "3")
    await settle()
    silent, in_use, free = servers.wires
    free.answers.put_nowait("3")
    await tasks[2]
    servers.checked.clear()
    tasks[0].cancel()
    await until(lambda: asyncio.sleep(0, silent.is_gone))
    assert free.is_gone
    assert not in_use.is_gone, "it may answer yet"
    in_use.answers.put_nowait("2")
    assert await tasks[1] == "2"
    assert in_use.is_gone


async def test_healthy_connections_outlive_the_checks_of_dead_ones(kind):
    """A firewall drops two connections; the operations on them reach their deadlines one after the other."""
    servers = Servers(kind, size=3, patience_s=0.1)
    first, second = servers.start("1", "2")
    await settle()
    dead = servers.wires[:2]
    servers.checked.clear()
    first.cancel()
    await settle()
    (third,) = servers.start("3")  # opened while the first check waits for its answer
    await until(lambda: asyncio.sleep(0, dead[0].is_gone))
    second.cancel()  # its check begins when the third is open
    await until(lambda: asyncio.sleep(0, dead[1].is_gone))
    healthy = servers.wires[2]
    healthy.answers.put_nowait("3")
    assert await third == "3"
    assert not healthy.is_gone
    servers.checked.set()
    await servers.connections.close(30)


async def test_a_pool_handed_in_is_emptied_when_one_connection_died():
    pool = mock.create_autospec(asyncpg.Pool, instance=True)
    pool.release.side_effect = TimeoutError
    lender = HandedIn(pool, patience_s=0.05)
    lender.give_up(mock.Mock(), asyncio.CancelledError())
    await lender.close(30)
    pool.expire_connections.assert_awaited_once_with()


class Few:
    """A pool of asyncpg, which can open so many connections."""

    def __init__(self, most):
        self.most, self.size, self.idle, self.attempts = most, 0, 0, 0
        self.opening = asyncio.Event()
        self.opening.set()
        pool = self.pool = mock.create_autospec(asyncpg.Pool, instance=True)
        pool.acquire.side_effect, pool.release.side_effect = self.acquire, self.release
        pool.get_size.side_effect = lambda: self.size
        pool.get_idle_size.side_effect = lambda: self.idle
        pool.get_max_size.return_value = 10

    async def acquire(self, *, timeout):
        await asyncio.sleep(0)  # it calls itself in a task
        if self.idle:
            self.idle -= 1
            return mock.sentinel.connection
        self.attempts += 1
        await self.opening.wait()
        if self.size == self.most:
            raise asyncpg.TooManyConnectionsError("refused")
        self.size += 1
        return mock.sentinel.connection

    async def release(self, connection, *, timeout):
        await asyncio.sleep(0)
        self.idle += 1


@pytest.fixture
def lent(monkeypatch):
    """Makes a pool handed in that was refused once, and has its connections back."""
    monkeypatch.setattr("stm_backends_postgres.client.GROW_AGAIN_S", 600.0)

    async def make(most):
        few = Few(most)
        lender = HandedIn(few.pool, patience_s=30)
        held = [await lender.take() for _ in range(most)]
        refused = asyncio.create_task(lender.take())
        await until(lambda: asyncio.sleep(0, few.attempts > most))
        await lender.give_back(held.pop())
        for connection in [*held, await refused]:
            await lender.give_back(connection)
        return few, lender

    return make


async def use_often(lender, names):
    """Use a connection again and again for each name; returns the names in the order of their turns."""
    done = []

    async def use(name):
        for _ in range(3):
            connection = await lender.take()
            done.append(name)
            await lender.give_back(connection)

    await asyncio.gather(*map(use, names))
    return "".join(done)


async def test_a_pool_handed_in_that_cannot_grow_tries_to_once_for_all(lent, clock):
    few, lender = await lent(2)
    await use_often(lender, "abcdefgh")
    assert few.attempts == 3, "one was refused"
    clock(601)
    held = [await lender.take() for _ in range(2)]
    using = asyncio.create_task(use_often(lender, "abcdefgh"))
    await until(lambda: asyncio.sleep(0, few.attempts > 3))
    for connection in held:
        await lender.give_back(connection)
    await using
    assert few.attempts == 4


async def test_operations_share_a_pool_handed_in_in_the_order_of_their_arrival(lent):
    _, lender = await lent(1)
    assert await use_often(lender, "abc") == "abcabcabc"


async def test_what_was_given_back_while_a_pool_was_refused_is_taken_at_once(lent, clock):
    few, lender = await lent(1)
    clock(601)
    held = await lender.take()
    few.opening.clear()
    late = asyncio.create_task(lender.take())
    await until(lambda: asyncio.sleep(0, few.attempts > 2))
    await lender.give_back(held)
    few.opening.set()
    async with asyncio.timeout(20):
        await lender.give_back(await late)


async def test_a_pool_handed_in_grows_when_the_server_accepts_more(lent, clock):
    few, lender = await lent(1)
    few.most = 3
    clock(601)
    assert len([await lender.take() for _ in range(3)]) == few.size


async def test_an_operation_cancelled_at_its_turn_passes_a_pool_handed_in_on(lent):
    _, lender = await lent(1)
    held = await lender.take()
    first, second = (asyncio.create_task(lender.take()) for _ in range(2))
    await settle()
    await lender.give_back(held)
    first.cancel()
    async with asyncio.timeout(20):
        await second


async def test_a_pool_that_lends_one_connection_to_all_is_rejected(lent, clock, monkeypatch):
    monkeypatch.setattr("tests.services.postgres.test_connections.HandedIn", LendsOneToAll)
    with pytest.raises(AssertionError, match="one was refused"):
        await test_a_pool_handed_in_that_cannot_grow_tries_to_once_for_all(lent, clock)


async def test_a_lost_connection_is_found_before_the_next_use():
    servers = Servers(size=1)
    for number in range(2):
        (task,) = servers.start("1")
        await settle()
        servers.wires[number].answers.put_nowait("1")
        await task
        servers.wires[number].is_gone = True
    assert len(servers.wires) == 2


async def ask_each(servers, count):
    """Use so many connections at once."""
    tasks = servers.start(*map(str, range(count)))
    await settle()
    for wire in servers.wires:
        if wire.users:
            wire.answers.put_nowait("")
    await asyncio.gather(*tasks)


async def test_old_connections_are_replaced_when_they_come_back(clock):
    servers = Servers(size=2)
    await ask_each(servers, 2)
    clock(LIFETIME_S - 1)
    await ask_each(servers, 2)
    assert len(servers.wires) == 2
    clock(2)
    await ask_each(servers, 2)
    assert [wire.is_gone for wire in servers.wires] == [True, True]
    await ask_each(servers, 1)
    assert len(servers.wires) == 3


async def test_connections_that_are_not_used_are_closed(clock):
    servers = Servers(size=2)
    await ask_each(servers, 2)
    clock(IDLE_S - 1)
    await ask_each(servers, 1)
    clock(2)
    await until(lambda: asyncio.sleep(0, any(wire.is_gone for wire in servers.wires)))
    assert sorted(wire.is_gone for wire in servers.wires) == [False, True]
    await servers.connections.close(1)


async def test_expired_connections_are_replaced_even_those_in_use():
    servers = Servers(size=2)
    await ask_each(servers, 2)
    (task,) = servers.start("1")
    await settle()
    await servers.connections.expire()
    assert sorted(wire.is_gone for wire in servers.wires) == [False, True]
    (used,) = [wire for wire in servers.wires if wire.users]
    used.answers.put_nowait("1")
    assert await task == "1"
    assert used.is_gone


async def test_close_waits_for_operations_and_ends_those_that_are_late():
    servers = Servers(size=1)
    first, waiting = servers.start("1", "2")
    await settle()
    closing = asyncio.create_task(servers.connections.close(30))
    await settle()
    assert not closing.done()
    for answer in "12":
        servers.wires[0].answers.put_nowait(answer)
        await settle()
    await closing
    assert await asyncio.gather(first, waiting) == ["1", "2"]
    assert servers.wires[0].is_gone
    late = Servers(size=1)
    used, waiting = late.start("1", "2")
    await settle()
    await late.connections.close(0.05)
    assert late.wires[0].is_gone
    with pytest.raises(exceptions.InterfaceError):
        await waiting
    used.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await used


@pytest.mark.parametrize("ends", [asyncio.CancelledError, None])
async def test_a_connection_opened_during_close_is_closed(ends):
    servers = Servers(size=1)

    async def open_late():
        with contextlib.suppress(ends or ()):
            await asyncio.Event().wait()
        return await servers.open()

    with mock.patch.object(servers.connections, "_connect", open_late):
        (task,) = servers.start("1")
        await settle()
        await servers.connections.close(0.05)
    with pytest.raises(exceptions.InterfaceError):
        await task
    assert all(wire.is_gone for wire in servers.wires)


class Refused:
    """Opens connections as long as `limit` are open, and counts the attempts."""

    def __init__(self, servers, limit):
        self.servers, self.limit, self.attempts = servers, limit, 0

    async def __call__(self):
        self.attempts += 1
        if sum(not wire.is_gone for wire in self.servers.wires) >= self.limit:
            raise exceptions.TooManyConnectionsError("too many connections for role")
        return await self.servers.open()


@pytest.fixture
async def refusing(kind):
    servers = Servers(kind, size=5)
    connect = Refused(servers, 2)
    servers.connections._connect = connect  # noqa: SLF001 -- given to the constructor otherwise
    return servers, connect


async def test_operations_share_what_there_is_if_no_more_can_be_opened(refusing, caplog):
    servers, connect = refusing
    tasks = servers.start(*"12345678")
    await settle()
    while waiting := [task for task in tasks if not task.done()]:
        for wire in servers.wires:
            wire.answers.put_nowait("answer")
        await settle()
        assert len(waiting) > sum(not task.done() for task in tasks)
    assert await asyncio.gather(*tasks, return_exceptions=True) == ["answer"] * 8
    assert connect.attempts == 5
    (record,) = caplog.records
    assert "fewer than 5 connections" in record.getMessage()


async def test_a_pool_that_could_not_grow_tries_again_later(refusing, clock):
    servers, connect = refusing
    tasks = servers.start("1", "2", "3")
    await settle()
    tasks += servers.start("4")
    await settle()
    assert connect.attempts == 3, "the fourth waits like the third"
    connect.limit = 5
    clock(LONGEST_PAUSE_S)
    tasks += servers.start("5")
    await settle()
    assert (connect.attempts, len(servers.wires)) == (4, 3)
    tasks += servers.start("6")
    await settle()
    assert len(servers.wires) == 4, "it grows on"
    for task in tasks:
        task.cancel()


async def test_operations_fail_if_the_last_connection_is_gone(refusing):
    servers, connect = refusing
    first, second, third = servers.start("1", "2", "3")
    await settle()
    connect.limit = 0
    for wire in servers.wires:
        wire.terminate()
        wire.answers.put_nowait(OSError())
    with pytest.raises(exceptions.TooManyConnectionsError):
        await third
    for task in (first, second):
        with pytest.raises(OSError):  # noqa: PT011 -- that of the wire
            await task
    connect.limit = 1
    (last,) = servers.start("4")
    await settle()
    servers.wires[-1].answers.put_nowait("4")
    assert await last == "4"


async def test_an_opening_that_hangs_delays_no_operation(kind):
    servers = Servers(kind, size=2)
    (first,) = servers.start("1")
    await settle()
    servers.may_open.clear()  # as if a service for tokens did not answer
    (second,) = servers.start("2")
    await settle()
    servers.wires[0].answers.put_nowait("1")
    await first
    await settle()
    servers.wires[0].answers.put_nowait("2")
    assert await second == "2"
    await servers.connections.close(30)


TABLES = {
    "there": True,
    "numbered": False,
    "secured": False,
    "entries_secured": False,
    "encoding": "UTF8",
    "isolation": "read committed",
    "standby": False,
    "columns": "id scope name version body expires first next size due",
    **SAMPLES,
}


@contextlib.asynccontextmanager
async def driver_on(wires, kind=PostgresDriver, **settings):
    """Open a driver on connections of the test's own."""

    async def connect(_):
        wires.append(wire := Wire(mock.Mock(checked=asyncio.Event())))
        wire.server.checked.set()
        if len(wires) == 1:
            wire.answers.put_nowait([TABLES])
        return wire

    with purging(after_writes=False), mock.patch("stm_backends_postgres.driver.connect", connect):
        driver = kind(PostgresSettings(**settings))
        await driver.open()
        yield driver
        await driver.close()


async def test_a_write_whose_answer_is_lost_is_sent_once(driver_kind):
    wires = []
    async with driver_on(wires, driver_kind, pool_size=2) as driver:
        task = asyncio.create_task(driver.append(KEY, b"a", initial_version="v", ttl=None))
        await settle()
        wires[0].terminate()
        wires[0].answers.put_nowait(exceptions.ConnectionDoesNotExistError("x"))
        await settle()
        for wire in wires[1:]:
            wire.answers.put_nowait([{"length": 1, "unswept": None}])
        with pytest.raises(OutcomeUnknown):
            await task
    assert sum(len(wire.sent) for wire in wires) == 2, "the check of the tables, and the append"


async def test_a_write_on_a_connection_that_the_server_ended_is_sent_on_another():
    wires = []
    async with driver_on(wires) as driver:
        task = asyncio.create_task(driver.append(KEY, b"a", initial_version="v", ttl=None))
        await settle()
        # asyncpg's, after `pg_terminate_backend`: nothing was sent.
        ended = "cannot switch to state 11; another operation (2) is in progress"
        wires[0].answers.put_nowait(exceptions.InternalClientError(ended))
        await until(lambda: asyncio.sleep(0, len(wires) == 2))
        wires[1].answers.put_nowait([{"length": 1, "unswept": None}])
        assert await task == 1


async def test_a_read_whose_answer_is_lost_is_sent_again():
    wires = []
    async with driver_on(wires) as driver:
        task = asyncio.create_task(driver.load(KEY))
        await settle()
        wires[0].terminate()
        wires[0].answers.put_nowait(exceptions.ConnectionDoesNotExistError("x"))
        await until(lambda: asyncio.sleep(0, len(wires) == 2))
        wires[1].answers.put_nowait([(1, "v", None, 1, 1, b"a")])
        assert await task == Record("v", None, (b"a",))


async def test_an_update_whose_outcome_is_unknown_is_not_followed_by_an_insert():
    wires = []
    async with driver_on(wires) as driver:
        task = asyncio.create_task(driver.append(KEY, b"a", initial_version="v", ttl=None))
        await settle()
        wires[0].answers.put_nowait([{"length": 1, "unswept": None}])
        assert await task == 1
        task = asyncio.create_task(driver.append(KEY, b"b", initial_version="v", ttl=None))
        await settle()
        assert "UPDATE" in wires[0].sent[-1][0]
        assert 'INSERT INTO "public".stm_record' not in wires[0].sent[-1][0]
        wires[0].answers.put_nowait(OSError())
        with pytest.raises(OutcomeUnknown):
            await task
        assert len(wires[0].sent) == 3


async def test_only_so_many_records_are_remembered(monkeypatch):
    monkeypatch.setattr("stm_backends_postgres.driver.REMEMBERED", 2)
    wires = []

    async def statement(name):
        task = asyncio.create_task(driver.append(Key("scope", name), b"", initial_version="v", ttl=None))
        await settle()
        wires[0].answers.put_nowait([{"length": 1, "unswept": None}])
        await task
        return "insert" if "ON CONFLICT" in wires[0].sent[-1][0] else "update"

    async with driver_on(wires) as driver:
        found = [await statement(name) for name in "abacab"]
    assert found == ["insert", "insert", "update", "insert", "update", "insert"]


async def test_without_a_time_limit_of_the_server_appends_never_only_update():
    wires = []
    async with driver_on(wires, pgbouncer=True) as driver:
        for _ in range(2):
            task = asyncio.create_task(driver.append(KEY, b"", initial_version="v", ttl=None))
            await settle()
            wires[0].answers.put_nowait([{"length": 1, "unswept": None}])
            await task
    assert all("ON CONFLICT" in query for query, *_ in wires[0].sent[1:])


async def test_concurrent_loads_get_their_own_records(url, schema, driver, driver_kind):
    settings = PostgresSettings.from_url(url, schema=schema)
    reader = driver_kind(settings)
    await reader.open()
    keys = [Key("scope", f"{number}") for number in range(200)]
    # Records of no entries, of several, and some that do not exist.
    for number, key in enumerate(keys[:100]):
        if number % 3:
            for part in range(number % 4):
                entry = b"%d:%d" % (number, part)
                await driver.append(key, entry, initial_version=f"v{number}", ttl=None)
    alone = [await driver.load(key) for key in keys]
    try:
        assert await asyncio.gather(*map(reader.load, keys)) == alone
    finally:
        await reader.close()


async def test_loads_of_the_newest_at_once_have_as_many_as_each_wants(url, schema, driver, driver_kind):
    reader = driver_kind(PostgresSettings.from_url(url, schema=schema))
    await reader.open()
    keys = [Key("scope", f"{number}") for number in range(9)]
    for number, key in enumerate(keys):
        for part in range(number % 4):
            await driver.append(key, b"%d:%d" % (number, part), initial_version=f"v{number}", ttl=None)
    wanted = [(key, last) for last in (None, 1, 0, 2, 3, 9, NO_LIMIT) for key in keys]
    alone = [await driver.load(key, last=last) for key, last in wanted]
    try:
        assert await asyncio.gather(*(reader.load(key, last=last) for key, last in wanted)) == alone
    finally:
        await reader.close()


async def test_newest_entries_that_are_large_delay_no_others(driver):
    """The newest entries of a large record come with the others if they are small, and alone if large."""
    small, large, key = (Key("scope", name) for name in ("small", "large", "other"))
    entry = bytes(LARGE_BYTES // 4)
    for record, entries in (
        (small, [entry] * 9 + [b"a"] * 9),
        (large, [b"a"] * 9 + [entry] * 9),
        (key, [b"b"]),
    ):
        for one in entries:
            await driver.append(record, one, initial_version="v", ttl=None)
    asked = [(key, 1), (small, 2), (large, 9), (key, 2), (small, 0), (large, None)]
    for _ in range(2):
        first, *records = await asyncio.gather(*(driver.load(one, last=last) for one, last in asked))
        assert first == Record("v", None, (b"b",))
        assert [(record.tail, record.skipped) for record in records] == [
            ((b"a", b"a"), 16),
            ((entry,) * 9, 9),
            ((b"b",), 0),
            ((), 18),
            ((b"a",) * 9 + (entry,) * 9, 0),
        ]


async def test_a_damaged_record_fails_its_own_caller_only(driver, admin, schema):
    keys = [Key("scope", f"{number}") for number in range(8)]
    for key in keys:
        await driver.append(key, b"a", initial_version="v", ttl=None)
    await admin.execute(DAMAGE.format(schema=schema))
    for last in (None, 1):
        loads = (driver.load(key, last=last) for key in keys)
        answers = await asyncio.gather(*loads, return_exceptions=True)
        assert [type(answer).__name__ for answer in answers] == ["Record"] * 5 + ["Corrupt"] + ["Record"] * 2


async def test_with_every_connection_in_use_writes_are_not_sent(url, schema, driver):
    small = await open_at(url, schema=schema, pool_size=1, deadline_s=1)
    lender = small._lender  # noqa: SLF001 -- nothing public takes a connection and sends nothing
    connection = await lender.take()
    tasks = [small.append(KEY, b"a", initial_version="v", ttl=None) for _ in range(3)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    await lender.give_back(connection)
    assert {type(answer) for answer in answers} == {Unavailable}
    assert await driver.load(KEY) is None
    await small.close()


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (LendsToTwo, test_a_connection_is_never_shared_by_two_operations),
        (CountsTheDeadTwice, test_healthy_connections_outlive_the_checks_of_dead_ones),
        (ReplacesTheHealthy, test_healthy_connections_outlive_the_checks_of_dead_ones),
        (KeepsTheOthers, test_connections_beside_one_that_died_unnoticed_are_replaced),
        (ReusesWhatWasCancelled, test_an_answer_to_a_cancelled_operation_reaches_no_other),
        (RetriesLostWrites, test_a_write_whose_answer_is_lost_is_sent_once),
    ],
)
async def test_each_mutant_is_killed_by_its_test(mutant, check):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await check(mutant)


async def test_a_pool_that_fails_operations_when_it_cannot_grow_is_killed():
    servers = Servers(FailsWhatWaits, size=5)
    servers.connections._connect = connect = Refused(servers, 2)  # noqa: SLF001
    with pytest.raises(AssertionError):
        await test_operations_share_what_there_is_if_no_more_can_be_opened((servers, connect), mock.Mock())


async def test_a_pool_that_never_grows_again_is_killed(clock):
    servers = Servers(NeverGrows, size=5)
    servers.connections._connect = connect = Refused(servers, 2)  # noqa: SLF001
    with pytest.raises(AssertionError):
        await test_a_pool_that_could_not_grow_tries_again_later((servers, connect), clock)


async def test_the_mutant_that_answers_in_order_is_killed(url, schema, driver):
    with pytest.raises(AssertionError):
        await test_concurrent_loads_get_their_own_records(url, schema, driver, AnswersInOrder)


async def test_the_mutant_that_reads_alike_for_all_is_killed(url, schema, driver):
    with pytest.raises(Corrupt):
        await test_loads_of_the_newest_at_once_have_as_many_as_each_wants(
            url, schema, driver, ReadsAlikeForAll
        )

"""Appends that share a statement: each is done once, in its order, and fails for itself alone."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import traceback
from unittest import mock

import asyncpg
import pytest
from asyncpg import exceptions

from stm_backends import open_backend
from stm_backends.drivers.coalesced import LARGE_BYTES
from stm_backends.drivers.contract import KEEP, Key, Record
from stm_backends.errors import Corrupt, OutcomeUnknown, TooLarge, Unavailable
from stm_backends_postgres import PostgresDriver, PostgresSettings
from stm_backends_postgres.grouped import IN_FLIGHT, MOST, MOST_BYTES, Append, Grouped
from tests.mutants.postgres import (
    AnswersInPlaceOfOthers,
    AppendsToTheExpired,
    ClosesOnAppends,
    CreatesAsItComes,
    FailsWithTheRefused,
    ForgetsWhatIsUnderWay,
    KeepsThePlaceOfTheGone,
    KeepsThePlaceOfTheSlow,
    OverfillsRecords,
    SendsAgainWhatWasLost,
    SendsForNobody,
    StaysOpenIfCancelled,
    WaitsForLocks,
)
from tests.services.postgres.support import purging, started, together, until, waiting
from tests.services.postgres.test_connections import driver_on, settle

HOLD = "SELECT FROM {schema}.stm_record WHERE name = $1 FOR UPDATE"
DAMAGE = "UPDATE {schema}.stm_record SET next = next - 1 WHERE name = $1"
LEFT_S = "SELECT extract(epoch FROM expires - now())::integer FROM {schema}.stm_record WHERE name = $1"
EXPIRE = "UPDATE {schema}.stm_record SET expires = clock_timestamp() WHERE name = $1"
ENTRIES = "SELECT count(*) FROM {schema}.stm_entry"
PAUSE = """
    CREATE FUNCTION {schema}.pause() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END';
    CREATE TRIGGER pause BEFORE INSERT ON {schema}.stm_record
        FOR EACH ROW EXECUTE FUNCTION {schema}.pause()"""

LOST = exceptions.ConnectionDoesNotExistError("connection was closed in the middle of operation")
REFUSED = exceptions.UniqueViolationError("refused")

HELD_S = 10.0
"""Seconds for which a statement keeps its place in a test without a server."""


class Server:
    """Takes the statements of grouped appends; each waits until the test answers it.

    An entry is named by its record and a number: `b"a2"` is the second of the record `a`.
    """

    def __init__(self, kind=Grouped, *, patience_s=30):
        self.groups = kind(self.alone, self.together, patience_s=patience_s)
        self.statements, self.answers = [], []
        self.connected = asyncio.Event()
        self.connected.set()

    async def alone(self, one):
        (row,) = await self.answer_to([one])
        return row

    async def together(self, take):
        await self.connected.wait()
        appends = take()
        return await self.answer_to(appends) if appends else []

    async def answer_to(self, appends):
        self.statements.append(b" ".join(one.entry[:2] for one in appends).decode())
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    async def start(self, *entries):
        appends = [Append(Key("scope", chr(one[0])), one, "v", None, is_known=True) for one in entries]
        tasks = [asyncio.create_task(self.groups.append(append)) for append in appends]
        await settle()
        return tasks

    async def answer(self, number, rows=None):
        """Answer a statement with an error or with rows; without, each entry's length is what it is named."""
        if isinstance(rows, BaseException):
            self.answers[number].set_exception(rows)
        else:
            names = self.statements[number].split()
            self.answers[number].set_result([int(name[1]) for name in names] if rows is None else rows)
        await settle()


@pytest.fixture(autouse=True)
def _only_the_clock_of_a_test_frees_places(request, monkeypatch):
    """A busy machine may take long for each step. The tests with a server do not depend on that."""
    if "url" not in request.fixturenames:
        monkeypatch.setattr("stm_backends_postgres.grouped.PLACE_S", HELD_S)


@pytest.fixture
def kind():
    """The groups; a mutant of them where a test is called for one."""
    return Grouped


@pytest.fixture
def driver_kind():
    """The driver; a mutant of it where a test is called for one."""
    return PostgresDriver


async def outcomes(tasks):
    return await asyncio.gather(*tasks, return_exceptions=True)


def are_copies(errors, error):
    """Return whether each caller got a copy of an error."""
    alike = all(type(one) is type(error) and str(one) == str(error) for one in errors)
    return alike and len({id(one) for one in (error, *errors)}) == len(errors) + 1


def shown_by(error):
    """Return what a reporter shows that records the local variables of each frame, and of each cause."""
    shown = []
    while error is not None:
        shown += [repr(frame.f_locals) for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__ or error.__context__
    return " ".join(shown)


async def test_appends_that_wait_share_a_statement_and_get_their_own_rows(kind):
    server = Server(kind)
    tasks = await server.start(b"a1", b"b2", b"c3", b"d4")
    assert server.statements == ["a1", "b2 c3 d4"]
    await server.answer(1)
    await server.answer(0)
    assert await outcomes(tasks) == [1, 2, 3, 4]


async def test_an_append_alone_is_sent_without_a_task():
    server = Server()
    (task,) = await server.start(b"a1")
    assert asyncio.all_tasks() == {asyncio.current_task(), task}
    await server.answer(0)
    assert await task == 1


async def test_nor_needs_one_a_second_append_with_no_other_to_share_with():
    server = Server()
    tasks = [*await server.start(b"a1"), *await server.start(b"b2")]
    assert server.statements == ["a1", "b2"]
    assert asyncio.all_tasks() == {asyncio.current_task(), *tasks}
    await server.answer(1)
    await server.answer(0)
    assert await outcomes(tasks) == [1, 2]


async def test_a_caller_cancelled_when_it_is_its_turn_leaves_its_place(kind):
    server = Server(kind)
    (first,) = await server.start(b"a1")
    append = Append(Key("scope", "b"), b"b1", "v", None, is_known=True)
    gone = asyncio.create_task(server.groups.append(append))
    await asyncio.sleep(0)  # it waits
    await asyncio.sleep(0)  # it is its turn, which it does not know yet
    gone.cancel()
    (later,) = await server.start(b"b2")
    assert server.statements == ["a1", "b2"]
    await server.answer(1)
    await server.answer(0)
    assert await outcomes([first, later]) == [1, 2]


async def test_at_most_so_many_statements_are_in_progress():
    server = Server()
    await server.start(b"a1")
    await server.start(b"b1")
    waiting = await server.start(b"c1", b"d2")
    assert len(server.statements) == IN_FLIGHT
    waiting += await server.start(b"e3")
    await server.answer(1)
    assert server.statements[IN_FLIGHT:] == ["c1 d2 e3"], "what came later shares it too"
    await server.answer(2)
    assert await outcomes(waiting) == [1, 2, 3]
    await server.answer(0)


async def test_what_a_statement_left_out_is_sent_alone():
    server = Server()
    first, left, done = await server.start(b"a1", b"b2", b"c3")
    await server.answer(1, [None, 3])
    assert await done == 3
    assert server.statements == ["a1", "b2 c3", "b2"]
    await server.answer(2)
    assert await left == 2
    await server.answer(0)
    assert await first == 1


async def test_no_statement_has_the_record_of_an_append_that_was_left_out(kind):
    server = Server(kind)
    tasks = await server.start(b"a1", b"b2", b"c3")
    await server.answer(1, [None, 3])
    tasks += await server.start(b"b4", b"d5")
    assert server.statements == ["a1", "b2 c3", "b2", "d5"], "it would be left out again"
    await server.answer(2)
    await server.answer(3)
    assert server.statements[4:] == ["b4"]
    await server.answer(4)
    await server.answer(0)
    assert await outcomes(tasks) == [1, 2, 3, 4, 5]


async def test_a_caller_cancelled_when_its_append_was_left_out_leaves_its_record(kind):
    server = Server(kind)
    first, gone, done = await server.start(b"a1", b"b2", b"c3")
    server.answers[1].set_result([None, 3])
    await asyncio.sleep(0)  # the statement has ended
    await asyncio.sleep(0)  # its append was left out, which the caller does not know yet
    gone.cancel()
    (later,) = await server.start(b"b4")
    assert server.statements == ["a1", "b2 c3", "b4"]
    await server.answer(2)
    await server.answer(0)
    assert await outcomes([first, done, later]) == [1, 3, 4]
    assert gone.cancelled()


async def test_appends_to_one_record_are_sent_in_their_order(kind):
    server = Server(kind)
    tasks = await server.start(b"a1", b"a2", b"b1")
    assert server.statements == ["a1", "b1"], "an earlier one is in progress"
    tasks += await server.start(b"a3", b"b2")
    await server.answer(0)
    assert server.statements[2:] == ["a2 a3"]
    await server.answer(2)
    assert len(server.statements) == 3, "what waits is in no hurry to overtake"
    await server.answer(1)
    assert server.statements[3:] == ["b2"]
    await server.answer(3)
    assert await outcomes(tasks) == [1, 2, 1, 3, 2]


async def test_appends_whose_answer_is_lost_are_unknown_and_not_sent_again(kind):
    server = Server(kind)
    first, *lost = await server.start(b"a1", b"b2", b"c3")
    await server.answer(1, LOST)
    assert server.statements == ["a1", "b2 c3"]
    assert are_copies(await outcomes(lost), LOST)
    await server.answer(0)
    assert await first == 1


@pytest.mark.parametrize(
    "error",
    [
        exceptions.StatementCompletionUnknownError("x"),
        exceptions.CrashShutdownError("x"),
        exceptions.InternalServerError("x"),
        exceptions.PostgresError("of no known kind"),
        OSError(),
        OutcomeUnknown("committed, but the wait for a synchronous standby was cancelled"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_may_have_been_done_is_never_sent_again(error):
    server = Server()
    tasks = await server.start(b"a1", b"b2", b"c3")
    await server.answer(1, error)
    await server.answer(0)
    first, *unknown = await outcomes(tasks)
    assert first == 1
    assert are_copies(unknown, error)
    assert len(server.statements) == 2


async def test_of_a_refused_statement_each_append_is_sent_alone(kind):
    server = Server(kind)
    tasks = await server.start(b"a1", b"b2", b"c3")
    await server.answer(1, REFUSED)
    assert server.statements == ["a1", "b2 c3", "b2", "c3"]
    await server.answer(2, REFUSED)
    await server.answer(3)
    await server.answer(0)
    assert await outcomes(tasks) == [1, REFUSED, 3]


async def test_what_the_time_limit_has_ended_is_not_sent_again():
    server = Server()
    late = exceptions.QueryCanceledError("canceling statement due to statement timeout")
    tasks = await server.start(b"a1", b"b2", b"c3")
    await server.answer(1, late)
    await server.answer(0)
    first, *ended = await outcomes(tasks)
    assert first == 1
    assert are_copies(ended, late)
    assert len(server.statements) == 2


async def test_a_cancelled_append_that_waits_is_not_sent(kind):
    server = Server(kind)
    server.connected.clear()
    first, gone, left = await server.start(b"a1", b"b2", b"c3")
    gone.cancel()
    await settle()
    server.connected.set()
    await settle()
    assert server.statements == ["a1", "c3"]
    await server.answer(1)
    await server.answer(0)
    assert await outcomes([first, left]) == [1, 3]
    assert gone.cancelled()


async def test_a_caller_cancelled_just_before_its_append_is_sent_is_left_out(kind):
    server = Server(kind)
    server.connected.clear()
    first, gone, left = await server.start(b"a1", b"b2", b"c3")
    server.connected.set()
    gone.cancel()  # it wakes up after the statement has got its connection
    await settle()
    assert server.statements == ["a1", "c3"]
    await server.answer(1)
    await server.answer(0)
    assert await outcomes([first, left]) == [1, 3]
    assert gone.cancelled()


async def test_nothing_is_sent_for_callers_that_are_gone(kind):
    server = Server(kind)
    server.connected.clear()
    first, *gone = await server.start(b"a1", b"b2", b"c3")
    for task in gone:
        task.cancel()
    await settle()
    server.connected.set()
    await settle()
    assert server.statements == ["a1"]
    await server.answer(0)
    assert await first == 1
    (later,) = await server.start(b"b1")
    await server.answer(-1)
    assert await later == 1


async def test_a_statement_ends_with_its_last_caller_and_not_before(kind):
    server = Server(kind)
    tasks = await server.start(b"a1", b"b2", b"c3")
    tasks[1].cancel()
    await settle()
    assert not server.answers[1].cancelled()
    tasks[2].cancel()
    await settle()
    assert server.answers[1].cancelled()
    await server.answer(0)
    assert await tasks[0] == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_answer_for_a_caller_that_is_gone_reaches_the_others():
    server = Server()
    first, gone, left = await server.start(b"a1", b"b2", b"c3")
    gone.cancel()
    await server.answer(1)
    await server.answer(0)
    assert await outcomes([first, left]) == [1, 3]


async def test_statements_that_take_long_leave_their_places_to_others(clock, kind):
    server = Server(kind)
    slow = [*await server.start(b"a1"), *await server.start(b"b1")]
    waiting = await server.start(b"a2", b"c1")
    assert server.statements == ["a1", "b1"]
    clock(HELD_S)
    await settle()
    assert server.statements == ["a1", "b1", "c1"], "the slow keep their places"
    waiting += await server.start(b"d1")
    assert server.statements[3:] == ["d1"], "this takes the place of the other slow one"
    waiting += await server.start(b"e1")
    await server.answer(0)
    await server.answer(1)
    assert not server.statements[4:], "each place is left once"
    await server.answer(2)
    assert server.statements[4:] == ["a2 e1"]
    await server.answer(3)
    await server.answer(4)
    assert await outcomes(slow) == [1, 1]
    assert await outcomes(waiting) == [2, 1, 1, 1]


async def test_an_append_that_cannot_be_sent_in_time_was_not_done(clock):
    server = Server(patience_s=30)
    server.connected.clear()
    first, *early = await server.start(b"a1", b"b1", b"c1")
    clock(20)
    (late,) = await server.start(b"d1")
    clock(11)
    await settle()
    assert {type(outcome) for outcome in await outcomes(early)} == {Unavailable}
    assert not late.done(), "the wait of each is its own"
    server.connected.set()
    await settle()
    assert server.statements == ["a1", "d1"], "the others are not sent any more"
    (last,) = await server.start(b"a2")
    clock(31)
    with pytest.raises(Unavailable):
        await last
    await server.answer(1)
    await server.answer(0)
    assert await outcomes([first, late]) == [1, 1]


async def test_appends_without_a_connection_were_not_sent():
    server = Server()
    server.connected.clear()
    unavailable = Unavailable("the server cannot be reached")

    async def refuse(_):
        await server.connected.wait()
        raise unavailable

    with mock.patch.object(server.groups, "_together", refuse):
        first, *waiting = await server.start(b"a1", b"b2", b"c3")
    (later,) = await server.start(b"d4")
    server.connected.set()
    await settle()
    assert are_copies(await outcomes(waiting), unavailable)
    assert server.statements == ["a1", "d4"], "one that came later asks again"
    await server.answer(1)
    await server.answer(0)
    assert await outcomes([first, later]) == [1, 4]


async def test_a_statement_refused_by_its_connection_goes_out_without_the_gone():
    server = Server()
    took, again = [], asyncio.Event()

    async def refused_once(take):
        took.append([one.entry for one in take()])
        await again.wait()
        took.append([one.entry for one in take()])
        return [2]

    with mock.patch.object(server.groups, "_together", refused_once):
        first, gone, left = await server.start(b"a1", b"b1", b"c2")
    (later,) = await server.start(b"b2")
    gone.cancel()
    await settle()
    again.set()
    await settle()
    assert took == [[b"b1", b"c2"], [b"c2"]]
    assert await left == 2
    await server.answer(-1)
    await server.answer(0)
    assert await outcomes([first, later]) == [1, 2]


async def test_a_statement_has_so_many_appends_and_bytes():
    server = Server()
    await server.start(b"y1")
    await server.start(b"z1")
    names = [b"%c1" % code for code in range(33, 33 + MOST + 10)]
    await server.start(*names)
    await server.answer(1)
    assert len(server.statements[2].split()) == MOST
    await server.answer(2)
    assert len(server.statements[3].split()) == 10
    await server.start(*(name + bytes(LARGE_BYTES - 2) for name in names[:5]))
    await server.answer(3)
    assert len(server.statements[4].split()) == MOST_BYTES // LARGE_BYTES
    await server.start(b"x1" + bytes(LARGE_BYTES))
    assert server.statements[5] == "x1", "it holds up no others, and waits for none"
    for number in (4, 5, 6, 0):
        await server.answer(number)


async def test_a_shared_statement_runs_in_the_context_of_no_caller():
    """A caller's context holds its traces, and they are not those of others."""
    name, seen = contextvars.ContextVar("name", default="none"), []
    server = Server()

    async def together(take):
        seen.append(name.get())
        return [1 for _ in take()]

    with mock.patch.object(server.groups, "_together", together):
        name.set("caller")
        tasks = await server.start(b"a1", b"b1", b"c1")
    await server.answer(0)
    assert await outcomes(tasks) == [1, 1, 1]
    assert seen == ["none"]


def append(driver, name, entry=b"a", *, version="v", ttl=None):
    return driver.append(Key("scope", name), entry, initial_version=version, ttl=ttl)


async def start(driver, *names):
    tasks = [asyncio.create_task(append(driver, name)) for name in names]
    await settle()
    return tasks


def lengths(*numbers):
    return [{"place": place, "length": one, "unswept": None} for place, one in enumerate(numbers, 1)]


async def test_a_lost_connection_makes_the_outcomes_of_its_appends_unknown():
    wires = []
    async with driver_on(wires) as driver:
        tasks = await start(driver, "a", "b", "c")
        assert [len(wire.sent) for wire in wires] == [2, 1], "the check of the tables, and two statements"
        wires[1].terminate()
        wires[1].answers.put_nowait(LOST)
        await settle()
        wires[0].answers.put_nowait(lengths(1))
        length, *errors = await outcomes(tasks)
        assert length == 1
        assert {type(error) for error in errors} == {OutcomeUnknown}
        assert len({id(error) for error in errors}) == 2, "each caller has its own"
    assert sum(len(wire.sent) for wire in wires) == 3


async def test_the_error_of_a_shared_statement_shows_no_caller_the_entries_of_others():
    wires = []
    async with driver_on(wires) as driver:
        tasks = [asyncio.create_task(append(driver, name, b"text of " + name.encode())) for name in "abc"]
        await settle()
        wires[1].terminate()
        wires[1].answers.put_nowait(LOST)
        wires[0].answers.put_nowait(lengths(1))
        length, *errors = await outcomes(tasks)
    assert length == 1
    for error, own, other in zip(errors, "bc", "cb", strict=True):
        assert isinstance(error.__cause__, type(LOST))
        assert f"text of {own}" in shown_by(error)
        assert f"text of {other}" not in shown_by(error)


async def test_an_answer_after_one_callers_deadline_reaches_the_others(clock):
    wires = []
    async with driver_on(wires, deadline_s=60, pool_size=1) as driver:
        first, *early = await start(driver, "a", "b", "c")
        clock(20)
        (late,) = await start(driver, "d")
        wires[0].answers.put_nowait(lengths(1))
        await settle()
        assert len(wires[0].sent) == 3, "the check of the tables, and two statements"
        clock(41)
        assert {type(error) for error in await outcomes(early)} == {OutcomeUnknown}
        wires[0].answers.put_nowait(lengths(3, 4, 5))
        assert await late == 5
        assert await first == 1


async def test_the_wait_for_a_turn_and_for_a_connection_is_one(clock):
    wires = []
    async with driver_on(wires, deadline_s=60, pool_size=1) as driver:
        tasks = [*await start(driver, "a"), *await start(driver, "b"), *await start(driver, "c")]
        clock(20)
        wires[0].answers.put_nowait(lengths(1))
        await settle()
        clock(11)
        await settle()
        assert tasks[2].done(), "it waits for a connection as long as it has waited for its turn"
        wires[0].answers.put_nowait(lengths(1))
        *lengths_of_others, error = await outcomes(tasks)
        assert lengths_of_others == [1, 1]
        assert isinstance(error, Unavailable)


async def test_closing_waits_for_appends_that_wait_to_be_sent():
    wires = []
    async with driver_on(wires) as driver:
        tasks = [*await start(driver, "a"), *await start(driver, "b"), *await start(driver, "c", "d")]
        closing = asyncio.create_task(driver.close())
        await settle()
        assert not closing.done()
        for wire, answer in ((1, lengths(2)), (0, lengths(1)), (1, lengths(3, 4))):
            wires[wire].answers.put_nowait(answer)
            await settle()
        await closing
        assert await outcomes(tasks) == [1, 2, 3, 4]
        with pytest.raises(Unavailable):
            await append(driver, "e")


async def test_closing_waits_for_an_append_that_a_statement_leaves_out(driver_kind):
    wires = []
    async with driver_on(wires, driver_kind) as driver:
        tasks = await start(driver, "a", "b", "c")
        wires[0].answers.put_nowait(lengths(1))
        await settle()
        closing = asyncio.create_task(driver.close())
        await settle()
        wires[1].answers.put_nowait(lengths(1))
        await settle()
        (busy,) = [wire for wire in wires if wire.users] or [None]
        assert busy is not None, "closed before the last answer"
        assert busy.sent[-1][2] == "c", "which the statement had left out"
        assert not closing.done()
        busy.answers.put_nowait(lengths(1))
        await closing
        assert await outcomes(tasks) == [1, 1, 1]


async def test_closing_waits_for_a_caller_whose_turn_has_come():
    wires = []
    async with driver_on(wires) as driver:
        tasks = await start(driver, "a")
        tasks.append(asyncio.create_task(append(driver, "b")))
        await asyncio.sleep(0)  # it waits; its turn comes in the next iteration, before that of the close
        closing = asyncio.create_task(driver.close())
        await settle()
        assert not closing.done()
        for wire in wires:
            wire.answers.put_nowait(lengths(1))
        await closing
        assert await outcomes(tasks) == [1, 1]


async def test_closing_waits_for_the_removals_that_its_last_appends_begin(monkeypatch):
    monkeypatch.setattr("stm_backends_postgres.cleaning._RUN_S", 60)
    wires = []
    async with driver_on(wires) as driver:
        tasks = await start(driver, "a", "b", "c")
        wires[0].answers.put_nowait(lengths(1))
        await settle()
        closing = asyncio.create_task(driver.close())
        await settle()
        with purging(after_writes=True):
            wires[1].answers.put_nowait(lengths(1, 1))
            await settle()
        (busy,) = [wire for wire in wires if wire.users]
        busy.answers.put_nowait([{"purged": 1}])
        await settle()
        assert [wire for wire in wires if wire.users] == [busy], "closed between two steps"
        assert not closing.done()
        busy.answers.put_nowait([])
        await closing
        assert await outcomes(tasks) == [1, 1, 1]


async def test_a_close_that_is_cancelled_while_it_waits_closes_at_once(driver_kind):
    wires = []
    async with driver_on(wires, driver_kind) as driver:
        tasks = await start(driver, "a", "b", "c")
        closing = asyncio.create_task(driver.close())
        await settle()
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert all(wire.is_gone for wire in wires), "connections stay open"
        with pytest.raises(Unavailable):
            await append(driver, "d")
        for wire in wires:
            wire.answers.put_nowait(LOST)
        assert {type(error) for error in await outcomes(tasks)} == {OutcomeUnknown}


async def test_behind_pgbouncer_no_statement_is_shared():
    wires = []
    async with driver_on(wires, pgbouncer=True) as driver:
        tasks = await start(driver, "a", "b", "c")
        for wire in wires:
            wire.answers.put_nowait(lengths(1))
        assert await outcomes(tasks) == [1, 1, 1]
    assert not any("unnest" in query for wire in wires for query, *_ in wire.sent)


async def test_on_a_pool_that_was_handed_in_no_statement_is_shared(url, schema, driver):
    with mock.patch.object(PostgresDriver, "_append_together") as shared:
        async with asyncpg.create_pool(url, min_size=0) as pool:
            ours = open_backend("postgres", client=pool, schema=schema).driver
            assert await asyncio.gather(*(append(ours, name) for name in "abcd")) == [1, 1, 1, 1]
    shared.assert_not_called()


@contextlib.asynccontextmanager
async def opened(url, schema, kind=PostgresDriver, **settings):
    driver = kind(PostgresSettings.from_url(url, schema=schema, **settings))
    await driver.open()
    try:
        yield driver
    finally:
        await driver.close()


class Watched(PostgresDriver):
    """Notes how many appends each statement has, and the errors of shared ones."""

    def __init__(self, *given, **named):
        self.sizes, self.errors = [], []
        super().__init__(*given, **named)

    async def _append_together(self, take):
        def noted():
            appends = take()
            self.sizes.append(len(appends))
            return appends

        try:
            return await super()._append_together(noted)
        except Exception as error:
            self.errors.append(error)
            raise

    async def _append_alone(self, one):
        self.sizes.append(1)
        return await super()._append_alone(one)


async def test_concurrent_appends_take_few_statements(url, schema, driver):
    async with opened(url, schema, Watched) as ours:
        for length in (1, 2):
            ours.sizes.clear()
            assert await asyncio.gather(*(append(ours, str(name)) for name in range(65))) == [length] * 65
            assert ours.sizes == [1, 64]


async def test_new_known_and_forgotten_records_share_a_statement(driver):
    keys = [Key("scope", name) for name in ("new", "known", "forgotten")]
    for key in keys[1:]:
        assert await driver.append(key, b"1", initial_version="old", ttl=None) == 1
        assert await driver.replace(key, b"body", version="v2", expect="old", drop=0, ttl=KEEP) is True
    driver._known.clear()  # noqa: SLF001 -- as after 10,000 other records
    await driver.load(keys[1])
    entries = [b"", b"x" * 1000, bytes(range(256))]
    appends = [append(driver, name, one) for name in ("new", "known", "forgotten") for one in entries]
    assert await together(driver, *appends) == [1, 2, 3, 2, 3, 4, 2, 3, 4]
    assert await driver.load(keys[0]) == Record("v", None, tuple(entries))
    for key in keys[1:]:
        assert await driver.load(key) == Record("v2", b"body", (b"1", *entries))


async def test_the_first_of_several_creates_and_the_last_says_how_long(driver, admin, schema):
    for name, ttls in (("lasts", (60, None)), ("expires", (None, 60))):
        for version, expected in (("first", [1, 2]), ("no", [3, 4])):
            appends = [(version, ttls[0]), ("no", ttls[1])]
            sent = [append(driver, name, version=version, ttl=ttl) for version, ttl in appends]
            assert await together(driver, *sent) == expected
        assert (await driver.load(Key("scope", name))).version == "first"
    assert await admin.fetchval(LEFT_S.format(schema=schema), "lasts") is None
    assert 50 < await admin.fetchval(LEFT_S.format(schema=schema), "expires") <= 60


async def test_a_locked_record_holds_up_no_other(url, schema, driver, admin, driver_kind):
    async with opened(url, schema, driver_kind) as ours:
        await append(ours, "held")
        async with admin.transaction():
            await admin.fetch(HOLD.format(schema=schema), "held")
            lone, held, *others = await started(ours, *(append(ours, name) for name in ("held", "a", "b")))
            assert await outcomes([lone, *others]) == [1, 1, 1]
            assert not held.done()
        assert await held == 2


async def test_two_locked_records_hold_up_no_other(url, schema, driver, admin):
    async with opened(url, schema, deadline_s=60) as ours:
        for name in ("held", "held too"):
            await append(ours, name)
        async with admin.transaction():
            for name in ("held", "held too"):
                await admin.fetch(HOLD.format(schema=schema), name)
            # One after the other, because they would share a statement, and that waits for no lock.
            held = [*await start(ours, "held"), *await start(ours, "held too")]
            async with asyncio.timeout(5):
                assert await append(ours, "other") == 1
            assert not any(task.done() for task in held)
        assert await outcomes(held) == [2, 2]


async def test_an_expired_record_is_begun_anew_beside_others(url, schema, driver, admin, driver_kind):
    async with opened(url, schema, driver_kind) as ours:
        with purging(after_writes=False):
            await append(ours, "old", version="old", ttl=0.05)
            await asyncio.sleep(0.1)
            assert await together(ours, append(ours, "old", b"b", version="new"), append(ours, "other")) == [
                1,
                1,
            ]
        assert await ours.load(Key("scope", "old")) == Record("new", None, (b"b",))
        await until(lambda: admin.fetchval(f"SELECT ({ENTRIES.format(schema=schema)}) = 3"))


class LocksLate(PostgresDriver):
    """Its shared statement waits between its snapshot and its first lock, while a test holds another lock."""

    def __init__(self, settings):
        super().__init__(settings)
        found, schema = "name = named FOR UPDATE", settings.schema
        late = f"name = named AND pg_advisory_xact_lock_shared(hashtext('{schema}')) IS NOT NULL FOR UPDATE"
        assert found in self._statements.append_many
        self._statements.append_many = self._statements.append_many.replace(found, late)


async def test_what_was_committed_after_the_snapshot_counts(url, schema, driver, admin):
    """The statement sees the old rows, and decides by the newest."""
    names = ("appended", "folded", "expired", "deleted", "again")
    for name in names * 2:
        await append(driver, name, b"old", version="old")
    async with opened(url, schema, LocksLate, deadline_s=60) as ours:
        await admin.execute(f"SELECT pg_advisory_lock(hashtext('{schema}'))")
        lone, *tasks = await started(ours, *(append(ours, name, b"b", version="new") for name in names))
        await until(lambda: waiting(admin, schema))
        await append(driver, "appended", b"a")
        assert await driver.replace(Key("scope", "folded"), b"", version="2", expect="old", drop=2, ttl=KEEP)
        await admin.execute(EXPIRE.format(schema=schema), "expired")
        for name in ("deleted", "again"):
            assert await driver.delete(Key("scope", name))
        await append(driver, "again", b"a", version="again")
        await admin.execute(f"SELECT pg_advisory_unlock(hashtext('{schema}'))")
        assert await outcomes([lone, *tasks]) == [1, 4, 1, 1, 1, 2]
    assert [await driver.load(Key("scope", name)) for name in names] == [
        Record("old", None, (b"old", b"old", b"a", b"b")),
        Record("2", b"", (b"b",)),
        Record("new", None, (b"b",)),
        Record("new", None, (b"b",)),
        Record("again", None, (b"a", b"b")),
    ]


async def test_a_full_record_refuses_its_own_append_only(url, schema, driver, driver_kind):
    sizes = {"max_entry_bytes": 100, "max_record_bytes": 250}
    async with opened(url, schema, driver_kind, **sizes) as ours:
        for _ in range(2):
            await append(ours, "full", bytes(100))
        refused, *done = await together(ours, append(ours, "full", bytes(60)), append(ours, "other"))
        assert isinstance(refused, TooLarge)
        assert (refused.what, refused.size, refused.limit) == ("record", 260, 250)
        assert done == [1]
        assert await append(ours, "full", bytes(50)) == 3


async def test_of_several_appends_those_that_fit_are_done(url, schema, driver):
    sizes = {"max_entry_bytes": 100, "max_record_bytes": 250}
    async with opened(url, schema, **sizes) as ours:
        for name in ("new", "old"):
            if name == "old":
                await append(ours, name, b"")
            answers = await together(ours, *(append(ours, name, bytes(90)) for _ in range(3)))
            assert sorted(type(one).__name__ for one in answers) == ["TooLarge", "int", "int"]


async def test_a_damaged_record_refuses_its_own_append_only(driver, admin, schema):
    for _ in range(2):
        await append(driver, "damaged")
    await admin.execute(DAMAGE.format(schema=schema), "damaged")
    answers = await together(driver, append(driver, "a"), append(driver, "damaged"), append(driver, "b"))
    assert [type(one).__name__ for one in answers] == ["int", "Corrupt", "int"]
    assert isinstance(answers[1], Corrupt)


async def test_what_the_server_refuses_of_one_fails_that_one_only(driver):
    answers = await together(
        driver, append(driver, "a"), append(driver, "b", version="\0"), append(driver, "c")
    )
    assert [type(one).__name__ for one in answers] == ["int", "Corrupt", "int"]


async def test_what_is_no_bytes_fails_its_own_caller_only(driver):
    answers = await together(driver, append(driver, "a"), append(driver, "b", "text"), append(driver, "c"))
    assert [type(one).__name__ for one in answers] == ["int", "TypeError", "int"]


async def test_bytes_that_change_while_they_wait_are_stored_as_they_were(driver):
    entry = bytearray(b"before")
    first = asyncio.ensure_future(append(driver, "first"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(append(driver, "second", entry))
    await asyncio.sleep(0)
    entry[:] = b"after!"
    assert await asyncio.gather(first, second) == [1, 1]
    assert (await driver.load(Key("scope", "second"))).tail == (b"before",)


async def test_processes_that_create_the_same_records_never_deadlock(url, schema, driver, admin, driver_kind):
    """The first creates one while the other creates the other, and then each wants what the other has."""
    kind = type("Kind", (Watched, driver_kind), {})
    await admin.execute(PAUSE.format(schema=schema))
    async with opened(url, schema, kind) as one, opened(url, schema, kind) as two:
        answers = await asyncio.gather(
            together(one, append(one, "a", b"1"), append(one, "b", b"1")),
            together(two, append(two, "b", b"2"), append(two, "a", b"2")),
        )
        assert not one.errors + two.errors, "a deadlock"
    assert sorted([*answers[0], *answers[1]]) == [1, 1, 2, 2]
    for name in "ab":
        assert sorted((await driver.load(Key("scope", name))).tail) == [b"1", b"2"]


async def test_appends_of_three_drivers_are_each_done_once_in_order(url, schema, driver, admin):
    """Writers share the records, and some give up at random."""
    chance, names = random.Random(7), [f"{number}" for number in range(12)]
    acknowledged, given_up = [], set()

    async def write(ours, writer):
        for number in range(40):
            name, entry = chance.choice(names), b"%d %d" % (writer, number)
            task = asyncio.ensure_future(append(ours, name, entry, ttl=chance.choice((None, 3600.0))))
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() * 0.003)
                task.cancel()
            try:
                acknowledged.append((name, entry, await task))
            except asyncio.CancelledError:
                given_up.add((name, entry))

    async with opened(url, schema) as one, opened(url, schema) as two, opened(url, schema) as three:
        await asyncio.gather(*(write((one, two, three)[writer % 3], writer) for writer in range(48)))
    stored = {name: (await driver.load(Key("scope", name))).tail for name in names}
    there = [(name, entry) for name, tail in stored.items() for entry in tail]
    assert len(there) == len(set(there)), "done twice"
    assert {(name, entry) for name, entry, _ in acknowledged} <= set(there), "lost"
    assert set(there) <= {(name, entry) for name, entry, _ in acknowledged} | given_up
    for name, entry, length in acknowledged:
        assert stored[name][length - 1] == entry, "the length is the place in the tail"
    for name, tail in stored.items():
        sure = [tuple(map(int, entry.split())) for entry in tail if (name, entry) not in given_up]
        assert sorted(sure, key=lambda one: one[0]) == sorted(sure), "each writer's own are in order"
    assert await admin.fetchval(ENTRIES.format(schema=schema)) == len(there)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (ForgetsWhatIsUnderWay, test_appends_to_one_record_are_sent_in_their_order),
        (SendsAgainWhatWasLost, test_appends_whose_answer_is_lost_are_unknown_and_not_sent_again),
        (FailsWithTheRefused, test_of_a_refused_statement_each_append_is_sent_alone),
        (ForgetsWhatIsUnderWay, test_no_statement_has_the_record_of_an_append_that_was_left_out),
        (SendsForNobody, test_a_cancelled_append_that_waits_is_not_sent),
        (KeepsThePlaceOfTheGone, test_a_caller_cancelled_when_it_is_its_turn_leaves_its_place),
        (KeepsThePlaceOfTheGone, test_a_caller_cancelled_when_its_append_was_left_out_leaves_its_record),
        (SendsForNobody, test_a_caller_cancelled_just_before_its_append_is_sent_is_left_out),
        (SendsForNobody, test_nothing_is_sent_for_callers_that_are_gone),
        (SendsForNobody, test_a_statement_ends_with_its_last_caller_and_not_before),
        (AnswersInPlaceOfOthers, test_appends_that_wait_share_a_statement_and_get_their_own_rows),
    ],
)
async def test_each_mutant_of_the_groups_is_killed_by_its_test(mutant, check):
    with pytest.raises(AssertionError):
        await check(mutant)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (WaitsForLocks, test_a_locked_record_holds_up_no_other),
        (AppendsToTheExpired, test_an_expired_record_is_begun_anew_beside_others),
        (CreatesAsItComes, test_processes_that_create_the_same_records_never_deadlock),
    ],
)
async def test_each_mutant_of_the_statement_is_killed_by_its_test(mutant, check, url, schema, driver, admin):
    with pytest.raises(AssertionError):
        await check(url, schema, driver, admin, mutant)


async def test_a_driver_that_closes_with_appends_under_way_is_killed():
    with pytest.raises(AssertionError, match="closed before the last answer"):
        await test_closing_waits_for_an_append_that_a_statement_leaves_out(ClosesOnAppends)


async def test_a_driver_that_overfills_records_is_killed(url, schema, driver):
    with pytest.raises(AssertionError):
        await test_a_full_record_refuses_its_own_append_only(url, schema, driver, OverfillsRecords)


async def test_groups_in_which_the_slow_keep_their_places_are_killed(clock):
    with pytest.raises(AssertionError, match="the slow keep their places"):
        await test_statements_that_take_long_leave_their_places_to_others(clock, KeepsThePlaceOfTheSlow)


async def test_a_driver_that_stays_open_if_its_close_is_cancelled_is_killed():
    with pytest.raises(AssertionError, match="connections stay open"):
        await test_a_close_that_is_cancelled_while_it_waits_closes_at_once(StaysOpenIfCancelled)

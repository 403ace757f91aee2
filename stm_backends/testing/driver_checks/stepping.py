"""Checks that pause an operation after each answer, act with another instance, and continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import pytest

from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.errors import StorageError, Unavailable
from stm_backends.testing.driver_checks.steps import (
    MOST_ANSWERS,
    TRIES,
    UNDONE,
    append_all,
    behind,
    comes,
    end,
    is_held,
    loaded,
    longest,
    mark_of,
    outcome,
    require_network,
    usable,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked, too_slow
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_end
from stm_backends.testing.workbench.proxy import HeldAnswer

STEP_S: Final = 0.3
"""Maximum number of seconds that a paused operation waits for another that may need its lock."""

EXPIRED: Final = 1.1
"""Number of times to live after which a record has certainly expired."""

GAVE_UP: Final = "needs writes that end while another is paused; these gave up"

ONE_REQUEST: Final = "its writes are one request each, or lock the record before they read it"

NO_QUEUE: Final = (
    "its writes do not queue in the driver: while one was paused, another of the same record was sent"
)

JUDGED: Final = "judged"
LATE: Final = "late"
UNPAUSED: Final = "unpaused"

Write: TypeAlias = Callable[[Driver, Key], Awaitable[Any]]


def _fold(body: bytes, drop: int = 1) -> Write:
    """Return a write over the version `initial`, with a version like its body."""
    return lambda driver, key: driver.replace(
        key, body, version=f"of {body.decode()}", expect="initial", drop=drop, ttl=None
    )


def _rewrite(driver: Driver, key: Key) -> Awaitable[bool]:
    return driver.replace(key, b"R", version="of R", expect="initial", rewrite=(b"A", b"B"), ttl=None)


def _append(driver: Driver, key: Key) -> Awaitable[int]:
    return driver.append(key, b"late", initial_version="late", ttl=None)


def _append_beside(driver: Driver, key: Key) -> Awaitable[int]:
    return driver.append(key, b"c", initial_version="beside", ttl=None)


def _delete(driver: Driver, key: Key) -> Awaitable[bool]:
    return driver.delete(key, expect="initial")


async def _make_anew(driver: Driver, key: Key) -> int:
    """Make a record like the previous one, except for its version and content."""
    first = await driver.append(key, b"x", initial_version="anew", ttl=None)
    await driver.append(key, b"y", initial_version="anew", ttl=None)
    return first


async def _delete_and_make_anew(driver: Driver, key: Key) -> int:
    await driver.delete(key)
    return await _make_anew(driver, key)


ONE_WINS: Final[Mapping[str, tuple[Write, Write]]] = {
    "two folds": (_fold(b"1"), _fold(b"2")),
    "two replaces of the body": (_fold(b"1", drop=0), _fold(b"2", drop=0)),
    "a delete and a replace of the body": (_delete, _fold(b"2", drop=0)),
    "a replace of the body and a delete": (_fold(b"1", drop=0), _delete),
}

BESIDE_AN_APPEND: Final[Mapping[str, tuple[Write, Record | None]]] = {
    "a fold": (_fold(b"F"), Record("of F", b"F", (b"b", b"c"))),
    "a replace of the body": (_fold(b"F", drop=0), Record("of F", b"F", (b"a", b"b", b"c"))),
    "a rewrite": (_rewrite, Record("of R", b"R", (b"A", b"B", b"c"))),
    "an append": (_append, None),
}

OVER_ANOTHER: Final[Mapping[str, Write]] = {
    "an append": _append,
    "a fold": _fold(b"F"),
    "a replace of the body": _fold(b"F", drop=0),
    "a delete": _delete,
}

READ_LATE: Final[Mapping[str, Write]] = {"an append": _append, "a fold": _fold(b"F")}


class Stepping(Contract):
    """Checks that pause an operation after each answer, act with another instance, and continue."""

    @check("driver.races")
    async def test_of_two_writes_that_are_paused_between_their_requests_exactly_one_wins(
        self, bench: Bench
    ) -> None:
        """The write has no condition, or one that another write does not change, such as a number."""

        async def judge(place: _Place, what: str) -> int:
            first, second = ONE_WINS[what]
            done = await _both(bench, place, first, second)
            if done is None:
                return 0
            answers = [done.first, done.second]
            must_be(sum(answers), 1, f"{what} expected the same version, so exactly one can win")
            found = await place.beside.load(place.key)
            winner = (first, second)[answers.index(True)]
            body = found.body if found else None
            expected = None if winner is _delete else b"%d" % (answers.index(True) + 1)
            must_be(body, expected, f"of {what}, this write received True")
            return 1

        _must_be_judged(await _each_paused(bench, ONE_WINS, judge))

    @check("driver.races")
    async def test_an_append_while_another_write_is_paused_is_not_lost(self, bench: Bench) -> None:
        """The tail is written back as it was read, or a conflict with an append becomes a lost race."""

        async def judge(place: _Place, what: str) -> int:
            first, after = BESIDE_AN_APPEND[what]
            done = await _both(bench, place, first, _append_beside)
            if done is None:
                return 0
            found = await place.beside.load(place.key)
            if after is not None:
                must_be(done.first, True, f"an append does not change the version that {what} expects")
                must_be(found, after, f"an entry was appended while {what} was paused")
                return 1
            order = (b"late", b"c") if done.first < done.second else (b"c", b"late")
            must_be(sorted((done.first, done.second)), [3, 4], "both entries were appended to two")
            must_be(found, Record("initial", None, (b"a", b"b", *order)), "no entry is lost")
            return 1

        _must_be_judged(await _each_paused(bench, BESIDE_AN_APPEND, judge))

    @check("driver.races")
    async def test_a_paused_write_does_not_bring_back_a_record_that_was_deleted(self, bench: Bench) -> None:
        """The compared value restarts with a new record under the key, as a count of writes does."""

        async def judge(place: _Place, what: str) -> int:
            done = await _both(bench, place, OVER_ANOTHER[what], _delete_and_make_anew)
            if done is None:
                return 0
            await _must_be_the_new_one(place, what, "was deleted and made anew")
            return 1

        _must_be_judged(await _each_paused(bench, OVER_ANOTHER, judge))

    @check("driver.expiry")
    async def test_a_paused_write_does_not_bring_back_a_record_that_has_expired(self, bench: Bench) -> None:
        """The condition of a write cannot tell a new record from the one that expired under its key."""
        ended = 0

        async def judge(place: _Place, what: str) -> int:
            nonlocal ended

            async def expire(driver: Driver, key: Key) -> int:
                await bench.pass_time(place.left_s)
                return await _make_anew(driver, key)

            done = await _both(bench, place, OVER_ANOTHER[what], expire, longer=place.left_s)
            if done is None:
                return 0
            ended += 1
            # If it waits for a lock of the first, nobody sees the record expired from here on.
            place.is_last = not done.meanwhile
            # A write done before the expiry has made the record permanent.
            if place.is_last or done.second != 1:
                return 0
            await _must_be_the_new_one(place, what, "had expired and was made anew")
            return 1

        some = ("an append", "a fold") if bench.quick else OVER_ANOTHER
        judged = await _each_paused(bench, some, judge, ttl=bench.tick)
        if not judged and ended:
            not_asked(ONE_REQUEST)
        _must_be_judged(judged)

    @check("driver.expiry")
    async def test_a_write_that_queues_behind_another_judges_expiry_when_its_turn_comes(
        self, bench: Bench
    ) -> None:
        """The time is taken before the write waits for its turn in the driver."""
        reasons: list[str] = []
        for _ in range(TRIES):
            found: list[str] = []

            async def judge(place: _Place, _: str, found: list[str] = found) -> int:
                found.append(await _queued(bench, place))
                return found[-1] == JUDGED

            if await _each_paused(bench, ("a refused fold",), judge, ttl=bench.tick):
                return
            reasons += [one for one in found if one not in (LATE, UNPAUSED)]
            if LATE not in found:
                break
        else:
            not_asked(too_slow("an append was called only when the record had expired"))
        # One that gave up might have queued.
        not_asked(next((one for one in reasons if one != NO_QUEUE), NO_QUEUE))

    @check("driver.expiry")
    async def test_a_write_whose_read_is_answered_late_judges_expiry_after_the_answer(
        self, bench: Bench
    ) -> None:
        """The time is taken before the record is read, and what others have seen expired is extended."""
        ended = 0

        async def judge(place: _Place, what: str) -> int:
            nonlocal ended
            # Of what follows the first answer, a part may be written already.
            place.is_last = True
            answer = await _answered_late(bench, place, READ_LATE[what])
            ended += place.held.happened and not isinstance(answer, StorageError)
            if answer is None or isinstance(answer, StorageError):
                return 0
            why = f"a load has found the record expired before the first answer to {what} came"
            must_be(answer, 1 if what == "an append" else False, why)
            new = Record("late", None, (b"late",)) if what == "an append" else None
            must_be(await place.beside.load(place.key), new, why)
            return 1

        judged = await _each_paused(bench, READ_LATE, judge, ttl=bench.tick)
        if not judged and ended:
            not_asked(ONE_REQUEST)
        _must_be_judged(judged)

    @check("driver.lifecycle")
    async def test_no_operation_goes_on_once_its_driver_is_closed(self, bench: Bench) -> None:
        """`close` neither ends what runs nor waits for it, so that a call connects anew, or writes later."""
        for is_marked in (True, False):
            number = 0
            for number in range(MOST_ANSWERS):
                if not await _closed_while_paused(bench, number, is_marked=is_marked):
                    break
            # If requests cannot be read, for example because keys are hashed, answers to any request count.
            if is_marked and number:
                return


async def _queued(bench: Bench, place: _Place) -> str:
    """Pause a refused write, let an append wait behind it until the record expires, and judge the append.

    Returns `JUDGED`, `UNPAUSED` if the write ended without that answer, `LATE` if the append was called too
    late to tell, or the reason why it was not judged.
    """
    refused = place.driver.replace(place.key, b"", version="no", expect="no", drop=1, ttl=None)
    running = asyncio.ensure_future(outcome(refused))
    waiting: asyncio.Future[Any] | None = None
    ends: list[float] = []
    try:
        if not await is_held(place.held, running):
            await running
            return UNPAUSED
        called = time.monotonic()
        is_late = bench.datastore.waits and called > place.expires
        waiting = asyncio.ensure_future(outcome(_append(place.driver, place.key)))
        for one in (running, waiting):
            one.add_done_callback(lambda _: ends.append(time.monotonic() - called))
        await bench.pass_time(place.left_s)
        seen = await place.beside.load(place.key)
        goes_on, waits = not running.done(), not waiting.done()
        # A request already sent may have been judged before the expiry.
        queues = seen is None and waits and not place.held.followed
        place.held.release()
        async with must_end(2 * longest(place.driver.traits), "the paused write goes on"):
            answers: Sequence[Any] = await asyncio.gather(running, waiting)
    finally:
        place.held.release()
        await end(running, *([waiting] if waiting is not None else []))
    if not goes_on or any(isinstance(one, StorageError) for one in answers):
        return (
            f"needs a write that waits {place.left_s:.2g} s for an answer, and another that queues behind "
            f"it; one of these gave up, or sent its request again, after {min(ends):.2g} s"
        )
    if not queues:
        return NO_QUEUE
    must_be(answers[0], False, "the record had another version")
    must_be(answers[1], 1, "a load has found the record expired before this append was sent")
    must_be(await place.beside.load(place.key), Record("late", None, (b"late",)), "the record is a new one")
    return LATE if is_late else JUDGED


async def _answered_late(bench: Bench, place: _Place, write: Write) -> Any:
    """Pause a write after its first answer until the record has expired for another instance.

    Returns its answer, or its error. `None` if it has written by then, or holds a lock of the record.
    """
    running = asyncio.ensure_future(outcome(write(place.driver, place.key)))
    looking: asyncio.Future[Any] | None = None
    try:
        if not await is_held(place.held, running):
            await running
            return None
        # A refused write changes nothing, and waits for a lock that the paused one may hold.
        refused = place.beside.replace(place.key, b"", version="no", expect="no", ttl=None)
        looking = asyncio.ensure_future(outcome(refused))
        await asyncio.wait({looking}, timeout=min(STEP_S, place.driver.traits.deadline / 4))
        is_judged = looking.done()
        if is_judged:
            await bench.pass_time(place.left_s)
            is_judged = await place.beside.load(place.key) is None and not running.done()
        bench.history.say("the paused write goes on", place.key)
        place.held.release()
        async with must_end(2 * longest(place.driver.traits), "the paused write goes on"):
            answer, _ = await asyncio.gather(running, looking)
    finally:
        place.held.release()
        await end(running, *([looking] if looking is not None else []))
    return answer if is_judged or isinstance(answer, StorageError) else None


async def _closed_while_paused(bench: Bench, number: int, *, is_marked: bool) -> bool:
    """Close a driver while an append is paused after an answer; returns whether there was such an answer."""
    proxy, driver = await behind(bench)
    beside, key = await bench.driver(), bench.key()
    await append_all(beside, key, b"a", b"b")
    await usable(driver, key)
    bench.history.say(f"the append is paused after answer {number + 1}", key)
    held = proxy.hold_answer(mark_of(key) if is_marked else b"", skip=number)
    soon_s = min(STEP_S, driver.traits.deadline / 4)
    running = asyncio.ensure_future(outcome(_append(driver, key)))
    closing: asyncio.Future[None] | None = None
    try:
        if not await is_held(held, running):
            await running
            await driver.close()
            return False
        closing = asyncio.ensure_future(driver.close())
        await asyncio.wait({closing}, timeout=soon_s)
        if not closing.done():
            bench.history.say("the paused append goes on", key)
            held.release()
        async with must_end(longest(driver.traits), "`close` ends what is running, or waits for it"):
            await closing
        accepted = proxy.accepted
        await asyncio.wait({running}, timeout=soon_s)
        assert running.done(), "the driver is closed, and an append that ran then goes on"
    finally:
        held.release()
        await end(running, *([closing] if closing is not None else []))
    found, count = running.result(), (await loaded(beside, key)).tail.count(b"late")
    if isinstance(found, Unavailable):
        must_be(count, 0, UNDONE)
    elif not isinstance(found, StorageError):
        must_be(count, 1, "the append was acknowledged")
    if not await comes(lambda: proxy.connections == 0):
        pytest.fail(f"{proxy.connections} connections are open after the driver was closed")
    must_be(proxy.accepted, accepted, "a driver that is closed opens no connection")
    return True


@dataclass
class _Place:
    """A record with two entries, its driver behind the proxy, another one without the proxy, and the pause.

    With a time to live, the record has expired once `left_s` have passed, and not before `expires`. A place
    marked as the last is followed by no other.
    """

    driver: Driver
    beside: Driver
    key: Key
    held: HeldAnswer
    left_s: float = 0.0
    expires: float = 0.0
    is_last: bool = False


class _Both(NamedTuple):
    """The answers of two writes. `meanwhile` says whether the second ended while the first was paused."""

    first: Any
    second: Any
    meanwhile: bool


async def _each_paused(
    bench: Bench,
    writes: Iterable[str],
    judge: Callable[[_Place, str], Awaitable[int]],
    *,
    ttl: float | None = None,
) -> int:
    """Pause each of the writes after each of its answers, and return the sum of the results of `judge`.

    They are paused concurrently, because each may have to wait for another that waits for a lock. On a clock
    that the check moves, time would pass for all of them at once.
    """
    require_network(bench)
    latest: dict[str, Key] = {}

    async def paused(what: str, *, is_marked: bool = True) -> tuple[int, bool]:
        judged, was_held = 0, False
        async with aclosing(_holding_each_answer(bench, what, is_marked=is_marked, ttl=ttl)) as places:
            async for place in places:
                latest[what] = place.key
                judged += await judge(place, what)
                was_held = was_held or place.held.happened
        return judged, was_held

    at_once = ttl is None or bench.datastore.waits
    found: dict[str, tuple[int, bool]] = {}
    tasks: dict[str, asyncio.Task[tuple[int, bool]]] = {}
    try:
        for what in writes:
            tasks[what] = asyncio.create_task(paused(what))
            if not at_once:
                await asyncio.wait([tasks[what]])
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for what, task in tasks.items():
            if task.done():
                if task.exception() is not None and what in latest:
                    # The history is about the record that it mentions last.
                    bench.history.say(f"that was {what}", latest[what])
                found[what] = task.result()
    finally:
        await end(*tasks.values())
    # If requests cannot be read, for example because keys are hashed, answers to any request count.
    unread = [await paused(what, is_marked=False) for what, (_, was_held) in found.items() if not was_held]
    return sum(judged for judged, _ in (*found.values(), *unread))


async def _holding_each_answer(
    bench: Bench, what: str, *, is_marked: bool, ttl: float | None
) -> AsyncGenerator[_Place]:
    """Yield a record once for each answer of an operation, after which the next operation on it is paused.

    With a `ttl`, enough of it has passed that the rest is well within the deadline.
    """
    proxy, driver = await behind(bench)
    beside = await bench.driver()
    whole_s = EXPIRED * (ttl or 0.0)
    left_s = min(whole_s, driver.traits.deadline / 2)
    for number in range(MOST_ANSWERS):
        key = bench.key()
        await beside.append(key, b"a", initial_version="initial", ttl=ttl)
        expires = time.monotonic() + (ttl or 0.0)
        await beside.append(key, b"b", initial_version="initial", ttl=ttl)
        await usable(driver, key)
        if whole_s > left_s:
            await bench.pass_time(whole_s - left_s)
        bench.history.say(f"{what} is paused after answer {number + 1}", key)
        held = proxy.hold_answer(mark_of(key) if is_marked else b"", skip=number)
        place = _Place(driver, beside, key, held, left_s, expires)
        yield place
        held.release()
        if place.is_last or not held.happened:
            return


async def _both(
    bench: Bench, place: _Place, first: Write, second: Write, *, longer: float = 0.0
) -> _Both | None:
    """Pause the first write, do the second, and let the first continue; `None` if there is nothing to judge.

    A second write that waits for a lock of the first ends after it.
    """
    running = asyncio.ensure_future(outcome(first(place.driver, place.key)))
    acting: asyncio.Future[Any] | None = None
    try:
        if not await is_held(place.held, running):
            await running
            return None
        acting = asyncio.ensure_future(outcome(second(place.beside, place.key)))
        deadline = place.driver.traits.deadline
        await asyncio.wait({acting}, timeout=min(STEP_S, deadline / 4) + longer)
        meanwhile = acting.done()
        bench.history.say("the paused write goes on", place.key)
        place.held.release()
        async with must_end(2 * longest(place.driver.traits), "the driver has a deadline"):
            answers: Sequence[Any] = await asyncio.gather(running, acting)
    finally:
        place.held.release()
        await end(running, *([acting] if acting is not None else []))
    return None if any(isinstance(one, StorageError) for one in answers) else _Both(*answers, meanwhile)


async def _must_be_the_new_one(place: _Place, what: str, happened: str) -> None:
    """Fail unless a record is the recreated one; an append may have added its entry."""
    found = await place.beside.load(place.key) or Record("none", None, ())
    others = tuple(entry for entry in found.tail if entry != b"late")
    must_be(others, (b"x", b"y"), f"the record {happened} while {what} was paused")
    must_be(found.body, None, f"{what} was for the previous record")
    late = found.tail.count(b"late")
    assert late <= (what == "an append"), f"the entry was appended at most once, but is stored {late} times"
    must_be(found.version, "late" if found.tail[0] == b"late" else "anew", "an append keeps the version")


def _must_be_judged(count: int) -> None:
    if not count:
        not_asked(GAVE_UP)

"""Checks that put a proxy before the datastore: answers that are lost, and networks that fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final

import pytest

from stm_backends.drivers.contract import KEEP, Driver, Key, Record
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing.driver_checks.steps import (
    HELD_S,
    LATE_S,
    MOST_ANSWERS,
    SLACK_S,
    TRIES,
    UNDONE,
    T,
    append_all,
    behind,
    comes,
    each_fails_in_time,
    end,
    loaded,
    longest,
    mark_of,
    outcome,
    persistently,
    recovered,
    usable,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked, too_slow
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_end
from stm_backends.testing.workbench.proxy import Proxy

WRITERS: Final = 8
"""Number of concurrent operations."""

RECOVERY: Final = 3
"""Number of deadlines after which no dead connection may be used any more. The first deadline shows that one
is dead; in the second, operations that already use another one may fail."""

ROUNDS: Final = 3
"""Number of consecutive rounds of failures with a rising number of connections that show a leak."""

SOON_S: Final = 1.0
"""Seconds for failed operations to close their connections, in any round but the last."""

OPENINGS: Final = 3
"""Number of openings that meet a stall."""

QUEUED: Final = 8
"""Number of writers of one record in a stall: if each waits for the one before, and begins to count the time
only then, the last one takes as many deadlines."""

LATER_S: Final = 2.0
"""Seconds after an outage within which a write sent into it may still arrive."""

ANSWERS_LATE: Final = 4
"""Number of answers of an append that come too late, in turn: most drivers send their commit by then."""

CANCELLED_AFTER: Final = (0.5, 1.5, 2.5)
"""Times at which calls are cancelled, as multiples of the time that an answer takes."""

LOST: Final = 2
"""Number of times that calls must fail next to a cancelled one before it counts as the reason."""

_FAULTS: Final[dict[str, Callable[[Proxy], AbstractAsyncContextManager[None]]]] = {
    "cut": Proxy.cut,
    "stalled": Proxy.stalled,
    "unanswered": lambda proxy: proxy.stalled("answers"),
}


class Network(Contract):
    """Checks that put a proxy before the datastore: answers that are lost, and networks that fall silent."""

    @check("driver.outage")
    async def test_an_append_that_loses_its_answer_is_never_called_undone(self, bench: Bench) -> None:
        """Every connection error is `Unavailable`, even after the request was sent."""
        async for place in _losing_each_answer(bench):
            found = await outcome(place.append(b"c"))
            count = await place.count(b"c")
            if isinstance(found, Unavailable):
                must_be(count, 0, UNDONE)

    @check("driver.resent")
    async def test_an_append_that_loses_its_answer_is_not_stored_twice(self, bench: Bench) -> None:
        """The driver, or its client library, sends an append again after the connection was lost."""
        async for place in _losing_each_answer(bench):
            found = await outcome(place.append(b"c"))
            count = await place.count(b"c")
            assert count <= 1, f"the entry was appended once but is stored {count} times: it was sent again"
            if not isinstance(found, StorageError):
                must_be(count, 1, "the append was acknowledged")

    @check("driver.resent")
    async def test_a_replace_that_loses_its_answer_can_be_retried(self, bench: Bench) -> None:
        """A lost connection is mistaken for a lost race, or a retry inside the driver meets its own write."""
        async for place in _losing_each_answer(bench):
            before, after = Record("initial", None, (b"a", b"b")), Record("v2", b"A", (b"b",))
            found = await outcome(place.fold())
            stored = await place.beside.load(place.key)
            if isinstance(found, Unavailable):
                must_be(stored, before, UNDONE)
            elif isinstance(found, OutcomeUnknown):
                assert stored in (before, after), "a replace whose answer was lost is done or not done"
            else:
                must_be(found, True, "no one else wrote, so no race was lost")
                must_be(stored, after, "the replace was acknowledged")
            must_be(await recovered(place.fold, place.driver.traits), True, "a retry of the same write")
            must_be(await place.beside.load(place.key), after, "the write and its retry are applied once")

    @check("driver.outage")
    async def test_a_delete_that_loses_its_answer_tells_the_truth(self, bench: Bench) -> None:
        """A retry inside the driver finds nothing, and its answer is taken as that of the first attempt."""
        async for place in _losing_each_answer(bench):
            found = await outcome(place.driver.delete(place.key))
            stored = await place.beside.load(place.key)
            if isinstance(found, Unavailable):
                must_be(stored, Record("initial", None, (b"a", b"b")), UNDONE)
            elif not isinstance(found, OutcomeUnknown):
                must_be(found, True, "there was a record, and no one else deleted it")
                must_be(stored, None, "the delete was acknowledged")

    @check("driver.outage")
    async def test_an_append_whose_answer_comes_too_late_is_never_called_undone(self, bench: Bench) -> None:
        """A deadline that ends after the request was sent is `Unavailable`."""
        found = await _all_of(*(_answered_late(bench, number) for number in range(ANSWERS_LATE)))
        if any(found):
            return
        # If requests cannot be read, for example because keys are hashed, every answer is held in turn.
        for number in range(ANSWERS_LATE):
            if not await _answered_late(bench, number, is_marked=False):
                return

    @check("driver.cancellation")
    async def test_cancelling_a_call_leaves_the_others_their_connection(self, bench: Bench) -> None:
        """The connection of a cancelled call is closed, and other calls wait for answers on it."""
        proxy, driver = await behind(bench)
        keys = [bench.key() for _ in range(WRITERS)]
        delay_s = min(HELD_S / 2, driver.traits.deadline / 20)
        # So slow that the calls of a round are under way at once, each between the same two answers.
        async with proxy.slow(delay_s, "answers"):
            await asyncio.gather(*(outcome(append_all(driver, key, b"first")) for key in keys))
            lost = 0
            for answers in CANCELLED_AFTER:
                for _ in range(TRIES):
                    error = await _cancelled_beside(driver, keys, answers * delay_s)
                    if error is None:
                        break
                    # On a machine that is too busy, they fail without a call that is cancelled.
                    if await _cancelled_beside(driver, keys, answers * delay_s, cancels=False) is None:
                        lost += 1
                    if lost == LOST:
                        raise AssertionError(
                            "calls fail beside one that is cancelled, and none fails if none is cancelled: "
                            f"{error}"
                        ) from error

    @check("driver.outage", slow={"fault": ["unanswered"]})
    @pytest.mark.parametrize("fault", ["cut", "stalled", "unanswered"])
    async def test_what_was_refused_in_an_outage_does_not_appear_later(
        self, bench: Bench, fault: str
    ) -> None:
        """A deadline that ends after the request was sent is `Unavailable`, or failed writes are queued."""
        proxy, driver = await behind(bench)
        beside, keys = await bench.driver(), [bench.key() for _ in range(WRITERS // 2)]
        tried = {key: _Tried() for key in keys}
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(WRITERS):
                key = keys[number % len(keys)]
                group.create_task(_append_until(is_over, driver, key, tried[key], b"%d-" % number))
            # Cut often, because only operations under way matter; a stall must outlast the deadline.
            rounds, lasting = (12, 0.05) if fault == "cut" else (2, driver.traits.deadline + 0.2)
            for _ in range(max(1, rounds // 3) if bench.quick else rounds):
                await asyncio.sleep(random.uniform(0.05, 0.3))
                async with _FAULTS[fault](proxy):
                    await asyncio.sleep(lasting)
            is_over.set()
        for wait in (0.0, LATER_S / 2 if bench.quick else LATER_S):
            await asyncio.sleep(wait)
            for key in keys:
                tried[key].require(await beside.load(key))
        # A driver that writes late does so on its next use.
        await usable(driver, keys[0])
        for key in keys:
            tried[key].require(await driver.load(key))

    @check("driver.outage", slow={"fault": ["unanswered"]})
    @pytest.mark.parametrize("fault", ["stalled", "unanswered"])
    async def test_every_operation_ends_in_time_while_the_network_is_silent(
        self, bench: Bench, fault: str
    ) -> None:
        """There is no deadline: the client waits for an answer while the connection looks open."""
        proxy, driver = await behind(bench)
        key = bench.key()
        await append_all(await bench.driver(), key, b"a")
        async with _FAULTS[fault](proxy):
            await _all_of(*(fails() for fails in each_fails_in_time(driver, key)))
        await usable(driver, key)

    @check("driver.outage")
    async def test_writers_of_one_record_end_in_time_however_many_wait(self, bench: Bench) -> None:
        """The deadline begins only after a write has waited for earlier ones, as for a record lock."""
        proxy, driver = await behind(bench)
        key, clock = bench.key(), asyncio.get_running_loop().time
        await append_all(await bench.driver(), key, b"a")
        limit = 2 * driver.traits.deadline + SLACK_S / 5
        # A busy machine may be late once, but not again and again.
        for is_last in (*[False] * (TRIES - 1), True):
            began = clock()
            async with proxy.stalled():
                writers = [
                    asyncio.ensure_future(outcome(append_all(driver, key, b"%d" % number)))
                    for number in range(QUEUED)
                ]
                ended, waiting = await asyncio.wait(writers, timeout=limit)
                took = clock() - began
                await end(*waiting)
            for writer in ended:
                writer.result()  # so that no error of another kind is lost
            await usable(driver, key)
            if not waiting:
                return
            if is_last:
                pytest.fail(
                    f"{len(waiting)} of {QUEUED} writers of one record have not ended after {took:.1f} s; "
                    f"their deadline is {driver.traits.deadline:g} s from their call"
                )

    @check("driver.lifecycle")
    async def test_an_opening_that_meets_a_stall_leaves_nothing_behind(self, bench: Bench) -> None:
        """The connections or tasks of a failed `open` are kept, and nobody closes them."""
        through, (proxy, driver) = bench.datastore.through, await behind(bench)
        assert through is not None, "`behind` requires it"
        await driver.close()
        if not await comes(lambda: proxy.connections == 0):
            pytest.fail(f"{proxy.connections} connections are open after the driver was closed")
        tasks = asyncio.all_tasks()
        # In one stall, because each must outlast a deadline.
        async with proxy.stalled(), must_end(longest(driver.traits), "`open` has a deadline"):
            opened = await asyncio.gather(*(outcome(through(proxy.address)) for _ in range(OPENINGS)))
        for one in opened:
            # A driver that connects on first use may be open, and is closed again.
            if not isinstance(one, StorageError):
                await one.close()
        if not await comes(lambda: proxy.connections == 0):
            pytest.fail(f"{proxy.connections} connections are open after {OPENINGS} openings met a stall")
        if not await comes(lambda: asyncio.all_tasks() <= tasks):
            left = len(asyncio.all_tasks() - tasks)
            pytest.fail(f"{left} tasks are running after {OPENINGS} openings met a stall")

    @check("driver.outage")
    async def test_connections_that_died_unnoticed_are_replaced(self, bench: Bench) -> None:
        """A connection that did not answer in time is kept and used again."""
        proxy, driver = await behind(bench)
        beside, keys = await bench.driver(), [bench.key() for _ in range(WRITERS)]
        await asyncio.gather(*(append_all(beside, key, b"a") for key in keys))
        # Slow enough for a driver to open all the connections that it ever will.
        async with proxy.slow(min(0.1, driver.traits.deadline / 20)):
            await asyncio.gather(*(outcome(driver.delete(Key(key.scope, "other"))) for key in keys))
        async with proxy.half_open():
            found = await _loaded_in_time(driver, keys, RECOVERY)
            if found is None:
                # On an overloaded machine, a driver without a dead connection fails, too.
                other = await persistently(lambda: bench.driver_at(proxy.address))
                if await _loaded_in_time(other, keys, 1) is None:
                    not_asked(too_slow("needs new connections that answer in time, and these did not"))
                found = await _loaded_in_time(driver, keys, 1)
            if found is None:
                pytest.fail(f"new connections work, and operations still fail after {RECOVERY} deadlines")
            must_be(found, [Record("initial", None, (b"a",))] * WRITERS, "the datastore answers")

    @check("driver.lifecycle")
    async def test_failed_operations_and_close_leave_no_connection_open(self, bench: Bench) -> None:
        """The connection of a failed operation leaves the pool and is never closed, or `open` opens two."""
        proxy, driver = await behind(bench)
        await driver.open()
        keys = [bench.key() for _ in range(2 * WRITERS)]

        async def spread() -> int:
            # Slow enough for a driver to open all its connections, but not so slow that one fails.
            async with proxy.slow(min(0.05, driver.traits.deadline / 50)):
                await asyncio.gather(*(outcome(append_all(driver, key, b"a")) for key in keys))
            return proxy.connections

        usual = max([await spread() for _ in range(3)])
        if bench.datastore.damage is not None:
            damaged = bench.key()
            await append_all(await bench.driver(), damaged, b"a", b"b", b"c")
            await bench.damage(damaged)

            async def refused() -> None:
                # More than most pools have: a connection lost to the pool is missed in the end. No more at a
                # time than before, because a pool that grows on demand would open more for them.
                for _ in range(2):
                    await asyncio.gather(*(_refused(driver, damaged) for _ in keys))
                await spread()

            usual = await _stops_growing(proxy, usual, refused, "errors")

        async def stalled() -> None:
            for _ in range(1 if bench.quick else 3):
                async with proxy.stalled():
                    await asyncio.gather(*(outcome(append_all(driver, key, b"b")) for key in keys))
                await usable(driver, keys[0])

        await _stops_growing(proxy, usual, stalled, "failures")
        await driver.close()
        if not await comes(lambda: proxy.connections == 0):
            pytest.fail(f"{proxy.connections} connections are open after the driver was closed")


@dataclass(frozen=True)
class _Place:
    """A record with two entries, its driver behind the proxy, and another driver that bypasses the proxy."""

    driver: Driver
    beside: Driver
    key: Key

    async def append(self, entry: bytes) -> int:
        return await self.driver.append(self.key, entry, initial_version="initial", ttl=None)

    async def fold(self) -> bool:
        return await self.driver.replace(self.key, b"A", version="v2", expect="initial", drop=1, ttl=KEEP)

    async def count(self, entry: bytes) -> int:
        return (await loaded(self.beside, self.key)).tail.count(entry)


@dataclass
class _Tried:
    """The entries appended to a record, by outcome."""

    acknowledged: list[bytes] = field(default_factory=list[bytes])
    refused: list[bytes] = field(default_factory=list[bytes])
    unknown: list[bytes] = field(default_factory=list[bytes])

    def require(self, record: Record | None) -> None:
        """Fail unless a record has valid content; it may be absent if no append to it was acknowledged."""
        tail = record.tail if record else ()
        must_be([entry for entry in self.refused if entry in tail], [], UNDONE)
        lost = [entry for entry in self.acknowledged if entry not in tail]
        must_be(lost, [], "acknowledged entries are stored")
        twice = [entry for entry in set(tail) if tail.count(entry) > 1]
        must_be(twice, [], "each entry was appended once, so none is stored twice")
        known = {*self.acknowledged, *self.refused, *self.unknown}
        must_be([entry for entry in tail if entry not in known], [], "nothing else was appended")


async def _losing_each_answer(bench: Bench) -> AsyncGenerator[_Place]:
    """Yield a record once for each answer of an operation; the next operation on it loses that answer."""
    proxy, driver = await behind(bench)
    beside = await bench.driver()
    for is_marked in (True, False):
        skip = 0
        for skip in range(MOST_ANSWERS):
            key = bench.key()
            await append_all(beside, key, b"a", b"b")
            await usable(driver, key)
            # A request other than the operation's may come first.
            mark = mark_of(key) if is_marked else b""
            bench.history.say(f"answer {skip + 1} is lost")
            lost = proxy.lose_answer(mark, skip=skip)
            yield _Place(driver, beside, key)
            lost.cancel()
            if not lost.happened:
                break
        # If requests cannot be read, for example because keys are hashed, answers to any request are lost.
        if is_marked and skip:
            return


async def _answered_late(bench: Bench, number: int, *, is_marked: bool = True) -> bool:
    """Hold an answer to an append until the append has ended; returns whether there was such an answer."""
    proxy, driver = await behind(bench)
    beside, key = await bench.driver(), bench.key()
    await append_all(beside, key, b"a", b"b")
    await usable(driver, key)
    bench.history.say(f"answer {number + 1} comes when the append has ended", key)
    held = proxy.hold_answer(mark_of(key) if is_marked else b"", skip=number)
    try:
        async with must_end(longest(driver.traits), "the driver has a deadline"):
            found = await outcome(append_all(driver, key, b"c"))
    finally:
        held.release()
    count = (await loaded(beside, key)).tail.count(b"c")
    if isinstance(found, Unavailable):
        must_be(count, 0, UNDONE)
    elif found is None:
        must_be(count, 1, "the append was acknowledged")
    return held.happened


async def _cancelled_beside(
    driver: Driver, keys: Sequence[Key], after_s: float, *, cancels: bool = True
) -> StorageError | None:
    """Append to each record at once, and cancel every other append; returns an error of those in between."""
    appends = [asyncio.ensure_future(outcome(append_all(driver, key, b"next"))) for key in keys]
    try:
        await asyncio.sleep(after_s)
        for append in appends[::2] if cancels else ():
            append.cancel()
        async with must_end(2 * longest(driver.traits), "the driver has a deadline"):
            await asyncio.wait(appends)
    finally:
        await end(*appends)
    errors: list[StorageError] = []
    for append in appends[1::2]:
        must_be(append.cancelled(), False, "only the calls beside it were cancelled")
        if (error := append.result()) is not None:
            errors.append(error)
    return errors[0] if errors else None


async def _append_until(
    is_over: asyncio.Event, driver: Driver, key: Key, tried: _Tried, prefix: bytes
) -> None:
    number = 0
    while not is_over.is_set():
        entry = prefix + b"%d" % number
        number += 1
        try:
            async with must_end(longest(driver.traits), "the driver has a deadline"):
                await driver.append(key, entry, initial_version="initial", ttl=None)
            tried.acknowledged.append(entry)
        except Unavailable:
            tried.refused.append(entry)
        except OutcomeUnknown:
            tried.unknown.append(entry)
        await asyncio.sleep(0.01)


async def _refused(driver: Driver, damaged: Key) -> None:
    """Fold a damaged record."""
    with contextlib.suppress(Corrupt, Unavailable, OutcomeUnknown):
        await driver.replace(damaged, b"A", version="v2", expect="initial", drop=1, ttl=KEEP)


async def _loaded_in_time(driver: Driver, keys: Sequence[Key], rounds: int) -> list[Record | None] | None:
    """Return the records of the first round of loads in which none fails, or `None`."""
    for _ in range(rounds):
        found = await asyncio.gather(*(outcome(driver.load(key)) for key in keys))
        records = [one for one in found if not isinstance(one, StorageError)]
        if len(records) == len(keys):
            return records
    return None


async def _all_of(*work: Awaitable[T]) -> list[T]:
    """Await everything, then raise the first error, or return what was answered."""
    answers: list[T] = []
    for found in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
        answers.append(found)
    return answers


async def _stops_growing(proxy: Proxy, usual: int, fail: Callable[[], Awaitable[None]], what: str) -> int:
    """Fail if each round of failures leaves more connections open. Return the usual number of them.

    A pool that grows on demand, or a client that watches its server, may open one more in the first round.
    """
    counts = [usual]
    for _ in range(ROUNDS):
        await fail()
        # Before the last round, a connection that closes late only raises the next round's baseline.
        within = LATE_S if len(counts) == ROUNDS else SOON_S
        if await comes(lambda: proxy.connections <= max(counts), within):
            return max(counts)
        counts.append(proxy.connections)
    before, *after = map(str, counts)
    pytest.fail(f"{before} connections were open before {what}, then {', then '.join(after)}")

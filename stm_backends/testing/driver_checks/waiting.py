"""Checks of writers that wait for each other, or for a lock held by the check."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stm_backends.drivers.contract import ABSENT, Driver, Key, Record, new_version
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing.driver_checks.steps import (
    HELD_S,
    TRIES,
    T,
    append_all,
    assert_located,
    gave_up,
    held_up,
    loaded,
    longest,
    rounds,
    take_steps,
    waiting_for,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_end, must_raise

SHORTEST_S = 0.0005
"""Minimum length of a pause; a shorter one takes longer than it says, so it is skipped."""

LONG_WAIT_S, LONG_WAIT_QUICK_S = 12.0, 1.0
"""Maximum wait of an append that a client may send again, in seconds: above most clients' timeouts."""


OF_ONE_WINS, OF_ORDER, OF_DELETES = 0.25, 0.75, 0.5
"""The share of `races_s` for each of the races."""

DUELS = 4
"""Number of records for which a write and a delete compete at a time."""

SHOWN_OF_ORDER = 300
"""Number of operations shown if an entry is missing or misplaced: almost all of the race."""


class Waiting(Contract):
    """Checks of writers that wait for each other, or for a lock held by the check."""

    @check("driver.expiry")
    async def test_a_write_that_had_to_wait_does_not_bring_back_what_has_expired(self, bench: Bench) -> None:
        """Expiry is judged before the wait for a lock, instead of once the record is locked."""
        if bench.datastore.hold is None:
            not_asked("needs `Datastore.hold`")
        one, two, reader = await bench.driver(), await bench.driver(), await bench.driver()
        for _ in range(TRIES):
            key = bench.key()
            await one.replace(key, b"old body", version="old", expect=ABSENT, ttl=bench.tick * 2)
            await two.append(key, b"old entry", initial_version="older", ttl=bench.tick)

            async def expire(key: Key = key) -> None:
                await bench.pass_time(bench.tick * 1.1)
                must_be(await reader.load(key), None, "the record has expired while writers wait for it")

            answers = await held_up(
                bench,
                key,
                functools.partial(one.append, key, b"new", initial_version="recreated", ttl=None),
                functools.partial(two.replace, key, b"late", version="late", expect="old", drop=1, ttl=None),
                meanwhile=expire,
            )
            if answers is None:
                continue
            length, folded = answers
            must_be(folded, False, "the record to be folded had expired, as a load has said")
            must_be(length, 1, "the tail ended with the expired record")
            must_be(await reader.load(key), Record("recreated", None, (b"new",)), "the record is a new one")
            return
        not_asked(f"needs writes that wait until a record expires; after {bench.tick:g} s these gave up")

    @check("driver.races")
    async def test_of_writers_that_wait_for_a_record_exactly_one_wins(self, bench: Bench) -> None:
        """The version is compared before the record is locked, instead of in the statement that writes it."""
        drivers, scope = [await bench.driver() for _ in range(4)], bench.scope()
        for number, is_held in enumerate(rounds(bench, OF_ONE_WINS)):
            key = Key(scope, f"record{number}")
            await append_all(drivers[0], key, b"a", b"b")
            writes: list[Callable[[], Awaitable[bool | int]]] = [
                functools.partial(
                    driver.replace, key, b"%d" % n, version=f"v{n}", expect="initial", drop=1, ttl=None
                )
                for n, driver in enumerate(drivers)
            ]
            append = functools.partial(drivers[0].append, key, b"c", initial_version="late", ttl=None)
            done = await _done(bench, key, [*writes, append], is_held=is_held)
            if done is None:
                continue
            *answers, _ = done
            must_be(sum(answers), 1, "all writers expected the same version, so only one can win")
            winner = answers.index(True)
            record = Record(f"v{winner}", b"%d" % winner, (b"b", b"c"))
            must_be(
                await drivers[1].load(key), record, "this writer received True, and an entry was appended"
            )
            await drivers[0].delete(key)

    @check("driver.races")
    async def test_no_entry_appears_before_one_that_a_load_has_seen(self, bench: Bench) -> None:
        """The number of an entry is drawn before the record is locked, or does not sort by arrival."""
        drivers, scope = [await bench.driver() for _ in range(4)], bench.scope()
        reader, chance = await bench.driver(), bench.chance()
        bench.history.shown_at_most = SHOWN_OF_ORDER
        for number, is_held in enumerate(rounds(bench, OF_ORDER)):
            key = Key(scope, f"record{number}")
            await append_all(drivers[0], key, b"first")
            writes = [
                functools.partial(_append_three, driver, key, n, chance) for n, driver in enumerate(drivers)
            ]
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(_done(bench, key, writes, is_held=is_held))
                tasks.create_task(_watch(reader, key, writing))
            appended = writing.result()
            if appended is None:
                continue
            tail = (await loaded(reader, key)).tail
            for length, entry in itertools.chain(*appended):
                must_be(tail[length - 1 : length], (entry,), "an append returns the place of its entry")
            must_be(len(tail), 13, "four writers appended three entries each, after the first")
            await drivers[0].delete(key)

    @check("driver.races")
    async def test_of_a_write_and_a_delete_of_one_version_exactly_one_wins(self, bench: Bench) -> None:
        """A delete compares the version and removes in two steps, or does not conflict with a write."""
        drivers, scope, chance = [await bench.driver() for _ in range(2)], bench.scope(), bench.chance()
        clock, took = asyncio.get_running_loop().time, 0.0
        for number, is_held in enumerate(rounds(bench, OF_DELETES)):
            keys = [Key(scope, f"record{number}-{n}") for n in range(1 if is_held else DUELS)]
            for key in keys:
                began = clock()
                await append_all(drivers[number % 2], key, b"a")
                took = clock() - began
            await asyncio.gather(
                *(_duel(bench, drivers, key, chance, within=took, is_held=is_held) for key in keys)
            )

    @check("driver.outage")
    async def test_a_write_that_waits_past_its_deadline_raises_and_is_not_done_later(
        self, bench: Bench
    ) -> None:
        """A wait for a lock has no deadline, or the write gives up while its request still waits."""
        if bench.datastore.hold is None:
            not_asked("needs `Datastore.hold`")
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await append_all(one, key, b"a", b"b")
        writes: dict[str, Callable[[], Awaitable[object]]] = {
            "append": lambda: one.append(key, b"late", initial_version="initial", ttl=None),
            "replace": lambda: one.replace(key, b"", version="late", expect="initial", drop=1, ttl=None),
            "delete": lambda: one.delete(key),
        }
        async with waiting_for(bench, key, *writes.values()) as waiting:
            async with must_end(longest(one.traits), "the driver has a deadline"):
                errors = await asyncio.gather(*waiting, return_exceptions=True)
            record = Record("initial", None, (b"a", b"b"))
            must_be(await one.load(key), record, "only writers wait, and none has written")
        for driver in (one, two):
            await append_all(driver, key, b"next")
        await asyncio.sleep(HELD_S)
        # `None` if the delete is done only now, which `OutcomeUnknown` allows.
        found = await one.load(key)
        tail = () if found is None else found.tail
        not_done = (b"late" not in tail, found is None or found.version == "initial", b"b" in tail)
        for operation, error, is_not_done in zip(writes, errors, not_done, strict=True):
            with must_raise((Unavailable, OutcomeUnknown), f"the {operation} waited to its end") as caught:
                if isinstance(error, BaseException):
                    raise error
            assert_located(caught.value, one, operation, key)
            assert is_not_done or isinstance(error, OutcomeUnknown), "Unavailable says that nothing was done"

    @check("driver.resent")
    async def test_an_append_that_waits_long_for_a_lock_is_stored_once(self, bench: Bench) -> None:
        """A client has its own timeout, after which it sends a waiting request again."""
        if bench.datastore.hold is None:
            not_asked("needs `Datastore.hold`")
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await append_all(two, key, b"first")
        append = functools.partial(one.append, key, b"waits", initial_version="initial", ttl=None)
        async with waiting_for(bench, key, append) as (waiting,):
            longest_s = LONG_WAIT_QUICK_S if bench.quick else LONG_WAIT_S
            await asyncio.sleep(min(longest_s, one.traits.deadline * 0.8))
        for driver in (one, two):
            await append_all(driver, key, b"next")
        await asyncio.sleep(HELD_S)
        count = (await loaded(two, key)).tail.count(b"waits")
        if gave_up(waiting):
            may_be = int(isinstance(waiting.exception(), OutcomeUnknown))
            assert count <= may_be, "Unavailable says that nothing was done, and no append is done twice"
        else:
            must_be(count, 1, "the append was acknowledged")
            must_be(waiting.result(), 2, "the record had one entry, and no one else wrote meanwhile")

    @check("driver.cancellation")
    async def test_cancelling_a_write_that_waits_leaves_the_others_waiting(self, bench: Bench) -> None:
        """Writes that wait together share a request, and one ends it, or a cancelled one is still done."""
        if bench.datastore.hold is None:
            not_asked("needs `Datastore.hold`")
        one, two = await bench.driver(), await bench.driver()
        drivers = (one, one, one, one, two, two)
        for _ in range(TRIES):
            waited_s = await _others_go_on(bench, drivers)
            if waited_s is None:
                return
            gives_up = waited_s == 0 or not await _all_wait(bench, drivers, waited_s)
            assert gives_up, "a write gave up when another was cancelled; otherwise it waits longer"
        not_asked("needs writes that wait while others are cancelled; these gave up by themselves")


async def _others_go_on(bench: Bench, drivers: Sequence[Driver]) -> float | None:
    """Cancel every other one of the appends that wait for a record, and judge the remaining ones.

    Returns `None` if these are correct, and 0 if too few waited. If some gave up, returns the longest wait of
    one of them in seconds.
    """
    key, waits, clock = bench.key(), dict[bytes, float](), asyncio.get_running_loop().time
    await append_all(drivers[0], key, b"first")

    async def append(driver: Driver, entry: bytes) -> int:
        began = clock()
        try:
            return await driver.append(key, entry, initial_version="initial", ttl=None)
        finally:
            waits[entry] = clock() - began

    entries = [b"%d" % number for number in range(len(drivers))]
    writes = [functools.partial(append, *each) for each in zip(drivers, entries, strict=True)]
    async with waiting_for(bench, key, *writes) as running:
        waiting = [(write, entry) for write, entry in zip(running, entries, strict=True) if not write.done()]
        cancelled, others = [write for write, _ in waiting[::2]], waiting[1::2]
        for write in cancelled:
            write.cancel()
        async with must_end(longest(drivers[0].traits), "these writes were cancelled"):
            await asyncio.gather(*cancelled, return_exceptions=True)
    tail = (await loaded(drivers[0], key)).tail
    assert len(tail) == len(set(tail)), "no entry was appended twice"
    for write, entry in others:
        must_be(write.cancelled(), False, "only other writes were cancelled")
        if not gave_up(write):
            length = write.result()
            must_be(tail[length - 1 : length], (entry,), "this write was not cancelled")
    if not others:
        return 0.0
    return max((waits[entry] for write, entry in others if gave_up(write)), default=None)


async def _all_wait(bench: Bench, drivers: Sequence[Driver], seconds: float) -> bool:
    """Return whether appends wait this long for a record, without giving up, while none of them is cancelled.

    If they give up here, too, the reason is a deadline, a short wait for a lock, or a busy machine.
    """
    key = bench.key()
    await append_all(drivers[0], key, b"first")
    writes = [
        functools.partial(driver.append, key, b"%d" % number, initial_version="initial", ttl=None)
        for number, driver in enumerate(drivers)
    ]
    async with waiting_for(bench, key, *writes) as running:
        waiting = [write for write in running if not write.done()]
        await asyncio.sleep(seconds)
    return bool(waiting) and not any(map(gave_up, waiting))


async def _done(
    bench: Bench, key: Key, writes: Sequence[Callable[[], Awaitable[T]]], *, is_held: bool
) -> list[T] | None:
    """Return the answers of concurrent writes, which all first wait for the check if `is_held`.

    `None` if a write gave up while it waited: then this round is not judged.
    """
    __tracebackhide__ = True
    if is_held:
        return await held_up(bench, key, *writes)
    return await asyncio.gather(*(write() for write in writes))


async def _duel(
    bench: Bench, drivers: Sequence[Driver], key: Key, chance: random.Random, *, within: float, is_held: bool
) -> None:
    """Replace the body of a record and delete it, each if it has its version; exactly one must win.

    Each begins at most some seconds after the other. Each uses its own instance, because a shared one may
    queue them.
    """
    __tracebackhide__ = True
    writer, deleter = chance.sample(drivers, 2)

    async def later(call: Callable[[], Awaitable[bool]], steps: int, seconds: float) -> bool | None:
        await take_steps(steps)
        if seconds > SHORTEST_S:
            await asyncio.sleep(seconds)
        try:
            return await call()
        except (Unavailable, OutcomeUnknown):
            return None

    calls: list[Callable[[], Awaitable[bool]]] = [
        functools.partial(writer.replace, key, b"body", version="v2", expect="initial", ttl=None),
        functools.partial(deleter.delete, key, expect="initial"),
    ]
    if is_held:
        answers: Sequence[bool | None] | None = await held_up(bench, key, *calls)
    else:
        answers = await asyncio.gather(
            *(later(call, chance.randrange(4), chance.uniform(0, within)) for call in calls)
        )
    if answers is not None and None not in answers:
        must_be(answers.count(True), 1, "a write and a delete expect the same version, so only one can win")
        left = Record("v2", b"body", (b"a",)) if answers[0] else None
        must_be(await writer.load(key), left, f"the {'write' if answers[0] else 'delete'} received True")
    await writer.delete(key)


async def _append_three(
    driver: Driver, key: Key, label: int, chance: random.Random
) -> list[tuple[int, bytes]]:
    """Append three entries, each a few steps after the previous one; returns each with its answer."""
    appended: list[tuple[int, bytes]] = []
    for entry in (b"%d:%d" % (label, number) for number in range(3)):
        await take_steps(chance.randrange(3))
        length = await driver.append(key, entry, initial_version=new_version(), ttl=None)
        appended.append((length, entry))
    return appended


async def _watch(driver: Driver, key: Key, writing: asyncio.Future[Any]) -> None:
    """Load while others append; fail if the tail changes except at its end."""
    seen: tuple[bytes, ...] = ()
    while not writing.done():
        tail = (await loaded(driver, key)).tail
        must_be(tail[: len(seen)], seen, "entries that a load has seen stay in place; new ones follow")
        seen = tail
        await asyncio.sleep(0)

"""Checks of writers that wait for each other, or for a lock that the check holds."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stm_backends.drivers.contract import ABSENT, Driver, Key, Record, new_version
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing.driver_checks.steps import (
    HELD_S,
    T,
    append_all,
    assert_located,
    held_up,
    loaded,
    longest,
    rounds,
    waiting_for,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_end, must_raise


class Waiting(Contract):
    """Checks of writers that wait for each other, or for a lock that the check holds."""

    @check("driver.expiry")
    async def test_a_write_that_had_to_wait_does_not_bring_back_what_has_expired(self, bench: Bench) -> None:
        """Expiry is judged before the wait for a lock, and not once the record is locked."""
        if bench.datastore.hold is None:
            not_asked("needs `Datastore.hold`")
        one, two, reader, key = await bench.driver(), await bench.driver(), await bench.driver(), bench.key()
        await one.replace(key, b"old body", version="old", expect=ABSENT, ttl=bench.tick * 2)
        await two.append(key, b"old entry", initial_version="older", ttl=bench.tick)

        async def expire() -> None:
            await bench.pass_time(bench.tick * 1.1)
            must_be(await reader.load(key), None, "the record has expired while writers wait for it")

        length, folded = await held_up(
            bench,
            key,
            lambda: one.append(key, b"new", initial_version="recreated", ttl=None),
            lambda: two.replace(key, b"late", version="late", expect="old", drop=1, ttl=None),
            meanwhile=expire,
        )
        must_be(folded, False, "the record that was to be folded had expired, and a load has said so")
        must_be(length, 1, "the tail ended with the expired record")
        must_be(await reader.load(key), Record("recreated", None, (b"new",)), "the record is a new one")

    @check("driver.races")
    async def test_of_writers_that_wait_for_a_record_exactly_one_wins(self, bench: Bench) -> None:
        """The version is compared before the record is locked, and not in the statement that writes it."""
        drivers, scope = [await bench.driver() for _ in range(4)], bench.scope()
        for number, is_held in enumerate(rounds(bench)):
            key = Key(scope, f"record{number}")
            await append_all(drivers[0], key, b"a", b"b")
            writes: list[Callable[[], Awaitable[bool | int]]] = [
                functools.partial(
                    driver.replace, key, b"%d" % n, version=f"v{n}", expect="initial", drop=1, ttl=None
                )
                for n, driver in enumerate(drivers)
            ]
            append = functools.partial(drivers[0].append, key, b"c", initial_version="late", ttl=None)
            *answers, _ = await _done(bench, key, [*writes, append], is_held=is_held)
            must_be(sum(answers), 1, "all writers expected the same version, so only one can win")
            winner = answers.index(True)
            record = Record(f"v{winner}", b"%d" % winner, (b"b", b"c"))
            must_be(
                await drivers[1].load(key), record, "this writer received True, and an entry was appended"
            )
            await drivers[0].delete(key)

    @check("driver.races")
    async def test_no_entry_appears_before_one_that_a_load_has_seen(self, bench: Bench) -> None:
        """The number of an entry is drawn before the record is locked, or sorts otherwise than by arrival."""
        drivers, scope = [await bench.driver() for _ in range(4)], bench.scope()
        reader = await bench.driver()
        for number, is_held in enumerate(rounds(bench)):
            key = Key(scope, f"record{number}")
            await append_all(drivers[0], key, b"first")
            writes = [functools.partial(_append_three, driver, key, n) for n, driver in enumerate(drivers)]
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(_done(bench, key, writes, is_held=is_held))
                tasks.create_task(_watch(reader, key, writing))
            tail = (await loaded(reader, key)).tail
            for length, entry in itertools.chain(*writing.result()):
                must_be(tail[length - 1 : length], (entry,), "an append answers the place of its entry")
            must_be(len(tail), 13, "four writers appended three entries each, after the first")
            await drivers[0].delete(key)

    @check("driver.outage")
    async def test_a_write_that_waits_past_its_deadline_raises_and_is_not_done_later(
        self, bench: Bench
    ) -> None:
        """A wait for a lock has no deadline, or the write is given up and its request still waits."""
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
        record = await loaded(one, key)
        not_done = (b"late" not in record.tail, record.version == "initial", b"b" in record.tail)
        for operation, error, is_not_done in zip(writes, errors, not_done, strict=True):
            with must_raise((Unavailable, OutcomeUnknown), f"the {operation} waited to its end") as caught:
                if isinstance(error, BaseException):
                    raise error
            assert_located(caught.value, one, operation, key)
            assert is_not_done or isinstance(error, OutcomeUnknown), "Unavailable says that nothing was done"

    @check("driver.cancellation")
    async def test_cancelling_a_write_that_waits_leaves_the_others_waiting(self, bench: Bench) -> None:
        """Writes that wait together share a request, and one of them ends it; or one is done all the same."""
        if bench.datastore.hold is None:
            not_asked("needs `Datastore.hold`")
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await append_all(one, key, b"first")
        entries = [b"%d" % number for number in range(6)]
        writes = [
            functools.partial(driver.append, key, entry, initial_version="initial", ttl=None)
            for driver, entry in zip((one, one, one, one, two, two), entries, strict=True)
        ]
        began = time.monotonic()
        async with waiting_for(bench, key, *writes) as waiting:
            for write in waiting[::2]:
                write.cancel()
            async with must_end(longest(one.traits), "the callers of these writes have gone"):
                await asyncio.gather(*waiting[::2], return_exceptions=True)
        # On a busy machine the others may have waited for as long as the driver lets a write wait.
        is_late = time.monotonic() - began > one.traits.deadline
        tail = (await loaded(one, key)).tail
        assert len(tail) == len(set(tail)), "no entry was appended twice"
        for write, entry in zip(waiting[1::2], entries[1::2], strict=True):
            must_be(write.cancelled(), False, "only the writes beside it were cancelled")
            if is_late and isinstance(write.exception(), (Unavailable, OutcomeUnknown)):
                continue
            length = write.result()
            must_be(tail[length - 1 : length], (entry,), "this write was not cancelled")


async def _done(
    bench: Bench, key: Key, writes: Sequence[Callable[[], Awaitable[T]]], *, is_held: bool
) -> list[T]:
    """Return the answers of concurrent writes, which all wait for the check first if `is_held`."""
    if is_held:
        return await held_up(bench, key, *writes)
    return await asyncio.gather(*(write() for write in writes))


async def _append_three(driver: Driver, key: Key, label: int) -> list[tuple[int, bytes]]:
    """Append three entries; returns each with the answer."""
    entries = [b"%d:%d" % (label, number) for number in range(3)]
    return [
        (await driver.append(key, entry, initial_version=new_version(), ttl=None), entry) for entry in entries
    ]


async def _watch(driver: Driver, key: Key, writing: asyncio.Future[Any]) -> None:
    """Load while others append; fail if the tail changes anywhere but at its end."""
    seen: tuple[bytes, ...] = ()
    while not writing.done():
        tail = (await loaded(driver, key)).tail
        must_be(tail[: len(seen)], seen, "what a load has seen stays where it is, and what is new follows it")
        seen = tail
        await asyncio.sleep(0)

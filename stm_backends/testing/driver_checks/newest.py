"""Checks of loads that request only the newest entries."""

from __future__ import annotations

import asyncio
from typing import Final

from stm_backends.drivers.contract import NO_LIMIT, Driver, Key, Record
from stm_backends.drivers.wrapper import with_last
from stm_backends.testing.driver_checks.numbered import watch_numbers, write_numbers
from stm_backends.testing.driver_checks.races import LARGE_ENTRY, LARGE_RECORD
from stm_backends.testing.driver_checks.snapshots import QUICK_WRITING_S, WRITING_S
from stm_backends.testing.driver_checks.steps import append_all, expired, loaded, noise
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_raise

_LARGE: Final = (10, 3_000, 100, 9_000, 0, 2_000, 5_000, 1, 4_000, 20)
"""Small and large entries, which some drivers store differently."""

_SMALL: Final = 120
"""Number of small entries that follow; some drivers store many of them together."""


class Newest(Contract):
    """Checks of loads that request only the newest entries."""

    @check("driver.last")
    async def test_a_load_of_the_newest_entries_has_these_in_order(self, bench: Bench) -> None:
        """They are counted from the wrong end, are one too many, or come newest first."""
        driver, key = await _asked(bench), bench.key()
        tail = tuple(b"entry %d" % number for number in range(5))
        await append_all(driver, key, *tail)
        for last in (1, 2, 4):
            await _must_have(driver, key, last, Record("initial", None, tail))

    @check("driver.last")
    async def test_a_load_of_more_entries_than_there_are_has_all(self, bench: Bench) -> None:
        """The index of the first entry is negative, and counts from the end."""
        driver, key = await _asked(bench), bench.key()
        for length in (1, 2, 3):
            await append_all(driver, key, b"%d" % length)
            whole = await loaded(driver, key)
            for last in (length, length + 1, 2 * length, 1_000, NO_LIMIT):
                await _must_have(driver, key, last, whole)

    @check("driver.last")
    async def test_a_load_of_no_entries_has_the_body_alone(self, bench: Bench) -> None:
        """The body comes with the first entry, or 0 means that there is no limit."""
        driver, key, empty = await _asked(bench), bench.key(), bench.key()
        await append_all(driver, key, b"a", b"b", b"c")
        await _must_have(driver, key, 0, Record("initial", None, (b"a", b"b", b"c")))
        await driver.replace(key, b"body", version="v2", expect="initial", drop=1, ttl=None)
        for last in (0, 1):
            await _must_have(driver, key, last, Record("v2", b"body", (b"b", b"c")))
        must_be(await driver.load(empty, last=0), None, "nothing was ever stored under this key")
        await append_all(driver, empty, b"a")
        await driver.replace(empty, b"", version="v1", expect="initial", drop=1, ttl=None)
        for last in (0, 1):
            await _must_have(driver, empty, last, Record("v1", b"", ()))

    @check("driver.last")
    async def test_the_newest_entries_may_be_many_and_of_any_size(self, bench: Bench) -> None:
        """Entries stored separately, or many together, are left out, counted once, or not cut."""
        driver, other, key = await _asked(bench), await bench.driver(), bench.key()
        sizes = [min(size, driver.traits.max_entry) for size in _LARGE]
        tail = [noise(size) for size in sizes]
        await append_all(driver, key, *tail)
        await driver.replace(key, noise(3_000), version="v2", expect="initial", ttl=None)
        for last in (1, 2, 7, 9):
            await _must_have(other, key, last, Record("v2", noise(3_000), tuple(tail)))
        tail += [b"small entry number %d" % number for number in range(_SMALL)]
        await append_all(driver, key, *tail[len(sizes) :])
        # In the middle of the entries that may be stored together.
        drop = min(len(sizes) + 7, driver.traits.max_drop)
        await driver.replace(key, b"body", version="v3", expect="v2", drop=drop, ttl=None)
        for reader in (driver, other):
            for last in (0, 1, 20, 100, _SMALL - 7):
                await _must_have(reader, key, last, Record("v3", b"body", tuple(tail[drop:])))

    @check("driver.last")
    async def test_loads_at_once_have_as_many_entries_as_each_asked_for(self, bench: Bench) -> None:
        """Loads of a record share an answer, even if they requested different numbers of entries."""
        driver, keys = await _asked(bench), (bench.key(), bench.key())
        for key in keys:
            await append_all(driver, key, b"a", b"b", b"c")
        asked = [(key, last) for last in (None, 1, 0, 2, None, 1) for key in keys]
        found = await asyncio.gather(*(driver.load(key, last=last) for key, last in asked))
        for (_, last), record in zip(asked, found, strict=True):
            skipped = 0 if last is None else 3 - last
            expected = Record("initial", None, (b"a", b"b", b"c")[skipped:], skipped)
            must_be(record, expected, f"this load was called with last={last}")

    @check("driver.last")
    async def test_newest_entries_of_any_size_loaded_at_once_are_whole(self, bench: Bench) -> None:
        """Large records are left out of a request shared by loads, and are then not loaded."""
        writer, driver, scope = await bench.driver(), await _asked(bench), bench.scope()
        # A record holds at least two entries of half the largest one.
        size = min(LARGE_ENTRY, writer.traits.max_entry) // 2
        count = min(LARGE_RECORD, writer.traits.max_record) // size - 1
        large, small = noise(size), b"small"
        tails = (
            [small] * 3,
            [large] * count,
            [large] * (count - 1) + [small],
            [small] + [large] * (count - 1),
        )
        keys = [Key(scope, f"record {number}") for number in range(len(tails))]
        for key, tail in zip(keys, tails, strict=True):
            await append_all(writer, key, *tail)
        asked = [(key, tail, last) for last in (1, 2, count) for key, tail in zip(keys, tails, strict=True)]
        # A driver may remember which records are large.
        for attempt in ("the first", "the second"):
            found = await asyncio.gather(*(driver.load(key, last=last) for key, _, last in asked))
            whole = [
                record == Record("initial", None, tuple(tail)).newest(last)
                for record, (_, tail, last) in zip(found, asked, strict=True)
            ]
            must_be(
                whole, [True] * len(asked), f"{attempt} loads at once find the newest as they were stored"
            )

    @check("driver.last")
    async def test_a_load_of_the_newest_entries_is_a_snapshot(self, bench: Bench) -> None:
        """The length is read first, and the entries afterwards."""
        reader, writer, key = await _asked(bench), await bench.driver(), bench.key()
        seconds = QUICK_WRITING_S if bench.quick else WRITING_S
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(write_numbers(writer, key, seconds=seconds))
            await watch_numbers(reader, key, writing, last=2)

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_a_load_of_the_newest(self, bench: Bench) -> None:
        driver, key = await _asked(bench), await expired(bench)
        for last in (0, 1):
            must_be(await driver.load(key, last=last), None, "the record has expired")

    @check("driver.arguments")
    async def test_a_load_of_a_negative_number_of_entries_is_refused(self, bench: Bench) -> None:
        """The number is checked along with the entries, and so not for a record without any."""
        driver, key = await _asked(bench), bench.key()
        with must_raise(ValueError, "last=-1 is invalid, even without a record"):
            await driver.load(key, last=-1)
        await append_all(driver, key, b"a", b"b")
        with must_raise(ValueError, "last=-1 is invalid"):
            await driver.load(key, last=-1)


async def _asked(bench: Bench) -> Driver:
    """Return a driver whose `load` has the parameter `last`; otherwise skip the check."""
    driver = await bench.driver()
    if with_last(driver) is not driver:
        not_asked("its `load` has no parameter `last`, so whole records are loaded instead")
    return driver


async def _must_have(driver: Driver, key: Key, last: int, whole: Record) -> None:
    """Fail unless a load with `last` has that part of the whole record."""
    __tracebackhide__ = True
    skipped = max(0, len(whole.tail) - last)
    expected = Record(whole.version, whole.body, whole.tail[skipped:], skipped)
    must_be(await driver.load(key, last=last), expected, f"this is the newest {last} of them")

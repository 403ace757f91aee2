"""Checks of sizes and of invalid arguments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stm_backends.drivers.contract import ABSENT, ANY, Record
from stm_backends.errors import TooLarge
from stm_backends.testing.driver_checks.steps import append_all, full_of_largest, loaded, noise
from stm_backends.testing.workbench.check import Contract, check, not_asked, would_write
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_raise

LARGEST_RECORD = 256 * 1024 * 1024
"""Maximum number of bytes with which a check fills a record."""

LARGEST_QUICK_RECORD = 1024 * 1024
"""The same in a quick run."""

NOT_STATED = "the traits do not say how many of the largest entries fill a record"

SMALL, SMALLS = 300, 40
"""The size of small entries, and the number of them that fill the end of a record."""


class Limits(Contract):
    """Checks of sizes and of invalid arguments."""

    @check("driver.limits")
    async def test_the_largest_entry_fits_and_one_byte_more_is_too_large(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        largest = noise(driver.traits.max_entry)
        length = await driver.append(key, largest, initial_version="initial", ttl=None)
        must_be(length, 1, "an entry of `max_entry` bytes fits")
        with must_raise(TooLarge, "the entry is one byte longer than `max_entry`") as caught:
            await driver.append(key, largest + b"x", initial_version="initial", ttl=None)
        must_be(caught.value.what, "entry", "the entry alone exceeds its limit")
        record = await loaded(driver, key)
        must_be(record.tail, (largest,), "no part of a refused entry is written")

    @check("driver.limits")
    async def test_the_largest_body_fits_and_one_byte_more_is_too_large(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        largest = noise(driver.traits.max_entry)
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        with must_raise(TooLarge, "the body is one byte longer than `max_entry`") as caught:
            await driver.replace(key, largest + b"x", version="v2", expect="initial", drop=1, ttl=None)
        must_be(caught.value.what, "entry", "the body alone exceeds its limit")
        must_be(await driver.load(key), Record("initial", None, (b"a",)), "a refused write changes nothing")
        done = await driver.replace(key, largest, version="v2", expect="initial", drop=1, ttl=None)
        must_be(done, True, "a body of `max_entry` bytes fits")
        must_be(await driver.load(key), Record("v2", largest, ()), "a body of `max_entry` bytes fits")

    @check("driver.limits", slow=True)
    async def test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room(
        self, bench: Bench
    ) -> None:
        driver, key = await bench.driver(), bench.key()
        count = full_of_largest(driver.traits) or not_asked(NOT_STATED)
        if (size := count * driver.traits.max_entry) > LARGEST_RECORD:
            not_asked(would_write(size))
        entry = noise(driver.traits.max_entry)
        await append_all(driver, key, *[entry] * count)
        with must_raise(TooLarge, "the record would hold more than `max_record` bytes") as caught:
            await driver.append(key, entry, initial_version="initial", ttl=None)
        must_be(caught.value.what, "record", "the entry would fit in a smaller record")
        must_be((await loaded(driver, key)).tail, (entry,) * count, "a refused append changes nothing")
        with must_raise(TooLarge, "the record would hold more than `max_record` bytes") as caught:
            await driver.replace(key, entry, version="v2", expect="initial", ttl=None)
        must_be(caught.value.what, "record", "the body would fit in a smaller record")
        must_be((await loaded(driver, key)).version, "initial", "a refused replace changes nothing")
        done = await driver.replace(key, b"body", version="v2", expect="initial", drop=count, ttl=None)
        must_be(done, True, "a fold of the whole tail makes room")
        length = await driver.append(key, entry[:-4], initial_version="initial", ttl=None)
        must_be(length, 1, "the fold has made room")

    @check("driver.limits")
    async def test_a_record_is_full_with_exactly_max_record_bytes(self, bench: Bench) -> None:
        """Some bytes are not counted, such as the body or small entries, or a replace is not checked."""
        driver, key = await bench.driver(), bench.key()
        limit, overhead = driver.traits.max_record, driver.traits.overhead
        # The largest value that takes room in the record itself; a larger one takes less.
        longest = min(driver.traits.max_entry, driver.traits.max_inline)
        if longest == 0:
            not_asked("no value takes room in the record itself")
        largest = LARGEST_QUICK_RECORD if bench.quick else LARGEST_RECORD
        if limit > largest:
            not_asked(would_write(limit))
        entry, small = noise(longest), min(SMALL, longest)
        room, sizes = limit, list[int]()
        while room > overhead:
            # Many small entries at the end, because a driver may store those elsewhere than large ones.
            most = room - overhead
            few = most <= SMALLS * (small + overhead)
            sizes.append(min(most, small if few else min(len(entry), most - SMALLS * (small + overhead))))
            room -= sizes[-1] + overhead
        tail = [entry[:size] for size in sizes]
        await append_all(driver, key, *tail)
        must_be(await driver.load(key), Record("initial", None, tuple(tail)), "all of them fit")
        done = await driver.replace(key, tail[0], version="v2", expect="initial", drop=1, ttl=None)
        must_be(done, True, "the body takes the room of the entry that goes")
        must_be(await driver.load(key), Record("v2", tail[0], (*tail[1:],)), "it is as full as before")
        done = await driver.replace(key, tail[0], version="v3", expect="v2", ttl=None)
        must_be(done, True, "a body takes the room of the body before it")
        done = await driver.replace(key, b"", version="v4", expect="v3", ttl=None)
        must_be(done, True, "an empty body makes room")
        # An overhead is the most that a value takes, so the driver may take more entries than it must.
        tail, left = tail[1:], limit - sum(sizes[1:])
        with must_raise(TooLarge, "the values are one byte more than `max_record`") as caught:
            while left >= 0:
                more = entry[: left + 1]
                await driver.append(key, more, initial_version="initial", ttl=None)
                tail.append(more)
                left -= len(more)
        must_be(caught.value.what, "record", "the entry would fit in a smaller record")
        if tail and left < len(entry):
            with must_raise(TooLarge, "the values are one byte more than `max_record`") as caught:
                await driver.replace(key, entry[: left + 1], version="v5", expect="v4", ttl=None)
            must_be(caught.value.what, "record", "the body would fit in a smaller record")
            # One entry grows as far as possible, and the body has the rest.
            *same, last = tail[: driver.traits.max_drop]
            grown = entry[: len(last) + left + 1]
            body, rewrite = entry[: len(last) + left + 1 - len(grown)], (*same, grown)
            with must_raise(TooLarge, "an entry grows, and the record is full") as caught:
                await driver.replace(key, body, version="v5", expect="v4", rewrite=rewrite, ttl=None)
            must_be(caught.value.what, "record", "each value would fit in a smaller record")
        must_be(await driver.load(key), Record("v4", b"", (*tail,)), "refused writes change nothing")

    @check("driver.arguments")
    async def test_invalid_arguments_raise_value_error_and_write_nothing(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "a time to live of 0 s": lambda: driver.append(key, b"a", initial_version="initial", ttl=0),
            "a time to live of -1 s": lambda: driver.append(key, b"a", initial_version="initial", ttl=-1.0),
            "a time to live of NaN s": lambda: driver.append(
                key, b"a", initial_version="initial", ttl=float("nan")
            ),
            "a body's time to live of 0 s": lambda: driver.replace(key, b"a", version="v", expect=ANY, ttl=0),
            "a drop with ANY": lambda: driver.replace(key, b"a", version="v", expect=ANY, drop=1, ttl=None),
            "a drop with ABSENT": lambda: driver.replace(
                key, b"a", version="v", expect=ABSENT, drop=1, ttl=None
            ),
            "a drop of -1": lambda: driver.replace(key, b"a", version="v", expect="u", drop=-1, ttl=None),
            "a rewrite with ANY": lambda: driver.replace(
                key, b"a", version="v", expect=ANY, rewrite=(b"a",), ttl=None
            ),
            "a rewrite with ABSENT": lambda: driver.replace(
                key, b"a", version="v", expect=ABSENT, rewrite=(b"a",), ttl=None
            ),
            "a rewrite with a drop": lambda: driver.replace(
                key, b"a", version="v", expect="u", drop=1, rewrite=(b"a",), ttl=None
            ),
            "a page of 0 names": lambda: driver.scan(key.scope, limit=0),
        }
        for what, call in calls.items():
            with must_raise(ValueError, f"{what} is invalid"):
                await call()
        must_be(await driver.load(key), None, "invalid arguments write nothing")

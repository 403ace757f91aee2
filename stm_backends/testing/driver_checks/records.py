"""Checks of loads and appends."""

from __future__ import annotations

from stm_backends.drivers.contract import Record
from stm_backends.testing.driver_checks.steps import loaded
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be


class Records(Contract):
    """Checks of loads and appends."""

    @check("driver.load")
    async def test_a_record_that_is_not_there_is_none(self, bench: Bench) -> None:
        driver = await bench.driver()
        must_be(await driver.load(bench.key()), None, "nothing was ever stored under this key")

    @check("driver.append")
    async def test_an_append_creates_a_record_with_the_initial_version_and_no_body(
        self, bench: Bench
    ) -> None:
        driver, key = await bench.driver(), bench.key()
        must_be(
            await driver.append(key, b"one", initial_version="initial", ttl=None), 1, "the tail has one entry"
        )
        must_be(await driver.load(key), Record("initial", None, (b"one",)), "the append created the record")

    @check("driver.append")
    async def test_an_append_adds_at_the_end_and_returns_the_length_of_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        lengths = [
            await driver.append(key, b"%d" % n, initial_version="initial", ttl=None) for n in range(12)
        ]
        must_be(lengths, list(range(1, 13)), "an append returns the new length of the tail")
        record = await loaded(driver, key)
        must_be(record.tail, tuple(b"%d" % n for n in range(12)), "an entry is added at the end")

    @check("driver.append")
    async def test_an_append_does_not_change_the_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", initial_version="initial", ttl=None)
        await driver.append(key, b"two", initial_version="other", ttl=None)
        must_be((await loaded(driver, key)).version, "initial", "the record existed before the second append")
        await driver.replace(key, b"body", version="second", expect="initial", ttl=None)
        await driver.append(key, b"three", initial_version="third", ttl=None)
        record = Record("second", b"body", (b"one", b"two", b"three"))
        must_be(await driver.load(key), record, "an append does not change version and body")

    @check("driver.append")
    async def test_the_same_entry_appended_twice_is_stored_twice(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for length in (1, 2):
            found = await driver.append(key, b"same", initial_version="initial", ttl=None)
            must_be(found, length, "a tail is a list, not a set")
        must_be((await loaded(driver, key)).tail, (b"same", b"same"), "a tail is a list, not a set")

    @check("driver.load")
    async def test_instances_on_one_datastore_see_each_others_writes_at_once(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        for number in range(10):
            writer, reader = (one, two) if number % 2 else (two, one)
            length = await writer.append(key, b"%d" % number, initial_version="initial", ttl=None)
            must_be(length, number + 1, "the instances take turns appending to one tail")
            entries = tuple(b"%d" % n for n in range(number + 1))
            must_be((await loaded(reader, key)).tail, entries, "the other instance was acknowledged the last")

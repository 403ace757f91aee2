"""Checks of what a load and an append do."""

from __future__ import annotations

from stm_backends.driver import Record
from stm_backends.testing.bench import Bench
from stm_backends.testing.contract import Contract, check
from stm_backends.testing.driver_checks.steps import loaded


class Records(Contract):
    """Checks of what a load and an append do."""

    @check("driver.load")
    async def test_a_record_that_is_not_there_is_none(self, bench: Bench) -> None:
        driver = await bench.driver()
        assert await driver.load(bench.key()) is None

    @check("driver.append")
    async def test_an_append_creates_a_record_with_its_birth_and_no_body(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.append(key, b"one", birth="birth", ttl=None) == 1
        assert await driver.load(key) == Record("birth", None, (b"one",))

    @check("driver.append")
    async def test_an_append_adds_at_the_end_and_returns_the_length_of_the_tail(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        lengths = [await driver.append(key, b"%d" % n, birth="birth", ttl=None) for n in range(12)]
        assert lengths == list(range(1, 13))
        record = await loaded(driver, key)
        assert record.tail == tuple(b"%d" % n for n in range(12))

    @check("driver.append")
    async def test_an_append_does_not_change_the_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"one", birth="birth", ttl=None)
        await driver.append(key, b"two", birth="other", ttl=None)
        assert (await loaded(driver, key)).version == "birth"
        await driver.replace(key, b"body", version="second", expect="birth", ttl=None)
        await driver.append(key, b"three", birth="third", ttl=None)
        assert await driver.load(key) == Record("second", b"body", (b"one", b"two", b"three"))

    @check("driver.append")
    async def test_the_same_entry_twice_stands_there_twice(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.append(key, b"same", birth="birth", ttl=None) == 1
        assert await driver.append(key, b"same", birth="birth", ttl=None) == 2
        assert (await loaded(driver, key)).tail == (b"same", b"same")

    @check("driver.load")
    async def test_instances_on_one_datastore_see_each_others_writes_at_once(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        for number in range(10):
            writer, reader = (one, two) if number % 2 else (two, one)
            assert await writer.append(key, b"%d" % number, birth="birth", ttl=None) == number + 1
            assert len((await loaded(reader, key)).tail) == number + 1

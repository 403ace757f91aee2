"""Checks of operations that are cancelled, and of drivers that are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stm_backends.driver import ANY, KEEP, Record, new_version
from stm_backends.errors import StmError, Unavailable
from stm_backends.testing.bench import Bench
from stm_backends.testing.contract import Contract, check
from stm_backends.testing.driver_checks.steps import append_all, cancelled_after, loaded


class Interruptions(Contract):
    """Checks of operations that are cancelled, and of drivers that are closed."""

    @check("driver.cancellation")
    async def test_a_cancelled_append_is_wholly_there_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        acknowledged: list[bytes] = []
        for steps in range(24):
            entry = b"%d" % steps
            if await cancelled_after(steps, driver.append(key, entry, birth="birth", ttl=None)):
                acknowledged.append(entry)
        await driver.append(key, b"end", birth="birth", ttl=None)
        tail = (await loaded(driver, key)).tail
        assert len(tail) == len(set(tail))
        assert list(tail) == [*sorted(tail[:-1], key=int), b"end"]
        assert set(acknowledged) <= set(tail)

    @check("driver.cancellation")
    async def test_a_cancelled_fold_is_wholly_there_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for steps in range(24):
            await append_all(driver, key, b"a", b"b")
            write = driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=KEEP)
            done = await cancelled_after(steps, write)
            await driver.append(key, b"c", birth="birth", ttl=None)
            after = Record("v2", b"a", (b"b", b"c"))
            before = Record("birth", None, (b"a", b"b", b"c"))
            assert await driver.load(key) in ((after,) if done else (before, after)), f"{steps} steps in"
            await driver.delete(key)

    @check("driver.cancellation")
    async def test_a_cancelled_read_leaves_the_driver_usable(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        for steps in range(24):
            await cancelled_after(steps, driver.load(key))
            await cancelled_after(steps, driver.scan(key.scope, limit=1))
            await cancelled_after(steps, driver.delete(key, expect="other"))
            assert await driver.load(key) == Record("birth", None, (b"a",))

    @check("driver.outage")
    async def test_a_closed_driver_raises_and_never_answers(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        await driver.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.load(key),
            lambda: driver.append(key, b"b", birth="birth", ttl=None),
            lambda: driver.replace(key, b"b", version="v", expect=ANY, ttl=None),
            lambda: driver.delete(key),
            lambda: driver.scan(key.scope, limit=1),
        ]
        for call, operation in zip(calls, ("load", "append", "replace", "delete", "scan"), strict=True):
            with pytest.raises(Unavailable) as caught:
                await call()
            assert (caught.value.backend, caught.value.operation) == (driver.name, operation)
            assert key.scope not in str(caught.value), "an error names a conversation"
        other = await bench.driver()
        assert await other.load(key) == Record("birth", None, (b"a",))

    @check("driver.lifecycle")
    async def test_opening_and_closing_twice_is_harmless(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        await driver.open()
        assert (await loaded(driver, key)).tail == (b"a",)
        await driver.close()
        await driver.close()

    @check("driver.lifecycle")
    async def test_closing_one_instance_leaves_the_others_and_the_data(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await one.append(key, b"a", birth="birth", ttl=None)
        await one.close()
        assert (await loaded(two, key)).tail == (b"a",)

    @check("driver.lifecycle")
    async def test_closing_while_operations_run_ends_each_of_them_one_way_or_the_other(
        self, bench: Bench
    ) -> None:
        driver, other, key = await bench.driver(), await bench.driver(), bench.key()
        appends = [
            asyncio.ensure_future(driver.append(key, b"%d" % n, birth=new_version(), ttl=None))
            for n in range(20)
        ]
        await asyncio.sleep(0)
        await driver.close()
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert all(isinstance(outcome, (int, StmError)) for outcome in outcomes)
        done = {b"%d" % n for n, outcome in enumerate(outcomes) if isinstance(outcome, int)}
        not_done = {b"%d" % n for n, outcome in enumerate(outcomes) if isinstance(outcome, Unavailable)}
        record = await other.load(key)
        there = set(record.tail if record else ())
        assert done <= there
        assert not not_done & there, "Unavailable says that nothing was done"

    @check("driver.traits")
    async def test_the_traits_are_facts_that_make_sense(self, bench: Bench) -> None:
        driver = await bench.driver()
        traits = driver.traits
        assert driver.name
        assert traits.durability
        assert 0 < traits.max_entry <= traits.max_record
        assert traits.max_drop > 0
        assert traits.min_ttl > 0
        assert traits.deadline > 0

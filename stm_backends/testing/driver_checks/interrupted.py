"""Checks of operations that are cancelled, and of drivers that are closed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from stm_backends.drivers.contract import ANY, KEEP, Key, Record, new_version
from stm_backends.errors import StorageError, Unavailable
from stm_backends.testing.driver_checks.steps import (
    HELD_S,
    append_all,
    assert_located,
    cancelled_after,
    end,
    loaded,
    longest,
    waiting_for,
)
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import OPERATIONS, Bench
from stm_backends.testing.workbench.expectations import must_be, must_end, must_raise


class Interruptions(Contract):
    """Checks of operations that are cancelled, and of drivers that are closed."""

    @check("driver.cancellation")
    async def test_a_cancelled_append_is_applied_completely_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        acknowledged: list[bytes] = []
        for steps in range(24):
            entry = b"%d" % steps
            if await cancelled_after(steps, driver.append(key, entry, initial_version="initial", ttl=None)):
                acknowledged.append(entry)
        await driver.append(key, b"end", initial_version="initial", ttl=None)
        acknowledged.append(b"end")
        tail = (await loaded(driver, key)).tail
        assert len(tail) == len(set(tail)), "an append that was cancelled must not be done twice"
        # An append cancelled after it was sent may arrive late, so it may stand anywhere.
        found = [entry for entry in tail if entry in acknowledged]
        must_be(found, acknowledged, "acknowledged entries are there, in the order of the calls")

    @check("driver.cancellation")
    async def test_a_cancelled_fold_is_applied_completely_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for steps in range(24):
            await append_all(driver, key, b"a", b"b")
            write = driver.replace(key, b"a", version="v2", expect="initial", drop=1, ttl=KEEP)
            done = await cancelled_after(steps, write)
            await driver.append(key, b"c", initial_version="initial", ttl=None)
            after = Record("v2", b"a", (b"b", b"c"))
            before = Record("initial", None, (b"a", b"b", b"c"))
            found = await driver.load(key)
            if done:
                must_be(found, after, "the fold was acknowledged before it could be cancelled")
            assert found in (before, after), f"a fold cancelled {steps} steps in must be done or not be done"
            await driver.delete(key)

    @check("driver.cancellation")
    async def test_a_cancelled_read_leaves_the_driver_usable(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        for steps in range(24):
            await cancelled_after(steps, driver.load(key))
            await cancelled_after(steps, driver.scan(key.scope, limit=1))
            await cancelled_after(steps, driver.delete(key, expect="other"))
            record = Record("initial", None, (b"a",))
            must_be(await driver.load(key), record, "cancelled reads change nothing and break nothing")

    @check("driver.outage")
    async def test_a_closed_driver_raises_and_never_answers(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        await driver.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.load(key),
            lambda: driver.append(key, b"b", initial_version="initial", ttl=None),
            lambda: driver.replace(key, b"b", version="v", expect=ANY, ttl=None),
            lambda: driver.delete(key),
            lambda: driver.scan(key.scope, limit=1),
        ]
        for call, operation in zip(calls, OPERATIONS, strict=True):
            with must_raise(Unavailable, f"a closed driver can do no {operation}") as caught:
                await call()
            assert_located(caught.value, driver, operation, key)
        other = await bench.driver()
        must_be(await other.load(key), Record("initial", None, (b"a",)), "a closed driver does nothing")

    @check("driver.lifecycle")
    async def test_opening_and_closing_twice_is_harmless(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        await driver.open()
        must_be((await loaded(driver, key)).tail, (b"a",), "opening a driver that is open changes nothing")
        await driver.close()
        await driver.close()

    @check("driver.lifecycle")
    async def test_an_opening_that_is_cancelled_does_not_close_what_another_opens(self, bench: Bench) -> None:
        key = bench.key()
        for steps in (1, 2, 4, 8):
            driver = await bench.driver()
            await driver.close()
            opening = asyncio.ensure_future(driver.open())
            await asyncio.sleep(0)
            await cancelled_after(steps, driver.open())
            await opening
            await driver.append(key, b"a", initial_version="initial", ttl=None)
            await driver.close()
        must_be(
            (await loaded(await bench.driver(), key)).tail,
            (b"a",) * 4,
            "a driver whose opening has returned is open, even if another opening was cancelled",
        )

    @check("driver.lifecycle")
    async def test_a_driver_that_is_opened_while_it_closes_is_open(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        closing = asyncio.ensure_future(driver.close())
        await asyncio.sleep(0)
        await driver.open()
        await closing
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        must_be((await loaded(driver, key)).tail, (b"a",), "it was opened after it was closed")

    @check("driver.lifecycle")
    async def test_closing_one_instance_leaves_the_others_and_the_data(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await one.append(key, b"a", initial_version="initial", ttl=None)
        await one.close()
        must_be((await loaded(two, key)).tail, (b"a",), "only the other instance was closed")

    @check("driver.lifecycle")
    async def test_closing_ends_each_running_operation_with_a_result_or_an_error(self, bench: Bench) -> None:
        """Writes that are queued or wait for a lock are forgotten, or are done after the close."""
        other, scope = await bench.driver(), bench.scope()
        for is_held in {False, bench.datastore.hold is not None}:
            driver, key = await bench.driver(), Key(scope, f"held {is_held}")
            appends = [
                functools.partial(driver.append, key, b"%d" % n, initial_version=new_version(), ttl=None)
                for n in range(20)
            ]
            await append_all(other, key, b"first")
            async with AsyncExitStack() as leaving:
                if is_held:
                    async with waiting_for(bench, key, *appends) as running:
                        closing = asyncio.ensure_future(driver.close())
                        # Also if a write does not end although nothing holds it up any more.
                        leaving.push_async_callback(end, closing)
                        await asyncio.sleep(HELD_S)
                else:
                    running = [asyncio.ensure_future(append()) for append in appends]
                    await asyncio.sleep(0)
                    closing = asyncio.ensure_future(driver.close())
                    leaving.push_async_callback(end, closing, *running)
                async with must_end(longest(driver.traits), "nothing holds up the close any more"):
                    await closing
                    outcomes = await asyncio.gather(*running, return_exceptions=True)
            others = [outcome for outcome in outcomes if not isinstance(outcome, (int, StorageError))]
            must_be(others, [], "an append that meets a close is done, or raises a `StorageError`")
            done = {b"%d" % n for n, outcome in enumerate(outcomes) if isinstance(outcome, int)}
            not_done = {b"%d" % n for n, outcome in enumerate(outcomes) if isinstance(outcome, Unavailable)}
            there = set((await loaded(other, key)).tail)
            must_be(done - there, set[bytes](), "an append that was acknowledged is there")
            must_be(not_done & there, set[bytes](), "Unavailable says that nothing was done")

    @check("driver.traits")
    async def test_the_traits_are_valid(self, bench: Bench) -> None:
        driver = await bench.driver()
        traits = driver.traits
        assert driver.name, "errors and reports call the backend by its `name`"
        assert traits.durability, "`durability` is a sentence about what survives"
        assert traits.max_entry > 0, "`max_entry` is positive"
        assert traits.room(traits.max_entry) <= traits.max_record, "`max_entry` fits in `max_record`"
        assert traits.max_drop > 0, "`max_drop` is positive, or nothing could be folded"
        assert traits.min_ttl > 0, "`min_ttl` is a positive number of seconds"
        assert traits.deadline > 0, "`deadline` is a positive number of seconds"

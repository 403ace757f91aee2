"""Checks for which the datastore must be reached past the driver, or taken away from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stm_backends.driver import ANY, KEEP, Key
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing.bench import OPERATIONS, Bench
from stm_backends.testing.contract import Contract, check, not_asked
from stm_backends.testing.driver_checks.steps import append_all, loaded

SLACK_S = 5.0
"""What a busy machine may add to a driver's deadline."""


class Faults(Contract):
    """Checks for which the datastore must be reached past the driver, or taken away from it."""

    @check("driver.outage")
    async def test_during_an_outage_every_operation_is_a_typed_error_in_time(self, bench: Bench) -> None:
        """An except clause turns whatever the client raises into an empty answer, or there is no deadline."""
        if bench.datastore.outage is None:
            not_asked("needs `Datastore.outage`")
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.load(key),
            lambda: driver.append(key, b"b", birth="birth", ttl=None),
            lambda: driver.replace(key, b"body", version="v", expect="birth", ttl=None),
            lambda: driver.delete(Key(key.scope, "other")),
            lambda: driver.scan(key.scope, limit=1),
        ]
        async with bench.datastore.outage():
            for call, operation in zip(calls, OPERATIONS, strict=True):
                with pytest.raises(StorageError) as caught:
                    async with asyncio.timeout(driver.traits.deadline + SLACK_S):
                        await call()
                assert isinstance(caught.value, Unavailable | OutcomeUnknown)
                assert (caught.value.backend, caught.value.operation) == (driver.name, operation)
                assert key.scope not in str(caught.value), "an error names a conversation"

    @check("driver.outage")
    async def test_after_an_outage_the_same_driver_works_and_nothing_is_lost(self, bench: Bench) -> None:
        """A broken connection is kept and never replaced."""
        if bench.datastore.outage is None:
            not_asked("needs `Datastore.outage`")
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a")
        async with bench.datastore.outage():
            with pytest.raises(StorageError):
                await driver.load(key)
        assert (await loaded(driver, key)).tail == (b"a",)
        assert await driver.append(key, b"b", birth="birth", ttl=None) == 2

    @check("driver.corruption")
    async def test_a_damaged_record_is_corrupt_and_reading_it_changes_nothing(self, bench: Bench) -> None:
        """Missing parts are taken for empty ones, or what does not parse is cleared away."""
        if bench.datastore.damage is None:
            not_asked("needs `Datastore.damage`")
        driver, key, sound = await bench.driver(), bench.key(), bench.key()
        for each in (key, sound):
            await append_all(driver, each, b"a", b"b", b"c")
            await driver.replace(each, b"a", version="v2", expect="birth", drop=1, ttl=KEEP)
        await bench.datastore.damage(key)
        for _ in range(2):
            with pytest.raises(Corrupt) as caught:
                await driver.load(key)
            assert (caught.value.backend, caught.value.operation) == (driver.name, "load")
        assert (await loaded(driver, sound)).tail == (b"b", b"c")
        assert await driver.delete(key) is True, "what cannot be read can still be erased"

    @check("driver.load")
    async def test_what_was_acknowledged_is_in_the_datastore_and_not_in_the_driver(
        self, bench: Bench
    ) -> None:
        """Writes are batched or answered from a cache."""
        if bench.datastore.peek is None:
            not_asked("needs `Datastore.peek`")
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        assert await bench.datastore.peek(key) == await loaded(driver, key)
        await driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=KEEP)
        assert await bench.datastore.peek(key) == await loaded(driver, key)
        await driver.delete(key)
        assert await bench.datastore.peek(key) is None

    @check("driver.client")
    async def test_a_client_that_was_handed_in_stays_open(self, bench: Bench) -> None:
        """`close` closes whatever client there is, whoever made it."""
        if bench.datastore.handed_in is None:
            not_asked("needs `Datastore.handed_in`")
        handed_in = await bench.datastore.handed_in()
        try:
            driver, key = bench.adopt(handed_in.driver), bench.key()
            await append_all(driver, key, b"a")
            await driver.close()
            assert await handed_in.is_open(), "closing the driver closed the caller's client"
            with pytest.raises(Unavailable):
                await driver.load(key)
        finally:
            await handed_in.close()

    @check("driver.round-trips")
    async def test_one_operation_is_one_round_trip(self, bench: Bench) -> None:
        """The record is read first, to decide in Python what to write."""
        count = bench.datastore.round_trips
        if count is None:
            not_asked("needs `Datastore.round_trips`")
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a")
        operations: dict[str, Callable[[], Awaitable[object]]] = {
            "append": lambda: driver.append(key, b"b", birth="birth", ttl=60),
            "load": lambda: driver.load(key),
            "replace": lambda: driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=KEEP),
            "a lost replace": lambda: driver.replace(key, b"a", version="v3", expect="no", drop=1, ttl=KEEP),
            "save": lambda: driver.replace(key, b"a", version="v4", expect=ANY, ttl=None),
            "scan": lambda: driver.scan(key.scope, limit=10),
            "delete": lambda: driver.delete(key),
        }
        trips: dict[str, int] = {}
        for name, operation in operations.items():
            before = count()
            await operation()
            trips[name] = count() - before
        assert trips == dict.fromkeys(operations, 1)

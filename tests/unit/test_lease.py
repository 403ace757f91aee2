"""A lease is taken with a load, and given back with a write, at the same time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.records.lease import Lease

KEY = Key("acme:u:lease", "chat")
RECORD = Key("acme:u:memory", "chat")


def lease_on(driver: Driver) -> Lease:
    return Lease(driver, KEY, ttl=10.0, content=b"")


async def answer() -> str:
    return "loaded"


async def fail() -> str:
    raise Unavailable("no answer")


async def test_a_free_lease_is_taken_with_what_was_loaded(driver: Driver) -> None:
    assert await lease_on(driver).acquire_and(answer) == "loaded"
    assert await driver.load(KEY) is not None


async def test_a_held_lease_is_not_taken_and_nothing_is_returned(driver: Driver) -> None:
    held, lease = lease_on(driver), lease_on(driver)
    await held.acquire()
    for load in (answer, fail):
        assert await lease.acquire_and(load) is None
    await lease.release()
    assert await driver.load(KEY) is not None


async def test_the_lease_and_the_load_are_in_progress_together(driver: Driver, calls: list[str]) -> None:
    seen: list[str] = []

    async def load() -> str:
        seen.extend(calls)
        return "loaded"

    await lease_on(driver).acquire_and(load)
    assert seen == ["replace"]


async def test_a_load_that_fails_leaves_a_lease_to_release(driver: Driver) -> None:
    lease = lease_on(driver)
    with pytest.raises(Unavailable):
        await lease.acquire_and(fail)
    assert await driver.load(KEY) is not None
    await lease.release()
    assert await driver.load(KEY) is None


async def test_an_acquire_that_fails_ends_the_load(driver: Driver, lose: Any) -> None:
    ended, started = asyncio.Event(), asyncio.Event()

    async def load() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    lose("replace", done=True, then=started.wait)
    lease = lease_on(driver)
    with pytest.raises(OutcomeUnknown):
        await lease.acquire_and(load)
    assert ended.is_set()
    await lease.release()
    assert await driver.load(KEY) is None


async def test_a_lease_is_given_back_with_the_last_write(driver: Driver, calls: list[str]) -> None:
    lease = lease_on(driver)
    await lease.acquire()
    calls.clear()
    assert await lease.release_and(lambda: driver.append(RECORD, b"x", initial_version="v", ttl=None)) == 1
    assert calls == ["append", "delete"]
    assert await driver.load(KEY) is None


async def test_a_write_that_fails_gives_the_lease_back(driver: Driver) -> None:
    lease = lease_on(driver)
    await lease.acquire()
    with pytest.raises(Unavailable):
        await lease.release_and(fail)
    assert await driver.load(KEY) is None


async def test_a_lease_that_is_not_released_is_logged(
    driver: Driver, lose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lease = lease_on(driver)
    await lease.acquire()
    lose("delete", done=False)
    with caplog.at_level(logging.WARNING):
        assert await lease.release_and(answer) == "loaded"
    assert "could not release a lease, it will expire" in caplog.text

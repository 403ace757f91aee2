"""A value that no record could hold is `TooLarge` in every driver, also in one that closes or is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, Driver
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import ConfigurationError, TooLarge, Unavailable
from stm_backends.records.keys import memory_key
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.limited import LimitedDriver
from stm_backends.records.limits import Guard, Limits
from stm_backends.types import MemoryKey
from tests.support.sealed import sealed

KEY = memory_key(MemoryKey("acme", "ada", "trip"))

LIMITS = Limits(conversation_turns=9, conversation_bytes=9_000, user_conversations=9)

DRIVERS: dict[str, Callable[[Path], Driver]] = {
    "memory": lambda _: open_driver("memory"),
    "sqlite": lambda folder: open_driver("sqlite", path=str(folder / "stm.db"), create=True),
    "redis": lambda _: open_driver("redis"),
    "postgres": lambda _: open_driver("postgres"),
    "mongo": lambda _: open_driver("mongo"),
    "dynamo": lambda _: open_driver("dynamo"),
    # What a backend puts around a driver.
    "large": lambda _: LargeEntries(MemoryDriver(max_entry_bytes=10_000), largest=20_000),
    "limited": lambda _: LimitedDriver(MemoryDriver(max_entry_bytes=10_000), Guard(LIMITS)),
    "sealed": lambda _: sealed(MemoryDriver(max_entry_bytes=10_000)),
}

EMBEDDED = ("memory", "sqlite", "large", "limited", "sealed")
"""Those that can be opened here."""


@pytest.fixture
def driver(backend: str, tmp_path: Path) -> Driver:
    """A driver that was never opened."""
    return DRIVERS[backend](tmp_path)


def writes(driver: Driver, value: bytes) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """Return every way to write a value."""
    return {
        "append": lambda: driver.append(KEY, value, initial_version="v1", ttl=None),
        "replace": lambda: driver.replace(KEY, value, version="v1", expect=ANY, ttl=None),
        "replace, new": lambda: driver.replace(KEY, value, version="v1", expect=ABSENT, ttl=None),
        "replace, rewritten": lambda: driver.replace(
            KEY, b"", version="v2", expect="v1", rewrite=(value,), ttl=None
        ),
    }


async def must_refuse(driver: Driver) -> None:
    """Ask each write for one byte more than the limit."""
    limit = driver.traits.max_entry
    for what, write in writes(driver, bytes(limit + 1)).items():
        with pytest.raises(TooLarge) as caught:
            await write()
        found = caught.value
        assert (found.what, found.size, found.limit) == ("entry", limit + 1, limit), what
        assert (found.backend, found.operation) == (driver.name, what.partition(",")[0])


@pytest.mark.parametrize("backend", DRIVERS)
async def test_a_value_is_too_large_for_a_driver_that_was_never_opened(driver: Driver) -> None:
    await must_refuse(driver)
    for write in (*writes(driver, b"x").values(), lambda: driver.load(KEY), lambda: driver.delete(KEY)):
        with pytest.raises(ConfigurationError, match="never opened"):
            await write()


@pytest.mark.parametrize("backend", EMBEDDED)
async def test_a_value_is_too_large_for_a_driver_that_was_closed(driver: Driver) -> None:
    await driver.open()
    await driver.close()
    await must_refuse(driver)
    for write in writes(driver, b"x").values():
        with pytest.raises(Unavailable, match="not open"):
            await write()


@pytest.mark.parametrize("backend", EMBEDDED)
async def test_a_value_is_too_large_at_each_moment_of_a_close(driver: Driver) -> None:
    await driver.open()
    each = writes(driver, bytes(driver.traits.max_entry + 1)).values()
    begun = [asyncio.create_task(write()) for write in each]
    closing = asyncio.create_task(driver.close())
    while not closing.done():
        begun += [asyncio.create_task(write()) for write in each]
        await asyncio.sleep(0)
    ended = await asyncio.gather(*begun, return_exceptions=True)
    assert {type(error) for error in ended} == {TooLarge}


@pytest.mark.parametrize("backend", DRIVERS)
async def test_what_makes_no_sense_is_refused_before_a_size_is_looked_at(driver: Driver) -> None:
    value = bytes(driver.traits.max_entry + 1)
    with pytest.raises(ValueError, match="ttl"):
        await driver.append(KEY, value, initial_version="v1", ttl=0)
    with pytest.raises(ValueError, match="drop"):
        await driver.replace(KEY, value, version="v1", expect=ANY, drop=1, ttl=None)

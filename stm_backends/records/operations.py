"""What the core asks of a driver that takes more than one operation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError
from stm_backends.records import keys

PAGE: Final = 200
"""How many names one `scan` asks for."""

SENDS: Final = 3
"""How often a write whose outcome is unknown is sent: both kinds of write bear repetition."""

_T = TypeVar("_T")


async def names(driver: Driver, scope: str, *, after: str = "") -> AsyncIterator[str]:
    """Yield the names of one scope past `after`, in order; those there throughout exactly once."""
    position: str | None = after
    while position is not None:
        page = await driver.scan(scope, after=position, limit=PAGE)
        for name in page.names:
            yield name
        position = page.after


async def names_of(driver: Driver, scope: str, prefix: str) -> AsyncIterator[str]:
    """Yield the names of one scope that begin with `prefix` and go on, in order."""
    async for name in names(driver, scope, after=prefix):
        if not name.startswith(prefix):
            return
        yield name


async def erase(driver: Driver, key: Key) -> bool:
    """Remove a record and all that is kept beside it, garbage included; returns whether it was there.

    One `scan` more than a `delete`, for records without parts.
    """
    erased = await driver.delete(key)
    while await erase_parts(driver, key) and await erase_dangling(driver, key):
        erased = True
    return erased


async def erase_dangling(driver: Driver, key: Key) -> bool:
    """Remove a record that points to parts which were erased meanwhile; returns whether it did."""
    try:
        await driver.load(key)
    except Corrupt:
        return await driver.delete(key)
    return False


async def erase_parts(driver: Driver, key: Key) -> int:
    """Remove all that is kept beside a record; returns how many parts that were."""
    scope, prefix = keys.parts_of(key)
    erased = 0
    async for name in names_of(driver, scope, prefix):
        erased += await driver.delete(Key(scope, name))
    return erased


async def resent(send: Callable[[], Awaitable[_T]]) -> _T:
    """Send a write that bears repetition, again if its outcome is unknown, `SENDS` times in all.

    Once one outcome is unknown it stays unknown until an attempt succeeds: raises `OutcomeUnknown`
    whatever a later attempt says of itself.
    """
    unknown: OutcomeUnknown | None = None
    attempt = 0
    while True:
        attempt += 1
        try:
            return await send()
        except OutcomeUnknown as error:
            unknown = error
            if attempt == SENDS:
                raise
        except StorageError as error:
            if unknown is None:
                raise
            raise unknown from error
        await asyncio.sleep(random.uniform(0, 0.05 * 2**attempt))

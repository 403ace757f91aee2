"""Whole listings, and work on many records at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar, cast

from stm_backends.drivers.contract import Driver, Record
from stm_backends.drivers.tasks import all_of

PAGE: Final = 200
"""Number of names that one `scan` requests."""

AT_ONCE: Final = 8
"""Number of records that are processed concurrently."""

SEALED: Final = (b"stm/2 sealed ", b"stm/2 absent ")
"""The prefixes of values that `sealing` has encrypted. Only a backend without it meets them."""

_T = TypeVar("_T")
_U = TypeVar("_U")


def is_sealed(record: Record) -> bool:
    """Say whether a record that was loaded without its keys has a sealed value."""
    return any(value.startswith(SEALED) for value in (record.body or b"", *record.tail))


async def names(driver: Driver, scope: str, *, after: str = "") -> AsyncIterator[str]:
    """Yield the names of one scope after `after`, in order; one that exists throughout comes exactly once."""
    position: str | None = after
    while position is not None:
        page = await driver.scan(scope, after=position, limit=PAGE)
        for name in page.names:
            yield name
        position = page.after


async def names_of(driver: Driver, scope: str, prefix: str) -> AsyncIterator[str]:
    """Yield the names of one scope that are longer than `prefix` and begin with it, in order."""
    async for name in names(driver, scope, after=prefix):
        if not name.startswith(prefix):
            return
        yield name


async def each(items: AsyncIterator[_T], work: Callable[[_T], Awaitable[None]]) -> None:
    """Do the work for each item, `AT_ONCE` at a time; the first `StorageError` ends it and is raised."""
    turn, end = asyncio.Lock(), object()

    async def worker() -> None:
        while True:
            async with turn:
                item = await anext(items, end)
            if item is end:
                return
            await work(cast("_T", item))

    await all_of(worker() for _ in range(AT_ONCE))


async def together(batch: Sequence[_U], work: Callable[[_U], Awaitable[_T]]) -> list[_T]:
    """Do the work for all items concurrently; returns the results in order.

    The first `StorageError` ends it and is raised. A single item needs no separate task.
    """
    return [await work(batch[0])] if len(batch) == 1 else await all_of(map(work, batch))

"""The work of the core that takes more than one operation of a driver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar, cast

from stm_backends.drivers.contract import Driver, Key, Record, new_version
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError
from stm_backends.records import keys

PAGE: Final = 200
"""How many names one `scan` requests."""

AT_ONCE: Final = 8
"""How many records are processed concurrently."""

ATTEMPTS: Final = 3
"""How often a write is attempted while its outcome is unknown. Both kinds of write may be repeated."""

RACES: Final = 10
"""How many lost races end an attempt to store something that is to be loaded again before it is stored."""

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

    The first `StorageError` ends it and is raised.
    """
    return await all_of(map(work, batch))


async def erase(driver: Driver, key: Key) -> bool:
    """Remove a record and all of its parts, garbage included; returns whether the record existed.

    For a record without parts, this takes one `scan` more than a `delete`.
    """
    erased = await driver.delete(key)
    while await erase_parts(driver, key) and await erase_dangling(driver, key):
        erased = True
    return erased


async def erase_dangling(driver: Driver, key: Key) -> bool:
    """Remove a record that points to parts which no longer exist; returns whether it did."""
    try:
        await driver.load(key)
    except Corrupt:
        return await driver.delete(key)
    return False


async def erase_parts(driver: Driver, key: Key) -> int:
    """Remove all parts of a record; returns how many."""
    scope, prefix = keys.parts_of(key)
    erased = 0
    async for name in names_of(driver, scope, prefix):
        erased += await driver.delete(Key(scope, name))
    return erased


async def confirm(driver: Driver, scopes: Iterable[str]) -> None:
    """Have the datastore acknowledge earlier writes in these scopes, which a load or a listing shows done.

    A write with an unknown outcome may be done on the server alone, and not on the replicas, or the disk,
    that an acknowledgement promises. A load does not show that. Deleting a missing record waits for them.
    """
    if driver.traits.shows_unconfirmed:
        await together([*scopes], lambda scope: driver.delete(Key(scope, keys.NO_NAME)))


def pause_after(races: int) -> float:
    """Return how many seconds to wait after so many lost races in a row, before the next one.

    None after one or two, as every contention loses them. Where a former master still answers loads and the
    new one does the writes, all are lost: each load shows a version that the writes no longer find.
    """
    return 0.0 if races <= 2 else random.uniform(0.5, 1.0) * min(0.01 * 2.0 ** min(races, 10), 1.0)


class Appended(NamedTuple):
    """The new length of the tail, and whether the append may have created the record."""

    length: int
    created: bool


async def append(driver: Driver, key: Key, entry: bytes, *, ttl: float | None) -> Appended:
    """Add one entry at the end, retrying while the outcome is unknown: it may be stored more than once.

    Readers recognize a repeat by its id. Ids of entries that have left the record are not remembered for
    ever, so a process that was stopped between two attempts does not retry: it raises `OutcomeUnknown`.
    """
    now, longest = asyncio.get_running_loop().time, (ATTEMPTS + 1) * driver.traits.deadline
    began = now()
    try:
        length = await driver.append(key, entry, initial_version=new_version(), ttl=ttl)
    except OutcomeUnknown as error:
        unknown = error

        async def again() -> int:
            if now() - began > longest:
                raise unknown
            return await driver.append(key, entry, initial_version=new_version(), ttl=ttl)

        length = await retried(again, after=unknown)
        # The first attempt may have created the record, and others may have appended since.
        return Appended(length, created=True)
    return Appended(length, length == 1)


async def retried(
    write: Callable[[], Awaitable[_T]], *, after: OutcomeUnknown | None = None, attempts: int = ATTEMPTS
) -> _T:
    """Carry out a write that may be repeated, again while its outcome is unknown, at most `attempts` times.

    Once the outcome of one attempt is unknown, only a later success settles it: any other error of a later
    attempt raises `OutcomeUnknown`, too. `after` is the error of a first attempt by the caller.
    """
    unknown, attempt = after, 0 if after is None else 1
    while True:
        if attempt:
            await asyncio.sleep(random.uniform(0, 0.05 * 2**attempt))
        attempt += 1
        try:
            return await write()
        except OutcomeUnknown as error:
            unknown = error
            if attempt >= attempts:
                raise
        except StorageError as error:
            if unknown is None:
                raise
            raise unknown from error

"""Ways to confirm entries with one fault each, which lose an entry that only a new server has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from stm_backends.drivers.contract import Driver, new_version
from stm_backends.errors import TooLarge
from stm_backends.records import confirming
from stm_backends.records.confirming import Loaded
from stm_backends.records.ledger import Change

Store = Callable[[str], Awaitable[bool]]
Load = Callable[[], Awaitable[Loaded | None]]


async def trusts_the_load(
    driver: Driver, seen: Loaded, going: int, *, store: Store, load: Load, **options: Any
) -> str | None:
    """Drops what a load has shown."""
    del driver, going, store, load, options
    return seen.version


async def loads_again(
    driver: Driver, seen: Loaded, going: int, *, store: Store, load: Load, **options: Any
) -> str | None:
    """Loads again, which the old server answers, and writes nothing before."""
    del store, options
    there = await confirming.still_there(driver, seen, going, seen.version, load=load)
    return seen.version if there else None


async def looks_at_nothing(
    driver: Driver, seen: Loaded, going: int, *, store: Store, load: Load, **options: Any
) -> str | None:
    """Stores the body as it is, and does not look which entries the server has."""
    del driver, seen, going, load, options
    version = new_version()
    return version if await store(version) else None


async def looks_at_the_version(
    driver: Driver, seen: Loaded, going: int, *, store: Store, load: Load, **options: Any
) -> str | None:
    """Stores the body as it is, and compares the version alone."""
    del going
    return await CORRECT(driver, seen, 0, store=store, load=load, **options)


async def stores_nothing_without_room(
    driver: Driver, seen: Loaded, going: int, *, store: Store, load: Load, **options: Any
) -> str | None:
    """Stores no version where the record has no room for a body, and loads again."""
    del options
    try:
        return await CORRECT(driver, seen, going, store=store, load=load)
    except TooLarge:
        there = await confirming.still_there(driver, seen, going, seen.version, load=load)
        return seen.version if there else None


def counts_what_is_dropped(change: Change) -> int:
    """Confirms no entry that is rewritten."""
    return change.drop


CORRECT = confirming.confirmed

CONFIRMATIONS = (trusts_the_load, loads_again, looks_at_nothing, looks_at_the_version)

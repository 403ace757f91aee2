"""What the records of a conversation say of it, for a card that is missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from stm_backends.catalogue.card import Activity
from stm_backends.catalogue.index import Catalogue
from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.errors import Corrupt, KeyMismatch, located
from stm_backends.history import activity as of_log
from stm_backends.history import items
from stm_backends.memory.shared.activity import activity_of
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.types import MemoryKey


def catalogue_on(
    driver: Driver, codec: Codec, directory: Directory, *, clock: Callable[[], float] = time.time
) -> Catalogue:
    """Return the catalogue on a driver; it keeps nothing in memory."""
    return Catalogue(driver, codec, directory, describe=partial(describe, driver, codec), clock=clock)


async def describe(driver: Driver, codec: Codec, key: MemoryKey, kind: str = "") -> Activity | None:
    """Return the last activity in the records of a conversation; `None` if nothing is in them.

    With a `kind`, the other records are read only if nothing is in that one. A record that cannot be read is
    one of which nothing is known.
    """
    places = {"memory": keys.memory_key(key), **{kind: keys.log_key(key, kind) for kind in keys.LOG_KINDS}}
    read = partial(_read, driver, codec)
    if kind and (own := await read(kind, places.pop(kind))) is not None:
        return own
    found = [one for one in await asyncio.gather(*map(read, places, places.values())) if one is not None]
    if not found:
        return None
    last = max(found, key=lambda one: one.at)
    return Activity(
        tuple(kind for one in found for kind in one.kinds),
        last.at,
        last.turns,
        last.preview,
        next((one.opening for one in found if one.opening), ""),
    )


async def _read(driver: Driver, codec: Codec, kind: str, where: Key) -> Activity | None:
    try:
        record = await driver.load(where)
        with located(driver.name, "catalogue"):
            return None if record is None else _activity(kind, record, codec)
    except KeyMismatch:
        raise
    except Corrupt:
        return Activity((kind,), 0.0, None)


def _activity(kind: str, record: Record, codec: Codec) -> Activity | None:
    if kind == "memory":
        return activity_of(Snapshot.of(record, codec))
    return of_log.activity_of(items.read(record, codec), kind)

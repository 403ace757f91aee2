"""Describing a conversation from its records, in place of a missing card."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from stm_backends.catalogue.card import Activity
from stm_backends.catalogue.index import Catalogue
from stm_backends.drivers.contract import Driver
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import Corrupt, InvalidKey, KeyMismatch, located
from stm_backends.history.log import ItemLog
from stm_backends.memory.shared.activity import activity_of
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import read_units
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.pages import Pages
from stm_backends.types import MemoryKey, StoredTurn

OPENING: Final = 8
"""Number of first messages searched for the title: instructions of the agent may come first."""


def catalogue_on(
    driver: Driver, codec: Codec, directory: Directory, *, clock: Callable[[], float] = time.time
) -> Catalogue:
    """Return the catalogue on a driver; it keeps nothing in memory."""
    return Catalogue(driver, codec, directory, describe=partial(describe, driver, codec), clock=clock)


async def describe(
    driver: Driver, codec: Codec, key: MemoryKey, kinds: Sequence[str] = ()
) -> Activity | None:
    """Return the last activity in the records of a conversation; `None` if they are empty.

    Reads the records of the given kinds, or of all kinds if none is given. Records that cannot be read do not
    count.
    """
    places: dict[str, Callable[[], Awaitable[Activity | None]]] = {}
    if not kinds or "memory" in kinds:
        places["memory"] = partial(_of_memory, driver, codec, key)
    for log_kind in keys.LOG_KINDS:
        # Ids that just fit a short kind name no record of a long one.
        with suppress(InvalidKey):
            if not kinds or log_kind in kinds:
                places[log_kind] = ItemLog(driver, key, log_kind, codec=codec).activity
    found = [one for one in await all_of(map(_read, places, places.values())) if one is not None]
    if not found:
        return None
    last = max(found, key=lambda one: one.at)
    return Activity(
        {kind: count for one in found for kind, count in one.counts.items()},
        last.at,
        last.preview,
        next((one.opening for one in found if one.opening), ""),
        min((one.created for one in found if one.created), default=0.0),
        next((one.usage for one in found if one.usage is not None), None),
        next((one.title for one in found if one.title), ""),
        last.is_answered,
    )


async def _read(kind: str, activity: Callable[[], Awaitable[Activity | None]]) -> Activity | None:
    try:
        return await activity()
    except KeyMismatch:
        raise
    except Corrupt:
        return Activity({kind: None}, 0.0)


async def _of_memory(driver: Driver, codec: Codec, key: MemoryKey) -> Activity | None:
    where = keys.memory_key(key)
    record = await driver.load(where)
    if record is None:
        return None
    with located(driver.name, "catalogue"):
        snapshot = Snapshot.of(record, codec)
        transcript = snapshot.body.transcript
        first: StoredTurn | None = None
        if transcript is not None and transcript.first < transcript.base:
            end = min(transcript.first + OPENING, transcript.base)
            found = await read_units(Pages(driver, codec), where, transcript, transcript.first, end)
            asked = (stored for stored in found.values() if stored.turn.user_message)
            first = next(asked, found.get(transcript.first))
        return activity_of(snapshot, first, usage=snapshot.usage)

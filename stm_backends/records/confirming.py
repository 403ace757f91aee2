"""Confirming that loaded entries are as durable as an acknowledged write; see decision 0037.

A former master that still answers loads may show entries that the new one lacks, under the same version, and
lack others. Entries are therefore confirmed before a write drops or replaces them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from stm_backends.drivers.contract import Driver, Key, version_after
from stm_backends.errors import TooLarge
from stm_backends.races import ATTEMPTS
from stm_backends.records import keys, operations


class Loaded(Protocol):
    """A record as it was loaded, in any form that has its version and its entries."""

    @property
    def version(self) -> str | None: ...

    @property
    def tail(self) -> Sequence[bytes]: ...


async def confirmed(
    driver: Driver,
    seen: Loaded,
    going: int,
    *,
    store: Callable[[str], Awaitable[bool]],
    load: Callable[[], Awaitable[Loaded | None]],
    store_least: Callable[[str], Awaitable[bool]] | None = None,
) -> str | None:
    """Return the record's version once its oldest `going` entries are confirmed; `None` after a lost race.

    `store` stores the body unchanged under a version, in one attempt, and `load` loads the record. Makes no
    request where a load shows only confirmed entries. Elsewhere, a server that takes over may have other
    entries under the version that was read, which must not be dropped.

    A full record may have no room for its first body. `store_least` then stores a body that always fits, such
    as an empty body, which reads as none. Without it, raises `TooLarge`.
    """
    if not driver.traits.shows_unconfirmed:
        return seen.version
    version = version_after(seen.version or "")
    try:
        # Its acknowledgement covers what was written before it. It is sent once: a retry could store this
        # version on a second server, which has other entries.
        if not await store(version):
            return None
    except TooLarge:
        # No write without a new version will do: a former master shows the old one with its own entries.
        if store_least is None:
            raise
        if not await store_least(version):
            return None
    return version if await still_there(driver, seen, going, version, load=load) else None


async def still_there(
    driver: Driver,
    seen: Loaded,
    going: int,
    version: str | None,
    *,
    load: Callable[[], Awaitable[Loaded | None]],
) -> bool:
    """Say whether the oldest entries that were seen are the first ones under a version that was just stored.

    It may be stored on another server than the one that returned the entries. Makes no request where a load
    shows only confirmed entries.
    """
    if not driver.traits.shows_unconfirmed:
        return True
    found = await load()
    return (
        found is not None
        and found.version == version
        and tuple(found.tail[:going]) == tuple(seen.tail[:going])
    )


def attempts_to_confirm(driver: Driver) -> int:
    """Return the number of attempts of a write whose version confirms entries; see `confirmed`."""
    return 1 if driver.traits.shows_unconfirmed else ATTEMPTS


async def confirm(driver: Driver, scopes: Iterable[str]) -> None:
    """Have the datastore acknowledge earlier writes in these scopes that a load or a listing shows.

    A write with an unknown outcome may be done on the server only, and not on the replicas, or the disk,
    that an acknowledgement promises. A load does not show that. Deleting a missing record waits for them.
    """
    if driver.traits.shows_unconfirmed:
        await operations.together([*scopes], lambda scope: driver.delete(Key(scope, keys.NO_NAME)))

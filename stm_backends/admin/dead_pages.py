"""Pages that no record has or will have, left by earlier lives of conversations and by imports.

Removing the pages of a conversation or a user removes only such pages, so that a conversation that begins
again meanwhile keeps its own. Their names are listed first: a page comes after its record, so the list has no
pages of a life that begins later. An import is the exception: its pages come first. See `Import`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import Corrupt, located
from stm_backends.history import items
from stm_backends.records import confirming, keys, operations, pages
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.large.pointers import time_of

IMPORTING_S: Final = 86_400.0
"""Seconds for which the pages of an import are kept before its record is stored."""

PAGED: Final[tuple[keys.Kind, ...]] = ("memory", *keys.LOG_KINDS)
"""The kinds of records that have pages."""


def imported_after(until: float) -> Callable[[str], bool]:
    """Return a predicate of page names: an import has stored the page since `until`, in epoch seconds."""

    def is_imported(name: str) -> bool:
        epoch = keys.page_epoch(name)
        try:
            return epoch.startswith(pages.IMPORTED) and time_of(epoch.removeprefix(pages.IMPORTED)) >= until
        except ValueError:
            return False

    return is_imported


def transcript_of(kind: str, codec: Codec, body: bytes | None) -> Transcript | None:
    """Return the transcript according to the body of a conversation or an item log."""
    return (codec.open_body(body) if kind == "memory" else items.open_folded(body, codec)).transcript


class DeadPages:
    """Finds dead pages, which no record has or will have; removes nothing.

    Pages whose names satisfy `spared` never count as dead.
    """

    def __init__(
        self, driver: Driver, codec: Codec, *, spared: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._spared = spared

    async def of_record(self, key: Key, *, epoch: str = "") -> list[Key]:
        """Return the dead pages of a conversation or an item log, of one epoch or of all, in order."""
        listed = await pages.listed(self._driver, key, epoch)
        return await self._dead(key, [place for place in listed if not self._spared(place.name)])

    async def of_user(self, tenant: str, user: str) -> list[Key]:
        """Return the dead pages of all conversations and item logs of a user, in order."""
        scope = keys.scope(tenant, user, "page")
        listed: dict[str, list[Key]] = {}
        async for name in operations.names(self._driver, scope):
            if not self._spared(name):
                listed.setdefault(keys.prefix_in(name), []).append(Key(scope, name))
        if not listed:
            return []
        owners = [keys.scope(tenant, user, kind) for kind in PAGED]
        # A server that others have replaced may not show the record of a page.
        await confirming.confirm(self._driver, owners)
        dead: list[Key] = []
        for owner in owners:

            async def compare(name: str, owner: str = owner) -> None:
                key = Key(owner, name)
                dead.extend(await self._dead(key, listed.pop(keys.pages_of(key).name, [])))

            await operations.each(operations.names(self._driver, owner), compare)
        return sorted(chain(dead, *listed.values()), key=lambda place: place.name)

    async def is_referred_to(self, key: Key, dead: Iterable[Key]) -> bool:
        """Say whether a record has pages that were found to be dead, as after an import."""
        prefix = keys.pages_of(key).name
        places = [place for place in dead if place.name.startswith(prefix)]
        return len(await self._dead(key, places)) < len(places)

    async def _dead(self, key: Key, places: Sequence[Key]) -> list[Key]:
        """Return the dead pages among those listed before for a record; none if it cannot be read."""

        async def load() -> tuple[str | None, Transcript | None]:
            record = await self._driver.load(key, last=0)
            with located(self._driver.name, "pages"):
                kind, body = key.scope.rpartition(":")[2], None if record is None else record.body
                return record and record.version, transcript_of(kind, self._codec, body)

        try:
            return await pages.dead(self._driver, key, places, load)
        except Corrupt:
            return []


async def erase_replaced(driver: Driver, codec: Codec, key: Key, before: Transcript | None) -> None:
    """Remove the pages of a record that was replaced without a condition.

    `before` is the transcript of the record as it was loaded before; another process may have changed it
    since. The pages of another import may be in use.
    """
    is_import = imported_after(time.time() - IMPORTING_S)

    def spared(name: str) -> bool:
        return is_import(name) and (before is None or keys.page_epoch(name) != before.epoch)

    await pages.remove(driver, await DeadPages(driver, codec, spared=spared).of_record(key))

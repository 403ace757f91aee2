"""Optional methods of drivers for erasures: find expired records, and clean up.

A driver may have one or both methods of `Erasing`. Drivers around another driver need not repeat them: the
functions of this module look for them along `inner`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, NamedTuple, Protocol

from stm_backends.drivers.contract import Driver, Page
from stm_backends.drivers.wrapper import layer_with

PAGE: Final = 200
"""Number of names that one `scan_expired` requests."""


class Remains(NamedTuple):
    """The remains of deleted records in a datastore, and their places.

    `finished` is `False` if the driver failed to remove all that it can remove, for example because SQLite's
    write-ahead log could not be cut. It is `None` if the driver does not say.
    """

    text: str
    finished: bool | None = True


NOT_STATED: Final = Remains("the driver does not say what remains after a deletion", finished=None)


class Erasing(Protocol):
    """The optional methods of a driver. Its `delete` also removes a record that has expired."""

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List the names of one scope that have expired and that the datastore has not removed yet."""
        ...

    async def finish_erasure(self) -> Remains:
        """Remove the leftovers of deletions, within about one deadline; returns what remains, and where.

        Raises no error that concerns only this work: the records are deleted.
        """
        ...


async def expired_names(driver: Driver, scope: str, *, after: str = "") -> AsyncIterator[str]:
    """Yield the names of expired records of one scope after `after` that the datastore has not removed."""
    layer: Erasing | None = layer_with(driver, "scan_expired")
    position: str | None = after
    while layer is not None and position is not None:
        page = await layer.scan_expired(scope, after=position, limit=PAGE)
        for name in page.names:
            yield name
        position = page.after


async def finish_erasure(driver: Driver) -> Remains:
    """Remove the leftovers of deletions; returns what remains, and where."""
    layer: Erasing | None = layer_with(driver, "finish_erasure")
    return NOT_STATED if layer is None else await layer.finish_erasure()

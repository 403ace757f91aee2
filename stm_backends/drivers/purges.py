"""An optional ability of a driver: removing expired records, which no operation sees."""

from __future__ import annotations

from typing import Protocol

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import layer_with


class Purges(Protocol):
    """A driver whose datastore does not remove all expired records by itself.

    An expired record is absent in every operation, so removing it only frees space. A datastore that removes
    expired records by itself, such as MongoDB, needs none of this.
    """

    async def expired(self) -> int:
        """Return how many expired records are still stored; changes nothing."""
        ...

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records in short steps; returns how many.

        Fewer than `limit` means that none is left. An interrupted call loses nothing that is in use, and the
        next one continues.
        """
        ...


def purges_of(driver: Driver) -> Purges | None:
    """Return the driver, or the driver inside it, that can purge; `None` if the datastore needs no purge."""
    return layer_with(driver, "expired", "purge")

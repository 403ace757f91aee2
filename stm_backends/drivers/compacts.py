"""An optional ability of a driver: storing its data in less space."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import layer_with


class Compacted(NamedTuple):
    """The bytes that the datastore took on its disk, before and after."""

    before: int
    after: int


class Compacts(Protocol):
    """A driver whose datastore does not give back free space, or may have an older form of its tables."""

    async def compact(self) -> Compacted:
        """Store everything as a new datastore would, and give back free space; changes no record.

        May take minutes. Writes of other processes wait, and may fail at their deadline.
        """
        ...


def compacts_of(driver: Driver) -> Compacts | None:
    """Return the driver, or the driver inside it, that can compact; `None` if there is nothing to compact."""
    return layer_with(driver, "compact")

"""What drivers do for an erasure beyond the five operations: find expired records, and clean up.

A driver may have one or both methods of `Erasing`. Drivers around another driver need not repeat them: the
functions of this module look for them along `inner`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

from stm_backends.drivers.contract import Driver, Page

PAGE: Final = 200
"""How many names one `scan_expired` requests."""

NOT_STATED: Final = "the driver does not say what remains after a deletion"


class Erasing(Protocol):
    """The optional methods of a driver. Its `delete` also removes a record that has expired."""

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List the names of one scope that have expired and that the datastore has not removed yet."""
        ...

    async def finish_erasure(self) -> str:
        """Remove what deletions have left behind, within about one deadline; returns what remains, and where.

        Raises nothing that concerns only this work: the records are deleted.
        """
        ...


async def expired_names(driver: Driver, scope: str, *, after: str = "") -> AsyncIterator[str]:
    """Yield the names of expired records of one scope after `after` that the datastore has not removed."""
    scan: Callable[..., Awaitable[Page]] | None = _method(driver, "scan_expired")
    position: str | None = after
    while scan is not None and position is not None:
        page = await scan(scope, after=position, limit=PAGE)
        for name in page.names:
            yield name
        position = page.after


async def finish_erasure(driver: Driver) -> str:
    """Remove what deletions have left behind; returns a sentence about what remains, and where."""
    finish: Callable[[], Awaitable[str]] | None = _method(driver, "finish_erasure")
    return NOT_STATED if finish is None else await finish()


def _method(driver: Driver | None, name: str) -> Any:
    """Return a method of a driver, or of the one within that has it; `None` if none has."""
    while driver is not None:
        found = getattr(driver, name, None)
        if found is not None:
            return found
        driver = getattr(driver, "inner", None)
    return None

"""An optional ability of a driver besides the five operations: finding scopes.

The core uses it to list tenants for an operator. No memory needs it, so a driver offers it only where the
datastore has its keys in order, and finds the next one without reading the records in between.
"""

from __future__ import annotations

from typing import Protocol

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import layer_with


class NextScope(Protocol):
    """The method `next_scope` of a driver that has this ability."""

    async def __call__(self, after: str) -> str | None:
        """Return the first scope greater than `after`, in the order of UTF-8 bytes, or `None`.

        A scope whose records have all expired may be returned.
        """
        ...


def next_scope_of(driver: Driver) -> NextScope | None:
    """Return the `next_scope` of a driver, or of the driver within it; `None` if neither has one.

    A driver around another driver that changes scopes sets its own `next_scope`, which may be `None`.
    """
    layer = layer_with(driver, "next_scope")
    return None if layer is None else layer.next_scope

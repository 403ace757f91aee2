"""The driver through which nothing is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from stm_backends.drivers.contract import ANY, AnyType, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Denied

T = TypeVar("T")


class ReadOnlyDriver(WrapperDriver):
    """Passes loads and scans on, and refuses everything else.

    `append` and `replace` raise `Denied`. `delete` removes nothing and returns `False`: readers of the
    catalogue tidy it up as they go, and go on if another process was faster.
    """

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        """Return what a load or a scan does. Raises `Denied` for any other operation."""
        if operation not in ("load", "scan"):
            raise Denied(
                "this process only reads; nothing was written", backend=self.name, operation=operation
            )
        return await super().call(operation, key, send)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove nothing."""
        del key, expect
        return False

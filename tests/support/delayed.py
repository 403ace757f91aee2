"""A datastore whose writes of states wait until a test lets them go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import Operation, WrapperDriver


class Delayed(WrapperDriver):
    """Does each write of a state only once it may go on, as a datastore that is slow."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.goes_on = asyncio.Event()
        self.reached = asyncio.Event()
        self.goes_on.set()

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if operation == "replace" and not self.goes_on.is_set():
            self.reached.set()
            await self.goes_on.wait()
        return await send()

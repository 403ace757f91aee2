"""What changes in between: something happens before one operation of a driver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver


class AtNth(WrapperDriver):
    """Lets something happen before its n-th operation; `reached` says whether that came."""

    def __init__(self, inner: Driver, number: int, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._left, self._then = number, then

    @property
    def reached(self) -> bool:
        return self._left <= 0

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        self._left -= 1
        if self._left == 0:
            await self._then()
        return await send()

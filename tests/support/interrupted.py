"""A driver in which something happens at a chosen operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Unavailable


class Interrupted(WrapperDriver):
    """Awaits `during` before the `at`-th operation from now on, or after it; `down` is an outage."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.arm(0)

    def arm(
        self, at: int, during: Callable[[], Awaitable[None]] | None = None, *, late: bool = False
    ) -> None:
        self.done, self.at, self.late, self.during = 0, at, late, during
        self.down = False

    async def call(self, operation: Operation, key: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if self.down:
            raise Unavailable("an outage", backend="test", operation=operation)
        self.done += 1
        now = self.done == self.at and self.during is not None
        if now and not self.late and self.during is not None:
            await self.during()
        answer = await send()
        if now and self.late and self.during is not None:
            await self.during()
        return answer

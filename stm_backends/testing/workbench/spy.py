"""A driver around a driver: counts the operations, and lets a test intervene."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver

Hook: TypeAlias = Callable[[Key | str], Awaitable[None]]
T = TypeVar("T")


class SpyDriver(WrapperDriver):
    """Passes every operation on to `inner`.

    `calls` lists them as `(operation, kind)`, where the kind is the last part of the scope. The hooks in
    `before` and `after` run around an operation and may wait or raise; raising afterwards simulates a lost
    answer. Each hook in a list is called once, oldest first.
    """

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.calls: list[tuple[Operation, str]] = []
        self.before: dict[Operation, list[Hook]] = {}
        self.after: dict[Operation, list[Hook]] = {}

    def count(self, operation: Operation, kind: str = "memory") -> int:
        """Return the number of such operations so far."""
        return self.calls.count((operation, kind))

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        scope = key if isinstance(key, str) else key.scope
        self.calls.append((operation, scope.rpartition(":")[2]))
        await self._run(self.before, operation, key)
        answer = await send()
        await self._run(self.after, operation, key)
        return answer

    async def _run(self, hooks: dict[Operation, list[Hook]], operation: Operation, key: Key | str) -> None:
        if isinstance(key, Key) and not key.scope.endswith(":memory"):
            return
        if hooks.get(operation):
            await hooks[operation].pop(0)(key)

"""A driver around a driver: counts what goes through it, and lets a test step in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

from stm_backends.drivers.contract import (
    ANY,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)

Operation: TypeAlias = Literal["load", "append", "replace", "delete", "scan"]
Hook: TypeAlias = Callable[[Key | str], Awaitable[None]]


class SpyDriver:
    """Passes every operation on to `inner`.

    `calls` lists them as `(operation, kind)` with the last part of the scope as the kind. The hooks in
    `before` and `after` run around an operation and may wait or raise; raising after it is how an answer
    gets lost. A hook is called once per entry in its list, oldest first, then no more.
    """

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.calls: list[tuple[Operation, str]] = []
        self.before: dict[Operation, list[Hook]] = {}
        self.after: dict[Operation, list[Hook]] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def count(self, operation: Operation, kind: str = "memory") -> int:
        """Return how many such operations went through."""
        return self.calls.count((operation, kind))

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def _through(self, operation: Operation, key: Key | str, call: Awaitable[Any]) -> Any:
        scope = key if isinstance(key, str) else key.scope
        self.calls.append((operation, scope.rpartition(":")[2]))
        try:
            await self._run(self.before, operation, key)
        except BaseException:
            call.close()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] -- a coroutine that nobody will await
            raise
        answer = await call
        await self._run(self.after, operation, key)
        return answer

    async def _run(self, hooks: dict[Operation, list[Hook]], operation: Operation, key: Key | str) -> None:
        if isinstance(key, Key) and not key.scope.endswith(":memory"):
            return
        if hooks.get(operation):
            await hooks[operation].pop(0)(key)

    async def load(self, key: Key) -> Record | None:
        return await self._through("load", key, self.inner.load(key))

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        return await self._through(
            "append", key, self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)
        )

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        ttl: float | None | KeepType,
    ) -> bool:
        call = self.inner.replace(key, body, version=version, expect=expect, drop=drop, ttl=ttl)
        return await self._through("replace", key, call)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        return await self._through("delete", key, self.inner.delete(key, expect=expect))

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        return await self._through("scan", scope, self.inner.scan(scope, after=after, limit=limit))

"""A server with a replica that may lag behind, one for each scope, as the slots of a cluster have them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from stm_backends.drivers.contract import Driver, Key, Traits
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown

T = TypeVar("T")


class ReplicatedDriver(WrapperDriver):
    """Answers a write once the replica has all writes of its scope; reads are those of the server itself.

    `lags` says that the replica confirms nothing, or nothing of these scopes. `behind` has the scopes whose
    writes it lacks.
    """

    def __init__(self, inner: Driver | None = None) -> None:
        super().__init__(inner or MemoryDriver())
        self.lags: bool | set[str] = False
        self.behind: set[str] = set()

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, shows_unconfirmed=True)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        answer = await send()
        if isinstance(key, Key) and operation != "load":
            self.behind.add(key.scope)
            if self.lags is True or (self.lags and key.scope in self.lags):
                raise OutcomeUnknown("done, but not confirmed by the replica")
            self.behind.discard(key.scope)
        return answer


class FailingOver(WrapperDriver):
    """A former master that was not demoted: it still answers loads, while writes go to its former replica."""

    def __init__(self, old: Driver, new: Driver) -> None:
        super().__init__(old)
        self.old, self.new = old, new
        self.writes_to: list[Driver] = [old, new]

    @property
    def traits(self) -> Traits:
        return replace(self.old.traits, shows_unconfirmed=True)

    async def append(self, key: Key, entry: bytes, **options: Any) -> int:
        lengths = [await one.append(key, entry, **options) for one in self.writes_to]
        if self.writes_to == [self.old]:
            raise OutcomeUnknown("done, but not confirmed", backend="memory", operation="append")
        return lengths[-1]

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        return all([await one.replace(key, body, **options) for one in self.writes_to])


class FailsOver(WrapperDriver):
    """A server that is lost when the first `replace` is sent, which reaches its former replica `new`.

    The two may have different entries under one version, because appending does not change it.
    """

    def __init__(self, new: Driver | None = None) -> None:
        super().__init__(MemoryDriver())
        self.new = new or MemoryDriver()

    @property
    def traits(self) -> Traits:
        return replace(self.new.traits, shows_unconfirmed=True)

    async def open(self) -> None:
        await self.inner.open()
        await self.new.open()

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        self.inner = self.new
        return await self.new.replace(key, body, **options)


class StillAnswersLoads(FailsOver):
    """A server that does the first `replace` and is replaced by `new` before it answers, but not demoted."""

    is_replaced = False

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        if self.is_replaced:
            return await self.new.replace(key, body, **options)
        self.is_replaced = True
        assert await self.inner.replace(key, body, **options)
        raise OutcomeUnknown("done, but not confirmed by the replica")

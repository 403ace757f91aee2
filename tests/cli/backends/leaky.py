"""A backend that breaks its promises in one way or another, to be found out by `replay`."""

from __future__ import annotations

import asyncio
from typing import Any

from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.drivers.plugins import BackendPlugin, hookimpl, open_driver
from tests.support.leases import without_lease


class Leaky:
    """The SQLite driver, as long as nobody asks for what it breaks."""

    name = "leaky"

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.traits = driver.traits
        for operation in ("open", "close", "load", "append", "replace", "delete", "scan"):
            if not hasattr(self, operation):
                setattr(self, operation, getattr(driver, operation))


class ForgetsEveryTenthAppend(Leaky):
    appends = 0

    async def append(self, key: Key, entry: bytes, **options: Any) -> int:
        self.appends += 1
        if self.appends % 10:
            return await self._driver.append(key, entry, **options)
        record = await self._driver.load(key)
        return 1 + (len(record.tail) if record else 0)


class FoldsOneTurnTooMany(Leaky):
    async def replace(self, key: Key, body: bytes, *, drop: int = 0, **options: Any) -> bool:
        return await self._driver.replace(key, body, drop=drop + bool(drop), **options)


class ReadsBackwards(Leaky):
    async def load(self, key: Key) -> Record | None:
        record = await self._driver.load(key)
        return record and Record(record.version, record.body, record.tail[::-1])


class MixesUpConversations(Leaky):
    async def append(self, key: Key, entry: bytes, **options: Any) -> int:
        return await self._driver.append(Key(key.scope, "all-in-one"), entry, **options)

    async def load(self, key: Key) -> Record | None:
        is_conversation = key.scope.endswith(":memory")
        return await self._driver.load(Key(key.scope, "all-in-one") if is_conversation else key)


class LosesAPageEntry(Leaky):
    entries = 0

    async def append(self, key: Key, entry: bytes, **options: Any) -> int:
        if key.scope.endswith(":page"):
            self.entries += 1
            if self.entries == 3:
                return 1
        return await self._driver.append(key, entry, **options)


class LeasesToEverybody(Leaky):
    """Breaks no promise that correctness rests on: a lease only saves money."""

    async def load(self, key: Key) -> Record | None:
        record = await self._driver.load(key)
        return record and (without_lease(record) if key.scope.endswith(":memory") else record)

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        if options.get("drop"):
            # Long enough for another pod to begin the same fold.
            await asyncio.sleep(0.05)
        return await self._driver.replace(key, body, **options)


WAYS = {kind.__name__: kind for kind in Leaky.__subclasses__()}


def open_leaky(url: str, *, create: bool = False) -> Any:
    way, _, path = url.removeprefix("leaky://").partition("/")
    return WAYS[way](open_driver(f"sqlite:///{path}", create=create))


@hookimpl
def stm_backend() -> BackendPlugin:
    return BackendPlugin(name="leaky", url_schemes=("leaky",), open=open_leaky)

"""What a check works with: a datastore, open drivers on it, fresh keys, and the passing of time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from stm_backends.driver import Driver, Key
from stm_backends.plugins import open_driver


@dataclass(frozen=True, kw_only=True)
class Datastore:
    """How a suite reaches one datastore.

    `open` returns an open driver, each time another instance on the same data. Where the driver's reach
    goes beyond the process it is called in other processes too, so it must pickle: a function at the top
    of an importable module, or a `functools.partial` of one.

    `pass_time` lets seconds go by on the clock that judges expiry; with a real clock it sleeps. `tick` is
    a time to live in seconds that no single operation outlasts, and that `pass_time` can wait for.
    """

    open: Callable[[], Awaitable[Driver]]
    pass_time: Callable[[float], Awaitable[None]] = asyncio.sleep
    tick: float = 0.5


@dataclass
class FakeClock:
    """A clock that stands still until it is told to move; for drivers that accept a `clock`."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    async def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds


async def open_at(url: str, **options: Any) -> Driver:
    """Return an open driver of an installed backend; `functools.partial(open_at, url)` pickles."""
    driver = open_driver(url, **options)
    await driver.open()
    return driver


class Bench:
    """One check's place of work; leaving it removes what the check stored and closes its drivers."""

    def __init__(self, datastore: Datastore) -> None:
        self.datastore = datastore
        self.tick = datastore.tick
        self._drivers: list[Driver] = []
        self._scopes: list[str] = []

    async def driver(self) -> Driver:
        """Return an open driver of one's own on the datastore."""
        driver = await self.datastore.open()
        self._drivers.append(driver)
        return driver

    def scope(self) -> str:
        """Return a scope that nobody has ever used."""
        scope = f"check:{uuid.uuid4().hex}:memory"
        self.clean(scope)
        return scope

    def key(self) -> Key:
        """Return a key that nobody has ever used."""
        return Key(self.scope(), "record")

    def clean(self, scope: str) -> None:
        """Remember to remove everything in `scope` in the end."""
        self._scopes.append(scope)

    async def pass_time(self, seconds: float) -> None:
        """Let seconds go by on the clock that judges expiry."""
        await self.datastore.pass_time(seconds)

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._remove_all()
        finally:
            for driver in self._drivers:
                await driver.close()

    async def _remove_all(self) -> None:
        # One of the check's own drivers may be closed by now, so this one is new.
        driver = await self.datastore.open()
        try:
            for scope in self._scopes:
                for name in await names_in(driver, scope):
                    await driver.delete(Key(scope, name))
        finally:
            await driver.close()


async def names_in(driver: Driver, scope: str, *, limit: int = 100) -> list[str]:
    """Return every name of a scope, as a listing in pages gives them."""
    names: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await driver.scan(scope, after=after, limit=limit)
        names += page.names
        after = page.after
    return names

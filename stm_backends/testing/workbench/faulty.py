"""The reference driver on a store that can be damaged, cut off, counted and passed in.

It provides everything that checks need. The mutants in `tests/mutants` are variations of it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from stm_backends.drivers.contract import (
    ANY,
    DEFAULT_DEADLINE_S,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Record,
)
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing.workbench.drivers import Datastore, FakeClock, HandedIn

SMALL: dict[str, int] = {"max_entry_bytes": 12_000, "max_record_bytes": 50_000}
"""Limits that a check reaches quickly."""


class FaultyStore(MemoryStore):
    """A store that a test can damage, cut off and close, and that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.refuses = False
        self.users: set[int] = set()
        self.closed = False
        self.damaged: set[str] = set()
        self.short: set[str] = set()
        self.replica: dict[str, Any] | None = None
        self.held: dict[Key, asyncio.Event] = {}
        self.transactions = 0
        self.asked = 0

    @asynccontextmanager
    async def outage(self) -> AsyncGenerator[None]:
        """Cut the store off within this context."""
        self.down = True
        try:
            yield
        finally:
            self.down = False

    @asynccontextmanager
    async def refusal(self) -> AsyncGenerator[None]:
        """Answer each request with an error for as long as the context lasts."""
        self.refuses = True
        try:
            yield
        finally:
            self.refuses = False

    @asynccontextmanager
    async def lag(self) -> AsyncGenerator[None]:
        """Freeze a replica at the store's current state within this context."""
        self.replica = copy.deepcopy(self.scopes)
        try:
            yield
        finally:
            self.replica = None

    def cut(self, key: Key) -> None:
        """Remove the newest entry of a record."""
        self.scopes[key.scope].records[key.name].tail.pop()
        self.short.add(key.scope)

    def held_of(self, key: Key) -> list[object]:
        """Return everything stored under a key, expired or not."""
        return [stored for name, stored in self.scope(key.scope).records.items() if name == key.name]

    @asynccontextmanager
    async def hold(self, key: Key) -> AsyncGenerator[None]:
        """Keep writers to a record waiting within this context."""
        self.held[key] = asyncio.Event()
        try:
            yield
        finally:
            self.held.pop(key).set()


class FaultyDriver(MemoryDriver):
    """The reference driver on a store that may fail. With `own=True`, it created the store and closes it."""

    def __init__(self, store: FaultyStore, *, own: bool = False, **options: Any) -> None:
        super().__init__(store, **options)
        self.store = store
        self._own = own

    async def open(self) -> None:
        await super().open()
        self.store.users.add(id(self))

    async def close(self) -> None:
        await super().close()
        self.store.users.discard(id(self))
        if self._own:
            self.store.closed = True

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        await self.lock(key, "append")
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType,
    ) -> bool:
        await self.lock(key, "replace")
        return await super().replace(
            key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
        )

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        await self.lock(key, "delete")
        if done := await super().delete(key, expect=expect):
            self.store.damaged.discard(key.scope)
            self.store.short.discard(key.scope)
        return done

    async def lock(self, key: Key, operation: str) -> None:
        """Wait at most one deadline until the record is free."""
        if held := self.store.held.get(key):
            try:
                async with asyncio.timeout(self.traits.deadline):
                    await held.wait()
            except TimeoutError:
                raise Unavailable(
                    "another writer holds the record", backend=self.name, operation=operation
                ) from None

    @contextmanager
    def _scope(self, name: str, operation: str) -> Generator[tuple[Any, float]]:
        with super()._scope(name, operation) as found:
            self.store.asked += 1
            if self.store.down or self.store.closed:
                raise Unavailable("the store is down", backend=self.name, operation=operation)
            if self.store.refuses:
                raise Unavailable("the store has no leader", backend=self.name, operation=operation)
            if name in self.store.damaged | self.store.short and operation in ("load", "append", "replace"):
                raise Corrupt("a part of the record is missing", backend=self.name, operation=operation)
            yield found


def faulty_datastore(
    driver_class: Callable[..., MemoryDriver] = FaultyDriver,
    *,
    clock: FakeClock | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    **limits: int,
) -> Datastore:
    """Return a datastore with drivers of a class, and with every means that a check may need.

    Without a `clock`, time passes only by waiting.
    """
    store = FaultyStore()
    options: dict[str, Any] = {"deadline_s": deadline_s, **limits} | ({"clock": clock} if clock else {})

    async def open_one() -> Driver:
        driver = driver_class(store, **options)
        await driver.open()
        return driver

    async def damage(key: Key) -> None:
        store.damaged.add(key.scope)

    async def cut(key: Key) -> None:
        store.cut(key)

    async def stored(key: Key) -> list[object]:
        return store.held_of(key)

    async def peek(key: Key) -> Record | None:
        truth = MemoryDriver(store, **options)
        await truth.open()
        return await truth.load(key)

    async def handed_in() -> HandedIn:
        client = FaultyStore()
        driver = driver_class(client, **options)
        await driver.open()

        async def is_open() -> bool:
            return not client.closed

        async def close() -> None:
            client.closed = True

        async def kept() -> list[int]:
            return [*client.users]

        return HandedIn(driver=driver, is_open=is_open, close=close, kept=kept)

    async def transactions() -> int:
        return store.transactions

    means: dict[str, Any] = {"pass_time": clock.pass_time, "tick": 60.0} if clock else {"tick": 0.1}
    return Datastore(
        open=open_one,
        damage=damage,
        cut=cut,
        stored=stored,
        lag=store.lag,
        peek=peek,
        outage=store.outage,
        refusal=store.refusal,
        handed_in=handed_in,
        hold=store.hold,
        transactions=transactions,
        round_trips=lambda: store.asked,
        server="a dictionary",
        **means,
    )

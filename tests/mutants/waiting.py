"""Drivers that are wrong about writers that wait, or write at once, and about whose clock decides."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from stm_backends.drivers.contract import ANY, AbsentType, AnyType, Driver, KeepType, Key, Record
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.errors import StorageError, TooLarge, Unavailable
from stm_backends.testing.workbench.faulty import FaultyDriver


class JudgesExpiryBeforeItWaits(FaultyDriver):
    """Finds a record alive, waits for its lock, and appends to what has expired by then."""

    _swept = 0

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            alive = scope.find(key.name, now)
        await self.lock(key, "append")
        if alive is not None:
            alive.expires = None
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class ComparesBeforeItLocks(FaultyDriver):
    """Reads the version, waits for the record's lock, and stores without a condition."""

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
        read = await self.load(key)
        await self.lock(key, "replace")
        if read is None or read.version != expect:
            return False
        done = False
        while not done and (found := await self.load(key)):
            drop = min(drop, len(found.tail))
            done = await super().replace(
                key, body, version=version, expect=found.version, drop=drop, rewrite=rewrite, ttl=ttl
            )
        return done


class DrawsBeforeItLocks(FaultyDriver):
    """Sorts entries by numbers that were drawn before the record was locked."""

    _numbers: ClassVar = itertools.count(1)
    _drawn: ClassVar[dict[bytes, int]] = {}

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        number = self._drawn[entry] = next(self._numbers)
        for _ in range(number % 3):
            await asyncio.sleep(0)
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        with self._scope(key.scope, "append") as (scope, _):
            scope.records[key.name].tail.sort(key=self._drawn.__getitem__)
        return length


class StaysInATransaction(FaultyDriver):
    """Begins a transaction with each load, and ends it with the next operation."""

    _is_open_since_a_load = False

    async def load(self, key: Key) -> Record | None:
        if not self._is_open_since_a_load:
            self._is_open_since_a_load = True
            self.store.transactions += 1
        return await super().load(key)

    async def close(self) -> None:
        self.store.transactions -= self._is_open_since_a_load
        self._is_open_since_a_load = False
        await super().close()


class KeepsTheLockAfterAnError(FaultyDriver):
    """Leaves its transaction, and so its lock, where it was when an entry proved to be too large."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except TooLarge:
            self.store.held[key] = asyncio.Event()
            raise


class ReadsAnOldSnapshotAfterARefusal(FaultyDriver):
    """Leaves a refused replace without an end, so that the next loads see what was there then."""

    _snapshot: dict[Key, Record | None]

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._snapshot = {}

    async def load(self, key: Key) -> Record | None:
        return self._snapshot[key] if key in self._snapshot else await super().load(key)

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        done = await super().replace(key, body, **how)
        self._snapshot = {} if done else {key: await super().load(key)}
        return done


class WaitsWithoutADeadline(FaultyDriver):
    """Waits for a lock for as long as another holds it."""

    async def lock(self, key: Key, operation: str) -> None:
        if held := self.store.held.get(key):
            await held.wait()


class WritesWhatItGaveUp(FaultyDriver):
    """Gives an append up at its deadline, and leaves the request waiting for the lock."""

    _late: asyncio.Future[int] | None = None

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        held = self.store.held.get(key)
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except Unavailable:
            if held:
                write = functools.partial(super().append, initial_version=initial_version, ttl=ttl)
                self._late = asyncio.ensure_future(self._after(held, write(key, entry)))
            raise

    async def _after(self, held: asyncio.Event, write: Coroutine[Any, Any, int]) -> int:
        await held.wait()
        return await write


class SendsWhatWaitsAgain(FaultyDriver):
    """Has a client that waits for an answer for 0.3 s, and then sends the append again."""

    _first: asyncio.Future[int] | None = None

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        send = functools.partial(super().append, key, entry, initial_version=initial_version, ttl=ttl)
        self._first = asyncio.ensure_future(send())
        await asyncio.wait((self._first,), timeout=0.3)
        return self._first.result() if self._first.done() else (await asyncio.gather(self._first, send()))[1]


class SharesItsWait(FaultyDriver):
    """Has one task wait for a lock, which the first writer that is cancelled takes with it."""

    _wait: asyncio.Future[None] | None = None

    async def lock(self, key: Key, operation: str) -> None:
        if key in self.store.held:
            self._wait = self._wait or asyncio.ensure_future(super().lock(key, operation))
            await self._wait


class FailsBesideWhatIsCancelled(FaultyDriver):
    """Has writers wait by one connection, which a cancelled one closes; the others say `Unavailable`."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._closed = asyncio.Event()

    async def lock(self, key: Key, operation: str) -> None:
        closed = self._closed
        waits = [asyncio.ensure_future(super().lock(key, operation)), asyncio.ensure_future(closed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            closed.set()
            self._closed = asyncio.Event()
            raise
        finally:
            for wait in waits:
                wait.cancel()
        if closed.is_set():
            raise Unavailable("the connection was closed", backend=self.name, operation=operation)
        waits[0].result()


class DropsItsQueue(FaultyDriver):
    """Drops the writes that wait when it is closed, and says that they are done."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        waits = key in self.store.held
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except Unavailable:
            if waits and not self._is_open:
                return 1
            raise


class FailsTogether(FaultyDriver):
    """Sends the appends of one moment together, and has one error for all that follow in it."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._errors: list[StorageError] = []

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        errors = self._errors
        await asyncio.sleep(0)
        self._errors = []
        try:
            length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except StorageError as error:
            errors.append(error)
        if errors:
            raise errors[0]
        return length


class FollowsTheClientsClock(SqliteDriver):
    """Says that the server's clock decides, and asks this process for the time."""

    def __init__(self, settings: SqliteSettings, **options: Any) -> None:
        super().__init__(settings, **options)
        self.traits = replace(self.traits, clock="server")


class FollowsTheServersClock(FollowsTheClientsClock):
    """Not wrong: the kernel is the server here, whose clock no process of a test sets."""

    def __init__(self, settings: SqliteSettings, **options: Any) -> None:
        super().__init__(
            settings, clock=functools.partial(time.clock_gettime, time.CLOCK_REALTIME), **options
        )


async def open_on_file(kind: type[SqliteDriver], path: str) -> Driver:
    """Return an open driver on a file; other processes can call this."""
    driver = kind(SqliteSettings(path=path))
    await driver.open()
    return driver


class ComparesThenDeletes(FaultyDriver):
    """Compares the version in one step, and removes whatever is there in another."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        found = await self.load(key)
        if found is None or expect not in (ANY, found.version):
            return False
        return await super().delete(key)


class KeepsATaskForEachRecord(FaultyDriver):
    """Has a task that waits for the writes of each record it has seen."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._tasks: dict[Key, asyncio.Task[bool]] = {}

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(asyncio.Event().wait())
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class KeepsALockForEachRecord(FaultyDriver):
    """Has writers of a record queue for a lock, which stays when nobody waits for it any more."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._turns: dict[Key, asyncio.Lock] = {}

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        async with self._turns.setdefault(key, asyncio.Lock()):
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)

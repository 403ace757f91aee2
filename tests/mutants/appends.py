"""Drivers whose appends and loads are broken."""

from __future__ import annotations

import asyncio

from stm_backends.drivers.contract import Key, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import TooLarge


class ReadThenWriteAppend(MemoryDriver):
    """Appends by reading the tail and writing it back."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        record = await self.load(key)
        await asyncio.sleep(0)
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        if record is None:
            return length
        with self._scope(key.scope, "append") as (scope, _):
            scope.records[key.name].tail = [*record.tail, entry]
        return len(record.tail) + 1


class AppendChangesTheVersion(MemoryDriver):
    """Bumps the version with every write, so that folds lose to appends."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        with self._scope(key.scope, "append") as (scope, _):
            scope.records[key.name].version = initial_version
        return length


class AppendKeepsTheTtl(MemoryDriver):
    """Sets the time to live when a record is created, and never again."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            found = scope.find(key.name, now)
            expires = found.expires if found else None
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        if found:
            found.expires = expires
        return length


class AppendIgnoresTtlNone(MemoryDriver):
    """Keeps the old time to live when `ttl` is None."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            found = scope.find(key.name, now)
            expires = found.expires if found else None
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        if found and ttl is None:
            found.expires = expires
        return length


class AppendIgnoresRepeats(MemoryDriver):
    """Keeps the tail as a set of values."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        record = await self.load(key)
        if record and entry in record.tail:
            return len(record.tail)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class RetryDoublesAnEntry(MemoryDriver):
    """Sends an append that was cancelled once more, to be sure."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await super().append(key, entry, initial_version=initial_version, ttl=ttl)
            raise
        return length


class TextNotBytes(MemoryDriver):
    """Stores text."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        text = entry.decode(errors="ignore").encode()
        return await super().append(key, text, initial_version=initial_version, ttl=ttl)


class EmptyIsNone(MemoryDriver):
    """Confuses an empty body with no body."""

    async def load(self, key: Key) -> Record | None:
        record = await super().load(key)
        return Record(record.version, record.body or None, record.tail) if record else None


class CutsWhatIsTooLarge(MemoryDriver):
    """Stores as much of an entry as fits."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        return await super().append(
            key, entry[: self.traits.max_entry], initial_version=initial_version, ttl=ttl
        )


class WritesBeforeItRefuses(MemoryDriver):
    """Notices that a record is full after having written to it."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        try:
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        except TooLarge:
            with self._scope(key.scope, "append") as (scope, _):
                scope.records[key.name].tail.append(entry)
            raise


class LoadInTwoReads(MemoryDriver):
    """Reads the body and the tail at different times."""

    async def load(self, key: Key) -> Record | None:
        first = await super().load(key)
        await asyncio.sleep(0)
        second = await super().load(key)
        return Record(first.version, first.body, second.tail) if first and second else first


class EmptiesWhatIsLarge(MemoryDriver):
    """Leaves the contents of a large record out of an answer that several loads share."""

    _loading = 0

    async def load(self, key: Key) -> Record | None:
        self._loading += 1
        await asyncio.sleep(0)
        is_shared, found = self._loading > 1, await super().load(key)
        self._loading -= 1
        if found and is_shared and sum(map(len, found.tail)) > self.traits.max_entry:
            return Record(found.version, None, ())
        return found


class VersionInASeparateRead(MemoryDriver):
    """Reads the version in one request, and body and tail in the next."""

    async def load(self, key: Key) -> Record | None:
        first = await super().load(key)
        await asyncio.sleep(0)
        second = await super().load(key)
        return Record(first.version, second.body, second.tail) if first and second else first

"""Drivers with faults in expiry, opening or closing."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from stm_backends.drivers.contract import ANY, AnyType, Key, Page, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import OutcomeUnknown, Unavailable


class Unswept(MemoryDriver):
    """Not wrong: what has expired stays where it is until something is written in its place."""

    _swept = 0


class ExpiredIsVisible(Unswept):
    """Leaves expiry to a reaper that comes some time."""

    async def load(self, key: Key) -> Record | None:
        with self._scope(key.scope, "load") as (scope, _):
            found = scope.records.get(key.name)
            return Record(found.version, found.body, tuple(found.tail)) if found else None


class ExpiredIsListed(Unswept):
    """Lists names whose records have expired."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        with self._scope(scope, "scan") as (found, _):
            names = sorted((name for name in found.records if name > after), key=str.encode)
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)


class ExpiredComesBack(Unswept):
    """Appends to what has expired and is still lying there."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, _):
            found = scope.records.get(key.name)
            if found:
                found.expires = None
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class PurgesByName(Unswept):
    """Removes with one write, by their names, the records that had expired at the write before."""

    _due: tuple[Key, ...] = ()

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            for _, name in self._due:
                scope.records.pop(name, None)
            expired = (name for name in scope.records if scope.find(name, now) is None)
            self._due = tuple(Key(key.scope, name) for name in expired)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class ListsToTheEnd(Unswept):
    """Lists a record at the moment of its end, when it is absent for all other operations."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        clock = self._clock
        try:
            self._clock = lambda: clock() - 1e-6
            return await super().scan(scope, after=after, limit=limit)
        finally:
            self._clock = clock


class LeavesTheRest(MemoryDriver):
    """Removes a thousand entries at a time, and with them the only trace of the others."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._rest: dict[Key, tuple[bytes, ...]] = {}

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        record = await self.load(key)
        done = await super().delete(key, expect=expect)
        if done and record:
            self._rest[key] = record.tail[1_000:]
        return done

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        for old in self._rest.pop(key, ()):
            await super().append(key, old, initial_version=initial_version, ttl=ttl)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class DatesEveryEnd(MemoryDriver):
    """Writes the end of a life as a date, of which there are not enough."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        if ttl is not None:
            try:
                datetime.fromtimestamp(ttl, UTC)
            except (OverflowError, ValueError, OSError):
                raise OutcomeUnknown("the end was refused", backend=self.name, operation="append") from None
        return length


class DeleteCountsTheExpired(Unswept):
    """Says that it removed what had expired."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        with self._scope(key.scope, "delete") as (scope, _):
            there = key.name in scope.records
        return await super().delete(key, expect=expect) or (there and expect is ANY)


class OutageIsNoData(MemoryDriver):
    """Answers that nothing is there when it cannot look."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Unavailable:
            return None


class ClosesTheSharedStore(MemoryDriver):
    """Takes away, on closing, what others still use."""

    async def close(self) -> None:
        await super().close()
        self._store.scopes.clear()
        self._store.mortal.clear()


class CannotBeReopened(MemoryDriver):
    """Refuses to be closed twice."""

    async def close(self) -> None:
        if not self._is_open:
            raise Unavailable("closed already", backend=self.name, operation="close")
        await super().close()


class EndsAtAPageOfExpiredNames(Unswept):
    """Takes a page of names, leaves out what has expired, and ends where nothing is left on it."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        with self._scope(scope, "scan") as (found, now):
            names = sorted((name for name in found.records if name > after), key=str.encode)
            living = tuple(name for name in names[:limit] if found.find(name, now) is not None)
        return Page(living, names[limit - 1] if living and len(names) > limit else None)


class SeesNoChangeOfTheTtl(MemoryDriver):
    """Sets a time to live only if it is another one than was set last."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._set: dict[Key, float | None] = {}

    def is_set(self, before: float | None, ttl: float | None) -> bool:
        return before == ttl

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            alive = scope.find(key.name, now)
            ends = alive.expires if alive and self.is_set(self._set.get(key), ttl) else None
        self._set[key] = ttl
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        if ends is not None:
            with self._scope(key.scope, "append") as (scope, _):
                scope.records[key.name].expires = ends
        return length


class RenewsNoWholeSeconds(SeesNoChangeOfTheTtl):
    """Sets times to live below a second by itself, and others by leases, only if their seconds change."""

    def is_set(self, before: float | None, ttl: float | None) -> bool:
        return before is not None and ttl is not None and math.ceil(before) == math.ceil(ttl) > 1


class EntriesKeepTheirLease(MemoryDriver):
    """Renews the lease of a record with each append, and not those of the entries that are there."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._ends: dict[tuple[Key, bytes], float] = {}

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        self._ends[key, entry] = math.inf if ttl is None else self._clock() + ttl
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)

    async def load(self, key: Key) -> Record | None:
        record = await super().load(key)
        if record is None:
            return None
        tail = (one for one in record.tail if self._ends.get((key, one), math.inf) > self._clock())
        return replace(record, tail=tuple(tail))

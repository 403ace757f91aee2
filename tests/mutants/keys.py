"""Drivers whose keys, deletes and listings are broken."""

from __future__ import annotations

import fnmatch
import unicodedata

from stm_backends.drivers.contract import ANY, AnyType, Key, Page, Record
from stm_backends.drivers.in_memory import MemoryDriver


class MappedKeys(MemoryDriver):
    """A driver that maps keys to others, and forgets that two may become one."""

    def map(self, key: Key) -> Key:
        """Return the key that is stored."""
        return key

    async def load(self, key: Key) -> Record | None:
        return await super().load(self.map(key))

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        return await super().append(self.map(key), entry, initial_version=initial_version, ttl=ttl)


class JoinedKeys(MappedKeys):
    """Joins scope and name with `:`, unescaped."""

    def map(self, key: Key) -> Key:
        return Key("all", f"{key.scope}:{key.name}")


class CaselessKeys(MappedKeys):
    """Uses a collation that ignores case."""

    def map(self, key: Key) -> Key:
        return Key(key.scope, key.name.casefold())


class NormalizedKeys(MappedKeys):
    """Brings names to a normal form."""

    def map(self, key: Key) -> Key:
        return Key(key.scope, unicodedata.normalize("NFC", key.name))


class ShortenedKeys(MappedKeys):
    """Cuts names to the width of a column."""

    def map(self, key: Key) -> Key:
        return Key(key.scope, key.name[:255])


class TrimmedScopes(MappedKeys):
    """Strips a scope."""

    def map(self, key: Key) -> Key:
        return Key(key.scope.strip(), key.name)


class DeleteByPattern(MemoryDriver):
    """Uses the name as a pattern."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        with self._scope(key.scope, "delete") as (scope, _):
            names = [name for name in scope.records if fnmatch.fnmatchcase(name, key.name)]
        results = [await super(DeleteByPattern, self).delete(Key(key.scope, n), expect=expect) for n in names]
        return any(results)


class DeleteIgnoresExpect(MemoryDriver):
    """Releases another holder's lease."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        del expect
        return await super().delete(key)


class ScanByOffset(MemoryDriver):
    """Counts rows, so that a page begins too late when listed names were deleted."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        offset = int(after or "0")
        page = await super().scan(scope, limit=1_000)
        names = page.names[offset : offset + limit]
        return Page(names, str(offset + limit) if len(page.names) > offset + limit else None)


class ScanIncludesItsStart(MemoryDriver):
    """Begins a page with the name at which the last one ended."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        with self._scope(scope, "scan") as (found, _):
            names = sorted((name for name in found.records if name >= after), key=str.encode)
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit > 1 else None)


class ScanEndsWithItsFirstPage(MemoryDriver):
    """Forgets that there is more."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        return (await super().scan(scope, after=after, limit=limit))._replace(after=None)


class ScanInUtf16Order(MemoryDriver):
    """Sorts as UTF-16 does, which puts emoji before some other characters."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        def order(name: str) -> bytes:
            return name.encode("utf-16-be")

        page = await super().scan(scope, limit=1_000)
        names = sorted((name for name in page.names if order(name) > order(after)), key=order)
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)


class WipesByPrefix(MemoryDriver):
    """Removes the parts of a record by the beginning of their keys, which longer names share."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        done = await super().delete(key, expect=expect)
        if done:
            with self._scope(key.scope, "delete") as (scope, _):
                for name in [name for name in scope.records if name.startswith(key.name)]:
                    scope.records[name].tail.clear()
        return done


class RepeatsItsPosition(MemoryDriver):
    """Says of a page that is not the last that the next one begins where it began."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        page = await super().scan(scope, after=after, limit=limit)
        return page if page.after is None else page._replace(after=after)

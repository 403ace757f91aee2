"""Drivers with faults in the methods that a driver may have beside the five operations."""

from __future__ import annotations

import asyncio
import sqlite3

from stm_backends.drivers.contract import ANY, AnyType, Key, Page
from stm_backends.drivers.erasing import Remains
from stm_backends.drivers.sqlite import SqliteDriver, statements
from tests.mutants.expiry import Unswept

EXPIRED_KEYS = "SELECT scope, name FROM stm_record WHERE expires <= ? LIMIT ?"
DELETE_KEY = "DELETE FROM stm_record WHERE scope = ? AND name = ?"


class ListsWhatWillExpire(Unswept):
    """Lists each name whose record has a time to live as expired."""

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        with self._scope(scope, "scan") as (found, _):
            mortal = (name for name, one in found.records.items() if one.expires and name > after)
            names = sorted(mortal, key=str.encode)
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)


class ListsAScopesNeighbours(Unswept):
    """Lists the expired names of all scopes."""

    async def scan_expired(self, scope: str, *, after: str = "", limit: int) -> Page:
        names = set[str]()
        for each in [*self._store.scopes]:
            names |= {*(await super().scan_expired(each, after=after, limit=limit + 1)).names}
        listed = sorted(names, key=str.encode)
        return Page(tuple(listed[:limit]), listed[limit - 1] if len(listed) > limit else None)


class FindsNothingToDelete(Unswept):
    """Leaves an expired record where it is, as an absent one."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        return await self.load(key) is not None and await super().delete(key, expect=expect)


class SaysNothingOfWhatRemains(Unswept):
    """Returns an empty text for the receipt."""

    async def finish_erasure(self) -> Remains:
        return Remains("")


class ErasesTooMuch(Unswept):
    """Takes the end of an erasure for the end of everything."""

    async def finish_erasure(self) -> Remains:
        for scope in [*self._store.scopes]:
            for name in (await self.scan(scope, limit=1_000)).names:
                await self.delete(Key(scope, name))
        return await super().finish_erasure()


class PurgesAStepTooMuch(Unswept):
    """Removes whole steps, and so more than its limit."""

    async def purge(self, limit: int) -> int:
        return await super().purge(limit + 1)


class PurgesAStepTooFew(Unswept):
    """Compares with "less than" where "at most" is meant, and leaves one record."""

    async def purge(self, limit: int) -> int:
        return await super().purge(limit - 1)


class PurgesWhatWillExpire(Unswept):
    """Removes each record that has a time to live."""

    async def purge(self, limit: int) -> int:
        with self._scope("", "purge"):
            keys = [*self._store.mortal][:limit]
            for key in keys:
                self._store.remove(key)
        return len(keys)


class PurgesWithoutRemoving(Unswept):
    """Says that nothing is left."""

    async def purge(self, limit: int) -> int:
        return 0


class PurgesByListedNames(Unswept):
    """Lists what has expired, and removes records of these names a moment later."""

    async def purge(self, limit: int) -> int:
        with self._scope("", "purge") as (_, now):
            keys = [key for key in self._store.mortal if self._store.is_expired(key, now)][:limit]
        await asyncio.sleep(0)
        for key in keys:
            await self.delete(key)
        return len(keys)


class PurgesInTwoTransactions(SqliteDriver):
    """Reads names in one transaction, and removes records of these names in another."""

    async def purge(self, limit: int) -> int:
        def read(connection: sqlite3.Connection) -> list[tuple[str, str]]:
            return connection.execute(EXPIRED_KEYS, (self._clock(), limit)).fetchall()

        def remove(connection: sqlite3.Connection) -> None:
            with statements.transaction(connection):
                connection.executemany(DELETE_KEY, keys)

        keys = await self._run("purge", read)
        await self._run("purge", remove)
        return len(keys)


class FindsScopesInUtf16Order(Unswept):
    """Compares scopes as some languages compare text."""

    async def next_scope(self, after: str) -> str | None:
        later = (one for one in self._store.scopes if _utf16(one) > _utf16(after))
        return min(later, key=_utf16, default=None)


class FindsTheScopeItWasGiven(Unswept):
    """Finds the scope again that the search begins after."""

    async def next_scope(self, after: str) -> str | None:
        return after if after in self._store.scopes else await super().next_scope(after)


class FindsScopesWithoutRecords(Unswept):
    """Remembers a scope for as long as the driver is open."""

    _found: frozenset[str] = frozenset()

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        self._found |= {key.scope}
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)

    async def next_scope(self, after: str) -> str | None:
        later = (scope for scope in self._found if scope.encode() > after.encode())
        return min(later, key=str.encode, default=None)


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")

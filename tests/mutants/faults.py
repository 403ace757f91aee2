"""Drivers that are wrong about outages, damage, clients and round trips."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from stm_backends.drivers.contract import ANY, AnyType, Key, Page, Record
from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing.workbench.faulty import FaultyDriver


class OutageIsEmpty(FaultyDriver):
    """Lists nothing when it cannot look."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        try:
            return await super().scan(scope, after=after, limit=limit)
        except Unavailable:
            return Page((), None)


class ErrorNamesTheConversation(FaultyDriver):
    """Puts the key into the message of an error, and so into logs."""

    @contextmanager
    def _scope(self, name: str, operation: str) -> Generator[tuple[Any, float]]:
        if self.store.down:
            raise Unavailable(f"could not reach {name}", backend=self.name, operation=operation)
        with super()._scope(name, operation) as found:
            yield found


class StaysBroken(FaultyDriver):
    """Never tries again once its connection has failed."""

    broken = False

    @contextmanager
    def _scope(self, name: str, operation: str) -> Generator[tuple[Any, float]]:
        if self.broken:
            raise Unavailable("not connected", backend=self.name, operation=operation)
        self.broken = self.store.down
        with super()._scope(name, operation) as found:
            yield found


class DamageIsNoData(FaultyDriver):
    """Takes what it cannot read for what is not there."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Corrupt:
            return None


class ClearsDamageAway(FaultyDriver):
    """Removes what it cannot read, so that the next reader finds nothing."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Corrupt:
            self.store.damaged.remove(key.scope)
            await self.delete(key)
            raise


class ClosesTheCallersClient(FaultyDriver):
    """Closes its client even if the caller made it."""

    async def close(self) -> None:
        await super().close()
        self.store.closed = True


class ReadsBeforeItWrites(FaultyDriver):
    """Looks first, and writes in a second round trip."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        await self.load(key)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class WritesBehind(FaultyDriver):
    """Acknowledges an append that it stores with the next operation."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        await self._write()
        self.waiting = (key, entry, initial_version, ttl)
        record = await super().load(key)
        return len(record.tail if record else ()) + 1

    async def load(self, key: Key) -> Record | None:
        record = await super().load(key)
        if self.waiting is None or self.waiting[0] != key:
            return record
        _, entry, initial_version, _ = self.waiting
        return (
            Record(record.version, record.body, (*record.tail, entry))
            if record
            else Record(initial_version, None, (entry,))
        )

    waiting: tuple[Key, bytes, str, float | None] | None = None

    async def _write(self) -> None:
        if self.waiting is not None:
            key, entry, initial_version, ttl = self.waiting
            self.waiting = None
            await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class WritesOverDamage(FaultyDriver):
    """Appends to what is left of a damaged record, and counts it again from the start."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        self.store.damaged.discard(key.scope)
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class SavesBesideDamage(FaultyDriver):
    """Stores a new body over a damaged record of whatever version, and leaves the tail where it is."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        if how["expect"] is ANY and key.scope in self.store.damaged:
            self.store.damaged.discard(key.scope)
            if record := await self.load(key):
                how["expect"] = record.version
        return await super().replace(key, body, **how)


class FoldsDamageAway(FaultyDriver):
    """Stores a new body over a damaged record, without a look at what it replaces."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        self.store.damaged.discard(key.scope)
        return await super().replace(key, body, **how)


class MarksAsDeleted(FaultyDriver):
    """Hides a record that was deleted, and leaves it where it is."""

    _swept = 0

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        found = await self.load(key)
        if found is None or expect not in (ANY, found.version):
            return False
        with self._scope(key.scope, "delete") as (scope, now):
            scope.records[key.name].expires = now
        return True


class SkipsWhatIsMissing(FaultyDriver):
    """Returns those entries that are left, because nothing says how many there were."""

    async def load(self, key: Key) -> Record | None:
        self.store.short.discard(key.scope)
        return await super().load(key)


class ReadsFromAReplica(FaultyDriver):
    """Sends loads to a replica, however far behind it is."""

    async def load(self, key: Key) -> Record | None:
        primary = self.store.scopes
        self.store.scopes = self.store.replica or primary
        try:
            return await super().load(key)
        finally:
            self.store.scopes = primary


class ErrorsAreNoRecord(FaultyDriver):
    """Takes each error that the store answers with for its word that the record does not exist."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Unavailable:
            if self.store.refuses:
                return None
            raise


class StaysOnTheCallersClient(FaultyDriver):
    """Leaves what it has registered with its client when it is closed."""

    async def close(self) -> None:
        users = {*self.store.users}
        await super().close()
        self.store.users |= users

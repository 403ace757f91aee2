"""Purges with one fault each, which lose a turn that is added at the wrong moment."""

from __future__ import annotations

from stm_backends.admin.purging import Kind, Purge
from stm_backends.drivers.contract import ANY, Key, Record, new_version
from stm_backends.records.body import Body


class DeletesByVersion(Purge):
    """Deletes the record that it has read; an append does not change the version."""

    async def _empty(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> bool:
        del kind, ttl, now
        return await self._driver.delete(key, expect=record.version)


class DeletesOnceItIsEmpty(Purge):
    """Empties the record, reads that it is empty, and deletes it a moment later."""

    async def _empty(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> bool:
        if not await super()._empty(kind, key, record, ttl, now):
            return False
        left = await self._driver.load(key)
        return left is not None and (bool(left.tail) or await self._driver.delete(key, expect=left.version))


class ExpiresSoon(Purge):
    """Gives the emptied record, and a turn that was added since, a time to live of a minute."""

    async def _empty(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> bool:
        return await super()._empty(kind, key, record, min(ttl, 60.0), now)


class EmptiesInAnyCase(Purge):
    """Empties the record without a condition."""

    async def _empty(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> bool:
        del kind, record
        body = self._codec.seal_body(Body(extra={"purged_at": now}))
        return await self._driver.replace(key, body, version=new_version(), expect=ANY, ttl=ttl)


class DropsAllThatIsThere(Purge):
    """Drops the entries that are there a moment later, and not those that it has judged."""

    async def _empty(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> bool:
        found = await self._driver.load(key)
        return found is not None and await super()._empty(kind, key, found, ttl, now)


PURGES = (DeletesByVersion, DeletesOnceItIsEmpty, ExpiresSoon, EmptiesInAnyCase, DropsAllThatIsThere)

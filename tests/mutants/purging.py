"""Purges with one fault each, which lose what is added at the wrong moment, or leave an earlier one valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stm_backends.admin.purging import Kind, Purge
from stm_backends.drivers.contract import ANY, Key, Record, new_version
from stm_backends.history import items
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


class LeavesThePlace(Purge):
    """Drops the entries of a log, whose place stays: what follows them is accepted without them."""

    async def _ended(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> Record | None:
        del kind, key, ttl, now
        return record


class RefusesWhatWasAccepted(LeavesThePlace):
    """Says in the body that something came last, also to an addition that was acknowledged before."""

    def _body(self, kind: Kind, extra: Mapping[str, Any], record: Record, drop: int = 0) -> bytes:
        if kind == "memory":
            return super()._body(kind, extra, record, drop)
        folded = items.read(record, self._codec).emptied(drop, extra)
        place = folded.place._replace(settled=folded.place.gone + 1)
        return items.seal_folded(replace(folded, place=place), self._codec)


class DropsWhatFollowsTheEnd(Purge):
    """Drops all that is there once the log has ended, and with it what begins the next one."""

    async def _ended(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> Record | None:
        ended = await super()._ended(kind, key, record, ttl, now)
        return ended and await self._driver.load(key)


LOG_PURGES = (LeavesThePlace, RefusesWhatWasAccepted, DropsWhatFollowsTheEnd)

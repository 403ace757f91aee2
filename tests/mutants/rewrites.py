"""Drivers whose rewrite of entries is broken."""

from __future__ import annotations

import asyncio

from stm_backends.drivers.contract import Record
from tests.mutants.replaces import Replace, Replacing


class Rewriting(Replacing):
    """A driver whose rewrite is one other function; other replaces are correct."""

    async def change(self, call: Replace, found: Record | None) -> bool:
        if found and call.rewrite and found.version != call.version:
            return await self.rewritten(call, found)
        return await self.proper(call)

    async def rewritten(self, call: Replace, found: Record) -> bool:
        """Do the rewrite, given what is there."""
        del found
        return await self.proper(call)


class RewriteIgnoresTheVersion(Rewriting):
    """Rewrites a record of any version."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        return await self.proper(call._replace(expect=found.version))


class RewritesTheNewest(Rewriting):
    """Counts the rewritten entries from the wrong end."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        done = await self.proper(call)
        if done:
            self.set_tail(call.key, [*found.tail[: len(found.tail) - len(call.rewrite)], *call.rewrite])
        return done


class RewriteShiftsAppends(Rewriting):
    """Drops the old entries and appends the new ones, behind entries appended since."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        done = await self.proper(call)
        if done:
            self.set_tail(call.key, [*found.tail[len(call.rewrite) :], *call.rewrite])
        return done


class RewriteOverwritesAppends(Rewriting):
    """Writes back the tail as it was read, without entries appended since."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        await asyncio.sleep(0)
        done = await self.proper(call)
        if done:
            self.set_tail(call.key, [*call.rewrite, *found.tail[len(call.rewrite) :]])
        return done


class RewriteInTwoSteps(Rewriting):
    """Stores the body and the version first, and the entries afterwards."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        if len(call.rewrite) > len(found.tail):
            return False
        done = await self.proper(call._replace(rewrite=()))
        await asyncio.sleep(0)
        record = await self.load(call.key)
        if done and record:
            self.set_tail(call.key, [*call.rewrite, *record.tail[len(call.rewrite) :]])
        return done


class RewriteAppendsTheRest(Rewriting):
    """Appends rewritten entries where the tail has too few."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        done = await self.proper(call._replace(rewrite=call.rewrite[: len(found.tail)]))
        if done:
            self.set_tail(call.key, [*call.rewrite, *found.tail[len(call.rewrite) :]])
        return done


class RewriteIgnoresTheSize(Rewriting):
    """Does not count the bytes of the rewritten entries."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        done = await self.proper(call._replace(rewrite=[b""] * len(call.rewrite)))
        if done:
            self.set_tail(call.key, [*call.rewrite, *found.tail[len(call.rewrite) :]])
        return done


class RewriteCountsWhatItReplaces(Rewriting):
    """Counts the replaced entries beside those that replace them."""

    async def rewritten(self, call: Replace, found: Record) -> bool:
        done = await self.proper(call)
        if done:
            with self._scope(call.key.scope, "replace") as (scope, _):
                size = sum(map(len, found.tail[: len(call.rewrite)]))
                scope.records[call.key.name].size += size
        return done


class RewriteForgetsItsToken(Replacing):
    """Answers a rewrite that is sent twice as a lost race."""

    async def change(self, call: Replace, found: Record | None) -> bool:
        if found and call.rewrite and found.version == call.version:
            return False
        return await self.proper(call)

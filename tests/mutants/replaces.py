"""Drivers whose conditional write is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, AbsentType, AnyType, KeepType, Key, Record, Ttl
from stm_backends.drivers.in_memory import MemoryDriver


class Replacing(MemoryDriver):
    """A driver whose `replace` is one other function."""

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
        call = Replace(key, body, version, expect, drop, rewrite, ttl)
        return await self.change(call, await self.load(key))

    async def change(self, call: Replace, found: _Found) -> bool:
        """Do the call, given what is there."""
        del found
        return await self.proper(call)

    async def proper(self, call: Replace) -> bool:
        """Do the call as the contract says."""
        key, body, version, expect, drop, rewrite, ttl = call
        return await super().replace(
            key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
        )

    def set_tail(self, key: Key, tail: list[bytes]) -> None:
        """Overwrite the tail of a record that is there."""
        with self._scope(key.scope, "replace") as (scope, _):
            scope.records[key.name].tail = tail


class Replace(NamedTuple):
    key: Key
    body: bytes
    version: str
    expect: str | AbsentType | AnyType
    drop: int
    rewrite: Sequence[bytes]
    ttl: float | None | KeepType


_Found = Record | None


class LastWriterWinsFold(Replacing):
    """Folds without checking whether another writer has."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if found and isinstance(call.expect, str):
            call = call._replace(expect=found.version, drop=min(call.drop, len(found.tail)))
        return await self.proper(call)


class CompareThenSwap(Replacing):
    """Compares the version in one round trip and writes in the next."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if isinstance(call.expect, str) and found and found.version == call.expect:
            await asyncio.sleep(0)
            now = await self.load(call.key)
            call = call._replace(expect=now.version if now else call.expect, drop=0)
        return await self.proper(call)


class LeaseWithoutExclusion(Replacing):
    """Looks whether a lease is free in one round trip and takes it in the next."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if call.expect is ABSENT and found is None:
            await asyncio.sleep(0)
            call = call._replace(expect=ANY)
        return await self.proper(call)


class AbsentIsIgnored(Replacing):
    """Writes over what is there when told to write only where nothing is."""

    async def change(self, call: Replace, found: _Found) -> bool:
        return await self.proper(call._replace(expect=ANY) if call.expect is ABSENT else call)


class ABodyMakesPresent(Replacing):
    """Takes a record without a body for absent."""

    async def change(self, call: Replace, found: _Found) -> bool:
        bodiless = found is not None and found.body is None
        return await self.proper(call._replace(expect=ANY) if call.expect is ABSENT and bodiless else call)


class AnyKeepsTheTail(Replacing):
    """Leaves the tail standing under a body that replaced everything."""

    async def change(self, call: Replace, found: _Found) -> bool:
        done = await self.proper(call)
        if call.expect is ANY and found:
            self.set_tail(call.key, list(found.tail))
        return done


class FoldClearsTheTail(Replacing):
    """Clears what is pending after the summary instead of what the summary covers."""

    async def change(self, call: Replace, found: _Found) -> bool:
        done = await self.proper(call)
        if done and call.drop:
            self.set_tail(call.key, [])
        return done


class FoldDropsTheNewest(Replacing):
    """Removes from the wrong end."""

    async def change(self, call: Replace, found: _Found) -> bool:
        done = await self.proper(call)
        if done and found and call.drop and found.version != call.version:
            self.set_tail(call.key, list(found.tail[: len(found.tail) - call.drop]))
        return done


class FoldOverwritesAppends(Replacing):
    """Reads the tail, cuts it, and writes it back over entries appended since."""

    async def change(self, call: Replace, found: _Found) -> bool:
        await asyncio.sleep(0)
        done = await self.proper(call)
        if done and found and call.drop and found.version == call.expect:
            self.set_tail(call.key, list(found.tail[call.drop :]))
        return done


class FoldInTwoSteps(Replacing):
    """Stores the body first and removes the entries afterwards."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if not call.drop or not found or call.drop > len(found.tail):
            return await self.proper(call)
        done = await self.proper(call._replace(drop=0))
        await asyncio.sleep(0)
        record = await self.load(call.key)
        if done and record:
            self.set_tail(call.key, list(record.tail[call.drop :]))
        return done


class DropIsClamped(Replacing):
    """Removes what there is when told to remove more."""

    async def change(self, call: Replace, found: _Found) -> bool:
        return await self.proper(call._replace(drop=min(call.drop, len(found.tail) if found else 0)))


class ReplaceForgetsItsToken(Replacing):
    """Answers a write that is sent twice as if the second were a lost race."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if found and found.version == call.version != call.expect and call.expect is not ANY:
            return False
        return await self.proper(call)


class ReplaceAppliesItsTokenTwice(Replacing):
    """Does a blind save again when it is sent again, over what came after it."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if found and found.version == call.version and call.expect is ANY:
            await self.delete(call.key)
        return await self.proper(call)


class CounterVersions(Replacing):
    """Numbers the versions of a record, from 1 again after it has expired."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        del initial_version
        return await super().append(key, entry, initial_version="1", ttl=ttl)


class KeepIsForEver(Replacing):
    """Takes `KEEP` for `None`: what the background does makes a record immortal."""

    async def change(self, call: Replace, found: _Found) -> bool:
        return await self.proper(call._replace(ttl=None) if call.ttl is KEEP else call)


class RefusalRenewsTheTtl(Replacing):
    """Sets the time to live before it looks at the condition."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if found and not isinstance(call.ttl, Ttl):
            with self._scope(call.key.scope, "replace") as (scope, now):
                scope.records[call.key.name].expires = None if call.ttl is None else now + call.ttl
        return await self.proper(call)


class ExpiredIsInTheWay(Replacing):
    """Does not give a lease away before the reaper has removed the expired one."""

    _swept = 0

    async def change(self, call: Replace, found: _Found) -> bool:
        with self._scope(call.key.scope, "replace") as (scope, _):
            there = call.key.name in scope.records
        return await self.proper(call) if found or not there or call.expect is not ABSENT else False


class CaselessVersions(Replacing):
    """Compares versions by a collation that knows no case."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if (
            found is not None
            and isinstance(call.expect, str)
            and call.expect.lower() == found.version.lower()
        ):
            call = call._replace(expect=found.version)
        return await self.proper(call)


class AppliesItsOwnVersion(Replacing):
    """Compares the condition before it asks whether the write was done already."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if found is not None and call.version == call.expect == found.version:
            await self.proper(call._replace(version=f"{call.version} again"))
            return await self.proper(call._replace(expect=f"{call.version} again", drop=0, rewrite=()))
        return await self.proper(call)


class RefusalSetsATimeToLive(Replacing):
    """Sets the time to live of a record in seconds before it looks at the condition, and no other."""

    async def change(self, call: Replace, found: _Found) -> bool:
        if found and isinstance(call.ttl, float | int):
            with self._scope(call.key.scope, "replace") as (scope, now):
                scope.records[call.key.name].expires = now + call.ttl
        return await self.proper(call)


class ConflictIsALostRace(Replacing):
    """Meets a conflict with an append, and answers as if another writer had won."""

    async def change(self, call: Replace, found: _Found) -> bool:
        await asyncio.sleep(0)
        if isinstance(call.expect, str) and found and await self.load(call.key) != found:
            return False
        return await self.proper(call)


class ReplaceIgnoresTtlNone(Replacing):
    """Sets an end where there is a time to live, and keeps the earlier one where there is none."""

    async def change(self, call: Replace, found: _Found) -> bool:
        return await self.proper(call._replace(ttl=KEEP) if call.ttl is None else call)

"""Drivers whose load of the newest entries is broken."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from stm_backends.drivers.contract import Key, Record
from tests.mutants.expiry import Unswept


class IgnoresLast(Unswept):
    """Takes the parameter, and returns all entries."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        return await super().load(key)


class ReturnsTheOldest(Unswept):
    """Counts from the wrong end."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        whole, found = await super().load(key), await super().load(key, last=last)
        return replace(found, tail=whole.tail[: len(found.tail)]) if whole and found else None


class ReturnsOneMore(Unswept):
    """Is off by one, unless nothing is asked for."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        return await super().load(key, last=last + 1 if last else last)


class ReturnsTheNewestFirst(Unswept):
    """Reads the entries from the end, and returns them so."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        found = await super().load(key, last=last)
        return replace(found, tail=found.tail[::-1]) if found and last is not None else found


class LeavesOutTheBody(Unswept):
    """Reads nothing but entries."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        found = await super().load(key, last=last)
        return replace(found, body=None) if found and last is not None else found


class NoEntriesIsAll(Unswept):
    """Cuts with `tail[-last:]`, which is the whole tail for 0."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        return await super().load(key, last=last or None)


class CutsShortTails(Unswept):
    """Cuts with `tail[length - last:]`, which counts from the end of a tail that is shorter."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        found = await super().load(key)
        if found is None or last is None:
            return found
        tail = found.tail[len(found.tail) - last :]
        return replace(found, tail=tail, skipped=len(found.tail) - len(tail))


class CountsNothing(Unswept):
    """Does not say how many entries it has skipped."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        found = await super().load(key, last=last)
        return replace(found, skipped=0) if found else None


class LeavesOutWhatIsLarge(Unswept):
    """Looks for the newest entries beside the others only, where large ones are not."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        found = await super().load(key, last=last)
        if found is None or last is None:
            return found
        return replace(found, tail=tuple(entry for entry in found.tail if len(entry) < 2_000))


class SharesAnAnswer(Unswept):
    """Loads of a record at the same time share the answer to the first of them."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.loading: dict[Key, asyncio.Future[Record | None]] = {}

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        if key not in self.loading:
            self.loading[key] = asyncio.ensure_future(super().load(key, last=last))
            self.loading[key].add_done_callback(lambda _: self.loading.pop(key))
        return await self.loading[key]


class EmptiesTheNewestThatAreLarge(Unswept):
    """Leaves the newest entries out of an answer that several loads share, if they are large."""

    _loading = 0

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        self._loading += 1
        await asyncio.sleep(0)
        is_shared, found = self._loading > 1, await super().load(key, last=last)
        self._loading -= 1
        is_large = found is not None and 2 * sum(map(len, found.tail)) > self.traits.max_entry
        if found is None or last is None or not (is_shared and is_large):
            return found
        return replace(found, tail=(), skipped=found.length)


class CountsAfterItHasRead(Unswept):
    """Reads the entries first, and then how many there are."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        found = await super().load(key, last=last)
        await asyncio.sleep(0)
        counted = await super().load(key, last=last)
        return replace(found, skipped=counted.skipped) if found and counted else None


class ShowsTheNewestOfTheExpired(Unswept):
    """Judges expiry in loads of whole records only."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        if last is None:
            return await super().load(key)
        with self._scope(key.scope, "load") as (scope, _):
            found = scope.records.get(key.name)
            return found and Record(found.version, found.body, tuple(found.tail))


class LooksAtTheNumberLast(Unswept):
    """Takes -1 where there is no record."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        return await super().load(key, last=last) if await super().load(key) else None


class TakesNegativeNumbers(Unswept):
    """Takes -1 for 0."""

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        return await super().load(key, last=last and max(0, last))

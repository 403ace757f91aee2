"""Drivers that are broken on purpose, each in one way in which real ones are.

The suite must reject every one of them, by the check named beside it; that is how it is known to bite.
All are `MemoryDriver`s of one store with one clause broken.
"""

from __future__ import annotations

import asyncio
import fnmatch
import unicodedata
from typing import Final, NamedTuple

from stm_backends.driver import ABSENT, ANY, KEEP, AbsentType, AnyType, KeepType, Key, Page, Record, Ttl
from stm_backends.errors import TooLarge, Unavailable
from stm_backends.reference import MemoryDriver


class ReadThenWriteAppend(MemoryDriver):
    """Appends by reading the tail and writing it back."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        record = await self.load(key)
        await asyncio.sleep(0)
        length = await super().append(key, entry, birth=birth, ttl=ttl)
        if record is None:
            return length
        with self._scope(key.scope, "append") as (scope, _):
            scope.records[key.name].tail = [*record.tail, entry]
        return len(record.tail) + 1


class AppendChangesTheVersion(MemoryDriver):
    """Bumps the version with every write, so that folds lose to appends."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        length = await super().append(key, entry, birth=birth, ttl=ttl)
        with self._scope(key.scope, "append") as (scope, _):
            scope.records[key.name].version = birth
        return length


class AppendKeepsTheTtl(MemoryDriver):
    """Sets the time to live when a record is created, and never again."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            found = scope.find(key.name, now)
            expires = found.expires if found else None
        length = await super().append(key, entry, birth=birth, ttl=ttl)
        if found:
            found.expires = expires
        return length


class AppendNeverEndsALife(MemoryDriver):
    """Leaves the old time to live standing when told that there is none."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, now):
            found = scope.find(key.name, now)
            expires = found.expires if found else None
        length = await super().append(key, entry, birth=birth, ttl=ttl)
        if found and ttl is None:
            found.expires = expires
        return length


class AppendIgnoresRepeats(MemoryDriver):
    """Keeps the tail as a set of values."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        record = await self.load(key)
        if record and entry in record.tail:
            return len(record.tail)
        return await super().append(key, entry, birth=birth, ttl=ttl)


class RetryDoublesAnEntry(MemoryDriver):
    """Sends an append that was cancelled once more, to be sure."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        length = await super().append(key, entry, birth=birth, ttl=ttl)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await super().append(key, entry, birth=birth, ttl=ttl)
            raise
        return length


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
        ttl: float | None | KeepType,
    ) -> bool:
        call = _Replace(key, body, version, expect, drop, ttl)
        return await self.change(call, await self.load(key))

    async def change(self, call: _Replace, found: _Found) -> bool:
        """Do the call, given what is there."""
        del found
        return await self.proper(call)

    async def proper(self, call: _Replace) -> bool:
        """Do the call as the contract says."""
        key, body, version, expect, drop, ttl = call
        return await super().replace(key, body, version=version, expect=expect, drop=drop, ttl=ttl)

    def set_tail(self, key: Key, tail: list[bytes]) -> None:
        """Overwrite the tail of a record that is there."""
        with self._scope(key.scope, "replace") as (scope, _):
            scope.records[key.name].tail = tail


class _Replace(NamedTuple):
    key: Key
    body: bytes
    version: str
    expect: str | AbsentType | AnyType
    drop: int
    ttl: float | None | KeepType


_Found = Record | None


class LastWriterWinsFold(Replacing):
    """Folds without looking whether somebody else has."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        if found and isinstance(call.expect, str):
            call = call._replace(expect=found.version, drop=min(call.drop, len(found.tail)))
        return await self.proper(call)


class CompareThenSwap(Replacing):
    """Compares the version in one round trip and writes in the next."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        if isinstance(call.expect, str) and found and found.version == call.expect:
            await asyncio.sleep(0)
            now = await self.load(call.key)
            call = call._replace(expect=now.version if now else call.expect, drop=0)
        return await self.proper(call)


class LeaseWithoutExclusion(Replacing):
    """Looks whether a lease is free in one round trip and takes it in the next."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        if call.expect is ABSENT and found is None:
            await asyncio.sleep(0)
            call = call._replace(expect=ANY)
        return await self.proper(call)


class AbsentIsIgnored(Replacing):
    """Writes over what is there when told to write only where nothing is."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        return await self.proper(call._replace(expect=ANY) if call.expect is ABSENT else call)


class ABodyMakesPresent(Replacing):
    """Takes a record without a body for absent."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        bodiless = found is not None and found.body is None
        return await self.proper(call._replace(expect=ANY) if call.expect is ABSENT and bodiless else call)


class AnyKeepsTheTail(Replacing):
    """Leaves the tail standing under a body that replaced everything."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        done = await self.proper(call)
        if call.expect is ANY and found:
            self.set_tail(call.key, list(found.tail))
        return done


class FoldClearsTheTail(Replacing):
    """Clears what is pending after the summary instead of what the summary covers."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        done = await self.proper(call)
        if done and call.drop:
            self.set_tail(call.key, [])
        return done


class FoldDropsTheNewest(Replacing):
    """Removes from the wrong end."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        done = await self.proper(call)
        if done and found and call.drop and found.version != call.version:
            self.set_tail(call.key, list(found.tail[: len(found.tail) - call.drop]))
        return done


class FoldOverwritesAppends(Replacing):
    """Reads the tail, cuts it, and writes it back after somebody has appended."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        await asyncio.sleep(0)
        done = await self.proper(call)
        if done and found and call.drop and found.version == call.expect:
            self.set_tail(call.key, list(found.tail[call.drop :]))
        return done


class FoldInTwoSteps(Replacing):
    """Stores the body first and removes the entries afterwards."""

    async def change(self, call: _Replace, found: _Found) -> bool:
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

    async def change(self, call: _Replace, found: _Found) -> bool:
        return await self.proper(call._replace(drop=min(call.drop, len(found.tail) if found else 0)))


class ReplaceForgetsItsToken(Replacing):
    """Answers a write that is sent twice as if the second were a lost race."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        if found and found.version == call.version != call.expect and call.expect is not ANY:
            return False
        return await self.proper(call)


class ReplaceAppliesItsTokenTwice(Replacing):
    """Does a blind save again when it is sent again, over what came after it."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        if found and found.version == call.version and call.expect is ANY:
            await self.delete(call.key)
        return await self.proper(call)


class CounterVersions(Replacing):
    """Numbers the versions of a record, from 1 again after it has expired."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        del birth
        return await super().append(key, entry, birth="1", ttl=ttl)


class KeepIsForEver(Replacing):
    """Takes `KEEP` for `None`: what the background does makes a record immortal."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        return await self.proper(call._replace(ttl=None) if call.ttl is KEEP else call)


class RefusalRenewsTheTtl(Replacing):
    """Sets the time to live before it looks at the condition."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        if found and not isinstance(call.ttl, Ttl):
            with self._scope(call.key.scope, "replace") as (scope, now):
                scope.records[call.key.name].expires = None if call.ttl is None else now + call.ttl
        return await self.proper(call)


class ExpiredIsVisible(MemoryDriver):
    """Leaves expiry to a reaper that comes some time."""

    async def load(self, key: Key) -> Record | None:
        with self._scope(key.scope, "load") as (scope, _):
            found = scope.records.get(key.name)
            return Record(found.version, found.body, tuple(found.tail)) if found else None


class ExpiredIsListed(MemoryDriver):
    """Lists names whose records have expired."""

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        with self._scope(scope, "scan") as (found, _):
            names = sorted((name for name in found.records if name > after), key=str.encode)
        return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)


class ExpiredIsInTheWay(Replacing):
    """Does not give a lease away before the reaper has removed the expired one."""

    async def change(self, call: _Replace, found: _Found) -> bool:
        with self._scope(call.key.scope, "replace") as (scope, _):
            there = call.key.name in scope.records
        return await self.proper(call) if found or not there or call.expect is not ABSENT else False


class ExpiredComesBack(MemoryDriver):
    """Appends to what has expired and is still lying there."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        with self._scope(key.scope, "append") as (scope, _):
            found = scope.records.get(key.name)
            if found:
                found.expires = None
        return await super().append(key, entry, birth=birth, ttl=ttl)


class DeleteCountsTheExpired(MemoryDriver):
    """Says that it removed what had expired."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        with self._scope(key.scope, "delete") as (scope, _):
            there = key.name in scope.records
        return await super().delete(key, expect=expect) or (there and expect is ANY)


class DeleteIgnoresExpect(MemoryDriver):
    """Releases somebody else's lease."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        del expect
        return await super().delete(key)


class DeleteByPattern(MemoryDriver):
    """Uses the name as a pattern."""

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        with self._scope(key.scope, "delete") as (scope, _):
            names = [name for name in scope.records if fnmatch.fnmatchcase(name, key.name)]
        results = [await super(DeleteByPattern, self).delete(Key(key.scope, n), expect=expect) for n in names]
        return any(results)


class MappedKeys(MemoryDriver):
    """A driver that maps keys to others, and forgets that two may become one."""

    def map(self, key: Key) -> Key:
        """Return the key that is stored."""
        return key

    async def load(self, key: Key) -> Record | None:
        return await super().load(self.map(key))

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        return await super().append(self.map(key), entry, birth=birth, ttl=ttl)


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


class TextNotBytes(MemoryDriver):
    """Stores text."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        text = entry.decode(errors="replace").encode()
        return await super().append(key, text, birth=birth, ttl=ttl)


class EmptyIsNone(MemoryDriver):
    """Confuses an empty body with no body."""

    async def load(self, key: Key) -> Record | None:
        record = await super().load(key)
        return Record(record.version, record.body or None, record.tail) if record else None


class CutsWhatIsTooLarge(MemoryDriver):
    """Stores as much of an entry as fits."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        return await super().append(key, entry[: self.traits.max_entry], birth=birth, ttl=ttl)


class WritesBeforeItRefuses(MemoryDriver):
    """Notices that a record is full after having written to it."""

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        try:
            return await super().append(key, entry, birth=birth, ttl=ttl)
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


class OutageIsNoData(MemoryDriver):
    """Answers that nothing is there when it cannot look."""

    async def load(self, key: Key) -> Record | None:
        try:
            return await super().load(key)
        except Unavailable:
            return None


class ClosesEverybodysStore(MemoryDriver):
    """Takes away, on closing, what others still use."""

    async def close(self) -> None:
        await super().close()
        self._store.scopes.clear()


class HasOneLife(MemoryDriver):
    """Refuses to be closed twice."""

    async def close(self) -> None:
        if not self._is_open:
            raise Unavailable("closed already", backend=self.name, operation="close")
        await super().close()


MUTANTS: Final[dict[type[MemoryDriver], str]] = {
    ReadThenWriteAppend: "test_appends_at_the_same_time_are_all_there_each_writers_in_order",
    AppendChangesTheVersion: "test_an_append_does_not_change_the_version",
    AppendKeepsTheTtl: "test_an_append_sets_the_time_to_live_anew",
    AppendNeverEndsALife: "test_an_append_without_a_time_to_live_makes_the_record_last",
    AppendIgnoresRepeats: "test_the_same_entry_twice_stands_there_twice",
    RetryDoublesAnEntry: "test_a_cancelled_append_is_wholly_there_or_not_at_all",
    LastWriterWinsFold: "test_replace_with_a_version_stores_only_over_that_version",
    CompareThenSwap: "test_of_writers_that_expect_the_same_version_exactly_one_wins",
    LeaseWithoutExclusion: "test_of_those_who_want_a_lease_exactly_one_gets_it",
    AbsentIsIgnored: "test_replace_absent_stores_only_where_nothing_is",
    ABodyMakesPresent: "test_a_record_that_only_has_a_tail_is_not_absent",
    AnyKeepsTheTail: "test_replace_any_replaces_what_is_there_and_empties_the_tail",
    FoldClearsTheTail: "test_a_fold_removes_exactly_the_oldest_entries",
    FoldDropsTheNewest: "test_a_fold_removes_exactly_the_oldest_entries",
    FoldOverwritesAppends: "test_folds_never_lose_an_append_and_loads_never_see_half_a_fold",
    FoldInTwoSteps: "test_a_cancelled_fold_is_wholly_there_or_not_at_all",
    DropIsClamped: "test_a_drop_larger_than_the_tail_is_a_lost_race_and_changes_nothing",
    ReplaceForgetsItsToken: "test_a_write_that_is_sent_twice_is_true_twice_and_done_once",
    ReplaceAppliesItsTokenTwice: "test_a_blob_that_is_saved_twice_with_one_token_keeps_what_came_after",
    CounterVersions: "test_a_new_record_is_not_mistaken_for_the_expired_one",
    KeepIsForEver: "test_keep_never_lengthens_and_never_ends_a_life",
    RefusalRenewsTheTtl: "test_a_refused_write_does_not_change_the_time_to_live",
    ExpiredIsVisible: "test_an_expired_record_is_absent_in_load",
    ExpiredIsListed: "test_an_expired_record_is_absent_in_scan",
    ExpiredIsInTheWay: "test_an_expired_record_is_absent_in_replace_absent",
    ExpiredComesBack: "test_an_expired_record_is_absent_in_append",
    DeleteCountsTheExpired: "test_an_expired_record_is_absent_in_delete",
    DeleteIgnoresExpect: "test_a_delete_with_a_version_removes_only_that_version",
    DeleteByPattern: "test_a_delete_touches_no_other_record",
    JoinedKeys: "test_scope_and_name_are_joined_injectively",
    CaselessKeys: "test_keys_never_collide_and_never_act_as_patterns",
    NormalizedKeys: "test_keys_never_collide_and_never_act_as_patterns",
    ShortenedKeys: "test_keys_never_collide_and_never_act_as_patterns",
    TrimmedScopes: "test_scopes_never_collide_and_never_act_as_patterns",
    ScanByOffset: "test_deleting_what_was_listed_does_not_hide_what_follows",
    ScanIncludesItsStart: "test_a_scan_begins_after_any_name_even_one_that_is_not_there",
    ScanEndsWithItsFirstPage: "test_a_scan_lists_names_in_the_order_of_their_utf8_bytes",
    ScanInUtf16Order: "test_a_scan_lists_names_in_the_order_of_their_utf8_bytes",
    TextNotBytes: "test_what_went_in_comes_out_byte_for_byte",
    EmptyIsNone: "test_an_empty_body_is_a_body_and_an_empty_entry_an_entry",
    CutsWhatIsTooLarge: "test_the_largest_entry_fits_and_one_byte_more_is_too_large",
    WritesBeforeItRefuses: "test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room",
    LoadInTwoReads: "test_folds_never_lose_an_append_and_loads_never_see_half_a_fold",
    OutageIsNoData: "test_a_closed_driver_raises_and_never_answers",
    ClosesEverybodysStore: "test_closing_one_instance_leaves_the_others_and_the_data",
    HasOneLife: "test_opening_and_closing_twice_is_harmless",
}
"""Every mutant, and the check that is meant for it."""

"""Retention: removing expired records, and records without an addition for a given time.

The age of a conversation is the time since its newest turn, by the turns' own `ts` and, for turns that have
left the record, by the time at which they were folded or trimmed. An item log has the times of its entries.
So a copy or an import is as old as its original. Records without a usable time are kept and counted.

An append does not change a record's version, so no conditional deletion protects a turn that is added at that
moment. A record is therefore emptied instead: one conditional `replace` removes exactly the entries that were
judged, stores an empty body, and gives the record `older_than` as its time to live. A turn that arrives in
between stays, and lasts at least as long as the retention rule demands. The empty record expires by itself.
See docs/decisions/0033-purge-empties-and-lets-expire.md.

An item log is ended first, by an entry that takes effect only if nothing was added since the log was judged.
Otherwise an addition on the condition that nothing follows the judged entries would be accepted once these
are gone.

Items popped from a log that stays are removed, too, from its record and its pages.

A transcript is shortened by the times of its turns: pages whose turns are all older are removed; see
`records.shortening` and docs/decisions/0063-pages-in-administration.md.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from stm_backends.admin.dead_pages import IMPORTING_S, DeadPages, imported_after, transcript_of
from stm_backends.admin.describing import catalogue_on
from stm_backends.catalogue.card import SLOT_S, hour_of, slot_of
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.checks import require_seconds
from stm_backends.drivers.contract import ANY, AnyType, Driver, Key, Record
from stm_backends.drivers.purges import purges_of
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    KeyMismatch,
    LimitReached,
    SealMismatch,
    TooLarge,
    located,
)
from stm_backends.history import items
from stm_backends.history.log import ItemLog
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import stored_unit
from stm_backends.records import keys, ledger, operations
from stm_backends.records.body import Body, Forgotten, Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.large.driver import ORPHANED_S
from stm_backends.records.large.pointers import id_in, time_of
from stm_backends.records.pages import Copy
from stm_backends.records.shortening import Bodies, Shortening
from stm_backends.types import AHEAD_S, MemoryKey

STEP: Final = 500
"""Maximum number of expired records removed by one call of a driver."""

LASTING: Final = 10
"""Margin in the time to live of an ended log until it is emptied, as a number of deadlines."""

EARLIEST: Final = 946_684_800.0
"""The first second of the year 2000. An earlier time, such as 0, cannot be that of a turn."""

EMPTIED: Final = "purged_at"
"""The field of a body with the time at which a purge emptied its record, in epoch seconds."""

Kind: TypeAlias = Literal["memory"] | keys.LogKind
"""Kinds that are purged by age: conversations and item logs."""

DATED: Final[tuple[Kind, ...]] = ("memory", *keys.LOG_KINDS)


@dataclass(slots=True)
class Purged:
    """Counts of what a purge removed or, in a dry run, would remove; updated as it goes.

    `expired` counts expired records that were still stored, of all tenants, on datastores that keep them.
    `conversations` and `logs` were older than asked for; their cards go with them. `pages` are those of
    transcripts that went with them or were older themselves, `parts` are left-over parts of large values, and
    `cards` are cards without a conversation and left-over names in their index.
    The rest was kept: `kept` is newer, `undated` has no usable time, `changed` was written to at that
    moment, `unreadable` cannot be read, and `empty` was emptied by an earlier purge and has yet to expire.
    """

    expired: int = 0
    conversations: int = 0
    logs: int = 0
    pages: int = 0
    parts: int = 0
    cards: int = 0
    kept: int = 0
    undated: int = 0
    changed: int = 0
    unreadable: int = 0
    empty: int = 0

    @property
    def looked_at(self) -> int:
        """Number of records counted so far."""
        return sum(getattr(self, name) for name in self.__slots__)


class Found(NamedTuple):
    """One record that was purged or would be: its owner, kind and name, such as the session id.

    The kind `"page"` means that the transcript of this conversation was shortened.
    """

    tenant: str
    user: str
    kind: keys.Kind
    name: str


def _found(kind: Kind, key: Key) -> Found:
    return Found(*keys.owner_of(key.scope), kind, keys.unname(key.name))


def last_added(added: Sequence[float], forgotten: Forgotten, *, now: float) -> float | None:
    """Return when something was last added to a record, in epoch seconds; `None` if that is unknown.

    `added` has the times of its entries, oldest first. The newest entry must have a usable time.
    """
    times = [*(when for when, _ in forgotten.ages), *added]
    usable = [when for when in times if EARLIEST <= when <= now + AHEAD_S]
    if not usable or usable[-1] != times[-1]:
        return None
    return max(usable)


class Purge:
    """One purge: call `expired`, `tenant` or `user` in any order; each may be repeated.

    Nothing is remembered between calls, so an interrupted purge is completed by another. With `dry_run`,
    nothing is written. `older_than` and `transcripts_older_than` are in seconds; without both, only expired
    records are removed. `clock` is in epoch seconds. `on_step` is called now and then, `on_found` for each
    record that is purged by its age, and `on_unreadable` for each that cannot be read, with the reason.
    """

    def __init__(  # noqa: PLR0913 -- the parts, the settings, and three events
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        older_than: float | None = None,
        transcripts_older_than: float | None = None,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
        on_step: Callable[[Purged], None] = lambda purged: None,
        on_found: Callable[[Found], None] = lambda found: None,
        on_unreadable: Callable[[Found, Corrupt], None] = lambda found, error: None,
    ) -> None:
        if older_than is not None:
            require_seconds("older_than", older_than)
            if older_than < driver.traits.min_ttl:
                raise ConfigurationError(
                    f"older_than is at least {driver.traits.min_ttl:g} s on this backend"
                )
        if transcripts_older_than is not None:
            require_seconds("transcripts_older_than", transcripts_older_than)
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._catalogue = catalogue_on(driver, codec, directory, clock=clock)
        self._older_than = older_than
        self._transcripts_older_than = transcripts_older_than
        self._dead_pages = DeadPages(driver, codec, spared=self._is_import)
        self._shortening = Shortening(driver, codec, dry_run=dry_run)
        self._dry_run = dry_run
        self._clock = clock
        self._on_step = on_step
        self._on_found = on_found
        self._on_unreadable = on_unreadable
        self.purged = Purged()

    async def expired(self) -> None:
        """Remove expired records that the datastore does not remove by itself, of all tenants."""
        purges = purges_of(self._driver)
        if purges is None:
            return
        if self._dry_run:
            self.purged.expired += await purges.expired()
            return
        gone = STEP
        while gone == STEP:
            gone = await purges.purge(STEP)
            self.purged.expired += gone
            self._on_step(self.purged)

    async def tenant(self, tenant: str) -> None:
        """Purge all users of a tenant, and left-over parts of large values of the tenant's states."""
        async for user in self._directory.users(tenant):
            await self.user(tenant, user)
        scope = keys.shared_scope(tenant)
        await self._left_over(keys.parts_of(Key(scope, "")).scope, [scope])

    async def user(self, tenant: str, user: str) -> None:
        """Purge old records, left-over parts of large values, and the entry of a user without records."""
        if self._older_than is not None:
            for kind in DATED:
                scope = keys.scope(tenant, user, kind)

                async def judge(name: str, kind: Kind = kind, scope: str = scope) -> None:
                    where = Key(scope, name)
                    if keys.is_beside(where) and await self._is_there(keys.log_with(where)):
                        return  # It is as old as the log that it belongs to, which is judged by itself.
                    outcome = await self._judge(kind, where, self._older_than or 0.0)
                    if outcome in ("conversations", "logs") and not self._dry_run:
                        # Removes the card, unless something is left of the conversation.
                        key = MemoryKey(tenant, user, keys.unname(name))
                        await self._catalogue.touch(key)
                        await self._state_beside(kind, key)
                        await self._words(tenant, user).forget(keys.card_key(key).name)
                    self._count(kind, where, outcome)
                    if outcome in ("logs", "empty"):
                        await self._judge_beside(kind, where, is_old=outcome == "logs")

                await operations.each(operations.names(self._driver, scope), judge)
        if self._transcripts_older_than is not None:
            await self._transcripts(tenant, user, self._transcripts_older_than)
        if not self._dry_run and (self._older_than, self._transcripts_older_than) != (None, None):
            await self._forget_popped(tenant, user)
        await self._remove_pages(await self._dead_pages.of_user(tenant, user))
        scopes = [keys.scope(tenant, user, kind) for kind in keys.KINDS]
        await self._left_over(keys.scope(tenant, user, "part"), scopes)
        await self._left_over_cards(tenant, user)
        if not self._dry_run:
            await self._left_over_words(tenant, user)
            await self._directory.forget_if_unused(tenant, user)

    async def _state_beside(self, kind: Kind, key: MemoryKey) -> None:
        """Erase the states that belong to a log which was emptied."""
        if kind != "memory":
            with suppress(InvalidKey):  # a key this long has none
                own = keys.state_beside(key, kind)
                await ledger.erase(self._driver, keys.blob_key(own))
                scope, prefix = keys.blob_key(f"{own}/")
                async for name in operations.names_of(self._driver, scope, prefix):
                    await ledger.erase(self._driver, Key(scope, name))

    def _count(self, kind: Kind, where: Key, outcome: str | None) -> None:
        """Count a record that was judged, and report one that was purged by its age."""
        if outcome in ("conversations", "logs"):
            self._on_found(_found(kind, where))
        if outcome is not None:
            setattr(self.purged, outcome, getattr(self.purged, outcome) + 1)
        self._on_step(self.purged)

    async def _judge_beside(self, kind: Kind, where: Key, *, is_old: bool) -> None:
        """Judge the logs that belong to one that was purged: they go with it, unless it was purged before."""
        for scope, prefix in keys.beside_of(where):
            async for name in operations.names_of(self._driver, scope, prefix):
                place = Key(scope, name)
                outcome = await self._judge(kind, place, self._older_than or 0.0, is_old=is_old)
                self._count(kind, place, outcome)

    async def _is_there(self, where: Key) -> bool:
        try:
            return await self._driver.load(where, last=0) is not None
        except Corrupt:
            return True

    async def _judge(self, kind: Kind, key: Key, older_than: float, *, is_old: bool = False) -> str | None:
        """Empty a record if it is old; returns the field of `Purged` that counts it."""
        try:
            record = await self._driver.load(key)
            if record is None:
                return None
            now = self._clock()
            added, is_empty = self._look(kind, record, now)
            if is_empty:
                return "empty"
            if not is_old and added is None:
                return "undated"
            if not is_old and added is not None and added > now - older_than:
                return "kept"
            if not self._dry_run and not await self._empty(kind, key, record, older_than, now):
                return "changed"
            await self._remove_pages(await self._pages_gone_with(key))
        except Corrupt as error:
            # The record itself, or the entry of its user, which is sealed.
            self._on_unreadable(_found(kind, key), error)
            return "unreadable"
        return "conversations" if kind == "memory" else "logs"

    async def _pages_gone_with(self, key: Key) -> list[Key]:
        """Return the pages that are dead once a record is emptied."""
        dead = await self._dead_pages.of_record(key)
        if not self._dry_run:
            return dead
        # The record still has them. Pages that were dead before are counted as left over.
        scope, prefix = keys.pages_of(key)
        listed = [Key(scope, name) async for name in operations.names_of(self._driver, scope, prefix)]
        return [where for where in listed if where not in dead and not self._is_import(where.name)]

    def _is_import(self, name: str) -> bool:
        """Say whether a page may be of an import that has yet to store its record."""
        return imported_after(self._clock() - IMPORTING_S)(name)

    def _look(self, kind: Kind, record: Record, now: float) -> tuple[float | None, bool]:
        """Return when something was last added to a record, and whether a purge has emptied it."""
        if kind == "memory":
            snapshot = Snapshot.of(record, self._codec)
            body, added = snapshot.body, [stored.turn.ts for stored in snapshot.turns]
            extra, forgotten = body.extra, body.forgotten
            added = [*([] if body.lease is None else [body.lease.at]), *added]
        else:
            log = items.read(record, self._codec)
            extra, forgotten, added = log.folded.extra, log.folded.forgotten, log.added
        is_empty = EMPTIED in extra and not record.tail and not forgotten.ages
        return last_added(added, forgotten, now=now), is_empty

    async def _empty(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> bool:
        """Remove the body and the entries that were read, in bounded steps; `False` after a lost race."""
        # The time to live may end after that of the user's entry.
        await self._directory.note(*keys.owner_of(key.scope), ttl=ttl)
        left = record if kind == "memory" else await self._ended(kind, key, record, ttl, now)
        while left is not None:
            is_last = len(left.tail) <= self._driver.traits.max_drop
            left = await self._dropped(kind, key, left, {EMPTIED: now}, ttl)
            if left is not None and is_last:
                return True
        return False

    async def _dropped(
        self, kind: Kind, key: Key, record: Record, extra: Mapping[str, Any], ttl: float
    ) -> Record | None:
        """Remove the body and what one step drops; returns the rest of the record, `None` for a lost race."""
        drop = min(len(record.tail), self._driver.traits.max_drop)
        change = ledger.Change(self._body(kind, extra, record, drop), drop=drop, ttl=ttl)
        unchanged = ledger.unchanged_by(lambda record: self._body(kind, {}, record))
        done = await ledger.fold(self._driver, key, record, change, unchanged=unchanged)
        return Record(change.version, change.body, record.tail[drop:]) if done else None

    async def _ended(self, kind: Kind, key: Key, record: Record, ttl: float, now: float) -> Record | None:
        """End a log that was read; returns it with all that goes, `None` if others have added to it since.

        Only the order of entries tells an addition that was acknowledged before from one that is too late.
        """
        log = items.read(record, self._codec)
        if not log.place.exists:
            return record
        # As old as the entries that it ends: a purge that is killed afterwards is completed by the next.
        end = items.End(secrets.token_hex(12), float(now - ttl), log.tip)
        entry, left = items.seal_entry(end, self._codec), record
        # It must not expire before it is emptied; emptying it sets its final time to live.
        lasting = ttl + LASTING * self._driver.traits.deadline

        async def send() -> ledger.Appended:
            listing = self._directory.listed(keys.owner_of(key.scope), lasting)
            return await ledger.append(self._driver, key, entry, ttl=lasting, listing=listing)

        async def make_room() -> bool:
            nonlocal left
            # Judged entries go first, as far as the end needs room.
            dropped = await self._dropped(kind, key, left, {}, lasting)
            left = dropped or left
            return dropped is not None

        try:
            await ledger.append_to_full(send, make_room)
        except (TooLarge, LimitReached):
            return None
        found = await self._driver.load(key)
        log = items.read(found, self._codec)
        if found is None or end.id not in log.ids:
            return None
        count = 1 + [one.id for one in log.entries].index(end.id)
        return Record(found.version, found.body, found.tail[:count])

    def _body(self, kind: Kind, extra: Mapping[str, Any], record: Record, drop: int = 0) -> bytes:
        """Return the body of a record that is empty except for the entries that are not dropped."""
        if kind == "memory":
            return self._codec.seal_body(Body(extra=extra))
        log = items.read(record, self._codec)
        return items.seal_folded(log.emptied(drop, extra), self._codec)

    async def _transcripts(self, tenant: str, user: str, older_than: float) -> None:
        """Shorten the transcripts of a user by the pages whose turns are all older."""
        for kind in DATED:
            scope = keys.scope(tenant, user, kind)

            async def shorten(name: str, kind: Kind = kind, scope: str = scope) -> None:
                try:
                    count = await self._shorten(kind, Key(scope, name), older_than)
                except Corrupt as error:
                    if self._older_than is None:  # else it was counted before
                        self.purged.unreadable += 1
                        self._on_unreadable(_found(kind, Key(scope, name)), error)
                    return
                self.purged.pages += count
                if count and not self._dry_run:
                    await self._forget_shortened(kind, Key(scope, name))
                if count:
                    self._on_found(Found(tenant, user, "page", keys.unname(name)))
                    self._on_step(self.purged)

            await operations.each(operations.names(self._driver, scope), shorten)

    async def _shorten(self, kind: Kind, key: Key, older_than: float) -> int:
        """Shorten one transcript, if there is one; returns by how many pages."""
        record, bodies = await self._driver.load(key, last=0), self._bodies(kind)
        with located(self._driver.name, "purge"):
            transcript = bodies.transcript_of(None if record is None else record.body)
        if transcript is None:
            return 0
        now = self._clock()

        def added_at(turn: Mapping[str, Any]) -> float:
            return stored_unit(turn).turn.ts if kind == "memory" else items.item_in(turn)[1]

        def is_old(copies: Mapping[int, Copy]) -> bool:
            added = [added_at(copy.turn) for _, copy in sorted(copies.items())]
            newest = last_added(added, Forgotten(), now=now)
            return newest is not None and newest <= now - older_than

        return await self._shortening.by_page(key, bodies, transcript, is_old)

    async def _forget_popped(self, tenant: str, user: str) -> None:
        """Remove items popped from the logs of a user. Unreadable logs were counted before."""
        life: list[float | None] = []
        for kind in keys.LOG_KINDS:

            async def forget(name: str, kind: keys.LogKind = kind) -> None:
                with suppress(Corrupt):
                    if not life:
                        # The time to live of a log is unknown; it is no longer than its user's entry.
                        known = await self._directory.life_of(tenant, user)
                        life.append(None if known is None else max(known, self._driver.traits.min_ttl))
                    key = MemoryKey(tenant, user, keys.unname(name))
                    ttl_s = life[0]
                    log = ItemLog(self._driver, key, kind, codec=self._codec, ttl_s=ttl_s, clock=self._clock)
                    await log.forget_popped()

            await operations.each(operations.names(self._driver, keys.scope(tenant, user, kind)), forget)

    async def _forget_shortened(self, kind: Kind, key: Key) -> None:
        """Remove the words of the turns that a transcript has lost."""
        record = await self._driver.load(key, last=0)
        transcript = self._bodies(kind).transcript_of(None if record is None else record.body)
        if kind == "memory" and transcript is not None:
            owner = keys.owner_of(key.scope)
            card = keys.card_key(MemoryKey(*owner, keys.unname(key.name))).name
            await self._words(*owner).forget(card, below=transcript.first)

    def _bodies(self, kind: Kind) -> Bodies:
        codec = self._codec

        def with_transcript(body: bytes | None, transcript: Transcript) -> bytes:
            if kind == "memory":
                return codec.seal_body(replace(codec.open_body(body), transcript=transcript))
            return items.seal_folded(replace(items.open_folded(body, codec), transcript=transcript), codec)

        return Bodies(partial(transcript_of, kind, codec), with_transcript)

    async def _remove_pages(self, dead: Iterable[Key]) -> None:
        for where in dead:
            if not self._dry_run:
                await ledger.erase(self._driver, where)
            self.purged.pages += 1
            self._on_step(self.purged)

    async def _left_over(self, scope: str, of: Iterable[str]) -> None:
        """Remove parts of large values whose record is gone, as an interrupted erasure or purge leaves them.

        `scope` has the parts, and `of` are those of the records. Listing the scopes also lets Redis remove
        the names of expired records from its indexes.
        """
        until = self._clock() - ORPHANED_S
        # Listed before the records: a part is older than its pointer, except for the first minutes.
        old = [name async for name in operations.names(self._driver, scope) if _is_part_before(name, until)]
        if self._dry_run and not old:
            return
        owners: set[str] = set()
        for owner in of:
            async for name in operations.names(self._driver, owner):
                if old:
                    owners.add(keys.parts_of(Key(owner, name)).name)
        for name in old:
            if keys.prefix_in(name) not in owners:
                if not self._dry_run:
                    await self._driver.delete(Key(scope, name))
                self.purged.parts += 1
                self._on_step(self.purged)

    async def _left_over_cards(self, tenant: str, user: str) -> None:
        """Remove cards without a conversation and names without a card, as killed processes leave them."""
        cards, recent = keys.scope(tenant, user, "card"), keys.scope(tenant, user, "recent")
        # Listed before the records: a card is newer than its conversation.
        left = {name async for name in operations.names(self._driver, cards)}
        names = [name async for name in operations.names(self._driver, recent)]
        there = await self._with_records(tenant, user) if left or names else set[str]()
        # A later name may be of a card that is being written.
        latest = slot_of(self._clock() - 2 * SLOT_S)
        gone: list[Key] = []
        several = Counter(keys.slot_and_card(name)[1] for name in names)
        for name in names:
            slot, card = keys.slot_and_card(name)
            if hour_of(slot) <= latest:
                continue
            is_left = card not in left & there
            if is_left or (several[card] > 1 and not await self._catalogue.is_at(Key(cards, card), slot)):
                gone.append(Key(recent, name))
        for where in gone:
            if not self._dry_run:
                await self._driver.delete(where)
            self.purged.cards += 1
            self._on_step(self.purged)
        if left - there:
            await self._cards_without(tenant, user, left - there)

    async def _cards_without(self, tenant: str, user: str, left: set[str]) -> None:
        """Remove cards whose conversation is gone, unless it begins again meanwhile."""
        cards = keys.scope(tenant, user, "card")
        expected: dict[str, str | AnyType] = {}
        for name in left:
            try:
                record = await self._driver.load(Key(cards, name), last=0)
            except Corrupt:
                expected[name] = ANY
            else:
                expected |= {} if record is None else {name: record.version}
        # After the versions: one that begins again later writes its card under another version.
        there = await self._with_records(tenant, user)
        for name, expect in expected.items():
            if name in there:
                continue
            if self._dry_run or await self._driver.delete(Key(cards, name), expect=expect):
                self.purged.cards += 1
                self._on_step(self.purged)

    async def _left_over_words(self, tenant: str, user: str) -> None:
        """Remove the words of conversations that are gone, as killed processes leave them."""
        words = self._words(tenant, user)
        try:
            known = await words.find(frozenset())
            there = await self._with_records(tenant, user) if known else set[str]()
            for card in known.keys() - there:
                await words.forget(card)
            await words.remove_dead()
        except (KeyMismatch, SealMismatch):
            return  # as the conversations of this user, which are counted as unreadable
        except Corrupt:
            await words.erase()

    def _words(self, tenant: str, user: str) -> WordIndex:
        return WordIndex(self._driver, self._codec, self._directory, (tenant, user))

    async def _with_records(self, tenant: str, user: str) -> set[str]:
        """Return the names that the cards of all of a user's conversations have."""
        there: set[str] = set()
        for kind in DATED:
            async for name in operations.names(self._driver, keys.scope(tenant, user, kind)):
                there.add(keys.card_key(MemoryKey(tenant, user, keys.unname(name))).name)
        return there


def _is_part_before(name: str, until: float) -> bool:
    """Say whether a name is that of a part that was created before a time, in epoch seconds."""
    try:
        return time_of(id_in(name)) < until
    except ValueError:
        return False

"""The cards of a user's conversations and the index that lists them: how both are written and read.

- `tenant:user:card`, named by the session: the card.
- `tenant:user:recent`, named `slot:session`: nothing but the name. A scan finds the latest slot first, and
  within an hour first those that do not tell the moment.

The card decides. A change of slot puts the new name, then writes the card, then deletes the old name, so
that a conversation is in the index at every moment, wherever a process is killed. A name that is behind its
card is left over, and the process that reads it removes it. A name that is ahead of its card belongs to a
write that is under way, and stays.

A card is only written for a conversation that exists: a first card is checked against the records before and
after it is written, because an erasure may come in between. An erasure removes the names before the card. A
process that has put a name looks for it once the card is written: a conversation that begins again while it
is erased is in the list. Any other name is deleted under its version, if the card does not have it.

A touch tells the time to live of its conversation. No operation does, so a card that is made without a touch
lives as long as the entry of its user, which outlives each record, and is shown while its conversation
exists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from stm_backends import races
from stm_backends.catalogue.card import (
    GOES_ON_S,
    SLOT_S,
    Activity,
    Content,
    after_activity,
    card_of,
    hour_of,
    is_before,
    slot_of,
)
from stm_backends.drivers.contract import ANY, KEEP, MAX_KEY_BYTES, Driver, KeepType, Key, Record
from stm_backends.drivers.tasks import all_of
from stm_backends.errors import Corrupt, KeyMismatch, SealMismatch, Unavailable, located
from stm_backends.records import confirming, keys, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

Describe: TypeAlias = Callable[[MemoryKey, Sequence[str]], Awaitable[Activity | None]]
"""Reads the records of some kinds, of all kinds for none; `None` if nothing is in any of them."""

Changed: TypeAlias = Callable[[Content | None], Awaitable[Content | None]]
"""Returns the card to write instead of the stored one; `None` for no change."""

SPARE: Final = 14
"""Names that a page reads besides its cards: a page that ends within a slot needs the rest of the slot.

If these do not suffice, each further scan reads as many as all before it.
"""


class _Written(NamedTuple):
    """A card before and after a change, and the version that it got."""

    before: Content | None
    after: Content | None
    version: str = ""


class Place(NamedTuple):
    """The place of a card in a list: latest first."""

    hour: str
    before: float
    name: str

    @staticmethod
    def of(name: str, content: Content) -> Place:
        """Return the place of a card with this name."""
        return Place(hour_of(content["slot"]), -content["at"], name)


class Catalogue:
    """The cards of all users on one backend. `clock` is in epoch seconds."""

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        describe: Describe,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._describe = describe
        self.clock = clock

    async def load(self, key: MemoryKey) -> Content | None:
        """Return the card of a conversation; `None` if it has none yet."""
        where = keys.card_key(key)
        record = await self._driver.load(where)
        return None if record is None else await self._shown(where, self._open(record))

    async def readable(self, where: Key) -> Content | None:
        """Return a stored card; `None` if there is none, or if it is damaged, so that others can be read."""
        try:
            record = await self._driver.load(where)
            if record is None:
                return None
            content = self._open(record)
            with located(self._driver.name, "catalogue"):
                card_of(where, content)
            return await self._shown(where, content)
        except (KeyMismatch, SealMismatch):
            raise
        except Corrupt as error:
            logger.warning("a card cannot be read: %s (conversation %s)", error, keys.log_name(where))
            return None

    async def _shown(self, where: Key, content: Content) -> Content | None:
        """Return a stored card; `None` if it has outlived its conversation, as it may if that was a guess."""
        if "guessed" not in content:
            return content
        with located(self._driver.name, "catalogue"):
            key = card_of(where, content).key
        for kind in keys.KINDS:
            if kind in content["counts"]:
                place = Key(keys.scope(key.tenant_id, key.user_id, kind), keys.name(key.session_id))
                with suppress(Corrupt):
                    if await self._driver.load(place, last=0) is None:
                        continue
                return content
        return None

    async def is_at(self, where: Key, slot: str) -> bool:
        """Say whether there is a card, and whether its name is that of this slot."""
        record = await self._driver.load(where)
        return record is not None and self._open(record)["slot"] == slot

    async def touch(
        self,
        key: MemoryKey,
        seen: Activity | None = None,
        *,
        kind: str = "",
        at: float = 0.0,
        ttl: float | None | KeepType = KEEP,
        reset: bool = False,
    ) -> Content | None:
        """Note an activity, and return the card; `None` if the conversation does not exist.

        Without `seen`, the record of the `kind` is read. With `reset`, and if that record is empty, the
        records that the card knows of are read, too, and only they count. Without a kind, and before a card
        is removed, all are read. `at` is the time of the activity in epoch seconds, if it is later than
        theirs. The card lives `ttl` seconds from now.
        """
        now = self.clock()

        async def changed(before: Content | None) -> Content | None:
            known = seen if before is not None else None
            found = known or await self._look(key, kind, before, reset=reset)
            if found is None:
                return None
            alone = known is None and (reset or kind not in found.counts)
            return after_activity(before, found, at=at, now=now, known=known is not None, reset=alone)

        written = await self._write(keys.card_key(key), key, changed, ttl=ttl)
        if written.after is None and written.before is not None:
            if await self._is_there_after_all(key, written.before):
                return written.before
            await self._remove(keys.card_key(key), written.before, version=written.version)
        return written.after

    async def _look(
        self, key: MemoryKey, kind: str, before: Content | None, *, reset: bool
    ) -> Activity | None:
        """Read as few records as a touch needs; see `touch`."""
        if not kind:
            return await self._describe(key, ())
        if (before is None or not reset) and (own := await self._describe(key, (kind,))) is not None:
            return own
        if before is None:
            return None
        return await self._describe(key, [*{kind, *before["counts"]}]) or await self._describe(key, ())

    async def _is_there_after_all(self, key: MemoryKey, content: Content) -> bool:
        """Say whether a server that others have replaced showed nothing of a conversation that exists."""
        if not self._driver.traits.shows_unconfirmed:
            return False
        scopes = {keys.scope(key.tenant_id, key.user_id, kind) for kind in content["counts"]}
        await confirming.confirm(self._driver, scopes)
        return await self._describe(key, ()) is not None

    async def update(self, key: MemoryKey, changes: Content) -> Content | None:
        """Set fields of a card, which keeps its place and its time to live; `None` as in `touch`."""

        async def changed(before: Content | None) -> Content | None:
            if before is None or "guessed" in before:
                found = await self._describe(key, ())
                if found is None:
                    return None
                before = before or after_activity(None, found, now=self.clock())
            return {**before, **changes}

        return (await self._write(keys.card_key(key), key, changed, ttl=KEEP)).after

    async def forget(self, key: MemoryKey) -> bool:
        """Remove the card of a conversation, and its name; returns whether it had one."""
        where = keys.card_key(key)
        record = await self._driver.load(where)
        if record is not None:
            await self._remove(where, self._open(record), version=record.version)
        return record is not None

    async def expire(self, where: Key, ttl: float) -> bool:
        """Give a stored card, and its name in the index, a time to live; returns whether it exists."""

        async def changed(before: Content | None) -> Content | None:
            return before

        return (await self._write(where, None, changed, ttl=ttl, renew=True)).after is not None

    async def _write(
        self,
        where: Key,
        key: MemoryKey | None,
        changed: Changed,
        *,
        ttl: float | None | KeepType,
        renew: bool = False,
    ) -> _Written:
        """Change a card: put its name, write it, delete the names that it had.

        `renew` puts the name even if it is there. Without a `key`, no card is created.
        """
        put, lives = set[str](), None if ttl is KEEP else ttl
        owner, listed = keys.owner_of(where.scope), False

        async def decided(record: Record | None) -> tuple[ledger.Change | None, _Written]:
            nonlocal listed, lives
            before = None if record is None else self._open(record)
            after = await changed(before)
            if after is None:
                return None, _Written(before, None, record.version if record else "")
            if len(_recent(where, after["slot"]).name.encode()) > MAX_KEY_BYTES:
                after = {**after, "slot": hour_of(after["slot"])}
            # The user is not listed before: those whose conversations were erased are not listed again.
            if before is None and ttl is KEEP:
                life = await self._directory.life_of(*owner)
                lives = None if life is None else max(life, self._driver.traits.min_ttl)
                # Names of this hour that touches have put are behind this one, so that readers remove them.
                after = {**after, "slot": hour_of(after["slot"]), "guessed": True}
            else:
                lives = self._life_left(before) if before is not None and ttl is KEEP else lives
                await self._directory.note(*owner, ttl=lives)
            listed, is_known = True, ttl is not KEEP and "guessed" in after
            if is_known:
                after = {name: value for name, value in after.items() if name != "guessed"}
            if before is None and key is not None and where.name.startswith(keys.NO_NAME):
                after["session"] = key.session_id
            if before is None or ttl is not KEEP or before["slot"] != after["slot"]:
                is_put = "put" in after
                after = {name: value for name, value in after.items() if name != "put"}
                named = await self._put(where, None if renew or is_known else before, after, lives)
                if named is not after:
                    after = {**named, "put": True}
                    put.add(named["slot"])
                elif is_put:
                    # The process that put the name may have been killed before it looked for it.
                    await self._look_for(where, after, lives)
            change = ledger.Change(self._codec.seal("card", after), ttl=ttl if before else lives)
            return change, _Written(before, after, change.version)

        written = await ledger.update(self._driver, where, decided)
        if written is None:
            raise Unavailable(
                "a card kept changing; it was not changed", backend=self._driver.name, operation="catalogue"
            )
        before, after, version = written
        if after and after["slot"] in put:
            await self._look_for(where, after, lives)
        stays = after or before
        # Those of lost races, too.
        for slot in sorted({*put, *([before["slot"]] if before else [])} - {stays["slot"] if stays else ""}):
            await self._delete_name(where, slot)
        created = after if before is None else None
        if created and key and await self._describe(key, [*created["counts"]]) is None:
            await self._remove(where, created, version=version)
            after = None
        if after is None and listed:
            # The conversation was erased while this was written, and its user may be listed again.
            await self._directory.forget_if_unused(*owner)
        return _Written(before, after, version)

    def _life_left(self, content: Content) -> float | None:
        """Return the maximum time to live of a card in seconds; `None` means forever."""
        until = content.get("until")
        return None if until is None else max(until - self.clock(), self._driver.traits.min_ttl)

    async def _put(self, where: Key, before: Content | None, after: Content, ttl: float | None) -> Content:
        """Put the name of a card into the index; returns the card, which is `after` if it was there.

        A name lives longer than its card by a slot, so that it is not put again within the slot; that of a
        guess does not outlive the entry of its user.
        """
        now, is_guess = self.clock(), "guessed" in after
        if before is not None and before["slot"] == after["slot"]:
            lives = before.get("until")
            if lives is None or (ttl is not None and now + ttl <= lives):
                return after
        name_ttl = ttl if ttl is None or is_guess else ttl + SLOT_S
        if not is_guess:
            await self._directory.note(*keys.owner_of(where.scope), ttl=name_ttl)
        name, change = (
            _recent(where, after["slot"]),
            ledger.Change(self._codec.seal("recent", {}), ttl=name_ttl),
        )
        await ledger.replace(self._driver, name, change, expect=ANY)
        after = {name: value for name, value in after.items() if name != "until"}
        return after if name_ttl is None else {**after, "until": now + name_ttl}

    async def _look_for(self, where: Key, after: Content, ttl: float | None) -> None:
        """Put the name of a card again that was written here, if the name is gone and the card is not.

        An erasure removes the names first. One that came before the card leaves the card.
        """
        if await self._driver.load(_recent(where, after["slot"]), last=0) is None:
            await self._put(where, None, after, ttl)
            await self._delete_name(where, after["slot"])

    async def _remove(self, where: Key, content: Content, *, version: str) -> None:
        """Remove a card that was read or written here, and its name."""
        await races.retried(lambda: self._driver.delete(where, expect=version))
        # Also after a lost race, which a lost answer looks like: the name of a card that is there stays.
        await self._delete_name(where, content["slot"])

    async def _delete_name(self, where: Key, slot: str) -> None:
        """Delete the name of a card in a slot, unless it is the card's own meanwhile."""
        name = _recent(where, slot)
        found = await self._driver.load(name, last=0)
        # The card is read after the name: a process that writes one of this slot later looks for its name.
        if found is not None and not await self.is_at(where, slot):
            await races.retried(lambda: self._driver.delete(name, expect=found.version))

    async def page(
        self,
        tenant: str,
        user: str,
        *,
        after: Place | None,
        limit: int,
        wanted: Callable[[str, str], bool] | None = None,
    ) -> tuple[list[tuple[Key, Content]], Place | None]:
        """Return the cards after a place, latest first, and the place of the last one if there may be more.

        With `wanted`, only the cards for which that holds, by a slot and the name of the card.

        Waits twice: for a scan of names, and for the loads of their cards at once. It waits more where one
        hour has more conversations than a page, of which many went on for minutes, and once more for a page
        that begins within such an hour.
        """
        scope, cards = keys.scope(tenant, user, "recent"), keys.scope(tenant, user, "card")
        found, position, most = dict[str, Content](), "" if after is None else after.hour, limit + SPARE
        # The names of the hour before this one are of cards that were shown.
        begins, read = "" if after is None else slot_of(-after.before, GOES_ON_S), 0
        while True:
            page = await self._driver.scan(
                scope, after=position, limit=most if wanted is None else operations.PAGE
            )
            names, position = page.names, page.after
            end = names[-1:]
            names = [name for name in names if not _is_skipped(keys.slot_and_card(name)[0], begins)]
            if wanted is not None:
                names = [name for name in names if wanted(*keys.slot_and_card(name))]
                if len(names) > most:
                    # The rest is for another page.
                    names = names[:most]
                    end, position = names[-1:], names[-1]
            found |= await self._cards_of(cards, names)
            listed = _in_order(found, after)
            slot = keys.slot_and_card(end[0])[0] if end else ""
            # All names that may belong before the end of this page of cards must be read.
            if position is None or (len(listed) > limit and is_before(slot, -listed[limit - 1].before)):
                break
            read += len(page.names)
            most = max(most, read)
            if _is_skipped(slot, begins):
                # Some of the next names may be of cards that were shown, too.
                position, most = begins, 2 * most
        shown = listed[:limit]
        last = shown[-1] if shown and (len(listed) > limit or position is not None) else None
        return [(Key(cards, one.name), found[one.name]) for one in shown], last

    async def _cards_of(self, cards: str, names: Sequence[str]) -> dict[str, Content]:
        """Return the cards that names of the index are of; removes the names that are behind their card."""
        pairs = [keys.slot_and_card(name) for name in names]
        contents = await all_of(self.readable(Key(cards, card)) for _, card in pairs)
        found: dict[str, Content] = {}
        for (slot, card), content in zip(pairs, contents, strict=True):
            if content is None or content["slot"] > slot:
                continue  # gone, or ahead of its card
            if content["slot"] < slot:
                await self._delete_name(Key(cards, card), slot)
            # Also by an old name: the card may have moved since the names were listed.
            found[card] = content
        return found

    def _open(self, record: Record) -> Content:
        with located(self._driver.name, "catalogue"):
            content = self._codec.open("card", record.body or b"")
            if not isinstance(content.get("slot"), str) or not isinstance(content.get("at"), float):
                raise Corrupt("a stored card lacks a field, or a field has the wrong type")
            return content


async def names_of(card: Key, names: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield those of a user's names in the index that are of one card.

    A process that was killed may have left one in any slot, so only a listing of all finds them.
    """
    async for name in names:
        if keys.slot_and_card(name)[1] == card.name:
            yield name


def _recent(where: Key, slot: str) -> Key:
    """Return the key of the name of a card in a slot."""
    return keys.recent_key(*keys.owner_of(where.scope), slot, where.name)


def _is_skipped(slot: str, begins: str) -> bool:
    """Say whether a slot is of the hour of `begins` and before it; not those that say no moment."""
    return slot != hour_of(slot) == hour_of(begins) and slot < begins


def _in_order(found: dict[str, Content], after: Place | None) -> list[Place]:
    """Return the places of cards beyond a place, in order."""
    places = sorted(Place.of(name, card) for name, card in found.items())
    return places if after is None else [place for place in places if place > after]

"""The erasure of a conversation, a user or a tenant."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime

from stm_backends.admin.dead_pages import PAGED, DeadPages
from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.receipt import RECORDS, Counted, Receipt
from stm_backends.catalogue.index import names_of
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.erasing import expired_names, finish_erasure
from stm_backends.errors import Corrupt, Denied, InvalidKey, StorageError
from stm_backends.records import confirming, keys, ledger, operations, pages
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from stm_backends.types import MemoryKey
from stm_backends.work.notes import Note
from stm_backends.work.queue import WorkQueue

logger = logging.getLogger("stm_backends")

EraseKeys = Callable[[str, str], Awaitable[int]]
"""Erases the data keys of a user or, with `""`, of a tenant and its users; returns how many had keys."""


class Erasure:
    """Erases, counts what it erases, and reads again what it erased. Use each object once."""

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        erase_keys: EraseKeys,
        observer: Observer = SILENT,
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._dead_pages = DeadPages(driver, codec)
        self._directory = directory
        self._catalogue = catalogue_on(driver, codec, directory)
        self._erase_keys = erase_keys
        self._observer = observer
        self._work = WorkQueue(driver, codec)
        self._erased: Counter[Counted] = Counter()
        self._found: Counter[Counted] = Counter()
        self._undecided: int | None = 0
        self._keys_left = False

    async def erase(self, tenant: str, user: str | None = None, session: str | None = None) -> Receipt:
        """Erase a conversation, a user or a tenant, and return the receipt.

        Raises `KeyMismatch` for a user or a tenant if the keys are not those of the data: otherwise the right
        keys would stay, and the receipt would not say so.
        """
        began = datetime.now(UTC)
        if session is None:
            await self._directory.require_keys(tenant)
        if user is None:
            await self._tenant(tenant)
        elif session is None:
            await self._user(tenant, user)
        else:
            await self._conversation(MemoryKey(tenant, user, session))
        await self._forget_work(tenant, user, session)
        remains = await finish_erasure(self._driver)
        return Receipt(
            tenant_id=tenant,
            user_id=user,
            session_id=session,
            backend=self._driver.name,
            began=began,
            ended=datetime.now(UTC),
            erased=+self._erased,
            found=+self._found,
            undecided=self._undecided,
            remains=remains.text,
            cleaned=remains.finished,
            keys_left=self._keys_left,
        )

    async def _forget_work(self, tenant: str, user: str | None, session: str | None) -> None:
        """Erase the notes for a worker that name what was erased."""
        names = (tenant, user, session)

        def owned(note: Note) -> bool:
            key = note.key
            dialogue = key.session_id
            if session is not None and key == keys.short_term_of(MemoryKey(tenant, user or "", session)):
                dialogue = session
            found = (key.tenant_id, key.user_id, dialogue)
            return all(wanted in (None, name) for wanted, name in zip(names, found, strict=True))

        try:
            await self._work.forget(owned)
        except Denied:
            # A role that may use one tenant only neither reads the queue of all nor has notes there.
            pass
        except Corrupt as error:
            # Sealed with other keys than this backend's, or damaged. A worker that reads it drops them.
            logger.warning("the queue of work may still name what was erased: %s", error)

    async def _conversation(self, key: MemoryKey) -> None:
        # Computed first: an invalid key raises before anything is erased.
        places: dict[Key, Counted] = {keys.memory_key(key): "conversations"}
        with suppress(InvalidKey):  # a key this long has no short-term memory
            places[keys.memory_key(keys.short_term_of(key))] = "conversations"
        places |= {keys.log_key(key, kind): "logs" for kind in keys.LOG_KINDS}
        beside = [one for place in places for one in keys.beside_of(place)]
        for expired in (False, True):
            async for place in self._beneath(beside, expired=expired):
                places[place] = "logs"
        states, prefixes = _states_of(key)
        places |= dict.fromkeys(states, "states")
        for place, kind in places.items():
            await self._record(place, kind)
        # After the records: a process that puts turns into pages meanwhile finds that its record is gone.
        transcripts = [place for place, kind in places.items() if kind in ("conversations", "logs")]
        for place in transcripts:
            await self._pages(place, places[place])
        # Last: a process that writes a card looks for the conversation afterwards.
        card = keys.card_key(key)
        await self._card(card)
        # Likewise, a process that indexes words looks for the card afterwards.
        words = WordIndex(self._driver, self._codec, self._directory, (key.tenant_id, key.user_id))
        await words.forget(card.name)
        async for place in self._beneath(prefixes):
            await self._record(place, "states")
        async for place in self._beneath(prefixes, expired=True):
            await self._expired(place)
        # Records are deleted even if absent, which confirms the erasure.
        listed = {of(place).scope for place in places for of in (keys.parts_of, keys.pages_of)}
        listed |= {beneath.scope for beneath in prefixes}
        recent = keys.scope(key.tenant_id, key.user_id, "recent")
        listed.add(recent)
        await confirming.confirm(self._driver, listed - {place.scope for place in places})
        for place, kind in places.items():
            self._found[kind] += await self._is_there(place)
        async for place in self._beneath(beside):
            self._found["logs"] += place not in places
        async for _ in self._beneath(map(keys.pages_of, transcripts)):
            self._found["pages"] += 1
        async for _ in self._beneath(prefixes):
            self._found["states"] += 1
        self._found["cards"] += await self._is_there(card)
        async for _ in names_of(card, operations.names(self._driver, recent)):
            self._found["cards"] += 1
        owner = (key.tenant_id, key.user_id)
        has_begun = self._found["conversations"] or self._found["logs"]
        await self._list(*owner, [keys.name(key.session_id)] if has_begun else [])
        self._erased["directory_entries"] += await self._directory.forget_if_unused(*owner)
        self._observer.erased(Subject.of(key), self._records)

    async def _beneath(self, prefixes: Iterable[Key], *, expired: bool = False) -> AsyncIterator[Key]:
        """Yield the records whose names begin with one of these; with `expired`, those that have expired."""
        for scope, prefix in prefixes:
            listed = expired_names if expired else operations.names
            async for name in listed(self._driver, scope, after=prefix):
                if not name.startswith(prefix):
                    break
                yield Key(scope, name)

    async def _record(self, place: Key, kind: Counted) -> None:
        """Erase a record, and its parts, expired or not."""
        self._erased[kind] += await ledger.erase(self._driver, place)
        async for part in self._beneath([keys.parts_of(place)], expired=True):
            await self._expired(part)

    async def _pages(self, place: Key, kind: Counted) -> None:
        """Erase the pages of a record, expired or not, except those of a record begun meanwhile.

        A record that an import has stored meanwhile is erased, too: some of its pages are gone.
        """
        dead = await self._dead_pages.of_record(place)
        self._erased["pages"] += await pages.remove(self._driver, dead)
        async for page in self._beneath([keys.pages_of(place)], expired=True):
            await self._expired(page)
        if await self._dead_pages.is_referred_to(place, dead):
            await self._record(place, kind)
            await self._pages(place, kind)

    async def _pages_of_user(self, tenant: str, user: str) -> bool:
        """Erase the pages of a user whose records are erased; returns whether there were any.

        Pages of conversations begun meanwhile stay. A conversation that an import has stored is erased.
        """
        dead, again = await self._dead_pages.of_user(tenant, user), False
        self._erased["pages"] += await pages.remove(self._driver, dead)
        for kind in PAGED if dead else ():
            scope = keys.scope(tenant, user, kind)
            async for name in operations.names(self._driver, scope):
                if await self._dead_pages.is_referred_to(Key(scope, name), dead):
                    self._erased[_counted(kind)] += await ledger.erase(self._driver, Key(scope, name))
                    again = True
        if again:
            await self._pages_of_user(tenant, user)
        return bool(dead)

    async def _card(self, card: Key) -> None:
        """Erase a card and all of its names in the index, expired or not.

        The names come first: a process that writes the card again looks for its name afterwards. Each is
        deleted under its version, so that an erasure whose answer is lost deletes none that was put later.
        """
        scope = keys.scope(*keys.owner_of(card.scope), "recent")
        async for name in names_of(card, operations.names(self._driver, scope)):
            found = await self._driver.load(Key(scope, name), last=0)
            if found is not None:
                self._erased["cards"] += await self._driver.delete(Key(scope, name), expect=found.version)
        async for name in names_of(card, expired_names(self._driver, scope)):
            await self._expired(Key(scope, name))
        await self._record(card, "cards")

    async def _expired(self, place: Key) -> None:
        """Remove an expired record that the datastore has not removed."""
        await self._driver.delete(place)
        self._erased["expired"] += 1

    async def _is_there(self, place: Key) -> bool:
        try:
            return await self._driver.load(place, last=0) is not None
        except Corrupt:
            return True

    @property
    def _records(self) -> int:
        return sum(self._erased[kind] for kind in RECORDS)

    async def _user(self, tenant: str, user: str) -> None:
        before = self._records
        self._keys_left |= await self._directory.other_seal(tenant, user) == "sealed"
        unconfirmed = {keys.scope(tenant, user, kind) for kind in keys.KINDS}
        for kind in keys.KINDS:
            scope, counted = keys.scope(tenant, user, kind), _counted(kind)
            if kind == "page":
                if await self._pages_of_user(tenant, user):
                    unconfirmed.discard(scope)
            else:
                async for name in operations.names(self._driver, scope):
                    unconfirmed.discard(scope)
                    run = kind == "planner" and await ledger.erase(self._driver, Key(keys.PAUSED_RUNS, name))
                    self._erased[counted] += await self._driver.delete(Key(scope, name)) or run
            async for name in expired_names(self._driver, scope):
                if kind == "planner":
                    await self._driver.delete(Key(keys.PAUSED_RUNS, name))
                await self._expired(Key(scope, name))
        await confirming.confirm(self._driver, unconfirmed)
        self._erased["data_keys"] += await self._erase_keys(tenant, user)
        life = await self._directory.forget(tenant, user)
        self._erased["directory_entries"] += life is not None
        # A process that creates a conversation lists its user again after the append, which covers creations
        # from here on. An earlier creation may have listed the user just before `forget`.
        found, begun = await self._second_reading(tenant, user)
        if found:
            await self._directory.restore(tenant, user, life)
        await self._list(tenant, user, begun)
        await self._count_undecided(tenant, user)
        self._observer.erased(Subject(tenant, user), self._records - before)

    async def _second_reading(self, tenant: str, user: str) -> tuple[bool, set[str]]:
        """Count records written in the meantime; returns whether there are any, and conversations' names."""
        found, begun = False, set[str]()
        for kind in keys.KINDS:
            scope = keys.scope(tenant, user, kind)
            async for name in operations.names(self._driver, scope):
                where = Key(scope, name)
                if self._erased["parts"] and await ledger.erase_dangling(self._driver, where):
                    continue
                found = True
                self._found[_counted(kind)] += 1
                if kind in PAGED and not keys.is_beside(where):
                    begun.add(name)
        return found, begun

    async def _list(self, tenant: str, user: str, begun: Iterable[str]) -> None:
        """Restore the cards of conversations that began during the erasure, if it removed them.

        The next touch of a process may never come. A failure is only logged: the erasure itself is done.
        """
        for name in begun:
            try:
                key = MemoryKey(tenant, user, keys.unname(name))
                if keys.is_dialogue(key) and await self._catalogue.load(key) is None:
                    await self._catalogue.touch(key)
            except StorageError as error:
                where = keys.log_name(Key(keys.scope(tenant, user, "card"), name))
                logger.warning("could not write to the catalogue: %s (conversation %s)", error, where)

    async def _count_undecided(self, tenant: str, user: str) -> None:
        """Count saved states that may be the user's or another's; a role for one tenant may not list them."""
        if self._undecided is None:
            return
        try:
            for prefix in keys.undecided_prefixes(tenant, user):
                async for _ in operations.names_of(self._driver, prefix.scope, prefix.name):
                    self._undecided += 1
        except Denied:
            # Then it does not list those of the tenant's other users either.
            self._undecided = None
        except InvalidKey:
            pass

    async def _shared(self, tenant: str) -> None:
        """Erase the states of a tenant as a whole, and their parts, expired or not."""
        scope = keys.shared_scope(tenant)
        places: dict[str, Counted] = {scope: "states", keys.parts_of(Key(scope, "")).scope: "parts"}
        for place, counted in places.items():
            async for name in operations.names(self._driver, place):
                self._keys_left |= await self._is_sealed(Key(place, name))
                self._erased[counted] += await self._driver.delete(Key(place, name))
            async for name in expired_names(self._driver, place):
                await self._expired(Key(place, name))
            await confirming.confirm(self._driver, (place,))

    async def _is_sealed(self, place: Key) -> bool:
        """Say whether a record has a sealed value that this backend, without sealing, cannot open."""
        with suppress(Corrupt):
            record = await self._driver.load(place, last=0)
            return record is not None and operations.is_sealed(record)
        return False

    async def _tenant(self, tenant: str) -> None:
        async for user in self._directory.users(tenant):
            await self._user(tenant, user)
        await confirming.confirm(self._driver, (keys.directory_scope(tenant),))
        # Users with expired entries that were not removed may have such records, too.
        async for name in expired_names(self._driver, keys.directory_scope(tenant)):
            await self._user(tenant, keys.unname(name))
        of_users = self._erased["states"]
        await self._shared(tenant)
        # Before the keys: a mark names a key that exists.
        await self._directory.forget_seal(tenant)
        self._erased["data_keys"] += await self._erase_keys(tenant, "")
        async for _ in self._directory.users(tenant):
            self._found["directory_entries"] += 1
        async for _ in operations.names(self._driver, keys.shared_scope(tenant)):
            self._found["states"] += 1
        self._observer.erased(Subject(tenant), self._erased["states"] - of_users)


def _counted(kind: keys.Kind) -> Counted:
    match kind:
        case "memory":
            return "conversations"
        case "blob":
            return "states"
        case "planner":
            return "paused_runs"
        case "graph":
            return "graph_records"
        case "page":
            return "pages"
        case "card" | "recent" | "words":
            return "cards"
        case "part":
            return "parts"
        case _:
            return "logs"


def _states_of(key: MemoryKey) -> tuple[list[Key], list[Key]]:
    """Return the keys of a conversation's saved states, and the prefixes of the states below it."""
    composite = ""
    with suppress(InvalidKey):
        composite = key.composite()
    owner = (key.tenant_id, key.user_id)
    texts = [composite] if composite else []
    # As in a composite, and as PenguiFlow writes them.
    for ids in dict.fromkeys((composite, ":".join((*owner, key.session_id)))):
        prefix = f"{keys.RESERVED_PREFIX}{ids}:"
        if ids and (ids == composite or ":" not in "".join((*owner, key.session_id))):
            texts += [prefix[:-1], prefix]
    places: dict[str, Key] = {}
    beneath: list[Key] = []
    for text in texts:
        # A key that is too long has no state.
        with suppress(InvalidKey):
            place, owned_by = keys.blob(text)
            if owned_by == owner:
                places[text] = place
            if text.endswith(":"):
                beneath.append(Key(keys.scope(*owner, "blob"), place.name))
    return [*places.values()], beneath

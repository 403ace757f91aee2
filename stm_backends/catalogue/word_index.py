"""The words of a user's conversations: one record that grows, and generations of records that do not.

- `log`: the portions that were indexed last, one entry each, and the names of the generations.
- `GENERATION:list`: the portions of a generation. `GENERATION:00` to `:3f`: their words, by bucket.

A portion is one append. When the log has `PORTIONS` of them, they become a generation: its records are
written first, and then one conditional write of the log drops the entries and names it. A generation is
named by the version of the log that this write replaces, so one that the log does not name, and that has
another version, is dead for good. Only forgetting changes the records of a generation.

The index may lack stored text, and may have text that is gone: a search reads all text that it shows.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stm_backends.catalogue import portions
from stm_backends.catalogue.portions import Logged, Portion
from stm_backends.drivers.contract import ABSENT, Driver, Key, Record
from stm_backends.errors import Corrupt, KeyMismatch, SealMismatch, StorageError, Unavailable, located
from stm_backends.records import keys, ledger, operations, postings
from stm_backends.records.codec import Codec
from stm_backends.records.compression import Preset
from stm_backends.records.directory import Directory

logger = logging.getLogger("stm_backends")

PORTIONS: Final = 64
"""Number of portions in a generation, unless the datastore drops fewer entries at once."""

LOG: Final = "log"


class Indexed(NamedTuple):
    """A portion, and the bits of the texts that have all words searched for."""

    portion: Portion
    bits: int


def is_settled(slot: str, known: Sequence[Indexed]) -> bool:
    """Say whether the index has all of a conversation that was last active in a slot."""
    return any(one.portion.settled and slot >= one.portion.settled for one in known)


class WordIndex:
    """The words of the conversations of one owner."""

    def __init__(self, driver: Driver, codec: Codec, directory: Directory, owner: tuple[str, str]) -> None:
        self._driver = driver
        self._codec = codec.after(Preset())
        self._directory = directory
        self._owner = owner
        self._log = self._at(LOG)

    # Writing

    async def add(self, logged: Logged) -> None:
        """Index a portion; a failure to make a generation is only logged; a later portion makes it."""
        entry = portions.seal_logged(logged, self._codec)

        async def send() -> ledger.Appended:
            return await ledger.append(self._driver, self._log, entry, ttl=None)

        async with self._directory.listed(self._owner) as listing:
            appended = await ledger.append_to_full(send, self.make_generation)
            listing.created = appended.created
        if appended.length >= PORTIONS:
            try:
                await self.make_generation()
            except StorageError as error:
                logger.warning("could not rewrite the index of conversations; a later write will: %s", error)

    async def make_generation(self) -> bool:
        """Move the oldest portions of the log to a generation; returns whether the log may have room now."""
        record = await self._driver.load(self._log)
        if record is None or not record.tail:
            return False
        going = min(len(record.tail), PORTIONS, self._driver.traits.max_drop)
        unchanged = ledger.unchanged_by(lambda _: portions.seal_generations([], self._codec))
        version = await ledger.confirmed(self._driver, self._log, record, going, unchanged=unchanged)
        if version is None:
            return True
        names, logged = self._opened(record)
        leaving, generation = [one for one in logged[:going] if one], f"{version}.{secrets.token_hex(4)}"
        if leaving:
            await self._write(generation, leaving)
            names = [*names, generation]
        change = ledger.Change(portions.seal_generations(names, self._codec), drop=going)
        # After an unknown outcome, a lost race may also mean that the log named it, and has changed since.
        if not await ledger.replace(self._driver, self._log, change, expect=version, repeatable=False):
            await self._remove(generation)
        return True

    async def _write(self, generation: str, logged: Sequence[Logged]) -> None:
        """Write the records of a generation that no other process uses."""
        buckets = portions.buckets_of(logged)
        bodies = {_bucket(number): postings.seal(one, self._codec) for number, one in buckets.items()}
        bodies[_LIST] = portions.seal_list([one.portion for one in logged], self._codec)

        async def write(record: tuple[str, bytes]) -> None:
            where = self._at(f"{generation}:{record[0]}")
            await ledger.replace(self._driver, where, ledger.Change(record[1], ttl=None), expect=ABSENT)

        await operations.together([*bodies.items()], write)

    # Forgetting

    async def forget(self, card: str, *, below: int | None = None) -> int:
        """Remove the words of a conversation, or of its numbers below one; returns the number of portions.

        A generation that another process is making meanwhile does not come to be. An index that cannot be
        read is removed as a whole, even if this process lacks its keys: it can be rebuilt.
        """
        try:
            return await self._forget(card, below)
        except Corrupt as error:
            logger.warning("the words of a user are removed, because they cannot be read: %s", error)
            await self.erase()
            return 0

    async def erase(self) -> None:
        """Remove all words of the owner. The log comes first: without it, no generation comes to be."""
        await ledger.erase(self._driver, self._log)
        async for name in operations.names(self._driver, self._log.scope):
            await ledger.erase(self._driver, Key(self._log.scope, name))

    async def _forget(self, card: str, below: int | None) -> int:
        gone = await self._forget_logged(card, below)
        names, _ = self._opened(await self._driver.load(self._log))
        for generation in names:
            gone += await self._forget_in(generation, card, below)
        await self.remove_dead()
        return gone

    async def _forget_logged(self, card: str, below: int | None) -> int:
        async def decided(record: Record | None) -> tuple[ledger.Change | None, int]:
            if record is None:
                return None, 0
            names, logged = self._opened(record)
            tail, gone, last = [*record.tail], 0, 0
            for place, one in enumerate(logged):
                if one is None or one.portion.card != card:
                    continue
                kept = portions.kept_bits(one.portion, below)
                if kept != -1:
                    gone, last = gone + 1, place + 1
                    tail[place] = portions.seal_logged(one.keeping(kept) if kept else None, self._codec)
            # A generation that another process makes meanwhile has what is in the log until it is named.
            body = portions.seal_generations(names, self._codec)
            return (ledger.Change(body, rewrite=tail[:last]) if gone else None), gone

        return await self._update(self._log, decided)

    async def _forget_in(self, generation: str, card: str, below: int | None) -> int:
        where = self._at(f"{generation}:{_LIST}")
        listed = self._list_in(await self._driver.load(where))
        kept = {
            str(number): bits
            for number, one in enumerate(listed)
            if one is not None and one.card == card and (bits := portions.kept_bits(one, below)) != -1
        }
        if not kept:
            return 0

        async def without(number: int) -> int:
            async def decided(record: Record | None) -> tuple[ledger.Change | None, int]:
                if record is None:
                    return None, 0
                left = portions.without(self._bucket_in(record), kept)
                return ledger.Change(postings.seal(left, self._codec)), 1

            return await self._update(self._at(f"{generation}:{_bucket(number)}"), decided)

        await operations.together(range(postings.BUCKETS), without)

        async def shorter(record: Record | None) -> tuple[ledger.Change | None, int]:
            # Last: an interrupted call finds them again.
            left = self._list_in(record)
            if not left:
                return None, 0  # erased meanwhile
            for number, bits in kept.items():
                one = left[int(number)]
                left[int(number)] = one.unsettled() if one and bits else None
            return ledger.Change(portions.seal_list(left, self._codec)), len(kept)

        return await self._update(where, shorter)

    async def remove_dead(self) -> int:
        """Remove generations that the log neither names nor comes to name; returns how many records."""
        scope = self._log.scope
        stored = [name async for name in operations.names(self._driver, scope) if name != LOG]
        if not stored:
            return 0
        # Loaded after the names were listed: what is named later was not listed.
        record = await self._driver.load(self._log)
        names, _ = self._opened(record)
        version = None if record is None else record.version
        dead = [
            name
            for name in stored
            if (generation := name.partition(":")[0]) not in names and generation.partition(".")[0] != version
        ]
        for name in dead:
            await self._driver.delete(Key(scope, name))
        return len(dead)

    async def _remove(self, generation: str) -> None:
        """Remove the records of a generation that lost its race; a failure is only logged."""
        try:
            scope, prefix = self._at(f"{generation}:")
            async for name in operations.names_of(self._driver, scope, prefix):
                await self._driver.delete(Key(scope, name))
        except StorageError as error:
            logger.warning("could not remove unused words; a purge will: %s", error)

    async def _update(self, where: Key, decide: ledger.Decide[int]) -> int:
        unchanged = ledger.unchanged_by(lambda _: portions.seal_generations([], self._codec))
        done = await ledger.update(self._driver, where, decide, unchanged=unchanged)
        if done is None:
            raise Unavailable(
                "the index of conversations kept changing", backend=self._driver.name, operation="erase"
            )
        return done

    # Reading

    async def find(self, words: frozenset[str]) -> dict[str, list[Indexed]]:
        """Return all portions by the name of their card, with the bits of the texts that have all words.

        Waits twice: for the log, and for the records of all generations at once. A generation that is damaged
        is left out, with a warning.
        """
        names, logged = self._opened(await self._driver.load(self._log), only=words)
        found: dict[str, list[Indexed]] = {}
        wanted = [*postings.by_bucket(words)]

        async def of(generation: str) -> list[Indexed]:
            try:
                return await self._find_in(generation, words, wanted)
            except (KeyMismatch, SealMismatch):
                raise
            except Corrupt as error:
                logger.warning("a search leaves out words that are damaged: %s", error)
                return []

        for some in await operations.together(names, of) if names else []:
            for one in some:
                found.setdefault(one.portion.card, []).append(one)
        for one in filter(None, logged):
            bits = portions.logged_with_all(words, one)
            found.setdefault(one.portion.card, []).append(Indexed(one.portion, bits))
        return found

    async def _find_in(self, generation: str, words: frozenset[str], buckets: Sequence[int]) -> list[Indexed]:
        names = [_LIST, *map(_bucket, buckets)]
        first, *others = await operations.together(
            names, lambda name: self._driver.load(self._at(f"{generation}:{name}"))
        )
        terms: dict[str, Mapping[str, str]] = {}
        for record in others:
            terms |= self._bucket_in(record).terms
        return [
            Indexed(one, portions.with_all(words, terms, str(number)))
            for number, one in enumerate(self._list_in(first))
            if one is not None
        ]

    def _at(self, name: str) -> Key:
        return keys.words_key(*self._owner, name)

    def _opened(
        self, record: Record | None, *, only: frozenset[str] | None = None
    ) -> tuple[list[str], list[Logged | None]]:
        """Return the generations that the log names, and its portions."""
        with located(self._driver.name, "search"):
            names = portions.open_generations(record, self._codec)
            tail = () if record is None else record.tail
            return names, [portions.open_logged(one, self._codec, only=only) for one in tail]

    def _list_in(self, record: Record | None) -> list[Portion | None]:
        with located(self._driver.name, "search"):
            return portions.open_list(record, self._codec)

    def _bucket_in(self, record: Record | None) -> postings.Bucket:
        with located(self._driver.name, "search"):
            return postings.read(record, self._codec)


_LIST: Final = "list"


def _bucket(number: int) -> str:
    return f"{number:02x}"

"""Searching the records of conversations, and indexing their words for later searches.

The index tells which turns or messages of a conversation may have the words, and which ones are not indexed;
only these are read. Pages that folds have filled are indexed, and so are conversations that a search has read
since they were last active. Both are indexed afterwards, in the background.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from stm_backends.catalogue.card import SLOT_S, Content, slot_of, title_of
from stm_backends.catalogue.index import Catalogue
from stm_backends.catalogue.matching import Match, Query
from stm_backends.catalogue.portions import UNITS, Logged, Portion, masks_of
from stm_backends.catalogue.word_index import Indexed, WordIndex, is_settled
from stm_backends.cutting import without_sections
from stm_backends.drivers.contract import Driver
from stm_backends.errors import Corrupt, KeyMismatch, SealMismatch, StorageError, located
from stm_backends.memory.shared.reading import bounds_of
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.tasks import Background
from stm_backends.memory.units import read_units
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.pages import TURNS, Pages
from stm_backends.types import MemoryKey, StoredTurn

logger = logging.getLogger("stm_backends")

MATCHES: Final = 3
"""Maximum number of turns or messages shown of one conversation."""

SETTLED_S: Final = 2 * SLOT_S
"""Seconds for which a conversation may still change without a change of its name in the list: the rest of an
hour, and a difference of clocks of an hour."""


WAITING: Final = 1_000
"""Maximum number of pages and conversations that wait to be indexed; others are left to a later search."""


class _Read(NamedTuple):
    """A conversation as it was loaded, and the numbers that the index has of it.

    `counts` is true if everything in the index holds for this record.
    """

    snapshot: Snapshot
    epoch: str
    rev: int
    numbers: range
    covered: frozenset[int]
    counts: bool


class _Place(NamedTuple):
    """A place to index: a page of a conversation, or all of it."""

    key: MemoryKey
    page: int | None = None


class Searching:
    """Reads conversations for searches of one backend, and indexes them."""

    def __init__(self, driver: Driver, codec: Codec, directory: Directory, catalogue: Catalogue) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._catalogue = catalogue
        self._pages = Pages(driver, codec)
        self.start_over()

    def start_over(self) -> None:
        """Forget the places to index of an event loop that has ended."""
        self._background = Background(self)
        self._queue: dict[_Place, None] = {}
        self._works = False

    async def close(self, *, timeout: float) -> None:
        """Index waiting pages, for at most `timeout` seconds; the rest is left to a later search."""
        for place in [place for place in self._queue if place.page is None]:
            del self._queue[place]
        await self._background.close(timeout=timeout)
        self._queue.clear()

    # Searching

    async def known(self, owner: tuple[str, str], query: Query) -> dict[str, list[Indexed]]:
        """Return the index entries of each conversation, by the name of its card."""
        try:
            return await self._words(owner).find(query.words)
        except (KeyMismatch, SealMismatch):
            raise
        except Corrupt as error:
            logger.warning("a search reads every conversation, because the index is damaged: %s", error)
            return {}

    async def look(self, key: MemoryKey, query: Query, known: Sequence[Indexed]) -> list[Match]:
        """Return the matches in the summary and in the newest turns or messages of a conversation.

        Damaged records are left out, with a warning.
        """
        read = await self._read(key, known)
        if read is None:
            return []
        summary = without_sections(read.snapshot.body.summary)
        found = [Match("summary", query.snippet(summary))] if query.is_in(summary) else []
        hits = {number for one in known for number in one.portion.numbers_in(one.bits)}
        numbers = [one for one in read.numbers if one in hits or one not in read.covered]
        said: list[Match] = []
        async for some in self._texts(key, read, numbers):
            said += query.among(sorted(some.items(), reverse=True), MATCHES - len(said))
            if len(said) == MATCHES:
                break
        return [*found, *said]

    async def _read(self, key: MemoryKey, known: Sequence[Indexed]) -> _Read | None:
        """Load a conversation; `None` if it has no record, or one that is damaged."""
        try:
            record = await self._driver.load(keys.memory_key(key))
            with located(self._driver.name, "search"):
                snapshot = Snapshot.of(record, self._codec)
        except Corrupt as error:
            self._damaged(key, error)
            return None
        stored = snapshot.body.transcript
        epoch, rev = ("", 0) if stored is None else (stored.epoch, stored.rev)
        snapshot = snapshot.transcribed()
        counts = all(one.portion.is_of(epoch, rev) for one in known)
        covered = (range(one.portion.first, one.portion.end) for one in known) if counts else ()
        covers = frozenset(itertools.chain.from_iterable(covered))
        return _Read(snapshot, epoch, rev, range(*bounds_of(snapshot)), covers, counts)

    async def _texts(
        self, key: MemoryKey, read: _Read, numbers: Sequence[int]
    ) -> AsyncIterator[dict[int, str]]:
        """Yield the items with these ascending numbers: from the record, then from each page."""
        snapshot, transcript = read.snapshot, read.snapshot.body.transcript
        base = 0 if transcript is None else transcript.base
        yield {one: _said_in(snapshot.turns[one - base]) for one in numbers if one >= base}
        if transcript is None:
            return
        older = reversed([one for one in numbers if one < base])
        for _, group in itertools.groupby(older, lambda one: one // TURNS):
            some = [*group]
            units = await read_units(
                self._pages,
                keys.memory_key(key),
                transcript,
                some[-1],
                some[0] + 1,
                damaged=lambda error: self._damaged(key, error),
            )
            yield {one: _said_in(units[one]) for one in some if one in units}

    def _damaged(self, key: MemoryKey, error: Corrupt) -> None:
        """Log that something is left out, unless this process lacks the key that opens it."""
        if isinstance(error, KeyMismatch | SealMismatch):
            raise error
        name = keys.log_name(keys.memory_key(key))
        logger.warning("a search leaves out damaged data: %s (conversation %s)", error, name)

    # Indexing

    def later(self, key: MemoryKey, card: Content, *, is_known: bool) -> None:
        """Schedule the indexing of a conversation that a search has read, if it was not active lately."""
        if card["slot"] >= self._settled() and (is_known or _lives_forever(card)):
            self._enter(_Place(key))

    def filled(self, key: MemoryKey, full: Iterable[int]) -> None:
        """Schedule the indexing of pages that have all their turns now."""
        for page in full:
            self._enter(_Place(key, page))

    def _enter(self, place: _Place) -> None:
        if len(self._queue) >= WAITING:
            return
        self._queue[place] = None
        if not self._works:
            self._works = True
            self._background.start(self._work(), name="stm-words")

    async def titled(self, key: MemoryKey, title: str) -> None:
        """Index a title that is about to be set; an empty one restores another title."""
        card = await self._catalogue.load(key)
        if card is not None and _lives_forever(card):
            portion, shown = Portion(keys.card_key(key).name), title_of({**card, "title": title})
            words = self._words((key.tenant_id, key.user_id))
            await words.add(Logged(portion, masks_of((), title=shown)))
            await self._forget_erased(key, card, words)

    def _settled(self) -> str:
        return slot_of(self._catalogue.clock() - SETTLED_S)

    async def _work(self) -> None:
        try:
            while self._queue:
                first = next(iter(self._queue)).key
                owner = (first.tenant_id, first.user_id)
                mine = [one for one in self._queue if (one.key.tenant_id, one.key.user_id) == owner]
                for place in mine:
                    del self._queue[place]
                await self._index_all(owner, mine)
        finally:
            self._works = False

    async def _index_all(self, owner: tuple[str, str], some: Sequence[_Place]) -> None:
        """Index conversations and pages of a user; failures are only logged."""
        known: dict[str, list[Indexed]] | None = None
        for key, page in some:
            try:
                if page is not None:
                    await self._index_page(key, page)
                    continue
                if known is None:
                    # The current state: an earlier search may have indexed these since they were read.
                    known = await self.known(owner, Query(frozenset()))
                await self._index(key, known.get(keys.card_key(key).name, ()))
            except StorageError as error:
                name = keys.log_name(keys.memory_key(key))
                logger.warning("could not index a conversation: %s (conversation %s)", error, name)

    async def _index_page(self, key: MemoryKey, page: int) -> None:
        """Index a full page, whatever the index has of it: usually no search has indexed it."""
        card = await self._catalogue.load(key)
        if card is None or not _lives_forever(card):
            return
        read = await self._read(key, ())
        transcript = None if read is None else read.snapshot.body.transcript
        if read is not None and transcript is not None:
            start, end = max(page * TURNS, transcript.first), min((page + 1) * TURNS, transcript.base)
            await self._add(key, card, read, [*_runs(range(start, end))])

    async def _index(self, key: MemoryKey, known: Sequence[Indexed]) -> None:
        """Add missing parts of a conversation to the index, and remove those that no longer hold."""
        words, name, settled = (
            self._words((key.tenant_id, key.user_id)),
            keys.card_key(key).name,
            self._settled(),
        )
        card = await self._catalogue.load(key)
        if card is None or not _lives_forever(card):
            await words.forget(name)
            return
        if card["slot"] < settled or is_settled(card["slot"], known):
            return
        if (read := await self._read(key, known)) is None:
            return
        if not read.counts:
            await words.forget(name)
            read = read._replace(covered=frozenset())
        elif any(one.portion.count and one.portion.end <= read.numbers.start for one in known):
            await words.forget(name, below=read.numbers.start)
        runs = [*_runs(one for one in read.numbers if one not in read.covered)]
        await self._add(key, card, read, runs or [range(0)], settled=settled)

    async def _add(
        self, key: MemoryKey, card: Content, read: _Read, runs: Sequence[range], *, settled: str = ""
    ) -> None:
        """Index these runs of numbers, and with the last one all else, if the conversation is settled.

        The card was loaded before the conversation was read. If the conversation was edited meanwhile, all of
        it is removed: the edit may have come too early to find it.
        """
        words, name = self._words((key.tenant_id, key.user_id)), keys.card_key(key).name
        texts: dict[int, str] = {}
        async for some in self._texts(key, read, [*itertools.chain.from_iterable(runs)]):
            texts |= some
        for run in runs:
            portion, others = Portion(name, read.epoch, read.rev, run.start, len(run)), dict[str, str]()
            if settled and run is runs[-1]:
                portion = replace(portion, settled=settled)
                others = {"title": title_of(card), "summary": without_sections(read.snapshot.body.summary)}
            await words.add(Logged(portion, masks_of((texts.get(one, "") for one in run), **others)))
        await self._forget_erased(key, card, words)
        now = await self._read(key, ())
        if now is not None and now.rev != read.rev:
            await words.forget(name)

    async def _forget_erased(self, key: MemoryKey, card: Content, words: WordIndex) -> None:
        """Remove the index entries of a conversation that was erased meanwhile, and perhaps begun again."""
        now = await self._catalogue.load(key)
        if now is None or now["created"] != card["created"]:
            await words.forget(keys.card_key(key).name)

    def _words(self, owner: tuple[str, str]) -> WordIndex:
        return WordIndex(self._driver, self._codec, self._directory, owner)


def _lives_forever(card: Content) -> bool:
    """Say whether a conversation has no time to live, as far as its card knows: words would outlive it."""
    return "until" not in card and "guessed" not in card


def _said_in(unit: StoredTurn) -> str:
    return f"{unit.turn.user_message}\n{unit.turn.assistant_response}"


def _runs(numbers: Iterable[int]) -> Iterable[range]:
    """Yield ascending numbers as ranges of at most `UNITS`."""
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        some = [number for _, number in group]
        for start in range(some[0], some[-1] + 1, UNITS):
            yield range(start, min(start + UNITS, some[-1] + 1))

"""The items that an agent framework keeps of a conversation, in a log that many processes share.

Adding items is one `append`, regardless of concurrent writers, and so is removing the last item: see `items`.
A process that removes items occasionally folds the entries into the body with one conditional `replace`. One
that adds to a long log moves its oldest items to pages, in the order of `records.pages`: first the pages,
then one conditional `replace`. The record may change during any await.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from stm_backends import races
from stm_backends.catalogue.card import Activity
from stm_backends.drivers.checks import require_integer
from stm_backends.drivers.contract import Driver, Record
from stm_backends.errors import (
    Corrupt,
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    Unavailable,
    located,
)
from stm_backends.history import items
from stm_backends.history.activity import activity_of
from stm_backends.history.items import Add, Entry, Item, Log, Pop, Removal
from stm_backends.memory.touches import Touches
from stm_backends.plain_json import DEEPEST_IN_TURN, require_json
from stm_backends.races import Lost, contend
from stm_backends.records import keys, ledger, operations, pages
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import LogKind
from stm_backends.records.ledger import Appended
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_in
from stm_backends.records.pages import (
    Copy,
    Damaged,
    Pages,
    each_after,
    numbers_asked_for,
    refused,
    require_one_place,
)
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

T = TypeVar("T")

TOLERATED_WASTE: Final = 32
"""How many entries without a remaining item justify a fold."""


LONG: Final = 128
"""From how many entries on those that are older than the newest `KEPT` move to pages."""

KEPT: Final = 64
"""The entries that stay at most: enough for a model's context, and for `items.MARGIN` entries before it.

`LONG` is a multiple of it, so that one of as many additions moves, whichever process makes it.
"""

LARGE: Final = 4 * 1024 * 1024
KEPT_BYTES: Final = 1024 * 1024
"""After how many bytes that one object has added it moves what is older than the newest `KEPT_BYTES`."""

AT_ONCE: Final = 512
"""The items that one step moves at most, so that a log that is long already holds up no addition.

One entry moves as a whole, however many it has. Removals count as items.
"""

PAGES_AT_ONCE: Final = 8
"""The number of pages that are loaded concurrently."""


@dataclass(frozen=True, slots=True)
class LogItem:
    """One item of a log. `number` counts from 0, and does not change while the item is there.

    `at` is when it was added, in epoch seconds, or 0 if that is unknown. `retained` says that it is still in
    the record.
    """

    number: int
    item: Item
    at: float
    retained: bool


@dataclass(frozen=True, slots=True)
class LogPage:
    """Items of one log as of one moment, oldest first.

    `oldest` and `newest` are the numbers of the oldest and the newest item of the log; without items,
    `newest` is less than `oldest`. `missing` has those of the numbers asked for that have no item: their
    pages have expired.
    """

    items: tuple[LogItem, ...]
    oldest: int
    newest: int
    missing: tuple[int, ...] = ()


class _ReadLog(NamedTuple):
    """A log as it was read, and its record."""

    record: Record | None
    log: Log


class ItemLog:
    """The items of one conversation, in order, shared by every process that opens the same key.

    Items are JSON objects; they are returned as new objects equal to those that were added. All items are
    kept, the oldest of a long log in pages. A log expires `ttl_s` seconds after the last write;
    `None` means never. Its pages expire by themselves, so a long log with a time to live loses its oldest
    items while it goes on: those that were moved to pages at least so long ago. `clock` is in epoch seconds.
    """

    def __init__(  # noqa: PLR0913 -- a backend passes them all; a driver, a key and a kind suffice
        self,
        driver: Driver,
        key: MemoryKey,
        kind: LogKind,
        *,
        codec: Codec | None = None,
        directory: Directory | None = None,
        guard: Guard = UNLIMITED,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
        touches: Touches | None = None,
    ) -> None:
        self._driver = driver
        self._key = key
        self._kind = kind
        self._where = keys.log_key(key, kind)
        self._owner = (key.tenant_id, key.user_id)
        self._whose = Whose(*self._owner, key.session_id)
        self._guard = guard
        self._codec = codec or Codec()
        self._directory = directory or Directory(driver, self._codec)
        self._ttl_s = ttl_s
        self._clock = clock
        self._touches = touches
        self._pages = Pages(driver, self._codec)
        # How many bytes this object has added since it last moved items.
        self._unmoved = 0

    def beside(self, name: str) -> ItemLog:
        """Return another log of the conversation, as one for each of its agents is; reads and writes nothing.

        It belongs to this one: it has no card, and is erased, purged and exported with the conversation.
        Raises `ConfigurationError` for a kind of log without such, and `InvalidKey` for one beside another,
        and for a name that is too long.
        """
        return ItemLog(
            self._driver,
            keys.beside(self._key, self._kind, name),
            self._kind,
            codec=self._codec,
            directory=self._directory,
            guard=self._guard,
            ttl_s=self._ttl_s,
            clock=self._clock,
        )

    async def names_beside(self, prefix: str = "") -> AsyncGenerator[str]:
        """Yield the names of the logs beside this one that are there and begin with a prefix."""
        for scope, first in keys.beside_of(self._where):
            wanted = f"{first}{keys.name(prefix) if prefix else ''}"
            async for found in operations.names_of(self._driver, scope, wanted):
                yield keys.unname(found.removeprefix(first))

    async def items(self, limit: int | None = None) -> list[Item]:
        """Return the latest `limit` items, oldest first, in one round trip; all of them for `None`.

        With a limit, it reads the entries of these and a few more, however long the log is. Where several of
        these have removed items, it takes another round trip. So does what is in pages: one for all pages of
        a limit, which are read at once, and one for each eight pages otherwise.

        If pages have expired, returns what is newer than they are. Raises `Corrupt` if an item that is read
        cannot be; an outage raises and never returns an empty log. Raises `ConfigurationError` for a limit
        that is no integer.
        """
        if limit is not None:
            require_integer("limit", limit)
        return await self._items("items", limit)

    async def transcript(
        self, *, before: int | None = None, after: int | None = None, at: int | None = None, limit: int = 50
    ) -> LogPage:
        """Return up to `limit` items before a number, after one or around one; by default the newest ones.

        The first item of the log has the number 0. Takes one round trip for the record, and one for the pages
        of these items, which are read at once. Raises `ConfigurationError` for more than one of the three, or
        a `limit` above 1,000.
        """
        require_one_place(before, after, at, limit)

        async def page(found: _ReadLog) -> tuple[LogPage, bool]:
            log = found.log
            end = log.low + len(log.items)
            start, stop = numbers_asked_for(log.first, end, before=before, after=after, at=at, limit=limit)
            result = await self._page(log, start, stop)
            return result, not result.missing

        return await self._whole("transcript", page)

    async def each_page(self, *, damaged: Damaged = refused) -> AsyncGenerator[LogPage]:
        """Yield the whole log as of one moment, oldest items first, by the numbers of its pages.

        `damaged` is called with the error for what cannot be read of a page before that is yielded, and by
        default raises it. If it does not, these numbers are among the missing ones. Raises `Unavailable` if
        items that are still to come were removed since that moment.
        """
        log = (await self._load("pages")).log
        end = log.low + len(log.items)
        for number in range(log.first // pages.TURNS, -(-end // pages.TURNS)):
            start = max(log.first, number * pages.TURNS)
            stop = min(end, (number + 1) * pages.TURNS)
            page = await self._page(log, start, stop, damaged=damaged)
            if page.missing and await self._is_changed(log):
                raise Unavailable(
                    "items were removed while the log was read; read it again",
                    backend=self._driver.name,
                    operation="export",
                )
            yield page

    async def _page(self, log: Log, start: int, stop: int, *, damaged: Damaged = refused) -> LogPage:
        """Return the items from `start` to `stop - 1`, of which some may be missing."""
        read: dict[int, tuple[Item, float]] = {}
        for number, copy in (await self._copies(log, start, min(stop, log.low), damaged=damaged)).items():
            with located(self._driver.name, "transcript"):
                try:
                    read[number] = items.item_in(copy.turn)
                except Corrupt as error:
                    damaged(error)
        read |= {number: (one.item, one.at) for number, one in enumerate(log.held, log.low)}
        numbers = range(start, stop)
        return LogPage(
            tuple(LogItem(number, *read[number], number >= log.low) for number in numbers if number in read),
            log.first,
            log.low + len(log.items) - 1,
            tuple(number for number in numbers if number not in read),
        )

    def each_item(self, *, after: int | None = None) -> AsyncGenerator[LogItem]:
        """Yield all items, or those after a number, oldest first; takes the memory of a few pages."""

        async def read(after: int) -> tuple[LogPage, Sequence[LogItem]]:
            page = await self.transcript(after=after, limit=PAGES_AT_ONCE * pages.TURNS)
            return page, page.items

        return each_after(after, read)

    async def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Add items at the end, all or none, in one round trip. An empty list is a no-op.

        One of 64 additions to a long log also moves its oldest items to pages, in some five round trips. A
        call that is cancelled meanwhile has added the items, and one that is cancelled before may have.
        Raises `InvalidState`, naming the path, for a value that is not a JSON object; `LimitReached`;
        `TooLarge` if the items do not fit into one entry; `OutcomeUnknown` if the items may have been stored.
        """
        added: list[Item] = []
        for index, item in enumerate(items):
            if not isinstance(item, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidState(f"items[{index}] is {type(item).__name__}, not an object")
            added.append(dict(item))
            require_json(added[-1], f"items[{index}]", deepest=DEEPEST_IN_TURN)
        with self._guard.reporting(self._whose, "add"):
            for item in added:
                self._guard.require("turn_characters", partial(characters_in, item))
            if added:
                await self._append(Add(_new_id(), added, self._clock()))

    async def pop(self) -> Item | None:
        """Remove the last item and return it; `None` if the log is empty.

        Two concurrent calls return two different items. If the log is cleared during the call, the result may
        be `None`. Takes three round trips, more if the log is full, or the item in a page. Raises
        `OutcomeUnknown` if an item may have been removed and cannot be returned.
        """
        if not await self._items("pop", 1):
            return None
        pop = Pop(_new_id(), self._clock())
        try:
            await self._send(items.seal_entry(pop, self._codec))
        except (TooLarge, LimitReached) as error:
            item = await self._pop_from_full(pop, error)
            self._touch()
            return item
        self._touch()
        try:
            found = await self._load("pop")
            removal = found.log.popped.get(pop.id)
            # Before it is folded: what is in a page may be replaced afterwards.
            item = None if removal is None else await self._removed(found.log, removal)
        except StorageError as error:
            raise self._lost("an item was removed, and loading it failed") from error
        log = found.log
        if log.waste >= max(TOLERATED_WASTE, len(log.items)):
            await self._tidy(found)
        if removal is None and log.has_folded(pop.id):
            raise self._lost("an item was removed, and which one is no longer remembered")
        # Without a trace of the pop, the log was cleared since, so there was nothing to remove.
        return item

    async def clear(self) -> None:
        """Erase the log; raises `OutcomeUnknown` if it may have been erased."""
        await races.retried(lambda: ledger.erase(self._driver, self._where))
        # After the record: a process that puts items into pages meanwhile finds that the record is gone.
        await races.retried(lambda: pages.erase_dead(self._driver, self._where, self._mark))
        if self._touches is not None:
            # The records say whether anything is left of the conversation; nothing that was erased is.
            self._touches.note(self._key, self._kind, None, ttl=self._ttl_s, at=0.0, reset=True)

    async def _mark(self) -> tuple[str | None, Transcript | None]:
        """Load what says which pages the record has."""
        record = await self._driver.load(self._where, last=0)
        with located(self._driver.name, "pages"):
            folded = items.open_folded(None if record is None else record.body, self._codec)
        return record and record.version, folded.transcript

    def _touch(self) -> None:
        """Note in the catalogue that items came or went.

        A touch reads how many there are: none that was counted here tells what others have added or removed.
        """
        if self._touches is not None:
            self._touches.note(self._key, self._kind, None, ttl=self._ttl_s)

    async def fold(self) -> bool:
        """Move the oldest entries into the body or to pages, which changes no item; whether any were moved.

        One call moves as many as one `replace` drops, and of a long log as many as one step moves. `False` if
        there is no room for them, or every race was lost.
        """

        async def attempt() -> bool | Lost:
            found = await self._load("fold")
            done = await self._fold(found) if found.log.length else None
            return Lost(found.log.version) if done is False else done is True

        return await contend(attempt) or False

    async def activity(self) -> Activity | None:
        """Return the last activity that the log shows; `None` if no item is in it."""
        log = (await self._load("catalogue")).log
        first_page = min(log.low, (log.first // pages.TURNS + 1) * pages.TURNS)
        last_page = max(log.first, (log.low - 1) // pages.TURNS * pages.TURNS)
        ends = [
            await self._copies(log, start, end)
            for start, end in ((log.first, first_page), (last_page, log.low))
        ]
        with located(self._driver.name, "catalogue"):
            oldest, newest = ([items.item_in(copy.turn) for copy in end.values()] for end in ends)
        held = [(one.item, one.at) for one in log.held]
        return activity_of(log, self._kind, [*oldest, *held], [*newest, *held])

    def _lost(self, message: str) -> OutcomeUnknown:
        return OutcomeUnknown(message, backend=self._driver.name, operation="pop")

    async def _items(self, operation: str, limit: int | None) -> list[Item]:
        """Return the latest items, those of pages included, as far as no older one is missing."""

        async def latest(found: _ReadLog) -> tuple[list[Item], bool]:
            log = found.log
            own = log.items if limit is None else log.newest(max(0, limit)) or []
            start = log.first if limit is None else max(log.first, log.low + len(own) - max(0, limit))
            older, end = list[Item](), log.low
            while end > start:
                begin = max(start, (-(-end // pages.TURNS) - PAGES_AT_ONCE) * pages.TURNS)
                copies = await self._copies(log, begin, end)
                there = itertools.takewhile(copies.__contains__, reversed(range(begin, end)))
                with located(self._driver.name, operation):
                    older += [items.item_in(copies[number].turn)[0] for number in there]
                if len(older) < log.low - begin:
                    return older[::-1] + own, False
                end = begin
            return older[::-1] + own, True

        return await self._whole(operation, latest, limit)

    async def _whole(
        self, operation: str, read: Callable[[_ReadLog], Awaitable[tuple[T, bool]]], limit: int | None = None
    ) -> T:
        """Return what `read` makes of the log; again if it misses items because the log has changed."""
        while True:
            found = await self._newest(operation, limit)
            result, complete = await read(found)
            if complete or not await self._is_changed(found.log):
                return result

    async def _is_changed(self, log: Log) -> bool:
        """Say whether items have left the pages of a log, or others have replaced them, since it was read."""
        _, transcript = await self._mark()
        return _place_of(transcript) != _place_of(log.folded.transcript)

    async def _newest(self, operation: str, limit: int | None) -> _ReadLog:
        """Load the entries with the latest `limit` items, or all of them."""
        if limit is None:
            return await self._load(operation)
        count = max(0, limit)
        last = count + items.MARGIN
        while (found := await self._load(operation, last)).log.newest(count) is None:
            last *= 4
        return found

    async def _copies(
        self, log: Log, first: int, end: int, *, damaged: Damaged = refused
    ) -> Mapping[int, Copy]:
        """Return what pages have of the numbers from `first` to `end - 1`, as of the time of a load."""
        if log.folded.transcript is None:
            return {}
        return await self._pages.between(self._where, log.folded.transcript, first, end, damaged=damaged)

    async def _removed(self, log: Log, removal: Removal) -> Item | None:
        """Return what a pop removed. Raises `Corrupt` if it is in no page any more."""
        number = removal.number
        if number is None:
            return removal.item
        copies = await self._copies(log, number, number + 1)
        with located(self._driver.name, "pop"):
            return items.item_in(copies[number].turn if number in copies else {})[0]

    async def _load(self, operation: str, last: int | None = None) -> _ReadLog:
        record = await self._driver.load(self._where, last=last)
        with located(self._driver.name, operation):
            return _ReadLog(record, items.read(record, self._codec))

    async def _pop_from_full(self, pop: Pop, full: TooLarge | LimitReached) -> Item | None:
        """Remove the last item of a log that has no room for another entry, as part of a fold.

        Raises `full` if there is nothing to fold, or the items do not fit into a body.
        """
        removal: Removal | None = None

        async def attempt() -> tuple[Item | None] | Lost:
            nonlocal removal
            found = await self._load("pop")
            log = found.log
            if removal is not None and log.has_folded(pop.id):
                # It was done, and the log was folded again, before the answer arrived.
                return (removal.item,)
            if not log.count:
                return (None,)
            if self._covered(log) < log.length:
                done = await self._fold(found)
            else:
                after = log.with_entry(pop)
                item = await self._removed(log, after.popped[pop.id])
                done = await self._replaced(found, after, count=after.length, drop=log.length)
                if done is not None:
                    removal = Removal(pop.at, item)
                    if done:
                        return (item,)
            if done is None:
                raise full
            return Lost(log.version)

        popped = await contend(attempt)
        if popped is None:
            raise full
        return popped[0]

    async def _append(self, entry: Entry) -> None:
        """Append an entry, folding a full record: a body is smaller than many entries, and has no waste."""
        data = items.seal_entry(entry, self._codec)
        self._guard.require("conversation_bytes", len(data))

        async def make_room() -> bool:
            found = await self._load("add")
            return found.log.length > 0 and await self._shorten(found) is not None

        appended = await ledger.append_to_full(lambda: self._send(data), make_room)
        # Before the log is shortened, which may be cancelled.
        self._touch()
        self._unmoved += len(data)
        is_long = appended.length >= LONG and appended.length % KEPT == 0
        if is_long or self._unmoved > LARGE:
            self._unmoved = 0
            await self._tidy(None)

    async def _send(self, data: bytes) -> Appended:
        listing = self._directory.listed(self._owner, self._ttl_s)
        return await ledger.append(self._driver, self._where, data, ttl=self._ttl_s, listing=listing)

    async def _tidy(self, found: _ReadLog | None) -> None:
        """Fold the log that was read, or shorten it; only logs a failure, because the work is done."""
        try:
            if found is None:
                await self._shorten(await self._load("add"), to_pages=True)
            else:
                await self._fold(found)
        except StorageError as error:
            logger.warning(
                "could not fold a log of items: %s (conversation %s)", error, keys.log_name(self._where)
            )

    async def _shorten(self, found: _ReadLog, *, to_pages: bool = False) -> bool | None:
        """Fold what is older than the newest entries, or everything if there is nothing else; as `_fold`."""
        kept, room = 0, min(KEPT_BYTES, self._driver.traits.max_record // 4)
        for entry in reversed(found.record.tail if found.record else ()):
            room -= len(entry)
            if kept == KEPT or room < 0:
                break
            kept += 1
        older = found.log.length - kept
        if to_pages and not older:
            return None
        return await self._fold(found, older or found.log.length, to_pages=to_pages)

    async def _fold(
        self, found: _ReadLog, count: int | None = None, *, to_pages: bool = False
    ) -> bool | None:
        """Fold the oldest `count` entries that were read, or all that one step folds.

        `False` after a lost race, `None` if there is no room for the items. Such a log is not folded, so
        reading it takes longer with each removal until its record is full.
        """
        count = min(self._covered(found.log), found.log.length if count is None else count)
        return await self._replaced(found, found.log, count=count, drop=count, to_pages=to_pages)

    async def _replaced(
        self, found: _ReadLog, log: Log, *, count: int, drop: int, to_pages: bool = False
    ) -> bool | None:
        """Store the body of `log` with `count` entries folded in, and drop `drop` entries that were read.

        Items that are too many for a body go to pages, and all of them with `to_pages`, or if some are there.
        Keeps what recent pops removed if there is room. `False` after a lost race, `None` if there is no
        room.
        """
        record = found.record
        if record is None:
            return False

        unchanged = ledger.unchanged_by(lambda _: items.seal_folded(log.folded, self._codec))
        expect = await ledger.confirmed(self._driver, self._where, record, drop, unchanged=unchanged)
        if expect is None:
            return False
        head = log.head(count)
        if not (to_pages or log.folded.transcript) and len(head.items) <= KEPT:
            done = await self._folded(head, drop, expect)
            if done is not None:
                return done
        return await self._paged(head, drop, expect)

    async def _folded(
        self,
        head: Log,
        drop: int,
        expect: str,
        *,
        transcript: Transcript | None = None,
        paged: Mapping[int, Item] | None = None,
    ) -> bool | None:
        """Store the body of a log with all entries folded in; as `_replaced`."""
        keep_for = 10 * self._driver.traits.deadline
        for removals in (True, False):
            folded = head.fold(
                head.length,
                now=self._clock(),
                keep_for=keep_for,
                removals=removals,
                transcript=transcript,
                paged=paged,
            )
            change = ledger.Change(items.seal_folded(folded, self._codec), drop=drop)
            with suppress(TooLarge):
                return await ledger.replace(self._driver, self._where, change, expect=expect)
        return None

    async def _paged(self, head: Log, drop: int, expect: str) -> bool | None:
        """Move the items of a log with all entries folded in to pages; as `_replaced`."""
        before = head.folded.transcript or Transcript(expect)
        removed = await self._copies(head, head.low, before.base)
        # The item before those that move, which pops may have uncovered.
        last = before.last
        if head.low < before.base:
            last = removed[head.low].prev if head.low in removed else ""
        start, leaving = replace(before, base=head.low, last=last), head.leaving(before.epoch)
        try:
            await self._pages.put(self._where, start, leaving, summary=None, ttl=self._ttl_s)
        except TooLarge:
            # An item that fits an entry of the log, and not one of a page.
            return None
        after = start.moved([one.id for one in leaving], summarized=True)
        done = await self._folded(
            head,
            drop,
            expect,
            transcript=replace(after, rev=head.rev),
            paged={number: items.item_in(copy.turn)[0] for number, copy in removed.items()},
        )
        if done:
            await self._pages.complete(self._where, start, leaving)
        elif leaving:
            # The log may have been cleared before the record could refer to them.
            await pages.erase_dead(self._driver, self._where, self._mark, epoch=before.epoch)
        return done

    def _covered(self, log: Log) -> int:
        """Return how many entries one step folds."""
        most, size = min(log.length, self._driver.traits.max_drop), 0
        for count, entry in enumerate(log.entries[:most]):
            size += max(1, len(entry.items)) if isinstance(entry, Add) else 1
            if size > AT_ONCE and count:
                return count
        return most


def _place_of(paged: Transcript | None) -> tuple[str, int, int] | None:
    """Return what changes when items leave the pages of a log, or are replaced there by others."""
    return paged and (paged.epoch, paged.first, paged.rev)


def _new_id() -> str:
    return secrets.token_hex(12)

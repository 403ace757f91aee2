"""The items that an agent framework keeps of a conversation, in a log that many processes share.

Adding items is one `append`, regardless of concurrent writers, and so is removing the last item: see `items`.
A change on the condition that nothing came in between is one `append`, too; a load of the newest entries
tells whether it took effect, because a fold by another process may make any length look right.
A process that removes items occasionally folds the entries into the body with one conditional `replace`. One
that adds to a long log moves its oldest items to pages, in the order of `records.pages`: first the pages,
then one conditional `replace`. The record may change during any await.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from stm_backends import races
from stm_backends.catalogue.card import Activity
from stm_backends.drivers.checks import require_integer
from stm_backends.drivers.contract import Driver, Record
from stm_backends.drivers.tasks import to_its_end
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
from stm_backends.history.items import NOWHERE, Add, End, Item, Log, Pop, Removal, Tip
from stm_backends.memory.touches import Touches
from stm_backends.plain_json import DEEPEST_IN_TURN, require_json
from stm_backends.races import Lost, contend
from stm_backends.records import confirming, keys, ledger, operations, pages
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
"""Number of entries without a remaining item that justifies a fold."""


LONG: Final = 128
"""Number of entries from which those older than the newest `KEPT` move to pages."""

KEPT: Final = 64
"""Maximum number of entries that stay: enough for a model's context and the `items.MARGIN` entries before.

`LONG` is a multiple of it, so that one in as many additions moves items, whichever process makes it.
"""

LARGE: Final = 4 * 1024 * 1024
KEPT_BYTES: Final = 1024 * 1024
"""Number of bytes added by one object after which it moves items older than the newest `KEPT_BYTES`."""

AT_ONCE: Final = 512
"""Maximum number of items that one step moves, so that a log that is already long delays no addition.

One entry moves as a whole, however many it has. Removals count as items.
"""

PAGES_AT_ONCE: Final = 8
"""The number of pages that are loaded concurrently."""

REMEMBERED_FOR: Final = 10
"""Number of deadlines for which a fold remembers the ids of entries, and the items that they removed."""

_NEWEST: Final = 4
"""Number of entries that are loaded first to find one that was just appended."""


@dataclass(frozen=True, slots=True)
class LogState:
    """A log as of one moment: its items, oldest first, or the latest of them.

    `tip` names the moment: a call that is given it takes effect only if nothing has since. `count` is the
    number of all items. A log that does not `exist` has the tip `""`.
    """

    items: tuple[Item, ...]
    tip: str
    count: int
    exists: bool


@dataclass(frozen=True, slots=True)
class Newest:
    """The latest items of a log, oldest first, and the moment that they show.

    The `tip` is that of `ItemLog.read` at this moment, if the log exists. If `exists` is false, it certainly
    does not; otherwise it may have only additions that took no effect.
    """

    items: tuple[Item, ...]
    tip: str
    exists: bool


@dataclass(frozen=True, slots=True)
class LogItem:
    """One item of a log. `number` counts from 0, and does not change while the item is there.

    `at` is the time of its addition in epoch seconds, or 0 if that is unknown. `retained` is true if it is
    still in the record.
    """

    number: int
    item: Item
    at: float
    retained: bool


@dataclass(frozen=True, slots=True)
class LogPage:
    """Items of one log as of one moment, oldest first.

    `oldest` and `newest` are the numbers of the oldest and the newest item of the log; without items,
    `newest` is less than `oldest`. `missing` has the requested numbers without an item: their pages have
    expired.
    """

    items: tuple[LogItem, ...]
    oldest: int
    newest: int
    missing: tuple[int, ...] = ()


class _ReadLog(NamedTuple):
    """A log as it was read, and its record."""

    record: Record | None
    log: Log


class _Seen(NamedTuple):
    """Hashes of the ids that the entries in a record had at a moment: no other id has come before."""

    moment: Tip
    ids: frozenset[int]

    def lacks(self, entry: Add | End) -> bool:
        """Say whether no entry before the one that a conditional one follows has its id."""
        return entry.after == self.moment and hash(entry.id) not in self.ids


class ItemLog:
    """The items of one conversation, in order, shared by every process that opens the same key.

    Items are JSON objects; they are returned as new objects equal to those that were added. All items are
    kept, the oldest of a long log in pages. A log expires `ttl_s` seconds after the last write;
    `None` means never. Its pages expire by themselves, so a long log with a time to live loses its oldest
    items while it is in use: those that were moved to pages at least that long ago. `clock` is in epoch
    seconds.
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
        self._kind: LogKind = kind
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
        # Number of bytes that this object has added since it last moved items.
        self._unmoved = 0
        self._seen: _Seen | None = None

    def beside(self, name: str) -> ItemLog:
        """Return another log of the conversation, such as one of its agents; reads and writes nothing.

        It belongs to this one: it has no card, and is erased, purged and exported with the conversation.
        Raises `ConfigurationError` if this kind of log has no such logs, and `InvalidKey` if this log belongs
        to another one itself, or for a name that is too long.
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
        """Yield the names of existing logs that belong to this one and begin with a prefix."""
        for scope, first in keys.beside_of(self._where):
            wanted = f"{first}{keys.name(prefix) if prefix else ''}"
            async for found in operations.names_of(self._driver, scope, wanted):
                yield keys.unname(found.removeprefix(first))

    async def items(self, limit: int | None = None) -> list[Item]:
        """Return the latest `limit` items, oldest first, in one round trip; all of them for `None`.

        With a limit, this reads the entries of these items and a few more, however long the log is. If
        several of these entries have removed items, it takes another round trip. Items in pages take more:
        with a limit, one round trip for all pages, which are read concurrently; otherwise one for each eight
        pages.

        If pages have expired, returns only newer items. Raises `Corrupt` if an item cannot be read; an outage
        raises and never returns an empty log. Raises `ConfigurationError` for a limit that is not an integer.
        """
        if limit is not None:
            require_integer("limit", limit)
        return await self._items("items", limit)

    async def read(self, limit: int | None = None) -> LogState:
        """Return the log with the latest `limit` items, or all of them, and the `tip` of this moment.

        Takes one round trip for the record, and more for items that are in pages; see `items`. Raises the
        same errors.
        """
        if limit is not None:
            require_integer("limit", limit)

        async def state(found: _ReadLog) -> tuple[LogState, bool]:
            log = found.log
            self._see(log)
            latest, is_complete = await self._latest(log, "read", limit)
            return LogState(tuple(latest), log.tip.text, log.count, log.place.exists), is_complete

        return await self._whole("read", state)

    async def newest(self, limit: int) -> Newest:
        """Return the latest `limit` items and the moment; reads a few more entries, however long the log is.

        With 0 it reads no entry, so that checking for changes since a moment costs little. Takes as many
        round trips as `items`, and raises the same errors.
        """
        require_integer("limit", limit, least=0)

        async def state(found: _ReadLog) -> tuple[Newest, bool]:
            log = found.log
            latest, is_complete = await self._latest(log, "read", limit)
            tip = Tip(log.life, log.place.gone)
            return Newest(tuple(latest), tip.text, log.skipped > 0 or log.place.exists), is_complete

        return await self._whole("read", state, limit)

    async def transcript(
        self, *, before: int | None = None, after: int | None = None, at: int | None = None, limit: int = 50
    ) -> LogPage:
        """Return up to `limit` items before a number, after one or around one; by default the newest ones.

        The first item of the log has the number 0. Takes one round trip for the record, and one for the pages
        of these items, which are read concurrently. Raises `ConfigurationError` for more than one of the
        three, or a `limit` above 1,000.
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

        `damaged` is called with the error for an unreadable part of a page before the page is yielded, and by
        default raises it. If it returns, these numbers are among the missing ones. Raises `Unavailable` if
        later items were removed since that moment.
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
        """Yield all items, or those after a number, oldest first; needs memory for a few pages."""

        async def read(after: int) -> tuple[LogPage, Sequence[LogItem]]:
            page = await self.transcript(after=after, limit=PAGES_AT_ONCE * pages.TURNS)
            return page, page.items

        return each_after(after, read)

    async def add(self, items: Sequence[Mapping[str, Any]], id: str | None = None) -> None:  # noqa: A002 -- what it is
        """Add items at the end, all or none, in one round trip. An empty list is a no-op.

        With an `id`, a repeat adds nothing: the ids of the last 256 additions are remembered, and those of
        all within ten deadlines. To recognize repeats, a read of the latest items then reads more entries.
        One in 64 additions to a long log also moves its oldest items to pages, in some five round trips. A
        cancelled call has ended when the cancellation is raised: the items may have been added, and are not
        added later. Raises `InvalidState`, naming the path, for a value that is not a JSON object, and for an
        `id` that is not a string; `LimitReached`; `TooLarge` if the items do not fit into one entry;
        `OutcomeUnknown` if the items may have been stored.
        """
        added = self._checked(items)
        entry = Add(_id_of(id), added, self._clock(), named=id is not None)
        with self._guard.reporting(self._whose, "add"):
            if added:
                await self._tidied(*await self._store(entry, "add"))

    async def add_after(
        self,
        tip: str,
        items: Sequence[Mapping[str, Any]],
        id: str | None = None,  # noqa: A002 -- what it is
    ) -> str | None:
        """Add items, all or none, if nothing has taken effect since a moment; returns the new moment.

        `tip` comes from `read` or from an addition; `""` begins a log that does not exist. Of any number of
        writers with one tip, exactly one gets a new tip. The others get `None`: their items are not in the
        log, and never will be. A fold is not a change. An empty list counts as an addition.

        With an `id`, a repeat of a stored addition is already done, whatever came since; if others came in
        between, nothing is accepted after the tip that it returns. Takes two round trips; the second reads a
        few entries. With an `id`, it reads all entries in the record, unless this object has done so and
        `tip` is the latest that it returned. Cancellation and errors are as for `add`. Also raises
        `ConfigurationError` for an invalid tip.
        """
        entry_id, added = _id_of(id), self._checked(items)
        entry = Add(entry_id, added, self._clock(), Tip.of(tip), named=id is not None)
        with self._guard.reporting(self._whose, "add"):
            return await self._added(entry, "add")

    async def rewrite(self, tip: str, items: Sequence[Mapping[str, Any]]) -> str | None:
        """Replace all items by others in one step, if nothing has taken effect since `tip`; see `add_after`.

        The new items are numbered from 0. The replaced items are erased before this returns, if the datastore
        answers; otherwise a later call erases them.
        """
        entry = Add(_new_id(), self._checked(items), self._clock(), Tip.of(tip), instead=True)
        with self._guard.reporting(self._whose, "rewrite"):
            return await self._added(entry, "rewrite")

    async def clear_after(self, tip: str) -> bool:
        """Erase the log if nothing has taken effect since `tip`; returns whether it did.

        Concurrent additions begin a new log, and are not lost. An empty record may stay. A cancelled call has
        ended when the cancellation is raised.
        """
        after = Tip.of(tip)
        if after == NOWHERE:
            return not (await self._load("clear")).log.place.exists
        return await self._added(End(_new_id(), self._clock(), after), "clear") is not None

    async def pop(self) -> Item | None:
        """Remove the last item and return it; `None` if the log is empty.

        The item stays stored until the log is folded, or a purge by age removes it. Two concurrent calls
        return two different items. If the log is cleared during the call, the result may be `None`. Takes
        three round trips, more if the log is full, or the item in a page. A cancelled call has ended when the
        cancellation is raised: an item may have been removed, and none is removed later. Raises
        `OutcomeUnknown` if an item may have been removed and cannot be returned.
        """
        if not await self._items("pop", 1):
            return None
        pop = Pop(_new_id(), self._clock())
        await self._store(pop, "pop")
        try:
            found = await self._load("pop")
            removal = found.log.popped.get(pop.id)
            # Before it is folded: an item in a page may be replaced afterwards.
            item = None if removal is None else await self._removed(found.log, removal)
        except StorageError as error:
            raise self._lost("pop", "an item was removed, but loading it failed") from error
        log = found.log
        if log.waste >= max(TOLERATED_WASTE, len(log.items)):
            await self._tidy(found)
        if removal is None and log.has_folded(pop.id):
            raise self._lost("pop", "an item was removed, but it is no longer known which one")
        # Without a trace of the pop, the log was cleared since, so there was nothing to remove.
        return item

    async def clear(self) -> None:
        """Erase the log; raises `OutcomeUnknown` if it may have been erased.

        A cancelled call has ended when the cancellation is raised.
        """
        await to_its_end(self._clear())

    async def _clear(self) -> None:
        await races.retried(lambda: ledger.erase(self._driver, self._where))
        # After the record: a process that puts items into pages meanwhile finds that the record is gone.
        await races.retried(lambda: pages.erase_dead(self._driver, self._where, self._mark))
        self._touch_erased()

    def _checked(self, items: Sequence[Mapping[str, Any]]) -> list[Item]:
        """Return copies of the items that were given. Raises `InvalidState` and `LimitReached`."""
        added: list[Item] = []
        for index, item in enumerate(items):
            if not isinstance(item, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidState(f"items[{index}] is {type(item).__name__}, not an object")
            added.append(dict(item))
            require_json(added[-1], f"items[{index}]", deepest=DEEPEST_IN_TURN)
        with self._guard.reporting(self._whose, "add"):
            for item in added:
                self._guard.require("turn_characters", partial(characters_in, item))
        return added

    async def _mark(self) -> tuple[str | None, Transcript | None]:
        """Load the data that names the pages of the record."""
        record = await self._driver.load(self._where, last=0)
        with located(self._driver.name, "pages"):
            folded = items.open_folded(None if record is None else record.body, self._codec)
        return record and record.version, folded.transcript

    def _touch(self) -> None:
        """Note in the catalogue that items came or went.

        A touch reads their number: a count made here would miss what others have added or removed.
        """
        if self._touches is not None:
            self._touches.note(self._key, self._kind, None, ttl=self._ttl_s)

    def _touch_erased(self, *, at: float | None = 0.0) -> None:
        """Note in the catalogue that items were erased, which is no activity unless it was `at` some time."""
        if self._touches is not None:
            # The records say whether anything is left of the conversation; nothing that was erased is.
            self._touches.note(self._key, self._kind, None, ttl=self._ttl_s, at=at, reset=True)

    async def fold(self) -> bool:
        """Move the oldest entries into the body or to pages; changes no item. Returns whether any were moved.

        One call moves as many as one `replace` drops or, in a long log, as one step moves. `False` if
        there is no room for them, or every race was lost.
        """

        async def attempt() -> bool | Lost:
            found = await self._load("fold")
            done = await self._fold(found) if found.log.length else None
            return Lost(found.log.version) if done is False else done is True

        return await contend(attempt) or False

    async def forget_popped(self) -> bool:
        """Remove popped items from wherever they are still stored; returns whether there were any.

        Items popped within ten deadlines stay: the process that popped them may not have read them yet.
        """
        keep_for, done = REMEMBERED_FOR * self._driver.traits.deadline, False

        async def attempt() -> bool | Lost:
            found = await self._load("fold")
            count = found.log.with_pops_until(self._clock() - keep_for)
            folded = None if count is None else await self._fold(found, count)
            return Lost(found.log.version) if folded is False else folded is True

        while await contend(attempt):
            done = True
        log = (await self._load("fold", 0)).log
        paged, now = log.folded.transcript, self._clock()
        if paged is None or any(removal.at > now - keep_for for removal in log.folded.popped.values()):
            return done
        if self._driver.traits.shows_unconfirmed:
            # A server that others have replaced shows an earlier log, with revisions that do not count.
            await confirming.confirm(self._driver, (self._where.scope,))
            if (await self._load("fold", 0)).log.folded.transcript != paged:
                return done
        return (paged.rev > 0 and await self._pages.forget_removed(self._where, paged)) or done

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

    def _lost(self, operation: str, message: str) -> OutcomeUnknown:
        return OutcomeUnknown(message, backend=self._driver.name, operation=operation)

    async def _items(self, operation: str, limit: int | None) -> list[Item]:
        """Return the latest items, those of pages included, back to the first missing one."""
        return await self._whole(operation, lambda found: self._latest(found.log, operation, limit), limit)

    async def _latest(self, log: Log, operation: str, limit: int | None) -> tuple[list[Item], bool]:
        """Return the latest items, and whether all requested ones are there."""
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

    async def _whole(
        self, operation: str, read: Callable[[_ReadLog], Awaitable[tuple[T, bool]]], limit: int | None = None
    ) -> T:
        """Return the result of `read` for the log; repeats it if items are missing because of changes."""
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
        last = count + items.MARGIN if count else 0
        while (found := await self._load(operation, last)).log.newest(count) is None:
            last *= 4
        return found

    async def _copies(
        self, log: Log, first: int, end: int, *, damaged: Damaged = refused
    ) -> Mapping[int, Copy]:
        """Return the items in pages of the numbers from `first` to `end - 1`, as of the time of a load."""
        if log.folded.transcript is None:
            return {}
        return await self._pages.between(self._where, log.folded.transcript, first, end, damaged=damaged)

    async def _removed(self, log: Log, removal: Removal) -> Item | None:
        """Return the item that a pop removed. Raises `Corrupt` if it is no longer in a page."""
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

    async def _store(self, entry: Add | Pop | End, operation: str) -> tuple[int, int]:
        """Append an entry; returns its size, and the new length of the tail.

        Folds a full record: a body is smaller than many entries, and has no waste. A cancellation is raised
        once this has ended.
        """
        data = items.seal_entry(entry, self._codec)
        if isinstance(entry, Add):
            self._guard.require("conversation_bytes", len(data))
        is_limited = False

        async def send() -> Appended:
            nonlocal is_limited
            try:
                return await self._send(data)
            except LimitReached:
                is_limited = isinstance(entry, Add)
                raise

        async def make_room() -> bool:
            found = await self._load(operation)
            if found.log.length:
                return await self._shorten(found) is not None
            # Items in pages do not count for a limit, so moving them there makes no room for more.
            has_more = not is_limited and (found.log.held or found.log.popped)
            return bool(has_more) and await self._fold(found, to_pages=True, removals=False) is not None

        try:
            appended = await to_its_end(ledger.append_to_full(send, make_room))
        except asyncio.CancelledError:
            # It may have been stored.
            self._touch()
            raise
        # Before the log is shortened, which may be cancelled.
        self._touch()
        return len(data), appended.length

    async def _tidied(self, size: int, length: int) -> None:
        """Shorten a log that an entry of this size has made too long."""
        self._unmoved += size
        is_long = length >= LONG and length % KEPT == 0
        if is_long or self._unmoved > LARGE:
            self._unmoved = 0
            await self._tidy(None)

    async def _added(self, entry: Add | End, operation: str) -> str | None:
        """Append a conditional entry; returns the moment after it, `None` if it does not take effect."""
        began = asyncio.get_running_loop().time()

        async def work() -> tuple[int, int, Tip | None]:
            stored = await self._store(entry, operation)
            tip, exists = await self._taken(entry, began, operation)
            replaces = tip is not None and (isinstance(entry, End) or entry.instead)
            if replaces:
                self._touch_erased(at=0.0 if isinstance(entry, End) else None)
            # Otherwise only refused items would be stored of a log that was erased.
            if replaces or not exists:
                await self._wipe()
            return *stored, tip

        size, length, tip = await to_its_end(work())
        if not isinstance(entry, End):
            await self._tidied(size, length)
        return None if tip is None else tip.text

    async def _taken(self, entry: Add | End, began: float, operation: str) -> tuple[Tip | None, bool]:
        """Return the place after a conditional entry that was appended; `None` if it takes no effect.

        Also returns whether the log may exist. The newest entries tell both if the entry is the first one
        after its place, and otherwise all do. A named one may be a repeat of any other.
        """
        after, is_named = entry.after or NOWHERE, isinstance(entry, Add) and entry.named
        may_repeat = is_named and not (self._seen and self._seen.lacks(entry))
        try:
            log = (await self._load(operation, None if may_repeat else _NEWEST)).log
            if log.skipped and not log.follows(entry.id, after):
                log = (await self._load(operation)).log
            if self._driver.traits.shows_unconfirmed and not log.has(entry.id):
                # A server that others have replaced may not show it.
                await confirming.confirm(self._driver, (self._where.scope,))
                log = (await self._load(operation)).log
        except StorageError as error:
            raise self._lost(operation, "an entry was stored, but loading it failed") from error
        took = asyncio.get_running_loop().time() - began
        if took >= (REMEMBERED_FOR - 1) * self._driver.traits.deadline and not log.has(entry.id):
            raise self._lost(operation, "an entry was stored, but whether it was in time is no longer known")
        tip = log.taken(entry.id, after)
        self._see(log, entry, tip)
        return tip, log.skipped > 0 or log.place.exists

    def _see(self, log: Log, added: Add | End | None = None, tip: Tip | None = None) -> None:
        """Remember the ids that are in a log, or the one that was added at this tip to those that are known.

        Those that leave the record are in its body, which every load reads.
        """
        seen = self._seen
        if not log.skipped:
            self._seen = _Seen(log.tip, frozenset(hash(entry.id) for entry in log.entries))
        elif added and tip and seen and seen.moment == added.after and len(seen.ids) < 2 * LONG:
            self._seen = _Seen(tip, seen.ids | {hash(added.id)})

    async def _wipe(self) -> None:
        """Erase items that an entry has replaced, or that were refused for a log that does not exist.

        A failure is only logged, because the work is done.
        """

        async def attempt() -> bool | Lost:
            found = await self._load("fold")
            log = found.log
            void = log.wipe_within(log.length)
            if void is None and (log.place.exists or not log.length):
                return True
            done = await self._fold(found)
            is_all = void is None or void <= self._driver.traits.max_drop
            return done is None or (done and is_all) or Lost(log.version)

        with self._logging_errors():
            await contend(attempt)

    async def _send(self, data: bytes) -> Appended:
        listing = self._directory.listed(self._owner, self._ttl_s)
        return await ledger.append(self._driver, self._where, data, ttl=self._ttl_s, listing=listing)

    async def _tidy(self, found: _ReadLog | None) -> None:
        """Fold the log that was read, or shorten it; a failure is only logged, because the work is done."""
        with self._logging_errors():
            if found is None:
                await self._shorten(await self._load("add"), to_pages=True)
            else:
                await self._fold(found)

    @contextmanager
    def _logging_errors(self) -> Generator[None]:
        try:
            yield
        except StorageError as error:
            logger.warning(
                "could not fold a log of items: %s (conversation %s)", error, keys.log_name(self._where)
            )

    async def _shorten(self, found: _ReadLog, *, to_pages: bool = False) -> bool | None:
        """Fold entries older than the newest entries, or everything if there is nothing else; as `_fold`."""
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
        self, found: _ReadLog, count: int | None = None, *, to_pages: bool = False, removals: bool = True
    ) -> bool | None:
        """Fold the oldest `count` entries that were read, or all that one step folds.

        `False` after a lost race, `None` if there is no room for the items. Such a log is not folded, so
        reading it takes longer with each removal until its record is full.
        """
        log = found.log
        wiped = log.wipe_within(self._driver.traits.max_drop)
        if wiped is not None:
            return await self._replaced(found, wiped)
        count = min(self._covered(log), log.length if count is None else count)
        return await self._replaced(found, count, to_pages=to_pages, removals=removals)

    async def _replaced(
        self, found: _ReadLog, count: int, *, to_pages: bool = False, removals: bool = True
    ) -> bool | None:
        """Fold the oldest `count` entries that were read into the body.

        Items that are too many for a body go to pages, and all of them with `to_pages`, or if some are there.
        Keeps items that recent pops removed if there is room, and with `removals`. `False` after a lost race,
        `None` if there is no room.
        """
        record, log = found
        if record is None:
            return False

        unchanged = ledger.unchanged_by(lambda _: items.seal_folded(log.folded, self._codec))
        expect = await ledger.confirmed(self._driver, self._where, record, count, unchanged=unchanged)
        if expect is None:
            return False
        head = log.head(count)
        if log.wipe_within(count) == count:
            done = await self._folded(log, count, expect, paged=await self._popped(head))
            if done and log.folded.transcript is not None:
                epoch = log.folded.transcript.epoch
                await pages.erase_dead(self._driver, self._where, self._mark, epoch=epoch)
            return done
        if not (to_pages or log.folded.transcript) and len(head.items) <= KEPT:
            done = await self._folded(log, count, expect, removals=removals)
            if done is not None:
                return done
        return await self._paged(log, count, expect, removals=removals)

    async def _folded(
        self,
        log: Log,
        count: int,
        expect: str,
        *,
        removals: bool = True,
        transcript: Transcript | None = None,
        paged: Mapping[int, Copy] | None = None,
    ) -> bool | None:
        """Store the body of a log with the oldest `count` entries folded in; as `_replaced`."""
        keep_for = REMEMBERED_FOR * self._driver.traits.deadline
        removed = {number: items.item_in(copy.turn)[0] for number, copy in (paged or {}).items()}
        for remembers in (True, False) if removals else (False,):
            folded = log.fold(
                count,
                now=self._clock(),
                keep_for=keep_for,
                removals=remembers,
                transcript=transcript,
                paged=removed,
            )
            change = ledger.Change(items.seal_folded(folded, self._codec), drop=count)
            with suppress(TooLarge):
                return await ledger.replace(self._driver, self._where, change, expect=expect)
        return None

    async def _popped(self, head: Log) -> Mapping[int, Copy]:
        """Return the items that pops removed, as far as pages have them."""
        numbers = [removal.number for removal in head.popped.values() if removal.number is not None]
        paged = head.folded.transcript
        return {} if paged is None or not numbers else await self._copies(head, min(numbers), paged.base)

    async def _paged(self, log: Log, count: int, expect: str, *, removals: bool) -> bool | None:
        """Move the items of a log with the oldest `count` entries folded in to pages; as `_replaced`."""
        head = log.head(count)
        before = head.folded.transcript or Transcript(expect)
        removed = await self._popped(head)
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
        transcript = replace(after, rev=head.rev)
        done = await self._folded(log, count, expect, removals=removals, transcript=transcript, paged=removed)
        if done:
            await self._pages.complete(self._where, start, leaving)
        elif leaving:
            # The log may have been cleared before the record could refer to them.
            await pages.erase_dead(self._driver, self._where, self._mark, epoch=before.epoch)
        return done

    def _covered(self, log: Log) -> int:
        """Return the number of entries that one step folds."""
        most, size = min(log.length, self._driver.traits.max_drop), 0
        for count, entry in enumerate(log.entries[:most]):
            size += max(1, len(entry.items)) if isinstance(entry, Add) else 1
            if size > AT_ONCE and count:
                return count
        return most


def _place_of(paged: Transcript | None) -> tuple[str, int, int] | None:
    """Return a value that changes when items leave the pages of a log, or are replaced there by others."""
    return paged and (paged.epoch, paged.first, paged.rev)


def _new_id() -> str:
    return secrets.token_hex(12)


def _id_of(given: object) -> str:
    """Return the id of an addition, a new one for `None`. Raises `InvalidState` for an invalid one."""
    if given is None:
        return _new_id()
    if not isinstance(given, str) or not given:
        raise InvalidState("the id of an addition must be a string that is not empty")
    return given

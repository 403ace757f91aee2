"""The items that an agent framework keeps of a conversation, in a log that many processes share.

Adding items is one `append`, regardless of concurrent writers, and so is removing the last item: see `items`.
A process that removes items occasionally folds the entries into the body with one conditional `replace`. The
record may change during any await.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from stm_backends import races
from stm_backends.catalogue.card import Activity
from stm_backends.drivers.contract import Driver, Record
from stm_backends.errors import (
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    located,
)
from stm_backends.history import items
from stm_backends.history.activity import beginning_in
from stm_backends.history.items import Add, Entry, Item, Log, Pop, Removal
from stm_backends.memory.touches import Touches
from stm_backends.races import Lost, contend
from stm_backends.records import confirming, keys, ledger
from stm_backends.records.codec import DEEPEST_IN_TURN, Codec, require_json
from stm_backends.records.directory import Directory
from stm_backends.records.keys import LogKind
from stm_backends.records.ledger import Appended
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_in
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

TOLERATED_WASTE: Final = 32
"""How many entries without a remaining item justify a fold."""


class _ReadLog(NamedTuple):
    """A log as it was read, and its record."""

    record: Record | None
    log: Log


class ItemLog:
    """The items of one conversation, in order, shared by every process that opens the same key.

    Items are JSON objects; they are returned as new objects equal to those that were added. All items are
    kept, up to the datastore's limits. A log expires `ttl_s` seconds after the last write; `None` means
    never. `clock` is in epoch seconds.
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
        # Since the last touch: how many items came and went, and the beginning of the last one with a text.
        self._added, self._preview = 0, ""

    async def items(self, limit: int | None = None) -> list[Item]:
        """Return the latest `limit` items, oldest first, in one round trip; all of them for `None`.

        Raises `Corrupt` if any item cannot be read; an outage raises and never returns an empty log.
        """
        found = (await self._load("items")).log.items
        return found if limit is None else found[max(0, len(found) - max(0, limit)) :]

    async def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Add items at the end, all or none, in one round trip. An empty list is a no-op.

        Raises `InvalidState`, naming the path, for a value that is not a JSON object; `LimitReached`;
        `TooLarge` if the items do not fit into one entry, or the log into one record; `OutcomeUnknown` if the
        items may have been stored.
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
                self._touch(len(added), beginning_in(reversed(added)))

    async def pop(self) -> Item | None:
        """Remove the last item and return it; `None` if the log is empty.

        Two concurrent calls return two different items. If the log is cleared during the call, the result may
        be `None`. Takes three round trips, and up to five more if the log is full. Raises `OutcomeUnknown` if
        an item may have been removed and cannot be returned.
        """
        if not (await self._load("pop")).log.items:
            return None
        pop = Pop(_new_id(), self._clock())
        self._touch(-1)
        try:
            await self._send(items.seal_entry(pop, self._codec))
        except (TooLarge, LimitReached) as error:
            return await self._pop_from_full(pop, error)
        try:
            found = await self._load("pop")
        except StorageError as error:
            raise self._lost("an item was removed, and loading it failed") from error
        log = found.log
        if log.waste >= max(TOLERATED_WASTE, len(log.items)):
            await self._tidy(found)
        removal = log.popped.get(pop.id)
        if removal is None and log.has_folded(pop.id):
            raise self._lost("an item was removed, and which one is no longer remembered")
        # Without a trace of the pop, the log was cleared since, so there was nothing to remove.
        return None if removal is None else removal.item

    async def clear(self) -> None:
        """Erase the log; raises `OutcomeUnknown` if it may have been erased."""
        await races.retried(lambda: ledger.erase(self._driver, self._where))
        if self._touches is not None:
            # The records say whether anything is left of the conversation.
            self._touches.note(self._key, self._kind, lambda: None, ttl=self._ttl_s, at=0.0)

    def _touch(self, added: int, preview: str = "") -> None:
        """Note in the catalogue that items came or went."""
        self._added, self._preview = self._added + added, preview or self._preview
        if self._touches is not None:
            self._touches.note(self._key, self._kind, self._look, ttl=self._ttl_s)

    def _look(self) -> Activity:
        """Return what was added since the last touch."""
        added, self._added = self._added, 0
        return Activity((self._kind,), 0.0, None, self._preview, added=added)

    async def fold(self) -> bool:
        """Move the oldest entries into the body, which changes no item; returns whether any were moved.

        One call moves as many as one `replace` drops. `False` if the items do not fit into a body, or every
        race was lost.
        """

        async def attempt() -> bool | Lost:
            found = await self._load("fold")
            done = await self._fold(found) if found.log.length else None
            return Lost(found.log.version) if done is False else done is True

        return await contend(attempt) or False

    def _lost(self, message: str) -> OutcomeUnknown:
        return OutcomeUnknown(message, backend=self._driver.name, operation="pop")

    async def _load(self, operation: str) -> _ReadLog:
        record = await self._driver.load(self._where)
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
            if not log.items:
                return (None,)
            if self._covered(log) < log.length:
                done = await self._fold(found)
            else:
                after = log.with_entry(pop)
                done = await self._replaced(found, after, count=after.length, drop=log.length)
                if done is not None:
                    removal = after.popped[pop.id]
                    if done:
                        return (removal.item,)
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
            return found.log.length > 0 and await self._fold(found) is not None

        await ledger.append_to_full(lambda: self._send(data), make_room)

    async def _send(self, data: bytes) -> Appended:
        listing = self._directory.listed(self._owner, self._ttl_s)
        return await ledger.append(self._driver, self._where, data, ttl=self._ttl_s, listing=listing)

    async def _tidy(self, found: _ReadLog) -> None:
        """Fold the log that was read; only logs a failure, because the item was removed."""
        try:
            await self._fold(found)
        except StorageError as error:
            logger.warning(
                "could not fold a log of items: %s (conversation %s)", error, keys.log_name(self._where)
            )

    async def _fold(self, found: _ReadLog) -> bool | None:
        """Fold the entries that were read; `False` after a lost race, `None` if the body would be too large.

        A log whose items do not fit into one body is not folded, so reading it takes longer with each removal
        until its record is full.
        """
        count = self._covered(found.log)
        return await self._replaced(found, found.log, count=count, drop=count)

    async def _replaced(self, found: _ReadLog, log: Log, *, count: int, drop: int) -> bool | None:
        """Store the body of `log` with `count` entries folded in, and drop `drop` entries that were read.

        Keeps what recent pops removed if there is room. `False` after a lost race, `None` if there is no
        room.
        """
        record = found.record
        if record is None:
            return False

        async def store(version: str) -> bool:
            unchanged = ledger.Change(items.seal_folded(log.folded, self._codec), version=version)
            return await ledger.replace(
                self._driver, self._where, unchanged, expect=record.version, attempts=1
            )

        expect = await confirming.confirmed(
            self._driver, self._where, record, drop, store=store, load=lambda: self._driver.load(self._where)
        )
        if expect is None:
            return False
        keep_for = 10 * self._driver.traits.deadline
        for removals in (True, False):
            folded = log.fold(count, now=self._clock(), keep_for=keep_for, removals=removals)
            change = ledger.Change(items.seal_folded(folded, self._codec), drop=drop)
            with suppress(TooLarge):
                return await ledger.replace(self._driver, self._where, change, expect=expect)
        return None

    def _covered(self, log: Log) -> int:
        return min(log.length, self._driver.traits.max_drop)


def _new_id() -> str:
    return secrets.token_hex(12)

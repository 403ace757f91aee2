"""The items that an agent framework keeps of a conversation, in a log that many processes share.

Adding items is one `append`, regardless of concurrent writers, and so is removing the last item: see `items`.
A process that removes items occasionally folds the entries into the body with one conditional `replace`. The
record may change during any await.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

from stm_backends import races
from stm_backends.drivers.contract import KEEP, Driver, new_version
from stm_backends.errors import (
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    located,
)
from stm_backends.history import items
from stm_backends.history.items import Add, Entry, Folded, Item, Log, Pop, Removal
from stm_backends.records import keys, ledger
from stm_backends.records.codec import DEEPEST_IN_TURN, Codec, require_json
from stm_backends.records.directory import Directory
from stm_backends.records.keys import LogKind
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_in
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

ROUNDS: Final = 10
"""How many attempts are made on a full log while other processes fold or fill it."""

TOLERATED_WASTE: Final = 32
"""How many entries without a remaining item justify a fold."""


class ItemLog:
    """The items of one conversation, in order, shared by every process that opens the same key.

    Items are JSON objects; they are returned as new objects equal to those that were added. All items are
    kept, up to the datastore's limits. A log expires `ttl_s` seconds after the last write; `None` means
    never. `clock` is in epoch seconds.
    """

    def __init__(
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
    ) -> None:
        self._driver = driver
        self._where = keys.log_key(key, kind)
        self._owner = (key.tenant_id, key.user_id)
        self._whose = Whose(*self._owner, key.session_id)
        self._guard = guard
        self._codec = codec or Codec()
        self._directory = directory or Directory(driver, self._codec)
        self._ttl_s = ttl_s
        self._clock = clock

    async def items(self, limit: int | None = None) -> list[Item]:
        """Return the latest `limit` items, oldest first, in one round trip; all of them for `None`.

        Raises `Corrupt` if any item cannot be read; an outage raises and never returns an empty log.
        """
        found = (await self._load("items")).items
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

    async def pop(self) -> Item | None:
        """Remove the last item and return it; `None` if the log is empty.

        Two concurrent calls return two different items. If the log is cleared during the call, the result may
        be `None`. Takes three round trips, and up to five more if the log is full. Raises `OutcomeUnknown` if
        an item may have been removed and cannot be returned.
        """
        if not (await self._load("pop")).items:
            return None
        pop = Pop(_new_id(), self._clock())
        try:
            await self._send(items.seal_entry(pop, self._codec))
        except (TooLarge, LimitReached) as error:
            return await self._pop_from_full(pop, error)
        try:
            log = await self._load("pop")
        except StorageError as error:
            raise self._lost("an item was removed, and loading it failed") from error
        if log.waste >= max(TOLERATED_WASTE, len(log.items)):
            await self._tidy(log)
        removal = log.popped.get(pop.id)
        if removal is None and log.has_folded(pop.id):
            raise self._lost("an item was removed, and which one is no longer remembered")
        # Without a trace of the pop, the log was cleared since, so there was nothing to remove.
        return None if removal is None else removal.item

    async def clear(self) -> None:
        """Erase the log; raises `OutcomeUnknown` if it may have been erased."""
        await ledger.retried(lambda: ledger.erase(self._driver, self._where))

    async def fold(self) -> bool:
        """Move the oldest entries into the body, which changes no item; returns whether any were moved.

        One call moves as many as one `replace` drops. `False` if the items do not fit into a body, or every
        race was lost.
        """
        for lost in range(races.RACES):
            await asyncio.sleep(races.pause_after(lost))
            log = await self._load("fold")
            done = await self._fold(log) if log.length else None
            if done is not False:
                return done is True
        return False

    def _lost(self, message: str) -> OutcomeUnknown:
        return OutcomeUnknown(message, backend=self._driver.name, operation="pop")

    async def _load(self, operation: str) -> Log:
        record = await self._driver.load(self._where)
        with located(self._driver.name, operation):
            return items.read(record, self._codec)

    async def _pop_from_full(self, pop: Pop, full: TooLarge | LimitReached) -> Item | None:
        """Remove the last item of a log that has no room for another entry, as part of a fold.

        Raises `full` if there is nothing to fold, or the items do not fit into a body.
        """
        removal: Removal | None = None
        for attempt in range(ROUNDS):
            log = await self._load("pop")
            if removal is not None and log.has_folded(pop.id):
                # It was done, and the log was folded again, before the answer arrived.
                return removal.item
            if not log.items:
                return None
            if self._covered(log) < log.length:
                await self._fold(log)
                continue
            after = log.with_entry(pop)
            done = await self._replaced(after, count=after.length, drop=log.length)
            if done is None:
                raise full
            removal = after.popped[pop.id]
            if done:
                return removal.item
            await asyncio.sleep(random.uniform(0, 0.01 * 2**attempt))
        raise full

    async def _append(self, entry: Entry) -> None:
        """Append an entry, folding a full record: a body is smaller than many entries, and has no waste.

        A fold that loses the race to another process has made room, too.
        """
        data = items.seal_entry(entry, self._codec)
        self._guard.require("conversation_bytes", len(data))
        for attempt in range(ROUNDS):
            try:
                await self._send(data)
            except (TooLarge, LimitReached) as error:
                if (isinstance(error, TooLarge) and error.what == "entry") or attempt == ROUNDS - 1:
                    raise
                log = await self._load("add")
                if not log.length or await self._fold(log) is None:
                    raise
            else:
                return
            await asyncio.sleep(random.uniform(0, 0.01 * attempt))

    async def _send(self, data: bytes) -> None:
        async with self._directory.listed(self._owner, self._ttl_s) as listing:
            appended = await ledger.append(self._driver, self._where, data, ttl=self._ttl_s)
            listing.created = appended.created

    async def _tidy(self, log: Log) -> None:
        """Fold the log that was read; only logs a failure, because the item was removed."""
        try:
            await self._fold(log)
        except StorageError as error:
            logger.warning(
                "could not fold a log of items: %s (conversation %s)", error, keys.log_name(self._where)
            )

    async def _fold(self, log: Log) -> bool | None:
        """Fold the entries that were read; `False` after a lost race, `None` if the body would be too large.

        A log whose items do not fit into one body is not folded, so reading it takes longer with each removal
        until its record is full.
        """
        count = self._covered(log)
        return await self._replaced(log, count=count, drop=count)

    async def _replaced(self, log: Log, *, count: int, drop: int) -> bool | None:
        """Store the body with `count` entries folded in, and drop `drop` entries of the record.

        Keeps what recent pops removed if there is room. `False` after a lost race, `None` if there is no
        room.
        """
        expect = await self._confirmed(log, drop)
        if expect is None:
            return False
        keep_for = 10 * self._driver.traits.deadline
        for removals in (True, False):
            folded = log.fold(count, now=self._clock(), keep_for=keep_for, removals=removals)
            with suppress(TooLarge):
                return await self._store(folded, new_version(), expect=expect, drop=drop)
        return None

    async def _confirmed(self, log: Log, drop: int) -> str | None:
        """Return the record's version once its oldest `drop` entries are confirmed; `None` after a lost race.

        Takes no request where a load shows only what is confirmed. Elsewhere, a server that takes over may
        have other entries under the version that was read, which must not be dropped; see decision 0037.
        """
        version = cast("str", log.version)
        if not self._driver.traits.shows_unconfirmed:
            return version
        try:
            # Its acknowledgement covers what was written before it. A retry could store this version on a
            # second server, which has other entries.
            confirming = new_version()
            if not await self._store(log.folded, confirming, expect=version, drop=0, attempts=1):
                return None
            version = confirming
        except TooLarge:
            # A full record may have no room for its first body.
            await ledger.confirm(self._driver, (self._where.scope,))
        found = await self._load("fold")
        is_same = found.version == version and found.entries[:drop] == log.entries[:drop]
        return version if is_same else None

    async def _store(
        self,
        folded: Folded,
        version: str,
        *,
        expect: str,
        drop: int,
        attempts: int = ledger.ATTEMPTS,
    ) -> bool:
        body = items.seal_folded(folded, self._codec)
        return await ledger.retried(
            lambda: self._driver.replace(
                self._where, body, version=version, expect=expect, drop=drop, ttl=KEEP
            ),
            attempts=attempts,
        )

    def _covered(self, log: Log) -> int:
        return min(log.length, self._driver.traits.max_drop)


def _new_id() -> str:
    return secrets.token_hex(12)

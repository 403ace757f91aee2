"""What an agent framework keeps of a conversation: a log of items that many processes share.

Adding is one `append`, whatever others do meanwhile, and so is removing the last item: see `items`. What
that leaves behind is folded away now and then, by whoever removes items, in one conditional `replace`.
Everything shared may change during any await.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from stm_backends.drivers.contract import KEEP, Driver, new_version
from stm_backends.errors import InvalidState, OutcomeUnknown, StorageError, TooLarge, located
from stm_backends.history import items
from stm_backends.history.items import Add, Entry, Item, Log, Pop, Removal
from stm_backends.records import keys, operations
from stm_backends.records.codec import DEEPEST_IN_TURN, Codec, require_json
from stm_backends.records.directory import Directory
from stm_backends.records.keys import LogKind
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

ROUNDS: Final = 10
"""How often a full log is looked at while others fold it or fill it again."""

TOLERATED_WASTE: Final = 32
"""How many entries that hold nothing any more are read along before a fold is worth a write."""


class ItemLog:
    """The items of one conversation, in order, shared by every process that opens the same key.

    Items are JSON objects; what comes back equals what went in, and is the caller's to keep. All of them
    are kept, up to the datastore's limits. `ttl_s`: a log that nobody writes to for so many seconds is
    forgotten; `None`: never. `clock` is in epoch seconds.
    """

    def __init__(
        self,
        driver: Driver,
        key: MemoryKey,
        kind: LogKind,
        *,
        codec: Codec | None = None,
        directory: Directory | None = None,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._where = keys.log_key(key, kind)
        self._owner = (key.tenant_id, key.user_id)
        self._codec = codec or Codec()
        self._directory = directory or Directory(driver, self._codec)
        self._ttl_s = ttl_s
        self._clock = clock

    async def items(self, limit: int | None = None) -> list[Item]:
        """Return the latest `limit` items, oldest first, in one round trip; all of them for `None`.

        Raises `Corrupt` rather than leave out what cannot be read; an outage is never an empty log.
        """
        standing = (await self._load("items")).items
        return standing if limit is None else standing[max(0, len(standing) - max(0, limit)) :]

    async def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Add items at the end, all or none, in one round trip; none is a call without effect.

        Raises `InvalidState`, naming the path, for what is not a JSON object; `TooLarge` if the items take
        more than one entry or the whole log more than one record; `OutcomeUnknown` if they were perhaps
        stored.
        """
        added: list[Item] = []
        for index, item in enumerate(items):
            if not isinstance(item, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidState(f"items[{index}] is {type(item).__name__}, not an object")
            added.append(dict(item))
            require_json(added[-1], f"items[{index}]", deepest=DEEPEST_IN_TURN)
        if added:
            await self._append(Add(_new_id(), added))

    async def pop(self) -> Item | None:
        """Remove the last item and return it; `None` if there is none.

        Of two that do this at once each gets another item. If the log is cleared meanwhile, the answer may
        be `None`: what was removed is erased with the rest. It takes three round trips, and one more now and
        then. Raises `OutcomeUnknown` if an item was perhaps removed and cannot be returned.
        """
        if not (await self._load("pop")).items:
            return None
        pop = Pop(_new_id(), self._clock())
        try:
            await self._send(items.seal_entry(pop, self._codec))
        except TooLarge as error:
            return await self._pop_from_full(pop, error)
        try:
            log = await self._load("pop")
        except StorageError as error:
            raise self._lost("an item was removed, and reading which one failed") from error
        if log.waste >= max(TOLERATED_WASTE, len(log.items)):
            await self._tidy(log)
        removal = log.popped.get(pop.id)
        if removal is None and log.has_folded(pop.id):
            raise self._lost("an item was removed, so long ago that nobody knows any more which one")
        # Without a trace of it, the log was cleared since: then there was nothing to remove.
        return None if removal is None else removal.item

    async def clear(self) -> None:
        """Erase the log and what was removed from it; `OutcomeUnknown` says that it was perhaps erased."""
        await operations.retried(lambda: operations.erase(self._driver, self._where))

    def _lost(self, message: str) -> OutcomeUnknown:
        return OutcomeUnknown(message, backend=self._driver.name, operation="pop")

    async def _load(self, operation: str) -> Log:
        record = await self._driver.load(self._where)
        with located(self._driver.name, operation):
            return items.read(record, self._codec)

    async def _pop_from_full(self, pop: Pop, full: TooLarge) -> Item | None:
        """Remove the last item where there is no room to say so: in the fold that makes room.

        Raises `full` if there is nothing to fold, or no body may be as large as what stands.
        """
        removal: Removal | None = None
        for attempt in range(ROUNDS):
            log = await self._load("pop")
            if removal is not None and log.has_folded(pop.id):
                # It was done, and the log folded again, before its answer came.
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
        """Append, folding a full record first: one body takes less than many entries, and no waste.

        A fold that another process forestalls has made room as well.
        """
        data = items.seal_entry(entry, self._codec)
        for attempt in range(ROUNDS):
            try:
                await self._send(data)
            except TooLarge as error:
                if error.what == "entry" or attempt == ROUNDS - 1:
                    raise
                log = await self._load("add")
                if not log.length or await self._fold(log) is None:
                    raise
            else:
                return
            await asyncio.sleep(random.uniform(0, 0.01 * attempt))

    async def _send(self, data: bytes) -> None:
        async with self._directory.listed(self._owner) as listing:
            appended = await operations.append(self._driver, self._where, data, ttl=self._ttl_s)
            listing.created = appended.created

    async def _tidy(self, log: Log) -> None:
        """Fold what was read; whoever removes an item does not fail because of it."""
        try:
            await self._fold(log)
        except StorageError as error:
            logger.warning("a log of items was not folded: %s", error)

    async def _fold(self, log: Log) -> bool | None:
        """Put the entries that were read into the body; `False` if others did, `None` if it is too large.

        A log whose items take more than one entry stays as it is: reading it grows with what was removed,
        until its record is full.
        """
        count = self._covered(log)
        return await self._replaced(log, count=count, drop=count)

    async def _replaced(self, log: Log, *, count: int, drop: int) -> bool | None:
        """Store the body into which `count` entries of a log go, and drop `drop` of those in the record.

        Keeps what young pops removed if there is room. `False` is a lost race; `None`: there is no room.
        """
        traits, expect = self._driver.traits, cast("str", log.version)
        for removals in (True, False):
            folded = log.fold(count, now=self._clock(), keep_for=10 * traits.deadline, removals=removals)
            body, version = items.seal_folded(folded, self._codec), new_version()
            with suppress(TooLarge):
                return await operations.retried(
                    lambda body=body, version=version: self._driver.replace(
                        self._where, body, version=version, expect=expect, drop=drop, ttl=KEEP
                    )
                )
        return None

    def _covered(self, log: Log) -> int:
        return min(log.length, self._driver.traits.max_drop)


def _new_id() -> str:
    return secrets.token_hex(12)

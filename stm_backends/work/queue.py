"""The queue of work in a datastore: eight records to append to, and what workers say in them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from stm_backends.drivers.contract import Driver, Record
from stm_backends.errors import Corrupt, KeyMismatch, SealMismatch, TooLarge, located
from stm_backends.records import keys, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.work import notes
from stm_backends.work.notes import VOID, Note
from stm_backends.work.policy import Noted, State, dump_state, load_state

logger = logging.getLogger("stm_backends")

SPILL_TRIES: Final = 3
"""The number of further records that a note is offered to if its shard is full."""


class Look(NamedTuple):
    """A shard as it was loaded."""

    shard: str
    record: Record
    state: State
    notes: tuple[Noted, ...]


Owned: TypeAlias = Callable[[Note], bool]
"""Says whether a note is to be erased."""


class WorkQueue:
    """The notes of all conversations on one backend."""

    def __init__(self, driver: Driver, codec: Codec) -> None:
        self._driver = driver
        self._codec = codec

    async def add(self, note: Note) -> None:
        """Add a note at the end of its shard, or of a further record if that is full.

        Raises `StorageError` if it is not stored, or perhaps not. Adding it twice costs one load.
        """
        entry, shard = self._codec.seal("note", notes.dump_note(note)), notes.shard_of(note.key)
        place = shard
        for left in range(SPILL_TRIES, -1, -1):
            try:
                # Never expires: a note waits for a worker, however long none runs.
                await ledger.append(self._driver, keys.work_key(place), entry, ttl=None)
            except TooLarge as error:
                if error.what == "entry" or not left:
                    raise
                place = notes.spill_of(shard, random.randrange(notes.SPILLS))
            else:
                return

    async def note(self, note: Note) -> None:
        """Add a note within one deadline of the driver. Raises what `add` raises, and `TimeoutError`."""
        async with asyncio.timeout(self._driver.traits.deadline):
            await self.add(note)

    async def shards(self) -> list[str]:
        """Return the names of the records that have or had notes, as a listing shows them."""
        return [name async for name in operations.names(self._driver, keys.WORK)]

    async def look(self, shard: str, last: Look | None = None) -> Look | None:
        """Return a shard as it is now; `None` if it does not exist.

        If only its body and length have to be read to see that it is as it was at `last`, that is returned.
        """
        where = keys.work_key(shard)
        if last is not None:
            head = await self._driver.load(where, last=0)
            if head is None:
                return None
            # While the version is the same, entries are only added.
            if (head.version, head.length) == (last.record.version, last.record.length):
                return last
        record = await self._driver.load(where)
        return None if record is None else self._open(shard, record, last)

    async def say(self, look: Look, state: State, *, drop: int) -> bool:
        """Store the state of a shard that was read, and drop its oldest notes; `False` after a lost race."""
        change = ledger.Change(self._codec.seal("work", dump_state(state)), drop=drop)
        return await ledger.fold(
            self._driver, keys.work_key(look.shard), look.record, change, unchanged=self._unchanged
        )

    async def forget(self, owned: Owned) -> int:
        """Erase the notes for which `owned` holds; returns how many there were."""
        erased = 0
        for shard in await self.shards():
            erased += await self._forget(shard, owned)
        return erased

    @property
    def max_drop(self) -> int:
        """The number of notes that one write may drop."""
        return self._driver.traits.max_drop

    async def _forget(self, shard: str, owned: Owned) -> int:
        """Put nothing in the place of notes, so that the others keep theirs."""
        void = self._codec.seal("note", notes.dump_note(VOID))

        async def decide(record: Record | None) -> tuple[ledger.Change | None, int]:
            look = None if record is None else self._open(shard, record)
            if record is None or look is None:
                return None, 0
            gone = [place for place, note in enumerate(look.notes) if note is not None and owned(note)]
            if not gone:
                return None, 0
            # A write reaches so many of the oldest. The rest is reached once workers have dropped these.
            end = min(gone[-1] + 1, self.max_drop)
            rewrite = [void if place in gone else entry for place, entry in enumerate(record.tail[:end])]
            body = await self._unchanged(record, record.version)
            return ledger.Change(body, rewrite=rewrite), sum(place < end for place in gone)

        found = await ledger.update(self._driver, keys.work_key(shard), decide, unchanged=self._unchanged)
        return found or 0

    async def _unchanged(self, record: Record, version: str) -> bytes:
        """Return the body of a shard; appends alone make none."""
        del version
        return self._codec.seal("work", dump_state(State())) if record.body is None else record.body

    def _open(self, shard: str, record: Record, last: Look | None = None) -> Look:
        known: dict[bytes, Noted] = {}
        if last is not None:
            known = dict(zip(last.record.tail, last.notes, strict=True))
        with located(self._driver.name, "work"):
            # A record that was created by an append has no body, and one that confirms entries an empty one.
            state = load_state(self._codec.open("work", record.body)) if record.body else State()
        opened = (known[one] if one in known else self._note(one) for one in record.tail)
        return Look(shard, record, state, tuple(opened))

    def _note(self, entry: bytes) -> Noted:
        try:
            return notes.load_note(self._codec.open("note", entry))
        except (KeyMismatch, SealMismatch):
            raise
        except Corrupt as error:
            # Of another version, perhaps, whose workers can read it.
            logger.warning("a note of the queue of work cannot be read: %s", error)
            return None

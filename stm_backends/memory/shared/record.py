"""The record of one conversation, as the processes that share it read and write it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from stm_backends import races
from stm_backends.drivers.contract import ABSENT, Driver, Key, new_version
from stm_backends.errors import Corrupt, StorageError, located
from stm_backends.memory.shared.archive import Archive
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import Entry, open_entry, units_of
from stm_backends.memory.view import View
from stm_backends.races import Lost, contend
from stm_backends.records import keys, ledger
from stm_backends.records.body import Body, Lease
from stm_backends.records.codec import Codec
from stm_backends.records.ledger import Appended
from stm_backends.records.pages import Pages
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig

logger = logging.getLogger("stm_backends")

MAX_OUTCOME_UNKNOWN: Final = 256
"""Number of turns with an unknown outcome that are remembered."""

MAX_ACKNOWLEDGED: Final = 32
"""Number of remembered ids of turns that were acknowledged to this process: repeats come soon."""


class SharedConversation:
    """Loads, appends and replaces, and remembers what this process has seen and added.

    `seen` is the last snapshot, with the entries that this process appended since. While the record has its
    version, these are the first entries of the record. `current` is true if this process knows of no other
    entry. `added` has the turns of this process since the last load, and `added_size` is the size of those
    that `seen` lacks. No write relies on any of these: a `replace` names the version. `leased` is the
    conversation under a lease that this process did not release. `outcome_unknown` has the ids of turns whose
    `add_turn` ended with an unknown outcome, and `acknowledged` those given by callers whose append was
    answered. `recovering` is true while this process makes an attempt to leave `DEGRADED`. `clock` is in
    epoch seconds. `used` is called when the remembered data changes. `archive` keeps the turns that
    leave a record with a transcript.
    """

    __slots__ = (
        "_positions",
        "_used",
        "acknowledged",
        "added",
        "added_size",
        "archive",
        "clock",
        "codec",
        "current",
        "driver",
        "key",
        "leased",
        "outcome_unknown",
        "recovering",
        "seen",
    )

    def __init__(
        self,
        driver: Driver,
        key: Key,
        codec: Codec,
        clock: Callable[[], float],
        used: Callable[[SharedConversation], None],
        pages: Pages | None = None,
    ) -> None:
        self.key = key
        self.driver = driver
        self.codec = codec
        self.archive = Archive(driver, key, codec, pages or Pages(driver, codec), clock)
        self.clock = clock
        self.recovering = False
        self.outcome_unknown: dict[str, None] = {}
        self.leased: Snapshot | None = None
        self._used = used
        # Another object whenever entries may be at other positions; `None` while a write removes some.
        self._positions: object | None = object()
        self.forget()

    def forget(self) -> None:
        """Forget what was seen and added."""
        self.seen = Snapshot()
        self.current = False
        self.added: dict[str, Entry] = {}
        self.added_size = 0
        self.acknowledged: dict[str, None] = {}

    @property
    def health(self) -> MemoryHealth:
        """The health as of the last load; `RECOVERING` only while this process makes an attempt."""
        return MemoryHealth.RECOVERING if self.recovering else self.seen.body.health

    @property
    def log_name(self) -> str:
        """The hash that names this conversation in log messages."""
        return keys.log_name(self.key)

    def view(self, snapshot: Snapshot, config: ShortTermMemoryConfig) -> View:
        """Return the model's view of a snapshot, as of this process."""
        return snapshot.view(config, recovering=self.recovering)

    def known(self) -> Snapshot:
        """Return what this process knows without a load: the last snapshot and its own turns since."""
        added = (entry for i, entry in self.added.items() if not self.seen.holds(i))
        return self.seen.plus(*(stored for entry in added for stored in units_of(entry)))

    def remembers(self, turn_id: str) -> bool:
        """Say whether this process knows that a turn is in the record, or was recently."""
        return turn_id in self.added or self.seen.holds(turn_id)

    def may_hold(self, turn_id: str) -> bool:
        """Say whether a turn may be in the record, as far as this process knows. Only a load is certain."""
        return turn_id in self.outcome_unknown or self.remembers(turn_id)

    async def load(self, operation: str) -> Snapshot:
        """Return the conversation as it is now. Raises `Corrupt` with the name of the `operation`."""
        before = {*self.added}
        record = await self.driver.load(self.key)
        last = self.seen
        try:
            snapshot = Snapshot.of(record, self.codec, last=last)
        except Corrupt:
            with located(self.driver.name, operation):
                raise
        self.seen = snapshot
        if snapshot.version != last.version and self._positions is not None:
            self._positions = object()
        if snapshot is not last:
            self._used(self)
        if self.added:
            # A turn that was acknowledged during this load may not be in it; any other has left the record.
            self.added = {
                i: stored for i, stored in self.added.items() if i not in before and not snapshot.holds(i)
            }
        self.current = not self.added
        self.added_size = 0 if self.current else self.added_size
        return snapshot

    async def load_copy(self, operation: str) -> Snapshot:
        """Return the conversation as it is now, in new objects that the caller may change."""
        record = await self.driver.load(self.key)
        with located(self.driver.name, operation):
            return Snapshot.of(record, self.codec)

    def note_outcome_unknown(self, turn_id: str) -> None:
        """Remember that a turn was perhaps stored."""
        _note(self.outcome_unknown, turn_id, MAX_OUTCOME_UNKNOWN)

    def note_acknowledged(self, turn_id: str) -> None:
        """Remember that the datastore has answered the append of a turn, so that a repeat need not wait."""
        _note(self.acknowledged, turn_id, MAX_ACKNOWLEDGED)

    async def append(self, stored: Entry, entry: bytes, *, ttl: float | None) -> Appended:
        """Add an entry; see `ledger.append`."""
        positions = self._positions
        appended = await ledger.append(self.driver, self.key, entry, ttl=ttl)
        seen = self.seen
        if (
            # The length says where the entry is only if none were removed since the append was sent.
            positions is not None
            and positions is self._positions
            and appended.length == len(seen.tail) + 1
            and not appended.created
        ):
            self.seen = seen.plus_entries((entry,), (stored,))
            self._used(self)
        else:
            self.current = False
        return appended

    def note_added(self, stored: Entry, size: int, length: int) -> None:
        """Remember an entry of `size` bytes that was acknowledged with this length of the tail."""
        self.added[stored.id] = stored
        if not self.current:
            self.added_size += size
            self._used(self)
        if len(self.added) > length:
            # A tail that is shorter than what this process added was folded elsewhere. The bound changes with
            # the tail, so this is no `Bounded`.
            del self.added[next(iter(self.added))]

    async def replace(
        self,
        snapshot: Snapshot,
        body: Body,
        *,
        drop: int,
        data: bytes = b"",
        version: str = "",
        attempts: int = races.ATTEMPTS,
    ) -> bool:
        """Store a body if the record still has the version that was read; `False` after a lost race.

        `data` is the sealed body, if it is known, and `version` the one to store it under, by default a new
        one. `attempts` is that of `ledger.replace`. Entries that leave must be confirmed before. Turns that
        leave a record with a transcript are put into pages first.
        """
        leaving = self.archive.leaving(snapshot, body)
        await self.archive.put(snapshot, leaving)
        data, version = data or self.codec.seal_body(body), version or new_version()
        expect = snapshot.version or ABSENT
        if body.lease is not None and body.lease is not snapshot.body.lease:
            # Set before the first await: a write that is cancelled may have taken the lease.
            self.leased = snapshot.after(version, body, 0)
        leased = self.leased
        if drop:
            self._positions = None
        try:
            change = ledger.Change(data, version=version, drop=drop)
            stored = await ledger.replace(self.driver, self.key, change, expect=expect, attempts=attempts)
        finally:
            if drop:
                self._positions = object()
        # Not a lease that was taken since this was sent, whose write came after it.
        if leased is not None and leased is self.leased:
            ended = not self.holds(body.lease) if stored else leased.version == version
            self.leased = None if ended else leased
        if not stored:
            self.current = False
            return False
        # A load since may have seen more entries.
        seen = self.seen if self.seen.version == snapshot.version else snapshot
        self.seen = seen = seen.after(version, body, drop)
        self.added = {i: one for i, one in self.added.items() if not seen.holds(i)}
        if leaving:
            await self.archive.left(snapshot, leaving)
        await self.archive.shortened(snapshot, body)
        return True

    async def edit(self, snapshot: Snapshot, body: Body, rewrite: Sequence[bytes]) -> bool:
        """Store a body, and entries in place of the oldest ones; `False` after a lost race.

        Entries that leave must be confirmed before, and their content must be in pages. Raises
        `OutcomeUnknown` if the write was perhaps done.
        """
        change = ledger.Change(self.codec.seal_body(body), rewrite=rewrite)
        self._positions = None
        try:
            stored = await ledger.replace(
                self.driver, self.key, change, expect=snapshot.version or ABSENT, repeatable=False
            )
        finally:
            # Even without an answer: it may be done.
            self._positions, self.current = object(), False
        if stored:
            tail = (*rewrite, *snapshot.tail[len(rewrite) :])
            opened = (open_entry(self.codec, entry) for entry in tail)
            self.seen = Snapshot(change.version, body).plus_entries(tail, opened)
            self.added = {i: one for i, one in self.added.items() if not self.seen.holds(i)}
            self.archive.settled()
        return stored

    def holds(self, lease: Lease | None) -> bool:
        """Say whether a lease is that of this process."""
        return self.leased is not None and lease == self.leased.body.lease

    async def release(self) -> None:
        """Release the lease if this process may hold it; a lease of another holder is left alone."""
        leased, self.leased = self.leased, None
        if leased is not None:
            found: Snapshot | None = leased

            async def released() -> bool | Lost:
                nonlocal found
                seen, found = found or await self.load("background"), None
                # Another process may have noted under a new version that the lease is overdue.
                is_over = seen.body.lease != leased.body.lease
                if is_over or await self.replace(seen, seen.body.unleased(), drop=0):
                    return True
                return Lost(seen.version)

            try:
                if await contend(released):
                    return
                problem: object = "each race was lost"
            except StorageError as error:
                problem = error
            logger.warning(
                "could not release a lease, it will expire: %s (conversation %s)", problem, self.log_name
            )


def _note(ids: dict[str, None], one: str, most: int) -> None:
    """Add an id as the newest, and forget the oldest beyond `most`.

    Not `Bounded`, whose ordered dictionary takes twice the memory, for each conversation.
    """
    ids.pop(one, None)
    ids[one] = None
    if len(ids) > most:
        del ids[next(iter(ids))]

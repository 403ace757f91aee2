"""The record of one conversation, as the processes that share it read and write it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from stm_backends.drivers.contract import ABSENT, KEEP, Driver, new_version
from stm_backends.errors import located
from stm_backends.memory.policy import Fold
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.view import View, render
from stm_backends.records import keys, operations
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.records.operations import Appended
from stm_backends.types import MemoryHealth, MemoryKey, ShortTermMemoryConfig, StoredTurn

UNSURE_IDS: Final = 256
"""How many turns with an unknown outcome are remembered."""


class SharedConversation:
    """Loads, appends and replaces, and knows what this process has seen and added.

    `seen` is what the last load found and `added` are the turns of this process since; neither is ever
    the ground of a write. `unsure` are the ids of turns that may have been stored, though their `add_turn`
    could not say so. `recovering` says that this process tries to leave `DEGRADED`. `clock` is in epoch
    seconds.
    """

    def __init__(
        self,
        driver: Driver,
        key: MemoryKey,
        codec: Codec,
        clock: Callable[[], float],
    ) -> None:
        self.driver = driver
        self.codec = codec
        self.clock = clock
        self.seen = Snapshot()
        self.added: dict[str, StoredTurn] = {}
        self.unsure: dict[str, None] = {}
        self.recovering = False
        self._key = keys.memory_key(key)

    @property
    def health(self) -> MemoryHealth:
        """How summarization is doing, as of the last load; `RECOVERING` only while this process tries."""
        return MemoryHealth.RECOVERING if self.recovering else self.seen.body.health

    def view(self, snapshot: Snapshot, config: ShortTermMemoryConfig) -> View:
        """Return what the model may see of a snapshot."""
        pending, recent = snapshot.split(config)
        body = snapshot.body
        health = MemoryHealth.RECOVERING if self.recovering else body.health
        return render(config, health=health, summary=body.summary, pending=pending, recent=recent)

    def known(self) -> Snapshot:
        """Return what this process knows without a load: the last snapshot and its own turns since."""
        return self.seen.plus(*self.added.values())

    def knows(self, turn_id: str) -> bool:
        """Say whether a turn is known to stand there, or to have stood there lately."""
        return turn_id in self.added or self.seen.holds(turn_id)

    def may_hold(self, turn_id: str) -> bool:
        """Say whether a turn may stand there, by what this process knows: a load says for sure."""
        return turn_id in self.unsure or self.knows(turn_id)

    async def load(self, operation: str) -> Snapshot:
        """Return the conversation as it is now. Raises `Corrupt`, saying which `operation` met it."""
        record = await self.driver.load(self._key)
        with located(self.driver.name, operation):
            snapshot = Snapshot.of(record, self.codec, last=self.seen)
        self.seen = snapshot
        # One that was acknowledged while this load was under way may not be in it.
        self.added = {i: stored for i, stored in self.added.items() if not snapshot.holds(i)}
        return snapshot

    async def load_anew(self, operation: str) -> Snapshot:
        """Return the conversation as it is now, in objects that are the caller's to keep."""
        record = await self.driver.load(self._key)
        with located(self.driver.name, operation):
            return Snapshot.of(record, self.codec)

    def note_unsure(self, turn_id: str) -> None:
        """Remember that nobody knows whether a turn was stored."""
        self.unsure[turn_id] = None
        if len(self.unsure) > UNSURE_IDS:
            del self.unsure[next(iter(self.unsure))]

    def append(self, entry: bytes, *, ttl: float | None) -> Awaitable[Appended]:
        """Add an entry; see `operations.append`."""
        return operations.append(self.driver, self._key, entry, ttl=ttl)

    def note_added(self, stored: StoredTurn, length: int) -> None:
        """Remember an own turn that was acknowledged with this length of the tail."""
        self.added[stored.id] = stored
        if len(self.added) > length:
            # A tail that is shorter than what we added was folded elsewhere.
            del self.added[next(iter(self.added))]

    async def replace(self, snapshot: Snapshot, body: Body, *, drop: int) -> str | None:
        """Store a body if the record is still the one that was read.

        Returns the version that the record has now; `None` is a lost race.
        """
        data, version, expect = self.codec.seal_body(body), new_version(), snapshot.version or ABSENT
        # Sent again under the same token it answers whether the body is there, and that is all we ask.
        stored = await operations.retried(
            lambda: self.driver.replace(self._key, data, version=version, expect=expect, drop=drop, ttl=KEEP)
        )
        return version if stored else None

    def note_fold(self, fold: Fold, body: Body, version: str) -> None:
        """Remember that an own fold was stored, as this version."""
        covered = {stored.id for stored in fold.turns}
        left = tuple(stored for stored in self.seen.turns if stored.id not in covered)
        # Kept open for the next load, but for what is a late copy to the new body, or was one to the old.
        opened = {
            entry: stored
            for entry, stored in self.seen.opened.items()
            if not isinstance(stored, str) and stored.id not in body.forgotten
        }
        self.seen = Snapshot(version, body, left, ids={stored.id for stored in left}, opened=opened)
        self.added = {i: stored for i, stored in self.added.items() if i not in covered}

    def note_body(self, body: Body) -> None:
        """Remember that an own body was stored."""
        self.seen = replace(self.seen, version=None, body=body)

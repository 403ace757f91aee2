"""The record of one conversation, as the processes that share it read and write it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from stm_backends.drivers.contract import ABSENT, KEEP, Driver, new_version
from stm_backends.errors import located
from stm_backends.memory.policy import Fold
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.view import View
from stm_backends.records import keys, operations
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.records.operations import Appended
from stm_backends.types import MemoryHealth, MemoryKey, ShortTermMemoryConfig, StoredTurn

MAX_OUTCOME_UNKNOWN: Final = 256
"""How many turns with an unknown outcome are remembered."""


class SharedConversation:
    """Loads, appends and replaces, and remembers what this process has seen and added.

    `seen` is the last snapshot and `added` has the turns of this process since; no write relies on either.
    `outcome_unknown` has the ids of turns whose `add_turn` ended with an unknown outcome. `recovering` says
    that this process is making an attempt to leave `DEGRADED`. `clock` is in epoch seconds.
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
        self.outcome_unknown: dict[str, None] = {}
        self.recovering = False
        self._key = keys.memory_key(key)

    @property
    def health(self) -> MemoryHealth:
        """The health as of the last load; `RECOVERING` only while this process makes an attempt."""
        return MemoryHealth.RECOVERING if self.recovering else self.seen.body.health

    def view(self, snapshot: Snapshot, config: ShortTermMemoryConfig) -> View:
        """Return what the model is shown of a snapshot by this process."""
        return snapshot.view(config, recovering=self.recovering)

    def known(self) -> Snapshot:
        """Return what this process knows without a load: the last snapshot and its own turns since."""
        return self.seen.plus(*self.added.values())

    def remembers(self, turn_id: str) -> bool:
        """Say whether this process knows that a turn is in the record, or was recently."""
        return turn_id in self.added or self.seen.holds(turn_id)

    def may_hold(self, turn_id: str) -> bool:
        """Say whether a turn may be in the record, as far as this process knows. Only a load is certain."""
        return turn_id in self.outcome_unknown or self.remembers(turn_id)

    async def load(self, operation: str) -> Snapshot:
        """Return the conversation as it is now. Raises `Corrupt` with the name of the `operation`."""
        record = await self.driver.load(self._key)
        with located(self.driver.name, operation):
            snapshot = Snapshot.of(record, self.codec, last=self.seen)
        self.seen = snapshot
        # A turn that was acknowledged during this load may not be in it.
        self.added = {i: stored for i, stored in self.added.items() if not snapshot.holds(i)}
        return snapshot

    async def load_copy(self, operation: str) -> Snapshot:
        """Return the conversation as it is now, in new objects that the caller may change."""
        record = await self.driver.load(self._key)
        with located(self.driver.name, operation):
            return Snapshot.of(record, self.codec)

    def note_outcome_unknown(self, turn_id: str) -> None:
        """Remember that a turn was perhaps stored."""
        self.outcome_unknown[turn_id] = None
        if len(self.outcome_unknown) > MAX_OUTCOME_UNKNOWN:
            del self.outcome_unknown[next(iter(self.outcome_unknown))]

    def append(self, entry: bytes, *, ttl: float | None) -> Awaitable[Appended]:
        """Add an entry; see `operations.append`."""
        return operations.append(self.driver, self._key, entry, ttl=ttl)

    def note_added(self, stored: StoredTurn, length: int) -> None:
        """Remember a turn of this process that was acknowledged with this length of the tail."""
        self.added[stored.id] = stored
        if len(self.added) > length:
            # A tail that is shorter than what this process added was folded elsewhere.
            del self.added[next(iter(self.added))]

    async def replace(self, snapshot: Snapshot, body: Body, *, drop: int) -> str | None:
        """Store a body if the record still has the version that was read.

        Returns the new version, or `None` after a lost race.
        """
        data, version, expect = self.codec.seal_body(body), new_version(), snapshot.version or ABSENT
        # A retry with the same version returns whether the body is stored.
        stored = await operations.retried(
            lambda: self.driver.replace(self._key, data, version=version, expect=expect, drop=drop, ttl=KEEP)
        )
        return version if stored else None

    def note_fold(self, fold: Fold, body: Body, version: str) -> None:
        """Remember that a fold of this process was stored under this version."""
        covered = {stored.id for stored in fold.turns}
        left = tuple(stored for stored in self.seen.turns if stored.id not in covered)
        # Kept for the next load, except for late copies under the new body or the old one.
        opened = {
            entry: stored
            for entry, stored in self.seen.opened.items()
            if not isinstance(stored, str) and stored.id not in body.forgotten
        }
        self.seen = Snapshot(version, body, left, ids={stored.id for stored in left}, opened=opened)
        self.added = {i: stored for i, stored in self.added.items() if i not in covered}

    def note_body(self, body: Body) -> None:
        """Remember that a body of this process was stored."""
        self.seen = replace(self.seen, version=None, body=body)

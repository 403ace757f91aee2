"""The driver that seals values on writing and opens them on reading, around any other driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_append, require_fits, require_replace
from stm_backends.drivers.contract import (
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Record,
    Traits,
    version_after,
)
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import OutcomeUnknown, SealMismatch, StorageError, located
from stm_backends.records import ledger
from stm_backends.records.keys import owner_of
from stm_backends.sealing.cipher import (
    ENTRY,
    OVERHEAD,
    Cipher,
    absent_body,
    absent_slot,
    body_slot,
    key_id_of,
    slot_and_value,
)
from stm_backends.sealing.keys import DataKey, OpensStore, Owner, Sealing
from stm_backends.sealing.marks import Marks
from stm_backends.sealing.stale import StaleKeys

_REMEMBERED: Final = 4_096
"""Number of derived keys that a process keeps. Deriving one takes about as long as sealing 10 kB."""


class Resealed(NamedTuple):
    """The result of resealing one record: the values that were sealed, the races lost, and the values left.

    `left` counts values that still need an older key: the record changed each time, or one write does not
    reach them. `exists` is true if the record exists.
    """

    values: int = 0
    left: int = 0
    lost_races: int = 0
    exists: bool = True


class SealedDriver(WrapperDriver):
    """The five operations of `inner` on sealed values.

    `clear_met` is called for each value that was found unsealed and accepted. The limits are those of `inner`
    less the overhead of sealing.
    """

    def __init__(self, inner: Driver, sealing: Sealing, *, clear_met: Callable[[], None]) -> None:
        super().__init__(inner)
        self._sealing = sealing
        self._clear_met = clear_met
        self.marks = Marks(self, sealing)
        self._ciphers: Bounded[tuple[Key, str], Cipher] = Bounded(_REMEMBERED)
        self._stale_keys = StaleKeys(inner, sealing.keys, self._seal, self._open_body)
        self._traits_within: Traits | None = None
        self._traits: Traits
        self.before_replace: Callable[[str], Awaitable[None]] | None = None
        """Called with the tenant of a record before a version of it is replaced; raises `KeyMismatch`."""

    @property
    def traits(self) -> Traits:
        """The facts about the driver within, with limits on the values before they are sealed."""
        traits = self.inner.traits
        if traits is not self._traits_within:
            self._traits_within = traits
            self._traits = replace(
                traits, max_entry=traits.max_entry - OVERHEAD, overhead=traits.overhead + OVERHEAD
            )
        return self._traits

    @property
    def accepts_clear(self) -> bool:
        """True if values in clear text are read, and sealed by `reseal`."""
        return self._sealing.accept_clear

    async def open(self) -> None:
        """Open the driver within, and before it the keys if they have a store."""
        keys = self._sealing.keys
        if not isinstance(keys, OpensStore):
            await self.inner.open()
            return
        try:
            with located(self.name, "open"):
                await keys.open()
            await self.inner.open()
        except BaseException:
            with suppress(StorageError):  # the error of opening says more
                await keys.close()
            raise

    async def close(self) -> None:
        """Close the driver within, and then the keys."""
        try:
            await self.inner.close()
        finally:
            if isinstance(self._sealing.keys, OpensStore):
                await self._sealing.keys.close()

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record with its values opened. Raises `Corrupt` if one of them cannot be opened."""
        record = await self.inner.load(key, last=last)
        self._stale_keys.note(key, 0 if record is None else record.length)
        if record is None:
            return None
        with located(self.name, "load"):
            body = await self._open_body(key, record)
            tail = tuple(await self._open_all(key, ENTRY, record.tail))
            return replace(record, body=body, tail=tail)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end, sealed; returns the new length of the tail.

        Reads the owner's data keys again if the record may be new: another process may have erased them.
        """
        require_append(entry, ttl, self.traits, backend=self.name)
        known, sealed = self._stale_keys.known(key), await self._seal(key, ENTRY, entry, "append")
        try:
            length = await self.inner.append(key, sealed, initial_version=initial_version, ttl=ttl)
        except (OutcomeUnknown, asyncio.CancelledError):
            self._stale_keys.doubt(key, sealed, entry)
            raise
        await self._stale_keys.appended(key, sealed, entry, length=length, known=known)
        return length

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body, sealed and bound to its version, if the record is what the caller expects.

        Without a version to expect, it reads the owner's data keys again, as an append to a new record does.
        """
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
        if isinstance(expect, str):
            await self._require_keys(key)
        sealed = await self._seal(key, body_slot(version), body, "replace")
        entries = [await self._seal(key, ENTRY, entry, "replace") for entry in rewrite]
        creates = not isinstance(expect, str)
        try:
            done = await self.inner.replace(
                key, sealed, version=version, expect=expect, drop=drop, rewrite=entries, ttl=ttl
            )
        except (OutcomeUnknown, asyncio.CancelledError):
            if creates:
                self._stale_keys.doubt(key, sealed, body)
            raise
        if done and creates:
            await self._stale_keys.settle(key, sealed, body, "replace")
        elif drop:
            self._stale_keys.note(key, 0)
        return done

    async def reseal(self, key: Key) -> Resealed:
        """Seal the values of a record with the primary key, unless all of them are. No value changes.

        Takes one load, and one conditional write that keeps the time to live. The version changes, so a
        concurrent `replace` of the record loses a race. Entries are confirmed before they are replaced, see
        `confirming.confirmed`. Seals accepted values in clear text, too.
        Reaches only the oldest `traits.max_drop` entries. Raises `Corrupt`, before anything is written, if a
        value cannot be opened.
        """
        lost_races, left = -1, 0

        async def decided(record: Record | None) -> tuple[ledger.Change | None, Resealed]:
            nonlocal lost_races, left
            lost_races += 1
            if record is None:
                return None, Resealed(lost_races=lost_races, exists=False)
            with located(self.name, "reseal"):
                stale = await self._stale(key, record)
                reached, left = [index for index in stale if index < self.traits.max_drop], len(stale)
                if not reached:
                    return None, Resealed(left=left, lost_races=lost_races)
                await self._require_keys(key)
                version = version_after(record.version)
                body = await self._body_sealed_again(key, record, version)
                rewrite = await self._entries_sealed_again(key, record, reached)
            change = ledger.Change(body, version=version, rewrite=rewrite)
            return change, Resealed(len(reached), left - len(reached), lost_races)

        async def unchanged(record: Record, version: str) -> bytes:
            return await self._body_sealed_again(key, record, version)

        resealed = await ledger.update(self.inner, key, decided, unchanged=unchanged)
        return Resealed(left=left, lost_races=lost_races + 1) if resealed is None else resealed

    async def rewrap(self, tenant: str, user: str) -> int:
        """Read the data keys of an owner again, and wrap those that an older key wraps; see `KeySource`."""
        with located(self.name, "reseal"):
            return await self._sealing.keys.rewrap(Owner(tenant, user))

    async def _require_keys(self, key: Key) -> None:
        """Check the mark of a tenant whose record is about to be sealed again.

        A process that only folds entries of others lists no user, and neither does `reseal`.
        """
        if self.before_replace is not None:
            await self.before_replace(_owner(key).tenant)

    async def _stale(self, key: Key, record: Record) -> list[int]:
        """Return the positions of values that are not sealed with the primary key; the body is at -1."""
        ids = [None if record.body is None else key_id_of(slot_and_value("", record.body)[1])]
        ids += [key_id_of(entry) for entry in record.tail]
        for key_id in {one for one in ids if one is not None}:
            # Asked for first: if the owner's keys were erased, none must be created.
            await self._sealing.keys.key(_owner(key), key_id)
        primary = (await self._sealing.keys.primary(_owner(key))).id
        return [
            index
            for index, key_id in enumerate(ids, -1)
            if key_id != primary and not (index < 0 and record.body is None)
        ]

    async def _body_sealed_again(self, key: Key, record: Record, version: str) -> bytes:
        """Return the body for a new version, including one that stands for none."""
        body = await self._open_body(key, record)
        if body is None:
            return absent_body(await self._seal(key, absent_slot(version), b"", "reseal"))
        return await self._seal(key, body_slot(version), body, "reseal")

    async def _entries_sealed_again(self, key: Key, record: Record, stale: Sequence[int]) -> list[bytes]:
        """Return the oldest entries up to the last of these positions."""
        entries = [*record.tail[: stale[-1] + 1]]
        for index in stale:
            if index >= 0:
                value = await self._open(key, ENTRY, entries[index])
                entries[index] = await self._seal(key, ENTRY, value, "reseal")
        return entries

    async def _open_body(self, key: Key, record: Record) -> bytes | None:
        if record.body is None:
            return None
        slot, sealed = slot_and_value(record.version, record.body)
        body = await self._open(key, slot, sealed)
        return None if slot == absent_slot(record.version) else body

    async def _seal(self, key: Key, slot: bytes, value: bytes, operation: str) -> bytes:
        require_fits("entry", len(value), self.traits.max_entry, backend=self.name, operation=operation)
        with located(self.name, operation):
            data_key = await self._sealing.keys.primary(_owner(key))
        return self._cipher(key, data_key).seal(slot, value)

    async def _open(self, key: Key, slot: bytes, value: bytes) -> bytes:
        return (await self._open_all(key, slot, (value,)))[0]

    async def _open_all(self, key: Key, slot: bytes, values: Sequence[bytes]) -> list[bytes]:
        """Open values of one record; each of their keys is asked for once."""
        ciphers: dict[str, Cipher] = {}
        opened: list[bytes] = []
        for value in values:
            key_id = key_id_of(value)
            if key_id is None:
                if not self._sealing.accept_clear:
                    raise SealMismatch(
                        "a value is not sealed, and this backend accepts only sealed values; "
                        "accept_clear=True accepts both"
                    )
                self._clear_met()
                opened.append(value)
                continue
            cipher = ciphers.get(key_id)
            if cipher is None:
                data_key = await self._sealing.keys.key(_owner(key), key_id)
                cipher = ciphers[key_id] = self._cipher(key, data_key)
            opened.append(cipher.open(slot, value))
        return opened

    def _cipher(self, key: Key, data_key: DataKey) -> Cipher:
        """Return the cipher of a record; it is derived again when the data key of an id has changed."""
        cipher = self._ciphers.get((key, data_key.id))
        if cipher is None or cipher.data_key != data_key.secret:
            cipher = self._ciphers[key, data_key.id] = Cipher(data_key.secret, data_key.id, key)
        return cipher


def _owner(key: Key) -> Owner:
    return _owner_of(key.scope)


@lru_cache(_REMEMBERED)
def _owner_of(scope: str) -> Owner:
    return Owner(*owner_of(scope))

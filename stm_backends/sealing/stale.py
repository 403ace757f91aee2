"""Writes under a data key that another process has erased: they are sealed again, with a key that exists.

A process keeps data keys for a while, so it may seal with one that is gone. An append does not read the
record, so its answer has to tell. If the append created the record, or if this process does not know that
the record had exactly one entry less before, an erasure may have preceded it. In these cases the
owner's keys are read again, after the write: an erasure that comes later finds the written data. A `replace`
of a version cannot follow an erasure, because no version outlives its record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.contract import Driver, Key, Record, version_after
from stm_backends.errors import KeyErased, OutcomeUnknown, StorageError, located
from stm_backends.records import ledger
from stm_backends.records.keys import owner_of
from stm_backends.sealing.cipher import ENTRY, absent_body, absent_slot, body_slot, key_id_of
from stm_backends.sealing.keys import KeySource, Owner, OwnersKeys

_REMEMBERED: Final = 4_096
"""Number of records whose length a process remembers."""

_IN_DOUBT: Final = 256
"""Number of records of which a process remembers values that were perhaps stored."""

_IN_DOUBT_OF_ONE: Final = 16
"""The number of values of one record that it remembers: the newest, since a caller may retry without end."""

Seal = Callable[[Key, bytes, bytes, str], Awaitable[bytes]]
"""Seals a value of a record for a slot; the last argument is the operation."""

Values = Mapping[bytes, bytes]
"""Sealed values of one record, and the values before sealing."""


class StaleKeys:
    """The recent writes of one process, and whether their data keys still exist."""

    def __init__(
        self,
        inner: Driver,
        source: KeySource,
        seal: Seal,
        open_body: Callable[[Key, Record], Awaitable[bytes | None]],
    ) -> None:
        self._inner = inner
        self._source = source
        self._owners = source if isinstance(source, OwnersKeys) else None
        self._seal = seal
        self._open_body = open_body
        self._lengths: Bounded[Key, int] = Bounded(_REMEMBERED)
        self._in_doubt: Bounded[Key, Bounded[bytes, bytes]] = Bounded(_IN_DOUBT)

    def known(self, key: Key) -> int | None:
        """Return the number of entries of a record, as far as this process knows; `None` if it does not."""
        return None if key in self._in_doubt else self._lengths.get(key)

    def note(self, key: Key, length: int) -> None:
        """Remember the number of entries of a record; one without entries may be another record next time."""
        if self._owners is None:
            return
        self._lengths.pop(key)
        if length > 0:
            self._lengths[key] = length

    def doubt(self, key: Key, sealed: bytes, value: bytes) -> None:
        """Remember a value that was perhaps stored, until the next write to the record settles it."""
        if self._owners is None:
            return
        values = self._in_doubt.get(key)
        if values is None:
            values = Bounded[bytes, bytes](_IN_DOUBT_OF_ONE)
        values[sealed] = value
        self._in_doubt[key] = values

    async def appended(
        self, key: Key, sealed: bytes, value: bytes, *, length: int, known: int | None
    ) -> None:
        """Settle an append that gave a record this length; `known` is what was known when it was sent."""
        follows = known is not None and length == known + 1
        self.note(key, max(length, self._lengths.get(key) or 0) if follows else length)
        if not follows:
            await self.settle(key, sealed, value, "append")

    async def settle(self, key: Key, sealed: bytes, value: bytes, operation: str) -> None:
        """Seal again the values that this process wrote to a record with a key that was erased since.

        Raises `OutcomeUnknown` if this cannot be checked, or done: the values may be unreadable.
        """
        if self._owners is None:
            return
        self.doubt(key, sealed, value)
        doubted = self._in_doubt.get(key)
        written = {} if doubted is None else dict(doubted.items())
        try:
            with located(self._inner.name, operation):
                owner = Owner(*owner_of(key.scope))
                await self._owners.reread(owner)
                erased = await self._erased(owner, written)
                if erased and not await self._sealed_again(key, erased, operation):
                    raise OutcomeUnknown("the record changed at each attempt to seal it again")
        except StorageError as error:
            raise OutcomeUnknown(
                "it was stored, but perhaps with a data key that was erased; nothing else was changed",
                backend=self._inner.name,
                operation=operation,
            ) from error
        if (doubted := self._in_doubt.get(key)) is not None:
            for settled in written:
                doubted.pop(settled)
            if not doubted:
                self._in_doubt.pop(key)

    async def _erased(self, owner: Owner, written: Values) -> Values:
        """Return those of the values whose data key is erased by now."""
        gone: set[str | None] = set()
        for key_id in {key_id_of(sealed) for sealed in written}:
            try:
                await self._source.key(owner, key_id or "")
            except KeyErased:
                gone.add(key_id)
        return {sealed: value for sealed, value in written.items() if key_id_of(sealed) in gone}

    async def _sealed_again(self, key: Key, erased: Values, operation: str) -> bool:
        """Replace values of a record by the same, sealed with a key that exists; `False` if that failed."""

        async def decided(record: Record | None) -> tuple[ledger.Change | None, bool]:
            if record is None:
                return None, True
            places = [index for index, entry in enumerate(record.tail) if entry in erased]
            if not places and record.body not in erased:
                return None, True
            reach = places[-1] + 1 if places else 0
            if reach > self._inner.traits.max_drop:
                return None, False
            version = version_after(record.version)
            rewrite = [
                await self._seal(key, ENTRY, erased[entry], operation) if entry in erased else entry
                for entry in record.tail[:reach]
            ]
            return ledger.Change(await unchanged(record, version), version=version, rewrite=rewrite), True

        async def unchanged(record: Record, version: str) -> bytes:
            return await self._body_again(key, record, erased, version, operation)

        return bool(await ledger.update(self._inner, key, decided, unchanged=unchanged))

    async def _body_again(
        self, key: Key, record: Record, erased: Values, version: str, operation: str
    ) -> bytes:
        """Return the body of a record, sealed for a new version."""
        known = record.body is not None and record.body in erased
        body = erased[record.body or b""] if known else await self._open_body(key, record)
        if body is None:
            return absent_body(await self._seal(key, absent_slot(version), b"", operation))
        return await self._seal(key, body_slot(version), body, operation)

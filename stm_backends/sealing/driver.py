"""The driver that seals what is written and opens what is read, around any other driver."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from stm_backends.drivers.checks import require_fits
from stm_backends.drivers.contract import AbsentType, AnyType, Driver, KeepType, Key, Record, Traits
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import Corrupt, located
from stm_backends.records.keys import owner_of
from stm_backends.sealing.cipher import ENTRY, OVERHEAD, Cipher, body_slot, key_id_of
from stm_backends.sealing.keys import DataKey, Owner, Sealing

_REMEMBERED: Final = 4_096
"""How many derived keys a process keeps. Deriving one takes about as long as sealing 10 kB."""


class SealedDriver(WrapperDriver):
    """The five operations of `inner` on sealed values.

    `clear_met` is called for each value that was found unsealed and accepted. The limits are those of `inner`
    less what sealing adds to a value.
    """

    def __init__(self, inner: Driver, sealing: Sealing, *, clear_met: Callable[[], None]) -> None:
        super().__init__(inner)
        self._sealing = sealing
        self._clear_met = clear_met
        self._ciphers: OrderedDict[tuple[Key, str], Cipher] = OrderedDict()
        self._traits_within: Traits | None = None
        self._traits: Traits

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

    async def load(self, key: Key) -> Record | None:
        """Return the record with its values opened. Raises `Corrupt` if one of them cannot be."""
        record = await self.inner.load(key)
        if record is None:
            return None
        with located(self.name, "load"):
            version, body, tail = record.version, record.body, record.tail
            opened = None if body is None else await self._open(key, body_slot(version), body)
            return Record(version, opened, tuple(await self._open_all(key, ENTRY, tail)))

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end, sealed; returns the new length of the tail."""
        sealed = await self._seal(key, ENTRY, entry, "append")
        return await self.inner.append(key, sealed, initial_version=initial_version, ttl=ttl)

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body, sealed and bound to its version, if the record is what the caller expects."""
        sealed = await self._seal(key, body_slot(version), body, "replace")
        return await self.inner.replace(key, sealed, version=version, expect=expect, drop=drop, ttl=ttl)

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
                    raise Corrupt("a value is not sealed, and this backend accepts sealed values only")
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
            if len(self._ciphers) > _REMEMBERED:
                self._ciphers.popitem(last=False)
        return cipher


def _owner(key: Key) -> Owner:
    return _owner_of(key.scope)


@lru_cache(_REMEMBERED)
def _owner_of(scope: str) -> Owner:
    return Owner(*owner_of(scope))

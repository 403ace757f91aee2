"""Broken sealing: drivers that protect less than they should, or lose data when they seal it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from stm_backends.drivers.contract import ANY, Driver, Key, Record
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.sealing.cipher import Cipher, key_id_of
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import DataKey, Sealing


class _OtherCipher(SealedDriver):
    """A driver with another cipher."""

    cipher: ClassVar[type[Cipher]]

    def _cipher(self, key: Key, data_key: DataKey) -> Cipher:
        return self.cipher(data_key.secret, data_key.id, key)


class _WithoutSlot(Cipher):
    def seal(self, slot: bytes, value: bytes) -> bytes:
        del slot
        return super().seal(b"", value)

    def open(self, slot: bytes, sealed: bytes) -> bytes:
        del slot
        return super().open(b"", sealed)


class ForgetsTheAssociatedData(_OtherCipher):
    """Binds a value to nothing but the key of its record: entries, bodies and versions may be swapped."""

    cipher = _WithoutSlot


class _WithoutPlace(Cipher):
    def __init__(self, data_key: bytes, key_id: str, key: Key) -> None:
        super().__init__(data_key, key_id, key._replace(scope="", name=""))


class OneKeyForAllRecords(_OtherCipher):
    """Derives the same key for all records: values of one open in another."""

    cipher = _WithoutPlace


class _OneNonce(Cipher):
    def seal(self, slot: bytes, value: bytes) -> bytes:
        nonce = bytes(12)
        return self._head + nonce + self._aead.encrypt(nonce, value, self._bound + slot)


class ReusesItsNonce(_OtherCipher):
    """Seals everything with the same nonce."""

    cipher = _OneNonce


class _WithoutCommitment(Cipher):
    def open(self, slot: bytes, sealed: bytes) -> bytes:
        return super().open(slot, self._head + sealed[len(self._head) :])


class IgnoresTheCommitment(_OtherCipher):
    """Does not compare the commitment, so that a value may be made that opens under two keys."""

    cipher = _WithoutCommitment


class AcceptsClearText(SealedDriver):
    """Returns what is not sealed as it is."""

    async def _open_all(self, key: Key, slot: bytes, values: Sequence[bytes]) -> list[bytes]:
        opened: list[bytes] = []
        for value in values:
            clear = key_id_of(value) is None
            opened += [value] if clear else await super()._open_all(key, slot, (value,))
        return opened


class _OtherWrite(SealedDriver):
    """A driver that changes the write of a reseal."""

    write: ClassVar[type[WrapperDriver]]

    def __init__(self, inner: Driver, sealing: Sealing, *, clear_met: Callable[[], None]) -> None:
        super().__init__(self.write(inner), sealing, clear_met=clear_met)


class _WithoutVersion(WrapperDriver):
    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        done = await self.inner.replace(key, body, **options)
        if done or not options.get("rewrite"):
            return done
        found = await self.inner.load(key)
        options["expect"] = ANY if found is None else found.version
        options["rewrite"] = options["rewrite"][: len(found.tail)] if found else ()
        return await self.inner.replace(key, body, **options)


class ResealsWithoutTheVersion(_OtherWrite):
    """Writes again after a lost race, over what another process has stored since."""

    write = _WithoutVersion


class _DropsOne(WrapperDriver):
    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        if options.get("rewrite"):
            options |= {"drop": len(options["rewrite"]), "rewrite": ()}
        return await self.inner.replace(key, body, **options)


class ResealDropsEntries(_OtherWrite):
    """Drops the entries that it should rewrite."""

    write = _DropsOne


class _WithoutTtl(WrapperDriver):
    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        if options.get("rewrite"):
            options["ttl"] = None
        return await self.inner.replace(key, body, **options)


class ResealMakesPermanent(_OtherWrite):
    """Forgets the time to live of what it reseals."""

    write = _WithoutTtl


class ResealInventsABody(SealedDriver):
    """Gives a record without a body an empty one."""

    async def _open_body(self, key: Key, record: Record) -> bytes | None:
        body = await super()._open_body(key, record)
        return b"" if body is None and record.body is not None else body

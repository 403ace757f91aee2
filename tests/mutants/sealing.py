"""Broken sealing: drivers that protect less than they should, or lose data when they seal it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from stm_backends.drivers.contract import ANY, Driver, Key, Record
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.sealing.cipher import Cipher, check_of, key_id_of
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import DataKey, Owner, Sealing
from stm_backends.sealing.marks import Marks
from stm_backends.sealing.stale import StaleKeys


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
        for one in values:
            opened += [one] if key_id_of(one) is None else await super()._open_all(key, slot, [one])
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


class _OtherStaleKeys(SealedDriver):
    """A driver that looks for stale keys in another way."""

    stale: ClassVar[type[StaleKeys]]

    def __init__(self, inner: Driver, sealing: Sealing, *, clear_met: Callable[[], None]) -> None:
        super().__init__(inner, sealing, clear_met=clear_met)
        self._stale_keys = self.stale(inner, sealing.keys, self._seal, self._open_body)


class _NeverStale(StaleKeys):
    async def settle(self, key: Key, sealed: bytes, value: bytes, operation: str) -> None:
        pass


class SealsWithAnErasedKey(_OtherStaleKeys):
    """Keeps to the key that it remembers, though another process has erased it."""

    stale = _NeverStale


class _StaleIfCreated(StaleKeys):
    async def appended(
        self, key: Key, sealed: bytes, value: bytes, *, length: int, known: int | None
    ) -> None:
        await super().appended(key, sealed, value, length=length, known=known if length == 1 else length - 1)


class LooksAtCreatedRecordsOnly(_OtherStaleKeys):
    """Takes a record with entries for one that this process has seen before."""

    stale = _StaleIfCreated


class _NeverInDoubt(StaleKeys):
    async def settle(self, key: Key, sealed: bytes, value: bytes, operation: str) -> None:
        self._in_doubt.clear()
        await super().settle(key, sealed, value, operation)


class ForgetsWhatMayBeStored(_OtherStaleKeys):
    """Seals only the last attempt again, and not those whose answers were lost."""

    stale = _NeverInDoubt


class _OtherMarks(SealedDriver):
    """A driver with other marks."""

    marks_kind: ClassVar[type[Marks]]

    def __init__(self, inner: Driver, sealing: Sealing, *, clear_met: Callable[[], None]) -> None:
        super().__init__(inner, sealing, clear_met=clear_met)
        self.marks = self.marks_kind(self, sealing)


class _Unmarked(Marks):
    async def meet(self, tenant: str) -> None:
        pass


class MarksNoTenant(_OtherMarks):
    """Neither leaves a mark nor looks for one."""

    marks_kind = _Unmarked


class _AnyBytes(Marks):
    async def _held(self, owner: Owner, checks: Mapping[str, str]) -> Mapping[str, str]:
        primary = await self._sealing.keys.primary(owner)
        return {**checks, primary.id: check_of(primary.secret)}


class OverwritesTheMark(_OtherMarks):
    """Adds its own key to a mark without comparing those that are there."""

    marks_kind = _AnyBytes


class _NotTheFirst(Marks):
    async def _first_is_sealed(self, tenant: str) -> bool:
        del tenant
        return True


class MarksWithoutLooking(_OtherMarks):
    """Marks a tenant of an older version without opening what is stored."""

    marks_kind = _NotTheFirst


class _AnyKey(Marks):
    async def key_of(self, tenant: str, user: str, known: str | None) -> str | None:
        del known
        return await super().key_of(tenant, user, None)


class MakesAKeyForALostOne(_OtherMarks):
    """Makes a data key for a user whose key is not in the store of keys."""

    marks_kind = _AnyKey

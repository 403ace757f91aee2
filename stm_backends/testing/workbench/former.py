"""A server that another one has replaced, but that still answers loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stm_backends.drivers.contract import ABSENT, AbsentType, AnyType, Driver, KeepType, Key, Record, Traits
from stm_backends.drivers.wrapper import WrapperDriver


async def fail_over(driver: Driver, key: Key, lost: int) -> Record:
    """Lose the newest `lost` entries of a record with their server, and return the record as it was there.

    The server that takes over has the other entries under the same version.
    """
    record = await driver.load(key)
    assert record is not None, "the record to lose entries must exist"
    await driver.delete(key)
    if record.body is not None:
        await driver.replace(key, record.body, version=record.version, expect=ABSENT, ttl=None)
    for entry in record.tail[: len(record.tail) - lost]:
        await driver.append(key, entry, initial_version=record.version, ttl=None)
    return record


class FormerServer(WrapperDriver):
    """Shows one record as a former server had it, until this driver replaces it in `inner`."""

    def __init__(self, inner: Driver, key: Key, record: Record) -> None:
        super().__init__(inner)
        self._key = key
        self._record: Record | None = record

    @property
    def traits(self) -> Traits:
        """The traits of the inner driver; reads from a former server are not confirmed."""
        return replace(self.inner.traits, shows_unconfirmed=True)

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record of the server that answers."""
        if self._record and key == self._key:
            return self._record.newest(last)
        return await super().load(key, last=last)

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
        """Store a body and its version on the server that took over, which answers loads from now on."""
        done = await super().replace(
            key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
        )
        if done and key == self._key:
            self._record = None
        return done

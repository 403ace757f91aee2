"""Checks before writes that the keys of a backend are those of the stored data; see `records.seals`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stm_backends.drivers.contract import Key
from stm_backends.errors import Corrupt, KeyErased, KeyMismatch, Unavailable, located
from stm_backends.races import Lost, contend
from stm_backends.records import keys, operations
from stm_backends.records.seals import load_mark, store_mark
from stm_backends.sealing.cipher import check_of
from stm_backends.sealing.keys import Owner, OwnersKeys, Sealing

if TYPE_CHECKING:
    from stm_backends.sealing.driver import SealedDriver


class Marks:
    """The marks of tenants, as a process with keys reads and writes them."""

    def __init__(self, driver: SealedDriver, sealing: Sealing) -> None:
        self._driver = driver
        self._sealing = sealing

    async def meet(self, tenant: str) -> None:
        """Make sure that this process has a key that wrote for a tenant, and mark the tenant as sealed.

        Takes one load in steady state. A tenant without a mark is judged by its first record, and not marked
        while that is in clear text or `accept_clear` is set: other processes may still write clear text.
        Raises `KeyMismatch`, before anything is written.
        """
        inner = self._driver.inner

        async def attempt() -> bool | Lost:
            mark = await load_mark(inner, tenant)
            sealed = bool(mark.checks) or await self._first_is_sealed(tenant)
            owner = Owner(tenant, "")
            left = await self._held(owner, mark.checks)
            primary = await self._sealing.keys.primary(owner)
            checks = {**left, primary.id: check_of(primary.secret)}
            if checks == mark.checks or not sealed or (self._sealing.accept_clear and not mark.checks):
                return True
            return await store_mark(inner, tenant, mark, checks) or Lost(mark.expect)

        with located(self._driver.name, "load"):
            if not await contend(attempt):
                raise Unavailable("the mark of a sealed tenant kept changing", backend=self._driver.name)

    async def require(self, tenant: str) -> None:
        """Raise `KeyMismatch` if this process has no key that wrote for a tenant. Writes nothing."""
        with located(self._driver.name, "load"):
            mark = await load_mark(self._driver.inner, tenant)
            if mark.checks:
                await self._held(Owner(tenant, ""), mark.checks)
            else:
                await self._first_is_sealed(tenant)

    async def _held(self, owner: Owner, checks: Mapping[str, str]) -> Mapping[str, str]:
        """Return the checks of a mark without those of erased keys. Raises `KeyMismatch`."""
        source, left, held = self._sealing.keys, dict(checks), False
        for key_id, check in checks.items():
            try:
                found = check_of((await source.key(owner, key_id)).secret)
            except KeyErased:
                del left[key_id]
                continue
            except KeyMismatch:
                continue
            if found != check:
                raise KeyMismatch(
                    f"the data of this tenant is sealed with other bytes of the key {key_id!r}; nothing was "
                    "changed; give the process the key that wrote it"
                )
            held = True
        if left and not held:
            raise KeyMismatch(
                f"the data of this tenant is sealed with the key {next(iter(left))!r}, which this process "
                "does not have; nothing was changed; give it the keys, or the wrapping key and the store of "
                "keys, that sealed it"
            )
        return left

    async def _first_is_sealed(self, tenant: str) -> bool:
        """Return whether the first record of a tenant without a mark is sealed; `True` if there is none.

        Raises `KeyMismatch` if this process lacks its key.
        """
        for scope in ([keys.directory_scope(tenant)] if tenant else []) + [keys.shared_scope(tenant)]:
            async for name in operations.names(self._driver.inner, scope):
                record = await self._driver.inner.load(Key(scope, name))
                if record is None:
                    continue
                if not operations.is_sealed(record):
                    return False
                try:
                    await self._driver.load(Key(scope, name))
                except KeyMismatch:
                    raise
                except Corrupt:
                    pass  # its key was erased, or it is damaged: it says nothing of the keys of this process
                return True
        return True

    async def key_of(self, tenant: str, user: str, known: str | None) -> str | None:
        """Return the id of an existing key of a user; see `Seals`."""
        source, owner = self._sealing.keys, Owner(tenant, user)
        if not isinstance(source, OwnersKeys):
            return None
        with located(self._driver.name, "load"):
            try:
                if known is not None:
                    await source.key(owner, known)
                    return known
            except KeyErased:
                pass
            # Another process may have erased the user, and with it the key that this one remembers.
            await source.reread(owner)
            return (await source.primary(owner)).id

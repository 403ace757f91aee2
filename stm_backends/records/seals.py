"""The mark of a tenant whose data is sealed, and the checks of a backend before it writes for the tenant.

A mark is one record for each tenant, and one for data without a tenant. It is in clear text, so that a
process without keys can read it. Its `keys` map the ids of keys to checks, which say whether two processes
have the same bytes for an id, and reveal nothing of the bytes. A process looks at the mark before its first
write for a tenant, and about once a minute after that. So a process in clear text that looked before the
first sealed write may write clear text for two minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol, cast

from stm_backends.drivers.contract import ABSENT, AbsentType, Driver
from stm_backends.errors import Corrupt, SealMismatch
from stm_backends.records import keys, ledger
from stm_backends.records.codec import Codec

_CODEC: Final = Codec()


class Mark(NamedTuple):
    """The condition to replace a mark, and the checks of keys by their ids: none if there is no mark."""

    expect: str | AbsentType
    checks: Mapping[str, str]


class Seals(Protocol):
    """Ensures that the writes of a backend can be read with the keys that wrote the rest."""

    async def meet(self, tenant: str) -> None:
        """Raise `SealMismatch` or `KeyMismatch` if this backend may not write for a tenant.

        `""` stands for data that names no tenant.
        """
        ...

    async def require(self, tenant: str) -> None:
        """Raise `KeyMismatch` if this backend has keys, and none that wrote for a tenant. Writes nothing."""
        ...

    async def key_of(self, tenant: str, user: str, known: str | None) -> str | None:
        """Return the id of an existing key of a user; `known` is the one that the user's entry names.

        A key is created only if `known` is `None` or was erased. Raises `KeyMismatch` if it is missing.
        Returns `None` if users have no separate keys.
        """
        ...


class Clear:
    """A backend without sealing: it writes nothing for a tenant whose data is sealed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def meet(self, tenant: str) -> None:
        """Raise `SealMismatch` if the tenant is marked as sealed."""
        if (await load_mark(self._driver, tenant)).checks:
            raise SealMismatch(
                "the data of this tenant is sealed, and this backend has no sealing; nothing was written; "
                "open the backend with the sealing that wrote it",
                backend=self._driver.name,
            )

    async def require(self, tenant: str) -> None:
        """Do nothing: this backend has no keys."""
        del tenant

    async def key_of(self, tenant: str, user: str, known: str | None) -> str | None:
        """Return the known id."""
        del tenant, user
        return known


async def load_mark(driver: Driver, tenant: str) -> Mark:
    """Return the mark of a tenant or, with `""`, of data without a tenant. The driver must not seal."""
    record = await driver.load(keys.mark_key(tenant))
    if record is None:
        return Mark(ABSENT, {})
    checks: object = _CODEC.open("seal", record.body or b"").get("keys")
    if not isinstance(checks, dict) or not checks:
        raise Corrupt("the mark of a sealed tenant cannot be read", backend=driver.name, operation="load")
    return Mark(record.version, {**cast("dict[str, str]", checks)})


async def store_mark(driver: Driver, tenant: str, before: Mark, checks: Mapping[str, str]) -> bool:
    """Store the mark of a tenant; `False` if another process has changed it."""
    change = ledger.Change(_CODEC.seal("seal", {"keys": dict(checks)}), ttl=None)
    return await ledger.replace(driver, keys.mark_key(tenant), change, expect=before.expect)

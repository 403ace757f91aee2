"""Giving stored records a time to live.

The body is stored again, unchanged, under a new version and with the time to live; the entries stay. The
write names the version that was read, so nothing is lost. An entry that is added afterwards resets the time
to live to the setting of the memory or log that adds it. A page of a transcript that is complete gets no more
entries, so it keeps the time to live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from stm_backends.admin.describing import catalogue_on
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.checks import require_seconds
from stm_backends.drivers.contract import Driver, Key, Record, version_after
from stm_backends.errors import ConfigurationError, Corrupt, TooLarge
from stm_backends.history import items
from stm_backends.records import keys, ledger, operations
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.pages import Pages

Kind: TypeAlias = Literal["memory", "blob", "page"] | keys.LogKind
"""Kinds that get a time to live. Paused runs expire by themselves, and parts follow their record. The
vertices of a graph and the records of its index belong together, so none of them expires."""

EXPIRING: Final[tuple[Kind, ...]] = ("memory", *keys.LOG_KINDS, "blob", "page")
"""Pages come after the conversations that they belong to, so none expires earlier."""

_FIELDS: Final[Mapping[Kind, str]] = {"memory": "conversations", "blob": "states", "page": "pages"}


@dataclass(slots=True)
class Expiring:
    """Counts of the records that got the time to live, by kind; updated as the work goes on.

    `changed` counts records that other processes replaced at each attempt, and `failed` those that cannot be
    read or have no room for a body. Both are left unchanged.
    """

    conversations: int = 0
    logs: int = 0
    states: int = 0
    pages: int = 0
    changed: int = 0
    failed: int = 0

    @property
    def looked_at(self) -> int:
        """Number of records counted so far."""
        return sum(getattr(self, name) for name in self.__slots__)


class Expire:
    """Gives the records of tenants and users a time to live of `ttl` seconds from now.

    Call `tenant` or `user`. Running it again restarts the time to live of everything. `on_step` is called
    after each record.
    """

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        ttl: float,
        on_step: Callable[[Expiring], None] = lambda expiring: None,
    ) -> None:
        require_seconds("ttl", ttl)
        if ttl < driver.traits.min_ttl:
            raise ConfigurationError(f"ttl is at least {driver.traits.min_ttl:g} s on this backend")
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._catalogue = catalogue_on(driver, codec, directory)
        self._ttl = ttl
        self._on_step = on_step
        self.expiring = Expiring()

    async def tenant(self, tenant: str) -> None:
        """Give the records of all users of a tenant, and the tenant's own states, the time to live."""
        async for user in self._directory.users(tenant):
            await self.user(tenant, user)
        await self._each("blob", keys.shared_scope(tenant))

    async def user(self, tenant: str, user: str) -> None:
        """Give the conversations, with transcripts and cards, logs and states of a user the time to live."""
        for kind in EXPIRING:
            await self._each(kind, keys.scope(tenant, user, kind))
        cards = keys.scope(tenant, user, "card")
        await operations.each(operations.names(self._driver, cards), partial(self._expire_card, cards))
        # Its records never expire.
        await WordIndex(self._driver, self._codec, self._directory, (tenant, user)).erase()

    async def _each(self, kind: Kind, scope: str) -> None:
        async def one(name: str) -> None:
            outcome = await self._expire(kind, Key(scope, name))
            if outcome:
                setattr(self.expiring, outcome, getattr(self.expiring, outcome) + 1)
            self._on_step(self.expiring)

        await operations.each(operations.names(self._driver, scope), one)

    async def _expire_card(self, scope: str, name: str) -> None:
        """Give a card the time to live. It counts with its conversation, even if it cannot be read."""
        with suppress(Corrupt, TooLarge):
            await self._catalogue.expire(Key(scope, name), self._ttl)

    async def _expire(self, kind: Kind, key: Key) -> str:
        """Give one record the time to live; returns the field of `Expiring` that counts it, or nothing."""

        async def decided(record: Record | None) -> tuple[ledger.Change | None, str]:
            if record is None:
                return None, ""
            if operations.is_sealed(record):
                # Without the keys: a sealed body cannot be opened under another version.
                return None, "failed"
            body, version = record.body or self._body(kind, record), version_after(record.version)
            return ledger.Change(body, version=version, ttl=self._ttl), _FIELDS.get(kind, "logs")

        # The user stays listed until the record expires.
        listing = self._directory.listed(keys.owner_of(key.scope), self._ttl)
        try:
            outcome = await ledger.update(self._driver, key, decided, listing=listing)
        except (Corrupt, TooLarge):
            return "failed"
        return "changed" if outcome is None else outcome

    def _body(self, kind: Kind, record: Record) -> bytes:
        """Return the body of a record that has entries only."""
        if kind == "memory":
            return self._codec.seal_body(Body())
        if kind == "page":
            return Pages(self._driver, self._codec).nothing()
        return items.seal_folded(items.folded_in(record, self._codec), self._codec)

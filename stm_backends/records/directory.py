"""Which users a tenant has, so that a tenant's conversations can be listed and erased.

Each user of a tenant has a record without a time to live, in a scope of the tenant. It is written before the
user's first conversation and, because an erasure may come in between, again after a conversation was
created: every stored record belongs to a listed user.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final

from stm_backends.drivers.contract import ABSENT, Driver, new_version
from stm_backends.drivers.scopes import next_scope_of
from stm_backends.errors import ConfigurationError, OutcomeUnknown, StorageError
from stm_backends.records import keys, operations
from stm_backends.records.codec import Codec

logger = logging.getLogger("stm_backends")

REMEMBERED_USERS: Final = 10_000
REMEMBERED_FOR_S: Final = 60.0
"""How many users a process remembers as listed, and for how many seconds."""


class Directory:
    """The users of every tenant on one backend."""

    def __init__(self, driver: Driver, codec: Codec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._codec = codec
        self._clock = clock
        self._noted: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def note(self, tenant: str, user: str, *, fresh: bool = False) -> None:
        """List a user of a tenant; without a round trip if this process did so within the last minute.

        `fresh=True` always takes a round trip.
        """
        owner = (tenant, user)
        if not fresh and self.knows(owner):
            return
        now = self._clock()
        key, body, version = keys.directory_key(*owner), self._codec.seal("user", {}), new_version()

        async def ensure() -> None:
            # A read: conversations of one user that begin at once do not wait for each other's writes.
            if not (fresh and await self._driver.load(key)):
                await self._driver.replace(key, body, version=version, expect=ABSENT, ttl=None)

        try:
            await operations.retried(ensure)
        except BaseException:
            # An earlier listing counts until then, so that no write of the user waits for this one.
            self.doubt(owner)
            raise
        self._noted[owner] = now
        self._noted.move_to_end(owner)
        if len(self._noted) > REMEMBERED_USERS:
            self._noted.popitem(last=False)

    def knows(self, owner: tuple[str, str]) -> bool:
        """Say whether this process listed a user within the last minute."""
        return self._clock() - self._noted.get(owner, -math.inf) < REMEMBERED_FOR_S

    def doubt(self, owner: tuple[str, str]) -> None:
        """Ask the datastore again before the next write for a user."""
        self._noted.pop(owner, None)

    def listed(self, owner: tuple[str, str] | None) -> Listing:
        """Keep a user listed around a write that may create a record of theirs; `None` is no user.

        The user is listed before the write, so that an erasure of the tenant finds the record even if this
        process dies after writing it. If `created` is set, the user is listed once more, because an erasure
        may have come in between; a write that creates nothing needs no more, because the erasure finds the
        record itself. After a write whose outcome is unknown, the next write asks the datastore again.
        """
        return Listing(self, owner)

    async def note_creation(self, owner: tuple[str, str]) -> None:
        """List a user again after a record of theirs was created. Only logs a failure: the write was done."""
        try:
            await self.note(*owner, fresh=True)
        except StorageError as error:
            logger.warning("could not refresh the tenant directory after creating a record: %s", error)

    async def users(self, tenant: str) -> AsyncIterator[str]:
        """Yield the users of a tenant."""
        async for name in operations.names(self._driver, keys.directory_scope(tenant)):
            yield keys.unname(name)

    async def tenants(self) -> AsyncIterator[str]:
        """Yield the tenants with a listed user. Raises `ConfigurationError` if the driver cannot find them.

        Takes two operations for each tenant, regardless of how many users and conversations it has.
        """
        next_scope = next_scope_of(self._driver)
        if next_scope is None:
            raise ConfigurationError(f"{self._driver.name} cannot list its tenants; name those that you mean")
        after = ""
        while (scope := await next_scope(after)) is not None:
            tenant, _, _ = scope.partition(":")
            # Every scope of the tenant sorts before this text, because ";" follows ":".
            after = f"{tenant};"
            async for _ in operations.names(self._driver, f"{tenant}::users"):
                yield keys.unname(tenant)
                break

    async def forget(self, tenant: str, user: str) -> bool:
        """Remove a user from the list; returns whether the user was listed."""
        try:
            return await self._driver.delete(keys.directory_key(tenant, user))
        finally:
            # Last, so that a concurrent note is not remembered either.
            self.doubt((tenant, user))


class Listing:
    """A user who is listed while something is written for them; see `Directory.listed`.

    Set `created` once the write may have created a record.
    """

    __slots__ = ("_directory", "_owner", "created")

    def __init__(self, directory: Directory, owner: tuple[str, str] | None) -> None:
        self._directory = directory
        self._owner = owner
        self.created = False

    async def __aenter__(self) -> Listing:
        if self._owner is not None and not self._directory.knows(self._owner):
            await self._directory.note(*self._owner)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner is None:
            return
        if isinstance(error, (OutcomeUnknown, asyncio.CancelledError)):
            self._directory.doubt(self._owner)
        elif error is None and self.created:
            await self._directory.note_creation(self._owner)

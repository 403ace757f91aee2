"""Which users a tenant has, so that a tenant's conversations can be listed and erased.

A tenant's users have a record each, without a time to live, in a scope of the tenant's own. It is
written before a user's first conversation and, because an erasure may come in between, again after one
was born: whatever is stored belongs to somebody who is listed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Final

from stm_backends import keys, records
from stm_backends.codec import Codec
from stm_backends.driver import ABSENT, Driver, new_version

REMEMBERED_USERS: Final = 10_000
REMEMBERED_FOR_S: Final = 60.0
"""How many users, and for how long, a process takes for listed without asking."""


class Directory:
    """The users of every tenant on one backend."""

    def __init__(self, driver: Driver, codec: Codec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._codec = codec
        self._clock = clock
        self._noted: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def note(self, tenant: str, user: str, *, fresh: bool = False) -> None:
        """Make sure that a tenant's user is listed; costs nothing for one noted within a minute.

        `fresh=True` asks the datastore whatever this process remembers.
        """
        owner = (tenant, user)
        now = self._clock()
        if not fresh and now - self._noted.get(owner, -REMEMBERED_FOR_S) < REMEMBERED_FOR_S:
            return
        key, body, version = keys.directory_key(*owner), self._codec.seal("user", {}), new_version()
        await records.resent(
            lambda: self._driver.replace(key, body, version=version, expect=ABSENT, ttl=None)
        )
        self._noted[owner] = now
        self._noted.move_to_end(owner)
        if len(self._noted) > REMEMBERED_USERS:
            self._noted.popitem(last=False)

    async def users(self, tenant: str) -> AsyncIterator[str]:
        """Yield the users of a tenant."""
        async for name in records.names(self._driver, keys.directory_scope(tenant)):
            yield keys.unname(name)

    async def forget(self, tenant: str, user: str) -> bool:
        """Take a user off the list; returns whether they stood there."""
        self._noted.pop((tenant, user), None)
        return await self._driver.delete(keys.directory_key(tenant, user))

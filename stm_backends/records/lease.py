"""One summarizer at a time: a lease that expires when its holder dies.

A lease only saves money. Two holders at once, for example after a long pause of one of them, cost an
unnecessary summarizer call; `Driver.replace` ensures that no summary is lost or applied twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from stm_backends.drivers.contract import ABSENT, Driver, Key, new_version
from stm_backends.errors import StorageError

T = TypeVar("T")

logger = logging.getLogger("stm_backends")


class Lease:
    """The exclusive right to summarize one conversation, for at most `ttl` seconds."""

    def __init__(self, driver: Driver, key: Key, *, ttl: float, content: bytes) -> None:
        self._driver = driver
        self._key = key
        self._ttl = max(ttl, driver.traits.min_ttl)
        self._content = content
        self._token: str | None = None

    async def acquire(self) -> bool:
        """Take the lease; `False` if another process holds it."""
        # Set before the first await: a cancelled acquire, or one with an unknown outcome, may have taken
        # effect.
        self._token = token = new_version()
        acquired = await self._driver.replace(
            self._key, self._content, version=token, expect=ABSENT, ttl=self._ttl
        )
        if not acquired:
            self._token = None
        return acquired

    async def acquire_and(self, load: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Take the lease and `load` at the same time; `None` if another process holds the lease.

        The lease is requested first. What is loaded may still be older than the lease by a round trip, in
        which its last holder may have written. After an error, `release` gives back what was perhaps taken.
        """
        loading = asyncio.ensure_future(load())
        try:
            if await self.acquire():
                return await loading
            with suppress(StorageError):
                await loading  # not cancelled, which would cost some drivers their connection
            return None
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def release(self) -> None:
        """Release the lease if this object still holds it; a lease of another holder is left alone.

        Only logs a failure: the lease expires.
        """
        token, self._token = self._token, None
        if token is not None:
            try:
                await self._driver.delete(self._key, expect=token)
            except StorageError as error:
                logger.warning("could not release a lease, it will expire: %s", error)

    async def release_and(self, write: Callable[[], Awaitable[T]]) -> T:
        """Carry out the last write under the lease and release the lease at the same time.

        The write is requested first. Returns or raises what it does; the lease is released in any case.
        """
        releasing = asyncio.ensure_future(self.release())
        try:
            return await write()
        finally:
            await releasing

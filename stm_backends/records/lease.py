"""One summarizer at a time: a lease that expires by itself when its holder dies.

A lease saves money, nothing else. Two holders at once, as after a long pause of one of them, cost one
summarizer call too many; that no summary is lost or applied twice rests on `Driver.replace` alone.
"""

from __future__ import annotations

from stm_backends.drivers.contract import ABSENT, Driver, Key, new_version


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
        # Kept before the first await: a cancelled or unanswered acquire may have taken effect.
        self._token = token = new_version()
        acquired = await self._driver.replace(
            self._key, self._content, version=token, expect=ABSENT, ttl=self._ttl
        )
        if not acquired:
            self._token = None
        return acquired

    async def release(self) -> None:
        """Give the lease back if it is still ours; somebody else's is never touched."""
        token, self._token = self._token, None
        if token is not None:
            await self._driver.delete(self._key, expect=token)

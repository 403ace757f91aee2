"""One summarizer at a time: a lease that expires when its holder dies.

A lease only saves money. Two holders at once, for example after a long pause of one of them, cost an
unnecessary summarizer call; `Driver.replace` ensures that no summary is lost or applied twice.
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
        # Set before the first await: a cancelled acquire, or one with an unknown outcome, may have taken
        # effect.
        self._token = token = new_version()
        acquired = await self._driver.replace(
            self._key, self._content, version=token, expect=ABSENT, ttl=self._ttl
        )
        if not acquired:
            self._token = None
        return acquired

    async def release(self) -> None:
        """Release the lease if this object still holds it; a lease of another holder is left alone."""
        token, self._token = self._token, None
        if token is not None:
            await self._driver.delete(self._key, expect=token)

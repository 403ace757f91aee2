"""One write at a time to each document, in the order in which this process asked for them.

MongoDB starts a write over when another was faster at the same document. Of many at once each starts over
again and again, and reads the whole document each time, until the deadline ends some of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from stm_backends.errors import Unavailable


class Turns:
    """A first-in, first-out queue for each key. A queue that nothing waits in takes no memory."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        # Whoever has a turn or waits for one holds the lock, and nothing else does.
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        """Count the keys that have a queue."""
        return len(self._locks)

    @asynccontextmanager
    async def turn(self, key: Hashable, *, operation: str) -> AsyncGenerator[None]:
        """Wait for a turn and keep it; raises `Unavailable` if it does not come within the patience."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        try:
            async with asyncio.timeout(self._patience_s):
                await lock.acquire()
        except TimeoutError:
            raise Unavailable(
                "earlier writes to the same record took too long; this one was not sent",
                backend="mongo",
                operation=operation,
            ) from None
        try:
            yield
        finally:
            lock.release()

"""One write at a time to each document, in the order in which this process makes them.

MongoDB restarts a write when another one changed the same document first. Many at once restart again and
again, and read the whole document each time, until the deadline ends some of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager

from stm_backends.errors import Unavailable


class _Queue(asyncio.Lock):
    """A lock, which is first in, first out, and the number of writes that hold it or wait for it."""

    users = 0


class Turns:
    """A queue for each key. A key without writes takes no memory."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._queues: dict[Hashable, _Queue] = {}

    def __len__(self) -> int:
        """Count the keys that have a queue."""
        return len(self._queues)

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncGenerator[None]:
        """Wait for earlier writes to the key, for at most `patience_s`; then raises `Unavailable`."""
        queue = self._queues.setdefault(key, _Queue())
        queue.users += 1
        try:
            await self._wait(queue)
            try:
                yield
            finally:
                queue.release()
        finally:
            queue.users -= 1
            if not queue.users:
                del self._queues[key]

    async def _wait(self, queue: _Queue) -> None:
        if queue.users == 1:
            await queue.acquire()  # does not wait, so it needs no timer
            return
        try:
            async with asyncio.timeout(self._patience_s):
                await queue.acquire()
        except TimeoutError:
            raise Unavailable(
                "earlier writes to the same record took too long; this one was not sent"
            ) from None

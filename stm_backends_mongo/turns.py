"""One write at a time to each document, in this process's order.

MongoDB restarts a write if another one changed the same document first. Many concurrent writes restart again
and again, each time reading the whole document, until some of them reach the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from stm_backends.errors import Unavailable


class _Queue(asyncio.Lock):
    """A first-in, first-out lock, with the number of writes that hold it or wait for it."""

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
    async def turn(self, key: Hashable) -> AsyncGenerator[Callable[[asyncio.Future[Any]], None]]:
        """Wait at most `patience_s` for earlier writes to the key, then raise `Unavailable`.

        The turn ends with the block, unless the block calls the yielded function with a request. Then it ends
        with the request, which goes on if the block is cancelled.
        """
        with ExitStack() as end:
            queue = self._queues.setdefault(key, _Queue())
            queue.users += 1
            end.callback(self._leave, key, queue)
            await self._wait(queue)
            end.callback(queue.release)

            def hand_over(request: asyncio.Future[Any]) -> None:
                later = end.pop_all()
                request.add_done_callback(lambda _: later.close())

            yield hand_over

    def _leave(self, key: Hashable, queue: _Queue) -> None:
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

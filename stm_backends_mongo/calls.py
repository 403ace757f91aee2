"""Calls of the client, which are never cancelled.

Before Python 3.12, if `asyncio.wait_for` is cancelled at the moment when the awaited work ends by its own
timeout, that work keeps running. PyMongo waits in this way for a server and for a connection. It then
releases a lock that another task holds, and the lock that is taken last is never released, so every later
call of the client ends at its deadline. So if a caller gives up, its call is left to PyMongo's own timeout,
which comes before the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Calls:
    """Runs each call in a separate task, which is never cancelled."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, call: Awaitable[T]) -> T:
        """Return the result of a call. Cancelling this ends only the waiting: the call may still be done."""
        task = asyncio.ensure_future(call)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait((task,))
        return task.result()

    async def ended(self, *, within: float) -> None:
        """Wait at most `within` seconds for calls in progress, including those whose caller gave up."""
        if self._running:
            await asyncio.wait(self._running, timeout=within)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved

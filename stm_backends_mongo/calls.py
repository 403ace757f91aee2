"""Calls of the client, none of which is cancelled.

Before Python 3.12, `asyncio.wait_for` that is cancelled, while what it waits for ends at its own timeout,
leaves that running. PyMongo waits so for a server and for a connection: it then releases a lock that another
task holds, and the lock that is taken last is never released. Every later call of the client ends at its
deadline. So a call whose caller gives up is left to PyMongo's own timeout, which comes before the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Calls:
    """Runs each call in a task of its own, which is never cancelled."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, call: Awaitable[T]) -> T:
        """Return what a call returns. Cancelling this ends the waiting alone: the call may still be done."""
        task = asyncio.ensure_future(call)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait((task,))
        return task.result()

    async def ended(self, *, within: float) -> None:
        """Wait for the calls in progress, those whose caller gave up too, for at most so many seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=within)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never retrieved

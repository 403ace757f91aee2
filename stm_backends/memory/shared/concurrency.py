"""A limit on the summarizer calls in flight that is fair to tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator


class FairConcurrencyLimit:
    """At most `count` calls in flight; a quarter of them is reserved for tenants without a call in flight.

    With the reserve (two of eight, none of fewer than four), a tenant whose model hangs cannot take every
    slot. Waiting tenants are served round robin, and the calls of one tenant in order of arrival. Slots that
    an event loop held when it was closed become free.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._reserved = count // 4
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._free = self._count
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncGenerator[bool]:
        """Hold a slot for the duration of the context; gives whether it had to be waited for."""
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            self._start_over()
        running = self._running
        waits = bool(self._waiting) or not self._has_free(tenant)
        if waits:
            await self._take(loop, tenant)
        else:
            self._free -= 1
            running[tenant] += 1
        try:
            yield waits
        finally:
            if running is self._running:
                self._give_back(tenant)

    async def _take(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was given a slot at the same moment.
                self._give_back(tenant)
            raise

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        while (tenant := self._next()) is not None:
            turns = self._waiting.pop(tenant)
            while turns and (turns[0].done() or turns[0].get_loop().is_closed()):
                # Cancelled while waiting, or its event loop was closed.
                turns.popleft()
            if turns:
                self._free -= 1
                self._running[tenant] += 1
                turns.popleft().set_result(None)
            if turns:
                # Behind every other waiting tenant.
                self._waiting[tenant] = turns

    def _next(self) -> str | None:
        return next(filter(self._has_free, self._waiting), None)

    def _has_free(self, tenant: str) -> bool:
        return self._free > (self._reserved if self._running[tenant] else 0)

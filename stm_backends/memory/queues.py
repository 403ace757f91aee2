"""Queues of conversations that wait until one of a few tasks is free, fair to tenants."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, Protocol

MAX_WAITING: Final = 10_000
"""Maximum number of conversations of a backend that wait in a queue, or for a time."""

PAUSE_S: Final = 0.05
"""Seconds after which the place of a cancelled task is given away. A loop that is ending cancels all tasks,
and is closed by then."""


class QueuedWork(Protocol):
    """The work on one conversation."""

    @property
    def tenant(self) -> str:
        """The tenant of the conversation."""
        ...

    def start(self) -> asyncio.Task[None]:
        """Begin, in a new task."""
        ...

    def cancel_plan(self) -> None:
        """Give up: a later call, or another process, resumes the work."""
        ...


class FairQueue:
    """At most `count` tasks at work; a quarter of them is reserved for tenants without a task at work.

    With the reserve (two of eight, none of fewer than four), a tenant whose model hangs cannot take every
    place. Waiting tenants are served round robin, and the work of one tenant in order of arrival. Work that
    waits has no task. At most `most` wait: beyond that, the tenant with the most of them gives up its newest.
    Places that an event loop held when it was closed become free.
    """

    def __init__(self, count: int, *, most: int = MAX_WAITING) -> None:
        self._count = count
        self._reserved = count // 4
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._free = self._count
        self._at_work: Counter[str] = Counter()
        self._size = 0
        self._waiting: OrderedDict[str, OrderedDict[QueuedWork, Context]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def __contains__(self, work: QueuedWork) -> bool:
        return work in self._waiting.get(work.tenant, ())

    def enter(self, work: QueuedWork) -> bool:
        """Start the work as soon as a place is free for its tenant; returns whether it waits for one.

        Entering twice changes nothing.
        """
        self._enter_loop()
        if work in self:
            return True
        self._waiting.setdefault(work.tenant, OrderedDict())[work] = copy_context()
        self._size += 1
        self._hand_out()
        if self._size > self._most:
            # The newest of the largest tenant, so a `Bounded` does not fit.
            largest = max(self._waiting.values(), key=len)
            next(reversed(largest)).cancel_plan()
        return work in self

    def take(self, tenant: str) -> bool:
        """Take a place for the rest of the current task, unless none is free or others wait for it."""
        self._enter_loop()
        task = asyncio.current_task()
        if task is None or self._waiting or not self._has_free(tenant):
            return False
        self._hold(tenant)
        task.add_done_callback(partial(self._give_back, tenant))
        return True

    def withdraw(self, work: QueuedWork) -> None:
        """Remove work from those that wait."""
        if work in self:
            line = self._waiting[work.tenant]
            del line[work]
            self._size -= 1
            if not line:
                del self._waiting[work.tenant]

    def _enter_loop(self) -> None:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()
            self._start_over()

    def _hand_out(self) -> None:
        while self._free and (tenant := next(filter(self._has_free, self._waiting), None)) is not None:
            line = self._waiting.pop(tenant)
            work, context = line.popitem(last=False)
            self._size -= 1
            if line:
                # Behind every other waiting tenant.
                self._waiting[tenant] = line
            self._hold(tenant)
            # In the context in which it was entered, not that of the work that ended. The place is given back
            # by a callback, because a task may be cancelled before it begins.
            context.run(work.start).add_done_callback(partial(self._give_back, tenant))

    def _has_free(self, tenant: str) -> bool:
        return self._free > (self._reserved if self._at_work[tenant] else 0)

    def _hold(self, tenant: str) -> None:
        self._free -= 1
        self._at_work[tenant] += 1

    def _give_back(self, tenant: str, task: asyncio.Task[Any]) -> None:
        self._free += 1
        self._at_work[tenant] -= 1
        if not self._at_work[tenant]:
            del self._at_work[tenant]
        if task.cancelled():
            task.get_loop().call_later(PAUSE_S, self._hand_out)
        else:
            self._hand_out()

"""Between frameworks that block, or have event loops of their own, and the loop of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Waits(Protocol):
    """Runs a coroutine on the event loop that the backend was opened on, and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, _T], /) -> _T: ...


async def settled(work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work and return its result; a cancellation is raised once the work has ended.

    So what follows a cancelled write is stored after it. The operations of a backend have deadlines, which
    bound the wait. If the work fails meanwhile, its error is the cause of the cancellation.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


async def elsewhere(run: Waits, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work on the loop that `run` runs coroutines on, while this loop goes on; see `settled`."""
    return await settled(asyncio.to_thread(run, work))

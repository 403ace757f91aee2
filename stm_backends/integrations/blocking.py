"""Between frameworks that block, or have event loops of their own, and the loop of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from stm_backends.drivers.tasks import to_its_end

_T = TypeVar("_T")


class Waits(Protocol):
    """Runs a coroutine on the event loop that the backend was opened on, and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, _T], /) -> _T: ...


async def elsewhere(run: Waits, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work on the loop that `run` runs coroutines on, while this loop goes on.

    A cancellation is raised once the work has ended, so that what follows a write is stored after it. The
    operations of a backend have deadlines, which bound the wait.
    """
    return await to_its_end(asyncio.to_thread(run, work))

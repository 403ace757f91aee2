"""Between frameworks that block, or have event loops of their own, and the loop of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

from stm_backends.drivers.tasks import to_its_end
from stm_backends.errors import ConfigurationError

_T = TypeVar("_T")


class Waits(Protocol):
    """Runs a coroutine on the event loop that the backend was opened on, and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, _T], /) -> _T: ...


def refuse(method: str, instead: str) -> NoReturn:
    """Raise the error of a blocking method without `run`, which says what to do instead."""
    raise ConfigurationError(
        f"{method} blocks and needs an event loop in another thread: {instead}, or pass run=..., a function "
        "that runs a coroutine on the loop that the backend was opened on"
    )


async def elsewhere(run: Waits, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work on the loop that `run` runs coroutines on, while this loop goes on.

    A cancellation is raised once the work has ended, so that what follows a write is stored after it. The
    operations of a backend have deadlines, which bound the wait.
    """
    return await to_its_end(asyncio.to_thread(run, work))

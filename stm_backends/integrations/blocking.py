"""Bridges frameworks that block, or run their own event loops, to the event loop of a backend."""

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
    """Raise the error of a blocking method without `run`. It says what to do instead."""
    raise ConfigurationError(
        f"{method} blocks and needs an event loop in another thread: {instead}, or pass run=..., a function "
        "that runs a coroutine on the loop that the backend was opened on"
    )


async def elsewhere(run: Waits, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work on the loop that `run` uses, without blocking this loop.

    A cancellation is raised only when the work has ended, so that anything the caller does next comes after
    it. The backend's operations have deadlines, which bound the wait.
    """
    return await to_its_end(asyncio.to_thread(run, work))

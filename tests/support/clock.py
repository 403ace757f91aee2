"""An event loop with virtual time: it stops while anything runs and jumps ahead when all tasks wait."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

START = 1_000_000.0

_T = TypeVar("_T")
_P = ParamSpec("_P")


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits: the requested time has passed at once."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits and nothing is scheduled: a deadlock")
        self.jumped += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that sleeps for hours in no time. Nothing in it may wait for a thread or a socket."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return START + self._jumping.jumped


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in a new virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtually(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def virtual(*args: _P.args, **given: _P.kwargs) -> None:
        run(test(*args, **given))

    return virtual


def now() -> float:
    """Return the running loop's time, to be used as a memory's `time_source`; outside of any, the start."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return START

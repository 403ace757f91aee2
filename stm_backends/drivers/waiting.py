"""Callers that wait for something that only one of them gets at a time, such as a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingLine(Generic[T]):
    """Serves callers in order of arrival, each with its own value.

    Unlike an `asyncio.Semaphore`, it hands a value over, fails all waiting callers, and lets its owner decide
    when to serve one. A served value is never lost: a caller that is cancelled at that moment passes it on.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[T], None] = {}

    def __len__(self) -> int:
        """Count the callers that wait."""
        return len(self._waiting)

    async def wait(self, seconds: float, *, unused: Callable[[T], None]) -> T:
        """Return the value served to this caller, or raise the error of `fail`.

        Raises `TimeoutError` after `seconds`. Calls `unused` with the value served to a caller that was
        cancelled meanwhile.
        """
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            await asyncio.wait((turn,), timeout=seconds)
        except BaseException:
            # Asking for the error tells asyncio that it was noticed.
            if turn.done() and turn.exception() is None:
                unused(turn.result())
            raise
        finally:
            self._waiting.pop(turn, None)
        if not turn.done():
            raise TimeoutError
        return turn.result()

    def serve(self, value: T) -> bool:
        """Give a value to the caller that has waited longest; returns whether one waits."""
        for turn in self._waiting:
            del self._waiting[turn]
            turn.set_result(value)
            return True
        return False

    def fail(self, error: Callable[[], BaseException]) -> None:
        """Raise an error in each caller that waits; it is called once for each."""
        waiting, self._waiting = self._waiting, {}
        for turn in waiting:
            turn.set_exception(error())

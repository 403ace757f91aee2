"""Whose code the processor time of a turn is spent in, measured while many coroutines run at once.

A coroutine runs in steps, from one wait to the next. Every step of a patched coroutine function is timed and
belongs to the innermost one: the memory, the driver, or the client library. The rest of a block's processor
time is the event loop, its callbacks and other threads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from stm_backends import DistributedShortTermMemory
from stm_backends.drivers.contract import Driver

_PAIRS = 5_000

_OPERATIONS = ("load", "append", "replace", "delete", "scan")


@dataclass
class Steps:
    """The processor time of the steps of each owner in nanoseconds, and the calls of each operation."""

    spent: dict[str, int] = field(default_factory=lambda: {"memory": 0, "driver": 0, "library": 0})
    calls: Counter[str] = field(default_factory=Counter[str])
    charges: int = 0
    _owners: list[str] = field(default_factory=list[str])
    _since: int = 0
    _clock_ns: int = 0

    def enter(self, owner: str) -> None:
        """Begin a step of an owner."""
        self._charge()
        self._owners.append(owner)

    def leave(self) -> None:
        """End the innermost step."""
        self._charge()
        self._owners.pop()

    def _charge(self) -> None:
        now = time.thread_time_ns()
        if self._owners:
            self.spent[self._owners[-1]] += now - self._since - self._clock_ns
        self._since = now
        self.charges += 1

    @property
    def overhead_ns(self) -> int:
        """What reading the clock has taken; it is in no owner's time."""
        return self.charges * self._clock_ns

    def calibrate(self) -> None:
        """Measure what one charge takes, and begin to count."""
        start = time.thread_time_ns()
        for _ in range(_PAIRS):
            self.enter("memory")
            self.leave()
        self._clock_ns = (time.thread_time_ns() - start) // (2 * _PAIRS)
        self.spent = dict.fromkeys(self.spent, 0)
        self.calls.clear()
        self.charges = 0

    @contextlib.contextmanager
    def watching(self, driver: Driver, library: tuple[type, ...]) -> Generator[None]:
        """Time the memory, this driver's class, and the coroutine functions of a client library."""
        with contextlib.ExitStack() as stack:
            for name in ("add_turn", "get_llm_context"):
                self._patch(stack, DistributedShortTermMemory, name, "memory")
            for name in _OPERATIONS:
                self._patch(stack, type(driver), name, "driver")
            for owner in library:
                for name, function in inspect.getmembers(owner, inspect.iscoroutinefunction):
                    if name in vars(owner) and not isinstance(vars(owner)[name], (staticmethod, classmethod)):
                        self._patch(stack, owner, name, "library", function)
            self.calibrate()
            yield

    def _patch(
        self,
        stack: contextlib.ExitStack,
        owner: type,
        name: str,
        account: str,
        function: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        original = function or getattr(owner, name)

        @functools.wraps(original)
        async def timed(*arguments: Any, **named: Any) -> Any:
            if account == "driver":
                self.calls[name] += 1
            return await _Timed(self, account, original(*arguments, **named))

        stack.enter_context(mock.patch.object(owner, name, timed))


class _Timed:
    """An awaitable that charges each step of another one to an owner."""

    def __init__(self, steps: Steps, owner: str, awaited: Awaitable[Any]) -> None:
        self._steps = steps
        self._owner = owner
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        iterator: Any = self._awaited.__await__()
        step: Callable[[], Any] = functools.partial(iterator.send, None)
        while True:
            self._steps.enter(self._owner)
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            finally:
                self._steps.leave()
            try:
                step = functools.partial(iterator.send, (yield waited_for))
            except BaseException as error:  # noqa: BLE001 -- a cancellation goes to the coroutine
                step = functools.partial(iterator.throw, error)

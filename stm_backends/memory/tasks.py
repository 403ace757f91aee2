"""Background tasks: kept referenced, logged when they fail, cancelled on closing; and a lock for tasks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from stm_backends import handed_in, logs
from stm_backends.handed_in import Report

LAST_S: Final = 1.0
"""Seconds that cancelled tasks may take to end on closing."""

CALLBACK_S: Final = 300.0
"""Seconds that a callback may take before it is cancelled."""

_T = TypeVar("_T")


class Background:
    """The running tasks of one owner.

    An event loop keeps only weak references, so an unreferenced task may be garbage collected while it runs.
    A running task keeps its owner alive, so that the task can be stopped through a weak reference to the
    owner. `failed` receives the failures of callbacks.
    """

    def __init__(self, owner: object | None = None, *, failed: Report = handed_in.ignore) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._owner = None if owner is None else weakref.ref(owner)
        self.failed = failed

    def start(self, work: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
        """Run `work` as a task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, self._owner and self._owner()))
        return task

    def _ended(self, _: object | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)

    def call_back(self, callback: Callable[..., object] | None, *args: object) -> None:
        """Call a user's callback in a new task; its failure is only logged and reported."""
        if callback is not None:
            self.start(self._call_back(callback, args), name="stm-callback")

    async def _call_back(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            await self.call_within(CALLBACK_S, callback, *args)
        except Exception as error:  # noqa: BLE001 -- a user's callback may raise anything
            logs.failed("a callback of the memory failed (%s)", error)
            self.failed("callback", error)

    async def call_within(self, timeout: float, function: Callable[..., object], *args: object) -> object:
        """Call a user's function in a new task and return its result; see `handed_in.call`."""
        start = partial(self.start, name="stm-call")
        return await handed_in.call(function, *args, within=timeout, start=start, report=self.failed)

    def __bool__(self) -> bool:
        """True if a task is running on an open event loop."""
        return any(not task.done() and not task.get_loop().is_closed() for task in self._tasks)

    async def close(self, *, timeout: float) -> None:
        """Wait up to `timeout` seconds for running tasks, then cancel the rest and wait for them to end.

        This includes tasks that are started in the meantime. A cancellation ends only the first wait.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        try:
            while running := self._running():
                await asyncio.wait(running, timeout=max(until - loop.time(), 0))
                if loop.time() >= until:
                    break
        finally:
            await self._end()

    async def _end(self) -> None:
        """Cancel each running task once, and wait: tasks may have something to release."""
        loop = asyncio.get_running_loop()
        until, cancelled = loop.time() + LAST_S, set[asyncio.Task[Any]]()
        while running := self._running():
            for task in running - cancelled:
                task.cancel()
            cancelled |= running
            if loop.time() >= until:
                return
            # A task that ends may have started another.
            await asyncio.wait(running, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)

    def _running(self) -> set[asyncio.Task[Any]]:
        here, current = asyncio.get_running_loop(), asyncio.current_task()
        return {task for task in self._tasks if task.get_loop() is here and task is not current}


class LoopLock:
    """A lock for the tasks of each event loop: `async with lock.here():`."""

    def __init__(self) -> None:
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Lock:
        """Return the lock of the running event loop; one that an ended loop left locked would stay locked."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

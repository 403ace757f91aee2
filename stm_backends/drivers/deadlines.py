"""Deadlines of many concurrent operations with one timer.

```python
deadlines = Deadlines(5.0)  # once for a driver

with deadlines.start() as deadline:  # for each operation
    await work()  # cancelled after 5 seconds; the block then raises `TimeoutError`
```

This is `asyncio.timeout(5.0)` with a synchronous context manager and without a timer for each block.
Cancellation works the same way: the deadline cancels the task that entered the block, a cancellation by the
caller at the same time wins, blocks may be nested, and a task that has left the block is never cancelled.

All deadlines of one `Deadlines` are equally long, so they expire in the order in which they started, and one
timer for the oldest suffices. The end of an operation does not stop the timer. When the timer fires, it is
set for the oldest operation in progress, if there is one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final


class Deadlines:
    """Starts deadlines of `seconds` each, on one event loop until that has ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds: Final = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[Deadline, None] = {}  # in the order in which they started

    def start(self) -> Deadline:
        """Return a context manager whose block may take `seconds`; it raises `TimeoutError` then."""
        return Deadline(self)

    def enter(self, deadline: Deadline, loop: asyncio.AbstractEventLoop) -> float:
        """Watch a deadline; returns the time of the event loop at which it expires."""
        if loop is not self._loop:
            if self._running and self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("deadlines are in progress on another event loop")
            # The timer of an event loop that has ended never fires.
            self._loop, self._timer, self._running = loop, None, {}
        when = loop.time() + self.seconds
        self._running[deadline] = None
        if self._timer is None:
            self._timer = loop.call_at(when, self._expire, loop, when)
        return when

    def leave(self, deadline: Deadline) -> None:
        """Stop watching a deadline."""
        self._running.pop(deadline, None)

    def _expire(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Expire what is due at `when` or by now, and set the timer for the oldest of the rest."""
        if loop is not self._loop:
            return
        until = max(when, loop.time())  # an event loop may call a little early
        self._timer = None
        while self._running:
            oldest = next(iter(self._running))
            if oldest.when > until:
                self._timer = loop.call_at(oldest.when, self._expire, loop, oldest.when)
                return
            del self._running[oldest]
            oldest.expire()


class Deadline:
    """The deadline of one block, which is entered once. `Deadlines.start` creates it.

    `when` is the time of the event loop at which it expires. `expired` is true if it cancelled the block.
    """

    __slots__ = ("_cancelling", "_deadlines", "_task", "expired", "when")

    _task: asyncio.Task[object]
    _cancelling: int
    when: float

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.expired = False

    def __enter__(self) -> Deadline:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a deadline needs a task, which it can cancel")
        self._task = task
        self._cancelling = task.cancelling()
        self.when = self._deadlines.enter(self, loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self._deadlines.leave(self)
        if (
            self.expired
            # If there are more requests than on entry, the caller has cancelled the task, too.
            and self._task.uncancel() <= self._cancelling
            and isinstance(error, asyncio.CancelledError)
        ):
            raise TimeoutError from error

    def left_s(self) -> float:
        """Return how many seconds are left."""
        return self.when - asyncio.get_running_loop().time()

    def expire(self) -> None:
        """Cancel the block."""
        self.expired = True
        self._task.cancel()

"""An event loop in a separate thread, which other threads use to run coroutines."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

from stm_backends.errors import ConfigurationError, OutcomeUnknown, StmError, Unavailable

logger = logging.getLogger("stm_backends")

LAST_S: Final = 5.0
"""Seconds that running coroutines may take to end once the loop is closed."""

T = TypeVar("T")


def require_coroutine(work: object) -> None:
    """Raise `ConfigurationError` for anything that is not awaited as a whole, such as an iterator."""
    if not asyncio.iscoroutine(work):
        raise ConfigurationError(f"run takes a coroutine, not {type(work).__name__}")


class LoopThread:
    """A thread that owns an event loop; `run` runs a coroutine on it and waits for the result.

    Close it, or use it in a `with` statement; otherwise it is closed when the program ends. It is a daemon
    thread, so nothing that it runs can keep the program from ending.
    """

    def __init__(self, *, name: str = "stm-loop") -> None:
        self._process = os.getpid()
        # Reentrant, because a signal handler may make a call during a call.
        self._lock = threading.RLock()
        self._calls: dict[Future[Any], asyncio.Task[Any] | None] = {}
        self._closed = False
        self._stop = asyncio.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._own_loop, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._loop = started.result()
        atexit.register(self.close)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, in the caller's context; returns its result or raises its error.

        An exception in the waiting thread, such as `KeyboardInterrupt`, cancels the coroutine and is raised
        once the coroutine has ended. Raises `Unavailable` if the loop is closed, `OutcomeUnknown` if it is
        closed during the call, and `ConfigurationError` on the loop's own thread and in a forked process. In
        each case the coroutine is closed, so Python does not warn that it was never awaited. Anything but a
        coroutine raises `ConfigurationError`, too.
        """
        require_coroutine(work)
        answer: Future[T] = Future()
        try:
            self._begin(work, answer)
            return answer.result()
        except BaseException:
            if not answer.done():
                self._interrupt(work, answer)
            raise
        finally:
            # The exception's traceback refers to this frame; `answer` would complete a reference cycle.
            del answer

    def close(self, *, timeout: float = LAST_S) -> None:
        """Cancel running coroutines, wait for them to end, and end the loop and its thread.

        Closing twice is harmless. A thread that has not ended after `timeout` seconds is abandoned, with a
        warning in the log. In a forked process, which has no such thread, this does nothing. Raises
        `ConfigurationError` on the loop's own thread.
        """
        if os.getpid() != self._process:
            return
        self.require_callable()
        with self._lock:
            self._closed = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout)
        atexit.unregister(self.close)
        if self._thread.is_alive():
            logger.warning("the thread of an event loop did not end within %g s and was abandoned", timeout)
            self._give_up()

    def require_callable(self) -> None:
        """Raise `ConfigurationError` where waiting for the loop would never end; takes no lock.

        That is on the loop's own thread, and in a process that was forked after the loop was started.
        """
        if os.getpid() != self._process:
            raise ConfigurationError(
                "the thread of this event loop does not exist in a forked process: "
                "open a backend in each process, after the fork"
            )
        if threading.current_thread() is self._thread:
            raise ConfigurationError(
                "called on the event loop's own thread, which would deadlock: "
                "use the asynchronous objects in callbacks"
            )

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # In any thread

    def _begin(self, work: Coroutine[Any, Any, T], answer: Future[T]) -> None:
        try:
            self.require_callable()
            with self._lock:
                if self._closed:
                    raise Unavailable("the event loop is closed; use the backend within its `with` block")
                # Under the lock, so that the loop receives it before the request to stop.
                self._loop.call_soon_threadsafe(self._start, work, answer)
                self._calls.setdefault(answer, None)
        except StmError as error:
            work.close()
            answer.set_exception(error)

    def _interrupt(self, work: Coroutine[Any, Any, Any], answer: Future[Any]) -> None:
        """Cancel a call and wait for its end; a second interrupt ends the wait."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, work, answer)
            wait((answer,))

    def _give_up(self) -> None:
        """End every unfinished call with `OutcomeUnknown`."""
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, {}
            for answer in calls:
                if not answer.done():
                    answer.set_exception(OutcomeUnknown("the event loop ended before the call did"))

    # In the loop's thread

    def _own_loop(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            # On exit, the runner cancels every task and waits for it.
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except BaseException as error:  # noqa: BLE001 -- for example `SystemExit` in a callback, which ends the loop
            logger.error("the thread of an event loop ended with %s", type(error).__name__)
            if not started.done():
                started.set_exception(error)
        finally:
            self._give_up()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    def _start(self, work: Coroutine[Any, Any, Any], answer: Future[Any]) -> None:
        try:
            task = self._loop.create_task(work)
        except Exception as error:  # noqa: BLE001 -- raised where it is waited for: nothing else would end the wait
            work.close()
            with self._lock:
                self._calls.pop(answer, None)
                if not answer.done():
                    answer.set_exception(error)
            return
        self._calls[answer] = task
        task.add_done_callback(partial(self._end, answer))

    def _cancel(self, work: Coroutine[Any, Any, Any], answer: Future[Any]) -> None:
        task = self._calls.get(answer)
        if task is not None:
            task.cancel()
        elif not answer.done():
            # Interrupted before the loop received it.
            work.close()
            answer.cancel()

    def _end(self, answer: Future[Any], task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        with self._lock:
            self._calls.pop(answer, None)
            if answer.done():
                # It took too long to end and was abandoned.
                return
            if task.cancelled():
                answer.set_exception(OutcomeUnknown("the call was cancelled before it ended"))
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

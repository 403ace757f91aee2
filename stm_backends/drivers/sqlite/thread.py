"""One thread that owns one SQLite connection and runs transactions for an event loop.

The loop never waits for a lock or a disk; it puts a job into a queue and is called back. A job is one whole
transaction, and either never begins or runs to its end: cancelling the caller skips a job that is still
queued and does not affect one that has begun. SQLite itself never waits for another process; the caller
decides when to retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_INTERRUPT_AGAIN_S: Final = 0.01
_GRACE_S: Final = 1.0
"""How long an interrupted transaction may take to roll back before its outcome counts as unknown."""


class NotBegun(Exception):
    """The deadline came, or the thread ended, before the job began; it will never run."""


class NotEnded(Exception):
    """The deadline came, and the job did not end when it was interrupted; it may still succeed."""


class _Job(Generic[T]):
    __slots__ = ("answer", "began", "timer", "work")

    def __init__(self, work: Callable[[sqlite3.Connection], T], answer: asyncio.Future[T]) -> None:
        self.work = work
        self.answer = answer
        self.began = False
        self.timer: asyncio.TimerHandle | None = None


class ConnectionThread:
    """A daemon thread that owns a connection; the first job makes it connect."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], *, name: str) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._running: _Job[Any] | None = None
        # Held while a job begins, ends or is interrupted, so that an interruption never hits the next job.
        self._turn = threading.Lock()
        self._closing = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T], *, until: float) -> T:
        """Run one transaction in the thread and return, or raise, what it does.

        `until` is a time of the running loop. At that time a job that has not begun raises `NotBegun`, and
        one that has begun is interrupted. If that does not end it, it raises `NotEnded`.
        """
        if self._closing:
            raise NotBegun
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future())
        job.timer = loop.call_at(until, self._expire, job, until + _GRACE_S)
        self._jobs.put(job)
        try:
            return await job.answer
        finally:
            job.timer.cancel()

    def post(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Run a transaction after those that are queued; its result and its errors are ignored."""
        if not self._closing:
            job = _Job(work, asyncio.get_running_loop().create_future())
            job.answer.add_done_callback(lambda answer: answer.exception())
            self._jobs.put(job)

    async def close(self, *, timeout: float) -> None:
        """Wait for the queued jobs, close the connection and end the thread. Twice is harmless.

        A job that still runs after `timeout` seconds is interrupted. If that does not end it soon, the thread
        is left behind: it is a daemon, so it does not delay an exit, and it closes the connection and ends
        once SQLite answers.
        """
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
        ended = asyncio.wrap_future(self._ended)
        until = asyncio.get_running_loop().time() + timeout
        await asyncio.wait({ended}, timeout=timeout)
        while not ended.done() and asyncio.get_running_loop().time() < until + _GRACE_S:
            with self._turn:
                if self._running is not None and self._connection is not None:
                    self._connection.interrupt()
            await asyncio.wait({ended}, timeout=_INTERRUPT_AGAIN_S)
        if ended.done():
            self._thread.join()

    def _expire(self, job: _Job[Any], give_up_at: float) -> None:
        """End a job at its deadline. Runs in the event loop."""
        if job.answer.done():
            return
        loop = asyncio.get_running_loop()
        with self._turn:
            if not job.began:
                job.answer.set_exception(NotBegun())
                return
            if self._running is job and self._connection is not None:
                self._connection.interrupt()
        if loop.time() >= give_up_at:
            job.answer.set_exception(NotEnded())
        else:
            # SQLite ignores an interruption between two statements, so it is repeated.
            job.timer = loop.call_later(_INTERRUPT_AGAIN_S, self._expire, job, give_up_at)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._run_one(job)
        finally:
            if self._connection is not None:
                self._connection.close()
            self._ended.set_result(None)

    def _run_one(self, job: _Job[Any]) -> None:
        with self._turn:
            if job.answer.done():
                return
            job.began = True
            self._running = job
        result: Any = None
        failure: Exception | None = None
        try:
            if self._connection is None:
                self._connection = self._connect()
            result = job.work(self._connection)
        except Exception as error:  # noqa: BLE001 -- every error goes to the caller
            failure = error
        with self._turn:
            self._running = None
        # The loop may have been closed without waiting for the answer.
        with contextlib.suppress(RuntimeError):
            job.answer.get_loop().call_soon_threadsafe(_deliver, job.answer, result, failure)


def _deliver(answer: asyncio.Future[Any], result: object, failure: Exception | None) -> None:
    if answer.done():
        return
    if failure is None:
        answer.set_result(result)
    else:
        answer.set_exception(failure)

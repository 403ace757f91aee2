"""One thread that owns one SQLite connection and runs jobs for an event loop.

The loop never waits for a lock or a disk; it puts a job into a queue and is called back. The thread takes all
that is queued: reads run first, one after another; then the writes run in one transaction, with one commit
for all of them; then what needs the connection for itself. The loop is woken once. A job either never begins
or runs to its end: cancelling the caller skips a job that is still queued and does not affect one that has
begun.

While another process is in the middle of a write, only the writes wait: reads that arrive are run. Other jobs
raise SQLite's error, and the caller decides when to retry.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import itertools
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from stm_backends.drivers.sqlite import statements

T = TypeVar("T")

MAX_JOBS: Final = 128
MAX_BYTES: Final = 1024 * 1024
MAX_SECONDS: Final = 0.005
"""The most that one transaction takes together. A single larger write is a transaction of its own."""

_INTERRUPT_AGAIN_S: Final = 0.01
_GRACE_S: Final = 1.0
"""How long an interrupted transaction may take to roll back before its outcome counts as unknown."""

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})


def is_busy(error: Exception) -> bool:
    """Return whether another connection held a lock, so that the transaction can be retried."""
    return isinstance(error, sqlite3.Error) and primary_code(error) in _BUSY


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's result code without its extension."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF


def pause(attempt: int) -> float:
    """Return how long to wait before the next attempt: random, growing, at most 10 ms."""
    return random.uniform(0, min(0.0002 * 2 ** min(attempt, 6), 0.01))


class NotBegun(Exception):
    """The deadline came, or the thread ended, before the job began; it will never run."""


class LockedOut(NotBegun):
    """The same, because another process held the write lock."""


class NotEnded(Exception):
    """The deadline came, and the job did not end when it was interrupted; it may still succeed."""


class Kind(Enum):
    """What a job needs: nothing but the connection, a transaction that it may share, or one of its own."""

    READ = "read"
    WRITE = "write"
    ALONE = "alone"


class _Job(Generic[T]):
    __slots__ = ("answer", "began", "failure", "kind", "result", "size", "timer", "until", "work")

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], T],
        answer: asyncio.Future[T],
        *,
        kind: Kind,
        size: int = 0,
        until: float = float("inf"),
    ) -> None:
        self.work = work
        self.answer = answer
        self.kind = kind
        self.size = size
        self.until = until
        self.began = False
        self.result: T | None = None
        self.failure: Exception | None = None
        self.timer: asyncio.TimerHandle | None = None


class ConnectionThread:
    """A daemon thread that owns a connection; the first job makes it connect.

    `check` is called before each batch of jobs; what it raises goes to all of them.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], *, check: Callable[[], None], name: str
    ) -> None:
        self._connect = connect
        self._check = check
        self._connection: sqlite3.Connection | None = None
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        # Writes that have not begun, oldest first; only the thread uses it.
        self._writes: collections.deque[_Job[Any]] = collections.deque()
        # How often in a row another process' lock refused them.
        self._refusals = 0
        self._last = False
        self._running: _Job[Any] | None = None
        # Held while a job begins, ends or is interrupted, so that an interruption never hits the next job.
        self._turn = threading.Lock()
        self._closing = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(
        self, work: Callable[[sqlite3.Connection], T], *, kind: Kind, until: float, size: int = 0
    ) -> T:
        """Run a job in the thread and return, or raise, what it does.

        A write runs within a transaction; it may run twice if the first transaction was rolled back. `size`
        is its bytes. `until` is a time of the running loop. At that time a job that has not begun raises
        `NotBegun`, and one that has begun is interrupted. If that does not end it, it raises `NotEnded`.
        """
        if self._closing:
            raise NotBegun
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), kind=kind, size=size, until=until)
        job.timer = loop.call_at(until, self._expire, job, until + _GRACE_S)
        self._jobs.put(job)
        try:
            return await job.answer
        finally:
            job.timer.cancel()

    def post(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Run a job alone after those that are queued; its result and its errors are ignored."""
        if not self._closing:
            answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda answer: answer.exception())
            self._jobs.put(_Job(work, answer, kind=Kind.ALONE))

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
                locked_out = job.kind is Kind.WRITE and self._refusals
                job.answer.set_exception(LockedOut() if locked_out else NotBegun())
                return
            if self._running is job and self._connection is not None:
                self._connection.interrupt()
        if loop.time() >= give_up_at:
            job.answer.set_exception(NotEnded())
        else:
            # SQLite ignores an interruption between two statements, so it is repeated.
            job.timer = loop.call_later(_INTERRUPT_AGAIN_S, self._expire, job, give_up_at)

    # In the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._last or self._writes:
                self._serve(self._take())
        finally:
            if self._connection is not None:
                self._connection.close()
            self._ended.set_result(None)

    def _take(self) -> list[_Job[Any]]:
        """Return all that is queued; waits for a job, or until the next attempt to take the write lock."""
        taken: list[_Job[Any]] = []
        with contextlib.suppress(queue.Empty):
            if self._refusals:
                job = self._jobs.get(timeout=pause(self._refusals))
            else:
                job = self._jobs.get(block=not self._writes)
            while job is not None:
                taken.append(job)
                job = self._jobs.get_nowait()
            self._last = True
        return taken

    def _serve(self, taken: Sequence[_Job[Any]]) -> None:
        """Run reads, then the writes that one transaction takes, then what runs alone."""
        reads = [job for job in taken if job.kind is Kind.READ]
        alone = [job for job in taken if job.kind is Kind.ALONE]
        self._writes.extend(job for job in taken if job.kind is Kind.WRITE)
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._check()
        except Exception as error:  # noqa: BLE001 -- every error goes to the callers
            _deliver(_failed([*reads, *self._withdrawn(), *alone], error))
            return
        for job in reads:
            self._run_one(self._connection, job)
        _deliver([*reads, *self._write(self._connection)])
        for job in alone:
            self._run_one(self._connection, job)
            _deliver([job])

    def _write(self, connection: sqlite3.Connection) -> list[_Job[Any]]:
        """Run the oldest writes in one transaction, if there are any; returns those that ended."""
        # What was cancelled or came too late takes no lock.
        while self._writes and self._writes[0].answer.done():
            self._writes.popleft()
        if not self._writes:
            self._refusals = 0
            return []
        try:
            connection.execute(statements.BEGIN)
        except sqlite3.Error as error:
            if is_busy(error):
                self._refusals += 1
                return []
            return _failed(self._withdrawn(), error)
        self._refusals = 0
        return self._transaction(connection)

    def _transaction(self, connection: sqlite3.Connection) -> list[_Job[Any]]:
        """Run and commit as many writes as one transaction takes; returns those that ended."""
        began, size, batch, lost = time.monotonic(), 0, list[_Job[Any]](), False
        try:
            while self._writes and len(batch) < MAX_JOBS and not lost:
                size += self._writes[0].size
                if batch and (size > MAX_BYTES or time.monotonic() - began > MAX_SECONDS):
                    break
                job = self._writes.popleft()
                batch.append(job)
                shared = len(batch) > 1 or bool(self._writes)
                if shared:
                    connection.execute(statements.SAVEPOINT)
                self._run_one(connection, job)
                # SQLite rolls back all of it by itself, as after an interruption or with a full disk.
                lost = not connection.in_transaction
                if shared and not lost:
                    if job.failure is not None:
                        connection.execute(statements.ROLLBACK_TO)
                    connection.execute(statements.RELEASE)
            if not lost and any(job.failure is None for job in batch):
                connection.execute(statements.COMMIT)
        except sqlite3.Error as error:
            _failed([job for job in batch if job.failure is None], error)
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute(statements.ROLLBACK)
        if lost:
            self._begin_again([job for job in batch if job.failure is None])
        return [job for job in batch if not lost or job.failure is not None]

    def _withdrawn(self) -> list[_Job[Any]]:
        """Return the writes that wait, which then no longer do."""
        writes, self._refusals = list(self._writes), 0
        self._writes.clear()
        return writes

    def _begin_again(self, jobs: Sequence[_Job[Any]]) -> None:
        """Put writes whose transaction was rolled back before those that wait."""
        with self._turn:
            for job in jobs:
                job.began = False
        self._writes.extendleft(reversed(jobs))

    def _run_one(self, connection: sqlite3.Connection, job: _Job[Any]) -> None:
        """Run a job, unless it was cancelled or its deadline has passed."""
        with self._turn:
            if job.answer.done() or job.answer.get_loop().time() >= job.until:
                job.failure = NotBegun()
                return
            job.began = True
            self._running = job
        try:
            job.result = job.work(connection)
        except Exception as error:  # noqa: BLE001 -- every error goes to the caller
            job.failure = error
        with self._turn:
            self._running = None


def _failed(jobs: list[_Job[Any]], error: Exception) -> list[_Job[Any]]:
    """Let jobs fail for the same reason, each with an exception that its caller may change."""
    for job in jobs:
        job.failure = copy.copy(error)
    return jobs


def _deliver(jobs: Sequence[_Job[Any]]) -> None:
    """Wake each event loop once for all of its jobs that ended."""
    for loop, ended in itertools.groupby(jobs, key=lambda job: job.answer.get_loop()):
        # The loop may have been closed without waiting for the answers.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_answer, list(ended))


def _answer(jobs: Sequence[_Job[Any]]) -> None:
    for job in jobs:
        if job.answer.done():
            continue
        if job.failure is None:
            job.answer.set_result(job.result)
        else:
            job.answer.set_exception(job.failure)

"""One thread that owns one SQLite connection and runs jobs for event loops.

A loop never waits for a lock or a disk; it puts a job into a queue and is called back. The thread takes all
jobs that are queued: it runs the reads, then the writes in one transaction with one commit, then the jobs
that need the connection for themselves. It wakes the loop once for all of them. Cancelling the caller skips a
job that is still queued and does not affect one that has begun.

Reads are run while the writes wait for the write lock of another process. Jobs that run alone do not wait for
it: they raise SQLite's error, and the caller decides when to retry.

While the process forks, no connection is open. SQLite counts the locks of a process in memory. A forked
process inherits the count but not the locks, and would use the file without any.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from stm_backends.drivers.sqlite import purging, statements
from stm_backends.drivers.sqlite.jobs import (
    MAX_JOBS,
    Job,
    Kind,
    LockedOut,
    NotBegun,
    NotEnded,
    Watch,
    deliver,
    failed,
    is_busy,
    pause,
)

T = TypeVar("T")

logger = logging.getLogger("stm_backends")

MAX_BYTES: Final = 1024 * 1024
MAX_SECONDS: Final = 0.005
"""The limits of one transaction, with `MAX_JOBS`. A single larger write is a separate transaction.

`MAX_SECONDS` also limits how long the answers of reads wait for other reads.
"""

_INTERRUPT_AGAIN_S: Final = 0.01
_GRACE_S: Final = 1.0
"""Time that an interrupted transaction may take to roll back before its outcome counts as unknown."""

_ASIDE_S: Final = 5.0
"""Time that a fork waits for jobs in progress to end."""


class ConnectionThread:
    """A daemon thread that owns a connection; the first job makes it connect.

    `check` is called before each transaction, and once before the reads of a batch; its errors go to
    their callers. `disconnect` closes the connection. `purge` removes some expired records and returns
    whether there are more; it is called now and then after writes, and its errors are ignored.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        disconnect: Callable[[sqlite3.Connection], object],
        *,
        check: Callable[[], None],
        purge: Callable[[sqlite3.Connection], bool],
        name: str,
    ) -> None:
        self._connect = connect
        self._disconnect = disconnect
        self._check = check
        self._purge = purge
        self._connection: sqlite3.Connection | None = None
        self._watch: Watch | None = None
        self._jobs: queue.SimpleQueue[list[Job[Any]] | None] = queue.SimpleQueue()
        # Writes that have not begun, oldest first; only the thread uses it.
        self._writes: collections.deque[Job[Any]] = collections.deque()
        # Number of times in a row that the lock of another process refused them.
        self._refusals = 0
        # Number of calls of `purge` that are still due.
        self._purges = 0
        self._last = False
        self._is_to_leave = False
        self._running: Job[Any] | None = None
        # Held while a job begins, ends or is interrupted, so that an interruption never hits the next job.
        self._turn = threading.Lock()
        self._closing = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(
        self, work: Callable[[sqlite3.Connection], T], *, kind: Kind, until: float, size: int = 0
    ) -> asyncio.Future[T]:
        """Run a job in the thread; await what it returns or raises.

        A write runs within a transaction; it runs again if the first transaction was rolled back because of
        another write. `size` is its bytes. `until` is a time of the running loop. At that time a job that has
        not begun raises `NotBegun`, and one that has begun is interrupted. If that does not end it, it raises
        `NotEnded`.
        """
        if self._closing:
            raise NotBegun
        loop, watch = asyncio.get_running_loop(), self._watch
        if watch is None or watch.loop is not loop:
            watch = self._watch = Watch(loop, self._jobs.put, self._expire)
        job = Job(work, kind, watch, until, size)
        watch.add(job)
        return job.answer

    async def close(self, *, timeout: float) -> None:
        """Wait for the queued jobs, close the connection and end the thread. Twice is harmless.

        A job that still runs after `timeout` seconds is interrupted. If that does not end it soon, the thread
        is left behind: it is a daemon, so it does not delay an exit, and it closes the connection and ends
        once SQLite answers.
        """
        if not self._closing:
            self._closing = True
            if self._watch is not None and self._watch.loop is asyncio.get_running_loop():
                self._watch.send()
            self._jobs.put(None)
        ended = asyncio.wrap_future(self._ended)
        until = asyncio.get_running_loop().time() + timeout
        await asyncio.wait({ended}, timeout=timeout)
        while not ended.done() and asyncio.get_running_loop().time() < until + _GRACE_S:
            with self._turn:
                self._purges = 0
                if self._running is not None and self._connection is not None:
                    self._connection.interrupt()
            await asyncio.wait({ended}, timeout=_INTERRUPT_AGAIN_S)
        if ended.done():
            self._thread.join()

    def stand_aside(self) -> None:
        """Close the connection after the job in progress, and open it again for the first after the fork."""
        self._is_to_leave = True
        self._jobs.put([])

    def _expire(self, job: Job[Any], now: float) -> float:
        """End a job at its deadline; returns when to try again. Runs in the event loop."""
        if job.answer.done():
            return math.inf
        with self._turn:
            if not job.began:
                job.answer.set_exception(self._not_begun(job))
                return math.inf
            if self._running is job and self._connection is not None:
                self._connection.interrupt()
        if now >= job.until + _GRACE_S:
            job.answer.set_exception(NotEnded())
            return math.inf
        # SQLite ignores an interruption between two statements, so it is repeated.
        return now + _INTERRUPT_AGAIN_S

    def _not_begun(self, job: Job[Any]) -> NotBegun:
        return LockedOut() if self._refusals and job.kind is Kind.WRITE else NotBegun()

    # In the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._last or self._writes or self._purges:
                self._serve(self._take())
                if self._is_to_leave:
                    self._is_to_leave = False
                    self._leave()
        finally:
            self._leave()
            self._ended.set_result(None)

    def _enter(self) -> sqlite3.Connection:
        """Open the connection, but not while the process forks."""
        with _GATE:
            _GATE.wait_for(lambda: not _forks)
            _connected.add(self)
        try:
            self._connection = connection = self._connect()
        except BaseException:
            self._leave()
            raise
        return connection

    def _leave(self) -> None:
        """Close the connection, if there is one."""
        with self._turn:
            connection, self._connection = self._connection, None
        try:
            if connection is not None:
                self._disconnect(connection)
        finally:
            with _GATE:
                _connected.discard(self)
                _GATE.notify_all()

    def _take(self) -> list[Job[Any]]:
        """Return all queued jobs; waits for a job, or until the next attempt to take the write lock."""
        if self._refusals:
            # Before Python 3.13, `SimpleQueue.get` with a timeout can wait until the next job comes.
            time.sleep(pause(self._refusals))
        taken: list[Job[Any]] = []
        try:
            jobs = self._jobs.get(block=not (self._writes or self._purges))
        except queue.Empty:
            return taken
        while jobs is not None:
            taken += jobs
            if self._jobs.empty():
                return taken
            jobs = self._jobs.get()
        self._last = True
        return taken

    def _serve(self, taken: Sequence[Job[Any]]) -> None:
        """Run reads, then the writes that one transaction takes, then jobs that run alone."""
        reads: list[Job[Any]] = []
        alone: list[Job[Any]] = []
        for job in taken:
            kind = job.kind
            (reads if kind is Kind.READ else self._writes if kind is Kind.WRITE else alone).append(job)
        deliver([*self._read(reads), *self._write()])
        for job in alone:
            deliver(self._read([job]))
        if self._purges:
            self._purges -= 1
            more = False
            with contextlib.suppress(Exception):
                more = self._purge(self._ready())
            if not more:
                self._purges = 0

    def _ready(self) -> sqlite3.Connection:
        """Return the connection for the next transaction; raises the error that prevents it."""
        connection = self._connection or self._enter()
        self._check()
        return connection

    def _read(self, jobs: Sequence[Job[Any]]) -> list[Job[Any]]:
        """Run jobs outside the transaction of the writes; returns those that are still to be answered."""
        if not jobs:
            return []
        try:
            connection = self._ready()
        except Exception as error:  # noqa: BLE001 -- every error goes to the callers
            return failed(jobs, error)
        ended: list[Job[Any]] = []
        began = time.monotonic()
        for job in jobs:
            self._run_one(connection, job)
            ended.append(job)
            # Many large answers would otherwise wait for each other, and be in memory together.
            if time.monotonic() - began > MAX_SECONDS:
                deliver(ended)
                ended, began = [], time.monotonic()
        return ended

    def _write(self) -> list[Job[Any]]:
        """Run the oldest writes in one transaction, if there are any; returns those that ended."""
        ended: list[Job[Any]] = []
        # Jobs that were cancelled or are late take no lock.
        while self._writes and self._writes[0].cancelled_or_late:
            job = self._writes.popleft()
            job.failure = self._not_begun(job)
            ended.append(job)
        if not self._writes:
            self._refusals = 0
            return ended
        try:
            connection = self._ready()
            connection.execute(statements.BEGIN)
        except Exception as error:  # noqa: BLE001 -- every error goes to the callers
            if is_busy(error):
                self._refusals += 1
                return ended
            return [*ended, *failed(self._withdrawn(), error)]
        self._refusals = 0
        return [*ended, *self._transaction(connection)]

    def _transaction(self, connection: sqlite3.Connection) -> list[Job[Any]]:
        """Run and commit as many writes as one transaction takes; returns those that ended."""
        batch: list[Job[Any]] = []
        try:
            intact = self._fill(connection, batch)
            if intact:
                connection.execute(statements.COMMIT)
            # SQLite rolls back by itself after an interruption or with a full disk.
            elif connection.in_transaction:
                connection.execute(statements.ROLLBACK)
        except Exception as error:  # noqa: BLE001 -- every error goes to the callers
            intact = True
            failed([job for job in batch if job.failure is None], error)
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute(statements.ROLLBACK)
        if not intact:
            self._begin_again([job for job in batch if job.failure is None])
            return [job for job in batch if job.failure is not None]
        self._purges += purging.steps_after(sum(job.size for job in batch), writes=len(batch))
        return batch

    def _fill(self, connection: sqlite3.Connection, batch: list[Job[Any]]) -> bool:
        """Run the oldest writes within the limits; returns whether the transaction can be committed.

        A write that fails after it changed something spoils the transaction. That is rare, and a savepoint
        around each write would make all of them slower.
        """
        began, size = time.monotonic(), 0
        while self._writes and len(batch) < MAX_JOBS:
            job = self._writes[0]
            size += job.size
            late = size > MAX_BYTES or time.monotonic() - began > MAX_SECONDS
            if batch and (late or job.retried or batch[0].retried):
                break
            batch.append(self._writes.popleft())
            changes = connection.total_changes
            self._run_one(connection, job)
            if job.failure is not None and not (
                connection.in_transaction and connection.total_changes == changes
            ):
                return False
        return True

    def _withdrawn(self) -> list[Job[Any]]:
        """Remove and return the waiting writes."""
        writes, self._refusals = list(self._writes), 0
        self._writes.clear()
        return writes

    def _begin_again(self, jobs: Sequence[Job[Any]]) -> None:
        """Put writes whose transaction was rolled back before those that wait, each to run by itself."""
        with self._turn:
            for job in jobs:
                job.began, job.retried = False, True
        self._writes.extendleft(reversed(jobs))

    def _run_one(self, connection: sqlite3.Connection, job: Job[Any]) -> None:
        """Run a job, unless it was cancelled or is late."""
        with self._turn:
            if job.cancelled_or_late:
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


_GATE: Final = threading.Condition()
"""Guards the variables below; held by a thread that forks the process."""

_connected: Final[set[ConnectionThread]] = set()
"""The threads that have a connection, open one or close one."""

_forks: Final[list[int]] = []
"""The threads that fork the process, by their identity. Until they have, no connection is opened."""


def _before_fork() -> None:
    _GATE.acquire()
    _forks.append(threading.get_ident())
    for thread in _connected:
        thread.stand_aside()
    if not _GATE.wait_for(lambda: not _connected, _ASIDE_S):
        logger.warning(
            "sqlite: the process was forked during an operation; the forked one must not use the same file"
        )


def _after_fork_in_parent() -> None:
    _forks.remove(threading.get_ident())
    _GATE.notify_all()
    _GATE.release()


def _after_fork_in_child() -> None:
    _forks.clear()
    _connected.clear()
    _GATE.release()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )

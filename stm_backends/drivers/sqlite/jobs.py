"""Jobs for the thread that owns a connection: their deadlines, their outcomes, and how callers are woken."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import math
import operator
import random
import sqlite3
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

MAX_JOBS: Final = 128
"""Maximum number of writes in one transaction, and of jobs that are put at once."""

LONGEST_PAUSE_S: Final = 0.002
"""The longest pause between two attempts to take a lock. An attempt takes up to 0.1 ms of processor time."""

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})


def is_busy(error: Exception) -> bool:
    """Return whether another connection held a lock, so that the transaction can be retried."""
    return isinstance(error, sqlite3.Error) and primary_code(error) in _BUSY


def primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's result code without its extension."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF


def pause(attempt: int) -> float:
    """Return how long to wait before the next attempt: random, growing, at most `LONGEST_PAUSE_S`."""
    # A free lock goes to the first writer that asks. With long pauses, new writers pass the one that
    # has waited longest, again and again.
    return random.uniform(0, min(0.0002 * 2 ** min(attempt, 4), LONGEST_PAUSE_S))


class NotBegun(Exception):
    """The deadline came, or the thread ended, before the job began; it will never run."""


class LockedOut(NotBegun):
    """The same, because another process held the write lock."""


class NotEnded(Exception):
    """The deadline came, and the job did not end when it was interrupted; it may still succeed."""


class Kind(Enum):
    """The needs of a job: only the connection, a transaction that it may share, or a separate one."""

    READ = "read"
    WRITE = "write"
    ALONE = "alone"


class Job(Generic[T]):
    """A piece of work and its answer. `retried` is true if its first transaction was rolled back."""

    __slots__ = ("answer", "began", "failure", "kind", "result", "retried", "size", "until", "watch", "work")

    def __init__(
        self, work: Callable[[sqlite3.Connection], T], kind: Kind, watch: Watch, until: float, size: int
    ) -> None:
        self.work = work
        self.kind = kind
        self.watch = watch
        self.until = until
        self.size = size
        self.answer: asyncio.Future[T] = watch.loop.create_future()
        self.began = self.retried = False
        self.result: T | None = None
        self.failure: Exception | None = None

    @property
    def cancelled_or_late(self) -> bool:
        return self.answer.done() or self.watch.loop.time() >= self.until


class Watch:
    """The jobs of one event loop that have not ended, and one timer for the earliest of their deadlines.

    `put` gives jobs to the thread. While several are in progress, those of one iteration of the event loop
    are put together at its end, so tasks that were woken together send their next jobs together. `expire` is
    called for a job at its deadline, and returns when to call it again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[list[Job[Any]]], object],
        expire: Callable[[Job[Any], float], float],
    ) -> None:
        self.loop = loop
        self._put = put
        self._expire = expire
        self._unsent: list[Job[Any]] = []
        self._crowded = False
        self._jobs: set[Job[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def add(self, job: Job[Any]) -> None:
        """Send a job to the thread, and watch it until it is answered."""
        self._jobs.add(job)
        if job.until < self._due:
            self._arm(job.until)
        self._unsent.append(job)
        if not self._crowded or len(self._unsent) == MAX_JOBS:
            self.send()
        elif len(self._unsent) == 1:
            self.loop.call_soon(self.send)

    def send(self) -> None:
        """Send the jobs that wait for the end of the iteration."""
        if self._unsent:
            jobs, self._unsent = self._unsent, []
            self._put(jobs)

    def answer(self, jobs: Sequence[Job[Any]]) -> None:
        """Wake the callers of jobs that have ended."""
        for job in jobs:
            self._jobs.discard(job)
            if job.answer.done():
                continue
            if job.failure is None:
                job.answer.set_result(job.result)
            else:
                job.answer.set_exception(job.failure)
        self._crowded = len(jobs) > 1 or bool(self._jobs)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = due, self.loop.call_at(due, self._look)

    def _look(self) -> None:
        now, self._due = self.loop.time(), math.inf
        due = min(
            (self._expire(job, now) if job.until <= now else job.until for job in self._jobs),
            default=math.inf,
        )
        if due < math.inf:
            self._arm(due)


def failed(jobs: Sequence[Job[Any]], error: Exception) -> list[Job[Any]]:
    """Let jobs fail for the same reason, each with an exception that its caller may change."""
    for job in jobs:
        job.failure = copy.copy(error)
    return [*jobs]


def deliver(jobs: Sequence[Job[Any]]) -> None:
    """Wake each event loop once for all of its jobs that ended."""
    for watch, ended in itertools.groupby(jobs, key=operator.attrgetter("watch")):
        # The loop may have been closed without waiting for the answers.
        with contextlib.suppress(RuntimeError):
            watch.loop.call_soon_threadsafe(watch.answer, list(ended))

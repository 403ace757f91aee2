"""Broken SQLite drivers, and broken threads of it; see test_sqlite_restored.py and test_sqlite_batches.py."""

from __future__ import annotations

import os
import sqlite3
from typing import Any
from unittest import mock

from stm_backends.drivers.sqlite import SqliteDriver, files, statements
from stm_backends.drivers.sqlite.jobs import pause
from stm_backends.drivers.sqlite.thread import ConnectionThread


class AnswersTheNextCaller(ConnectionThread):
    """Gives each caller of a transaction the answer of the one before."""

    def _transaction(self, connection: sqlite3.Connection) -> list[Any]:
        ended = super()._transaction(connection)
        results = [job.result for job in ended]
        for job, result in zip(ended, results[-1:] + results[:-1], strict=True):
            job.result = result
        return ended


class RunsAWriteTwice(ConnectionThread):
    """Commits what a spoiled transaction did before it runs those writes again."""

    def _fill(self, connection: sqlite3.Connection, batch: list[Any]) -> bool:
        intact = super()._fill(connection, batch)
        if not intact and connection.in_transaction:
            connection.execute(statements.COMMIT)
        return intact


class AnswersBeforeTheCommit(ConnectionThread):
    """Answers each write when its statements have run."""

    def _run_one(self, connection: sqlite3.Connection, job: Any) -> None:
        super()._run_one(connection, job)
        job.watch.loop.call_soon_threadsafe(job.watch.answer, [job])


class WaitsInTheQueue(ConnectionThread):
    """Waits for the next attempt with a time limit on the queue, which CPython 3.11 and 3.12 may not keep."""

    def _take(self) -> list[Any]:
        if self._refusals:
            self._jobs.get(timeout=pause(self._refusals))
        return super()._take()


class CopiesAStaleLog(SqliteDriver):
    """Closes the connection in the same way whether or not the files are still those that it opened."""

    def _disconnect(self, opened: files.OpenFiles, connection: sqlite3.Connection) -> None:
        del opened
        connection.close()


class LooksBesideTheLink(SqliteDriver):
    """Looks for the write-ahead log beside a symbolic link, and not where the link leads."""

    def _connect(self) -> sqlite3.Connection:
        connection = super()._connect()
        with mock.patch.object(files.os.path, "realpath", os.path.abspath):
            self._files.note()
        return connection


class ReadsInOneThread(SqliteDriver):
    """Reads large records in the thread of all other operations."""

    def _thread_for_large(self) -> ConnectionThread | None:
        return self._thread

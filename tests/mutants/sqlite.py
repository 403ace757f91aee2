"""Threads of the SQLite driver whose shared transactions are broken; see test_sqlite_batches.py."""

from __future__ import annotations

import sqlite3
from typing import Any

from stm_backends.drivers.sqlite import statements
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

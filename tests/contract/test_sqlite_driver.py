"""The SQLite driver keeps the contract."""

import contextlib
import functools
import sqlite3

import pytest

from stm_backends.drivers.contract import Record
from stm_backends.testing import Datastore, DriverContract, FakeClock, open_at

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}

FIND = "WITH found AS (SELECT id, version FROM stm_record WHERE scope = ? AND name = ?)"


class TestSqliteDriver(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        clock, path = FakeClock(), tmp_path / "stm.db"

        def ask(statement, key):
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                return connection.execute(f"{FIND} {statement}", key).fetchall()

        async def damage(key):
            ask("DELETE FROM stm_entry WHERE record IN (SELECT id FROM found) AND seq % 2", key)

        async def peek(key):
            entries = dict(
                ask("SELECT seq, entry FROM stm_entry WHERE record IN (SELECT id FROM found)", key)
            )
            versions = ask("SELECT version FROM found", key)
            body = entries.pop(0, None)
            return Record(*versions[0], body, tuple(entries.values())) if versions else None

        @contextlib.asynccontextmanager
        async def hold(key):
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                yield

        async def transactions():
            # Copies the whole log into the file, unless a transaction is open.
            with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
                return connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

        return Datastore(
            open=functools.partial(open_at, f"sqlite:///{path}", clock=clock, **SMALL),
            pass_time=clock.pass_time,
            tick=60.0,
            damage=damage,
            peek=peek,
            hold=hold,
            transactions=transactions,
            server=f"SQLite {sqlite3.sqlite_version}",
        )


class TestSqliteDriverAsUsersHaveIt(DriverContract):
    """The real clock and the default settings."""

    @pytest.fixture
    def datastore(self, tmp_path):
        opening = functools.partial(open_at, f"sqlite:///{tmp_path}/stm.db")
        return Datastore(open=opening, tick=0.3, histories=5)

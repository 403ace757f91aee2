"""The SQLite driver keeps the contract."""

import contextlib
import functools
import itertools
import sqlite3

import pytest

from stm_backends.drivers.contract import Record
from stm_backends.testing import Datastore, DriverContract, FakeClock, open_at

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}

FIND = "WITH found AS (SELECT id, version FROM stm_record WHERE scope = ? AND name = ?)"

DAMAGES = (
    "INSERT INTO stm_entry SELECT id, next, x'00' FROM stm_record WHERE id IN (SELECT id FROM found)",
    "UPDATE stm_entry SET entry = x'' WHERE record IN (SELECT id FROM found) AND seq > 1",
    "DELETE FROM stm_entry WHERE record IN (SELECT id FROM found) AND seq % 2",
)
"""An entry where the next append puts its own, and fails half done; other sizes; missing entries."""

CUT = """
    UPDATE stm_entry SET entry = substr(entry, 1, length(entry) - 1)
    WHERE (record, seq) IN (SELECT record, max(seq) FROM stm_entry JOIN found ON record = id)"""

STORED = """
    SELECT 'record', id FROM found
    UNION ALL SELECT 'entry', seq FROM stm_entry WHERE record NOT IN (SELECT id FROM stm_record)"""
"""The row of a record, and entries of which no record knows."""


class TestSqliteDriver(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        clock, path = FakeClock(), tmp_path / "stm.db"

        def ask(statement, key):
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                return connection.execute(f"{FIND} {statement}", key).fetchall()

        ways = itertools.cycle(DAMAGES)

        async def damage(key):
            ask(next(ways), key)

        async def cut(key):
            ask(CUT, key)

        async def stored(key):
            return ask(STORED, key)

        @contextlib.asynccontextmanager
        async def outage():
            path.rename(tmp_path / "away")
            yield
            (tmp_path / "away").rename(path)

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
            cut=cut,
            stored=stored,
            outage=outage,
            peek=peek,
            hold=hold,
            transactions=transactions,
            server=f"SQLite {sqlite3.sqlite_version}",
        )


@pytest.mark.full
class TestSqliteDriverAsUsersHaveIt(DriverContract):
    """The real clock and the default settings."""

    @pytest.fixture
    def datastore(self, tmp_path):
        opening = functools.partial(open_at, f"sqlite:///{tmp_path}/stm.db")
        return Datastore(open=opening, tick=0.3, histories=5)

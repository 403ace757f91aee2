"""One SQLite file that all pods open."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.stands import Fault
from tests.chaos.stands.disk import Disk

_INDEX = (
    "stm_record_expires",
    "CREATE INDEX IF NOT EXISTS stm_record_expires ON stm_record (expires) WHERE expires IS NOT NULL",
)


class SqliteStand:
    """A file on a file system of its own, which can be full."""

    name = "sqlite"
    programs = ()
    pooled = 0

    def __init__(self, folder: Path) -> None:
        self._disk = Disk(folder / "disk", 64)
        self._file = folder / "disk" / "chaos.db"
        self.url = self.direct_url = f"sqlite:///{self._file}"
        self.doubts: list[tuple[float, float]] = []
        self.versions: Mapping[str, str] = {"sqlite": sqlite3.sqlite_version}

    async def start(self) -> None:
        self._disk.open()

    async def stop(self) -> None:
        self._disk.close()

    def faults(self) -> Mapping[str, Fault]:
        faults: dict[str, Fault] = {
            # As a backup or a person at a prompt does, for as long as the fault is held.
            "locked": partial(self._doing, "BEGIN IMMEDIATE"),
            "checkpoint": partial(self._doing, "PRAGMA wal_checkpoint(TRUNCATE)"),
            "vacuum": partial(self._doing, "VACUUM"),
            "index-rebuilt": partial(
                self._doing, f"BEGIN IMMEDIATE; DROP INDEX {_INDEX[0]}; {_INDEX[1]}; COMMIT"
            ),
            "schema-migrated": self._migrate,
            # A reader that stays keeps the log of writes from starting over.
            "long-read": partial(self._doing, "BEGIN; SELECT count(*) FROM sqlite_master"),
        }
        return {**faults, "disk-full": self._full} if self._disk.can_fill else faults

    @contextlib.asynccontextmanager
    async def _doing(
        self, statements: str, chance: random.Random, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        with closing(await asyncio.to_thread(self._connect)) as connection:
            yield {"acted": await asyncio.to_thread(_attempt, connection, statements)}

    @contextlib.asynccontextmanager
    async def _migrate(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Give a table a column of a later layout, or take it away: statements are prepared again."""
        with closing(await asyncio.to_thread(self._connect)) as connection:
            done = False
            for change in ("ADD COLUMN later TEXT", "DROP COLUMN later"):
                statement = f"ALTER TABLE stm_record {change}"
                done = done or await asyncio.to_thread(_attempt, connection, statement)
            yield {"acted": done}

    @contextlib.asynccontextmanager
    async def _full(self, chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        free = await asyncio.to_thread(self._disk.fill)
        try:
            yield {"bytes": free}
        finally:
            await asyncio.to_thread(self._disk.free)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=3.0, check_same_thread=False, isolation_level=None)


stand = SqliteStand


def _attempt(connection: sqlite3.Connection, statements: str) -> bool:
    try:
        for statement in statements.split(";"):
            connection.execute(statement).fetchall()
    except sqlite3.OperationalError:
        return False
    return True

"""The five operations on DuckDB, an SQL database in one process, by optimistic transactions.

Nobody waits for a lock here. Two transactions that change the same row meet a conflict, one of them is rolled
back, and it begins again from what the other has committed. Several threads work at once, and each has a
connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from urllib.parse import SplitResult, unquote

import duckdb

from stm_backends import ConfigurationError, Corrupt, OutcomeUnknown, Unavailable
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Settings, Traits, setting
from stm_backends.drivers.checks import require_drop, require_limit, require_rewrite, require_ttl
from stm_backends.drivers.edge import Edge
from stm_backends.drivers.home import Home

MIB = 1024 * 1024
PURGE_CHANCE = 1 / 16

# The row of the record holds everything that decisions depend on, and each write changes it. So writers of
# the same record always meet in that row.
SCHEMA = """
CREATE SEQUENCE IF NOT EXISTS stm_id;
CREATE TABLE IF NOT EXISTS stm_record (
    scope BLOB, name BLOB, id BIGINT, version VARCHAR, body BLOB, expires DOUBLE,
    first BIGINT, next BIGINT, size BIGINT, PRIMARY KEY (scope, name)
);
CREATE TABLE IF NOT EXISTS stm_entry (record BIGINT, seq BIGINT, entry BLOB);
"""


FIND = """
SELECT id, version, expires IS NULL OR expires > ?, expires, first, next, size
FROM stm_record WHERE scope = ? AND name = ?"""

BODY = "SELECT body FROM stm_record WHERE id = ?"

TAIL = "SELECT entry FROM stm_entry WHERE record = ? AND seq >= ? ORDER BY seq"

SCAN = """
SELECT name FROM stm_record WHERE scope = ? AND name > ? AND (expires IS NULL OR expires > ?)
ORDER BY name LIMIT ?"""

CREATE = """
INSERT INTO stm_record VALUES (?, ?, nextval('stm_id'), ?, NULL, NULL, 0, 0, 0) RETURNING id"""

ADD = "INSERT INTO stm_entry VALUES (?, ?, ?)"

APPENDED = "UPDATE stm_record SET expires = ?, next = next + 1, size = size + ? WHERE id = ?"

DROP = "DELETE FROM stm_entry WHERE record = ? AND seq < ?"

REWRITE = "UPDATE stm_entry SET entry = ? WHERE record = ? AND seq = ?"

REPLACED = "UPDATE stm_record SET version = ?, body = ?, expires = ?, first = ?, size = ? WHERE id = ?"

# DuckDB sees a conflict between two updates, and none between an update and a delete: a delete updates first.
# To another value, because an update that changes nothing is none: a later write would meet no conflict.
DELETE = (
    "UPDATE stm_record SET size = -1 WHERE id = ?",
    "DELETE FROM stm_entry WHERE record = ?",
    "DELETE FROM stm_record WHERE id = ?",
)

PURGE = "SELECT id FROM stm_record WHERE expires <= ? LIMIT 10"

CONFLICTS = (duckdb.TransactionException, duckdb.ConstraintException)
"""The transaction was rolled back: another one has changed or created the same row."""


@dataclass(frozen=True, kw_only=True)
class DuckSettings(Settings):
    backend: ClassVar = "duck"
    url_schemes: ClassVar = ("duck",)

    path: str = setting("", query=False)
    threads: int = 4
    max_entry_bytes: int = MIB
    max_record_bytes: int = 8 * MIB

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        if parts.netloc or not parts.path[1:]:
            raise ConfigurationError("name a file: duck:///relative/file or duck:////absolute/file")
        return {"path": unquote(parts.path[1:])}


class Found(NamedTuple):
    """What a transaction finds under a key; it counts only if `alive`."""

    id: int
    version: str
    alive: bool
    expires: float | None
    first: int
    next: int
    size: int


class DuckDriver:
    """One file of one process."""

    name = "duck"

    def __init__(self, settings: DuckSettings, *, create: bool = False) -> None:
        self._settings, self._create = settings, create
        self._database: duckdb.DuckDBPyConnection | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self.traits = Traits(
            reach="process",
            clock="host",
            durability="survives the death of the process, and a power failure",
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=1_000_000,
            deadline=settings.deadline_s,
        )
        self._home = Home(self._start_over)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    async def open(self) -> None:
        self._home.enter()
        if self._database is None:
            self._database = await self._edge.run("open", self._connect)
            self._threads = ThreadPoolExecutor(self._settings.threads, "stm-duck")

    async def _connect(self) -> duckdb.DuckDBPyConnection:
        # The connections of a process to the same file share one database.
        database = duckdb.connect(self._settings.path)
        if self._create:
            database.execute(SCHEMA)
        return database

    async def close(self) -> None:
        if not self._home.may_close():
            return
        database, self._database = self._database, None
        if database is not None:
            # In one piece, because a close that is cancelled ends only its own waiting.
            loop = asyncio.get_running_loop()
            await asyncio.shield(loop.run_in_executor(None, self._end, database))
        self._home.leave()

    def _start_over(self) -> None:
        pass  # nothing here belongs to an event loop: the threads serve one after the other

    def _end(self, database: duckdb.DuckDBPyConnection) -> None:
        self._threads.shutdown()
        database.close()

    async def load(self, key: Key) -> Record | None:
        def work(cursor, now: float) -> Record | None:
            found = find(cursor, key, now)
            if found is None or not found.alive:
                return None
            return Record(found.version, *content(cursor, found))

        return await self._run("load", work)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        require_ttl(ttl)
        self._edge.require_fits("append", "entry", len(entry))

        def work(cursor, now: float) -> int:
            found = find(cursor, key, now)
            if found is None or not found.alive:
                found = create(cursor, key, found, initial_version)
            self._edge.require_fits("append", "record", found.size + len(entry))
            cursor.execute(ADD, [found.id, found.next, entry])
            cursor.execute(APPENDED, [None if ttl is None else now + ttl, len(entry), found.id])
            return found.next + 1 - found.first

        return await self._run("append", work)

    async def replace(
        self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, rewrite=(), ttl
    ) -> bool:
        require_ttl(ttl)
        require_drop(drop, expect)
        if rewrite:
            require_rewrite(rewrite, drop, expect, self.traits, backend=self.name)
        self._edge.require_fits("replace", "entry", len(body))

        def work(cursor, now: float) -> bool:
            found = find(cursor, key, now)
            alive = found is not None and found.alive
            if alive and found.version == version:
                return True
            if isinstance(expect, str):
                enough = alive and max(drop, len(rewrite)) <= found.next - found.first
                if not enough or found.version != expect:
                    return False
                content(cursor, found)  # what is damaged stays so, and is not counted again below
                first = found.first + drop
            elif expect is ABSENT and alive:
                return False
            else:
                kept = found.expires if alive else None
                found = create(cursor, key, found, version)._replace(expires=kept)
                first = 0
            for seq, entry in enumerate(rewrite, first):
                cursor.execute(REWRITE, [entry, found.id, seq])
            cursor.execute(DROP, [found.id, first])
            rest = cursor.execute(TAIL, [found.id, first]).fetchall()
            size = sum((len(entry) for (entry,) in rest), len(body))
            self._edge.require_fits("replace", "record", size)
            expires = found.expires if ttl is KEEP else None if ttl is None else now + ttl
            cursor.execute(REPLACED, [version, body, expires, first, size, found.id])
            return True

        return await self._run("replace", work)

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        def work(cursor, now: float) -> bool:
            found = find(cursor, key, now)
            if found is None or not found.alive or expect not in (ANY, found.version):
                return False
            remove(cursor, found.id)
            return True

        return await self._run("delete", work)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)

        def work(cursor, now: float) -> Page:
            rows = cursor.execute(SCAN, [scope.encode(), after.encode(), now, limit + 1]).fetchall()
            names = [name.decode() for (name,) in rows]
            return Page(tuple(names[:limit]), names[limit - 1] if len(names) > limit else None)

        return await self._run("scan", work)

    async def _run(self, operation: str, work: Callable[[Any, float], Any]) -> Any:
        database = self._database
        if database is None:
            raise self._edge.not_open(operation)
        until = time.monotonic() + self._settings.deadline_s / 2

        def transact() -> Any:
            if not hasattr(self._local, "cursor"):
                self._local.cursor = database.cursor()
            cursor = self._local.cursor
            while True:
                try:
                    with transaction(cursor):
                        # A new time for each attempt: expiry is judged in the transaction that counts.
                        return work(cursor, time.time())
                except CONFLICTS:
                    if time.monotonic() > until:
                        raise Unavailable("other writers changed the record again and again") from None
                    time.sleep(random.uniform(0, 0.01))

        def act() -> Any:
            answer = transact()
            if operation not in ("load", "scan") and random.random() < PURGE_CHANCE:
                with contextlib.suppress(duckdb.Error), transaction(self._local.cursor):
                    for (row,) in self._local.cursor.execute(PURGE, [time.time()]).fetchall():
                        remove(self._local.cursor, row)
            return answer

        loop = asyncio.get_running_loop()
        return await self._edge.run(operation, lambda: loop.run_in_executor(self._threads, act))


@contextlib.contextmanager
def transaction(cursor) -> Iterator[None]:
    """Commit what the block does, or roll it back if it raises."""
    cursor.begin()
    try:
        yield
        cursor.commit()
    except BaseException:
        with contextlib.suppress(duckdb.Error):
            cursor.rollback()  # a commit that failed has done so already
        raise


def find(cursor, key: Key, now: float) -> Found | None:
    rows = cursor.execute(FIND, [now, key.scope.encode(), key.name.encode()]).fetchall()
    return Found(*rows[0]) if rows else None


def content(cursor, found: Found) -> tuple[bytes | None, tuple[bytes, ...]]:
    """Return body and tail; raises `Corrupt` if they are not what the row says."""
    ((body,),) = cursor.execute(BODY, [found.id]).fetchall()
    tail = tuple(entry for (entry,) in cursor.execute(TAIL, [found.id, found.first]).fetchall())
    if len(tail) != found.next - found.first or sum(map(len, tail), len(body or b"")) != found.size:
        raise Corrupt("a part of the record is missing")
    return body, tail


def create(cursor, key: Key, old: Found | None, version: str) -> Found:
    """Put a new record in the place of an old one, if there is one, whatever belonged to that."""
    if old is not None:
        remove(cursor, old.id)
    ((row,),) = cursor.execute(CREATE, [key.scope.encode(), key.name.encode(), version]).fetchall()
    return Found(row, version, True, None, 0, 0, 0)


def remove(cursor, row: int) -> None:
    for statement in DELETE:
        cursor.execute(statement, [row])


def meaning(error: Exception):
    if isinstance(error, (duckdb.IOException, duckdb.CatalogException)):
        return Unavailable, "the file cannot be used, or lacks its tables: open it with create=True"
    return (OutcomeUnknown, "DuckDB failed") if isinstance(error, duckdb.Error) else None


async def open_duck(url: str) -> DuckDriver:
    """Return an open driver; what `Datastore.open` calls."""
    driver = DuckDriver(DuckSettings.from_url(url), create=True)
    await driver.open()
    return driver

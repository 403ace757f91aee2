"""The five operations on MariaDB; each is one statement or one transaction."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import asyncmy
from asyncmy.errors import MySQLError

from stm_backends import ConfigurationError, Corrupt, OutcomeUnknown, Unavailable
from stm_backends.drivers import ABSENT, ANY, KEEP, Key, Page, Record, Traits
from stm_backends.drivers.checks import (
    LONGEST_S,
    require_append,
    require_last,
    require_limit,
    require_replace,
)
from stm_backends.drivers.edge import ConcurrencyLimit, Edge
from stm_backends.drivers.home import Home
from stm_backends_mariadb import statements as sql
from stm_backends_mariadb.errors import DEADLOCK, MISSING, RETRIED, code_of, meaning
from stm_backends_mariadb.settings import MariadbSettings

PAUSES_S = (0.01, 0.05, 0.2, 0.5)
PURGE_CHANCE = 1 / 16
LARGEST_PAGE = 10_000
COMMIT_BY = 0.8
"""The share of the deadline within which a transaction must reach its `COMMIT`."""


class Found(NamedTuple):
    """A row of `stm_record` that this transaction has locked."""

    id: int
    version: bytes
    alive: int
    first: int
    next: int
    size: int
    body: int


class NotCommitted(Exception):
    """A transaction failed before it was committed, so it changed nothing; `__cause__` is the reason."""


class MariadbDriver:
    """The five operations on the two tables of one database."""

    name = "mariadb"

    def __init__(self, settings: MariadbSettings, *, create: bool = False) -> None:
        self._settings, self._create = settings, create
        self._start_over()
        self.traits = Traits(
            reach="network",
            clock="server",
            durability="survives a crash of the server, with its default innodb_flush_log_at_trx_commit=1",
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=1_000_000,
            deadline=settings.deadline_s,
        )
        self._home = Home(self._start_over)
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning, home=self._home)

    async def open(self) -> None:
        await self._home.open(self._begin, self._end)

    async def close(self) -> None:
        await self._home.close(self._end)

    async def _begin(self) -> None:
        settings, half = self._settings, self._settings.deadline_s / 2
        self._limit = ConcurrencyLimit(settings.pool_size, patience_s=half)
        self._pool = await asyncmy.create_pool(
            minsize=0,
            maxsize=settings.pool_size,
            host=settings.host,
            port=settings.port,
            user=settings.user,
            password=settings.password,
            database=settings.database,
            connect_timeout=half,
            pool_recycle=300,
            autocommit=True,
            binary_prefix=True,
            init_command=sql.SESSION.format(seconds=max(1, math.ceil(half))),
        )
        await self._edge.run("open", self._make_ready)

    async def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.deadline_s):
                    await self._limit.drain()
            pool.terminate()
            await pool.wait_closed()

    def _start_over(self) -> None:
        self._pool: Any = None  # the pool and the limit belong to one event loop

    async def _make_ready(self) -> None:
        async with self._session("open") as cursor:
            try:
                await cursor.execute(sql.READY)
            except MySQLError as error:
                if not self._create or code_of(error) != MISSING:
                    raise
                for statement in sql.SCHEMA:
                    await cursor.execute(statement)
                await cursor.execute(sql.READY)
            # A statement carries an entry with each quote and backslash escaped: twice its size at most.
            if (await cursor.fetchone())[0] < 2 * self.traits.max_entry + 8_192:
                raise ConfigurationError(
                    "max_entry_bytes is more than half of the server's max_allowed_packet"
                )

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        require_last(last)
        rows = await self._read("load", sql.LOAD, key_bytes(key))
        if not rows:
            return None
        version, body, length, size, _ = rows[0]
        tail = tuple(entry for *_, entry in rows if entry is not None)
        if len(tail) != length or sum(map(len, tail), len(body or b"")) != size:
            raise Corrupt("a part of the record is missing", backend=self.name, operation="load")
        return Record(version.decode(), body, tail).newest(last)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        require_limit(limit)
        limit = min(limit, LARGEST_PAGE)
        rows = await self._read("scan", sql.SCAN, (scope.encode(), after.encode(), limit + 1))
        names = tuple(name.decode() for (name,) in rows[:limit])
        return Page(names, names[-1] if len(rows) > limit else None)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl) -> int:
        require_append(entry, ttl, self.traits, backend=self.name)

        async def work(cursor) -> int:
            found = await self._find(cursor, key, create=True)
            version, first, size = initial_version, found.next, len(entry)
            if found.alive:
                version, first, size = found.version, found.first, size + found.size
            self._edge.require_fits("append", "record", size)
            await cursor.execute(sql.ADD, (found.id, found.next, entry))
            row = (version, found.alive, first, found.next + 1, size, microseconds(ttl), found.id)
            await cursor.execute(sql.APPENDED, row)
            return found.next + 1 - first

        return await self._write("append", work)

    async def replace(
        self, key: Key, body: bytes, *, version: str, expect, drop: int = 0, rewrite=(), ttl
    ) -> bool:
        require_replace(body, rewrite, drop, expect, ttl, self.traits, backend=self.name)
        going = drop or len(rewrite)

        async def work(cursor) -> bool:
            found = await self._find(cursor, key, create=not isinstance(expect, str))
            alive = found is not None and found.alive
            if alive and found.version == version.encode():
                return True
            if isinstance(expect, str):
                if not alive or found.version != expect.encode() or going > found.next - found.first:
                    return False
            elif expect is ABSENT and alive:
                return False
            first, size = found.next, len(body)
            if isinstance(expect, str):
                first = found.first + going
                await cursor.execute(sql.TAIL, (first, found.id, found.first))
                length, stored, staying = await cursor.fetchone()
                if length != found.next - found.first or found.body + stored != found.size:
                    raise Corrupt("a part of the record is missing", backend=self.name, operation="replace")
                size += staying + sum(map(len, rewrite))
            self._edge.require_fits("replace", "record", size)
            await cursor.execute(sql.DROP, (found.id, first))
            if rewrite:
                first = found.first
                for seq, entry in enumerate(rewrite, first):
                    await cursor.execute(sql.ADD, (found.id, seq, entry))
            kept = alive and ttl is KEEP
            await cursor.execute(
                sql.REPLACED, (version, body, first, size, kept, microseconds(ttl), found.id)
            )
            return True

        return await self._write("replace", work)

    async def delete(self, key: Key, *, expect=ANY) -> bool:
        async def work(cursor) -> bool:
            found = await self._find(cursor, key)
            if found is None or not found.alive or not (expect is ANY or found.version == expect.encode()):
                return False
            await cursor.execute(sql.DELETE, (found.id,))
            return True

        return await self._write("delete", work)

    async def _find(self, cursor, key: Key, *, create: bool = False) -> Found | None:
        """Lock the record's row, and return what it holds once the lock is granted."""
        if not await cursor.execute(sql.LOCK, key_bytes(key)) and create:
            await cursor.execute(sql.CREATE, key_bytes(key))
        await cursor.execute(sql.FIND, key_bytes(key))
        row = await cursor.fetchone()
        return None if row is None else Found(*row)

    @contextlib.asynccontextmanager
    async def _session(self, operation: str) -> AsyncIterator[Any]:
        """Lend a connection of the pool; close it if the block raises or is cancelled."""
        pool = self._pool
        if pool is None:
            raise self._edge.not_open(operation)
        async with self._limit:
            connection = await pool.acquire()
            try:
                yield connection.cursor()
            except BaseException:
                connection.close()
                raise
            finally:
                pool.release(connection)

    async def _read(self, operation: str, statement: str, arguments: tuple[object, ...]) -> Any:
        async def work() -> Any:
            async with self._session(operation) as cursor:
                await cursor.execute(statement, arguments)
                return await cursor.fetchall()

        return await self._edge.run(operation, work)

    async def _write(self, operation: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def transact() -> Any:
            until = asyncio.get_running_loop().time() + self._settings.deadline_s * COMMIT_BY
            pauses = iter(PAUSES_S)
            while True:
                try:
                    return await self._transact(operation, work, until)
                except NotCommitted as failure:
                    cause, pause = failure.__cause__, next(pauses, None)
                    if pause is None or code_of(cause) not in RETRIED:
                        kind, message = meaning(cause)
                        raise (Unavailable if kind is OutcomeUnknown else kind)(message) from cause
                    await asyncio.sleep(random.uniform(pause / 2, pause))

        return await self._edge.run(operation, transact)

    async def _transact(self, operation: str, work: Callable[[Any], Awaitable[Any]], until: float) -> Any:
        """Run `work` in one transaction; raises `NotCommitted` if it was certainly not committed."""
        committing = False
        try:
            async with asyncio.timeout_at(until) as before_commit, self._session(operation) as cursor:
                if random.random() < PURGE_CHANCE:
                    with contextlib.suppress(MySQLError):
                        await cursor.execute(sql.PURGE)
                await cursor.execute("START TRANSACTION")
                answer = await work(cursor)
                before_commit.reschedule(None)  # from here on, the deadline of the whole operation applies
                committing = bool(answer)
                await cursor.execute("COMMIT" if answer else "ROLLBACK")
                return answer
        except (MySQLError, OSError) as error:
            if committing and code_of(error) != DEADLOCK:
                raise  # perhaps committed; a cluster may report a deadlock here, and then it was not
            raise NotCommitted from error


def key_bytes(key: Key) -> tuple[bytes, bytes]:
    return key.scope.encode(), key.name.encode()


def microseconds(ttl) -> int | None:
    return None if ttl is None or ttl is KEEP else max(1, round(min(ttl, LONGEST_S) * 1_000_000))

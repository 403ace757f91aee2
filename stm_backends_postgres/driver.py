"""The PostgreSQL driver: each operation one statement, on the tables of one schema."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.drivers.checks import LONGEST_S, require_drop, require_limit, require_ttl
from stm_backends.drivers.contract import (
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    Expect,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)
from stm_backends.drivers.edge import Edge
from stm_backends.errors import ConfigurationError, Corrupt, located
from stm_backends_postgres.cleaning import Cleaner
from stm_backends_postgres.client import (
    Connection,
    Pool,
    Row,
    make_client,
    require_client,
    require_same_loop,
)
from stm_backends_postgres.errors import is_spent, meaning, unsent
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_postgres.statements import Statements
from stm_backends_postgres.tables import make_ready

T = TypeVar("T")

logger = logging.getLogger("stm_backends")

_PURGE_EVERY: Final = 16
"""On average, one write in this many is followed by a removal of expired records."""

_MAX_PAGE: Final = 10_000

_DURABILITY: Final = {
    "off": "survives the death of any client; a crash of the server may lose the last moments",
    "local": "survives a crash of the server, but perhaps not the loss of the primary",
    "remote_write": "survives a crash of the server, and of its synchronous standbys' PostgreSQL",
    "on": "survives a crash of the server, and the loss of the primary if it has synchronous standbys",
    "remote_apply": "survives a crash of the server, and can be read on its synchronous standbys",
    None: "as `synchronous_commit` has it, which the role, the database or the pool sets",
}


class PostgresDriver:
    """The five operations on the tables of one schema.

    A `client` that is handed in, an `asyncpg.Pool`, is never closed here, and works without `open()`: the
    first operation checks it. Without one, `open()` makes a pool and `close()` closes it. `create=True` lets
    `open` set the tables up, or bring them up to date.
    """

    name = "postgres"

    def __init__(
        self, settings: PostgresSettings, *, client: object | None = None, create: bool = False
    ) -> None:
        self._settings = settings
        self._create = create
        self._own = client is None
        self._pool = self._given = None if client is None else require_client(client)
        self._is_ready = False
        self._opening = asyncio.Lock()
        self._releasing: set[asyncio.Task[None]] = set()
        self._has_warned = False
        self._statements = Statements(settings.schema)
        self._cleaner = Cleaner(self._purge_step, self._sweep_step)
        ours = self._own and not settings.pgbouncer
        self.traits = Traits(
            reach="network",
            clock="server",
            durability=_DURABILITY[settings.synchronous_commit or "on" if ours else None],
            max_entry=settings.max_entry_bytes,
            max_record=settings.max_record_bytes,
            max_drop=settings.max_record_bytes,
            deadline=settings.deadline_s,
        )
        self._edge = Edge(backend=self.name, traits=self.traits, meaning=meaning)

    async def open(self) -> None:
        """Connect, and check the tables, or set them up if `create` is set. Twice is harmless.

        Raises `Unavailable` if the tables do not exist or the server is a standby, and `ConfigurationError`
        if the tables, the role or the connections do not match the settings.
        """
        async with self._opening:
            if self._is_ready:
                return
            self._pool = self._given or await make_client(self._settings)
            try:
                await self._make_ready(self._pool)
            except exceptions.ClientConfigurationError as error:
                await self.close()
                # Its message names hosts, files and modes, and never the password.
                raise ConfigurationError(f"asyncpg cannot connect with these settings: {error}") from error
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Close the pool unless it was handed in. Twice is harmless.

        Waits for operations in progress, and for a purge, at most one deadline each.
        """
        await self._cleaner.close(self._settings.deadline_s)
        pool, self._pool, self._is_ready = self._pool, None, False
        if pool is None or not self._own:
            return
        # When its `close` is cancelled, a pool ends its connections at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.deadline_s):
                await pool.close()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def load(self, key: Key) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        rows = await self._ask("load", self._statements.load, *key)
        if not rows:
            return None
        version, body, length, size, _ = rows[0].values()
        tail = tuple(row["entry"] for row in rows if row["entry"] is not None)
        if len(tail) != length or sum(map(len, tail), len(body or b"")) != size:
            raise Corrupt("a part of the record is missing", backend=self.name, operation="load")
        return Record(version, body, tail)

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; the version stays, the time to live is reset."""
        require_ttl(ttl)
        self._edge.require_fits("append", "entry", len(entry))
        limit = self.traits.max_record
        (row,) = await self._ask(
            "append", self._statements.append, *key, initial_version, entry, _seconds(ttl), limit
        )
        if row["length"] is None:
            # The size comes from the snapshot; the size that caused the refusal may be newer.
            self._edge.require_fits("append", "record", max((row["size"] or 0) + len(entry), limit + 1))
        self._clean_after(row)
        return row["length"]

    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        ttl: float | None | KeepType,
    ) -> bool:
        """Store a body and its version if the record is what the caller expects."""
        require_ttl(ttl)
        require_drop(drop, expect)
        self._edge.require_fits("replace", "entry", len(body))
        what = (*key, version, body, _seconds(ttl))
        if isinstance(expect, Expect):
            (row,) = await self._ask("replace", self._statements.store, *what, expect is ANY, ttl is KEEP)
            self._clean_after(row)
            return row["stored"]
        limit = self.traits.max_record
        rows = await self._ask("replace", self._statements.fold, *what, drop, ttl is KEEP, expect, limit)
        for row in rows:
            if row["may"] and not row["stored"]:
                self._edge.require_fits("replace", "record", row["size"])
            self._clean_after(row)
            return row["stored"]
        return False

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`; returns whether it did.

        The rows of a record of more than 1,000 entries or 16 MiB are removed in steps, after the answer.
        """
        version = None if expect is ANY else expect
        rows = await self._ask("delete", self._statements.delete, *key, version)
        if any(row["unfinished"] for row in rows):
            self._cleaner.purge()
        return any(row["alive"] for row in rows)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        require_limit(limit)
        limit = min(limit, _MAX_PAGE)
        rows = await self._ask("scan", self._statements.scan, scope, after, limit + 1)
        names = tuple(row["name"] for row in rows[:limit])
        return Page(names, names[-1] if len(rows) > limit else None)

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records from the tables; returns how many.

        Each statement removes one record, or 1,000 entries of a larger one.
        """
        require_limit(limit)
        removed = 0
        while removed < limit:
            step = await self._purge_step()
            if step is None:
                break
            removed += step
        return removed

    async def _purge_step(self) -> int | None:
        """Return how many records one step removed; `None` if there was nothing to remove."""
        rows = await self._ask("purge", self._statements.purge)
        return rows[0]["purged"] if rows else None

    async def _sweep_step(self, record: int) -> bool:
        """Remove entries below the bounds of a record's tail; returns whether any are left."""
        (row,) = await self._ask("purge", self._statements.sweep, record)
        return row["unswept"] is not None

    def _clean_after(self, row: Row) -> None:
        """Start the removal of what a write has left and, at random, of expired records."""
        if row["unswept"] is not None:
            self._cleaner.sweep(row["unswept"])
        if _is_purging():
            self._cleaner.purge()

    async def _ask(self, operation: str, statement: str, *arguments: object) -> list[Row]:
        """Send one statement; returns the rows of its answer."""
        return await self._run(operation, lambda connection: connection.fetch(statement, *arguments))

    async def _run(self, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        """Use a connection of the pool, within the deadline."""
        pool = self._pool
        if pool is None:
            raise self._edge.not_open(operation)
        if not self._is_ready:
            # A pool that was handed in may be used without `open()`, so the check of `open()` is made here.
            # Waiting for the check of another operation counts towards the deadline.
            await self._edge.run("open", lambda: self._first_look(pool))
        return await self._send(pool, operation, send)

    async def _first_look(self, pool: Pool) -> None:
        async with self._opening:
            if not self._is_ready:
                await self._make_ready(pool)

    async def _make_ready(self, pool: Pool) -> None:
        """Check that this server, role and tables can be used; may set the tables up."""

        async def send(use: Callable[[Connection], Awaitable[T]]) -> T:
            return await self._send(pool, "open", use)

        with located(self.name, "open"):
            await make_ready(send, self._settings, self._statements, create=self._create)
        self._is_ready = True

    async def _send(self, pool: Pool, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        require_same_loop(pool)
        return await self._edge.run(operation, lambda: self._borrow(pool, operation, send))

    async def _borrow(self, pool: Pool, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        try:
            return await self._use(pool, operation, send)
        except exceptions.PostgresError as error:
            if not is_spent(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                _, message = meaning(error) or (None, "")
                logger.warning("postgres: reconnecting: %s", message)
        # The server refused the statement, so it was not done. The other connections go to the same server.
        await pool.expire_connections()
        return await self._use(pool, operation, send)

    async def _use(self, pool: Pool, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        patience = self._settings.deadline_s
        try:
            # The other half of the deadline is for the statement.
            connection = await pool.acquire(timeout=patience / 2)
        except Exception as error:
            ours = unsent(error, operation)
            if ours is None:
                raise
            raise ours from error
        try:
            answer = await send(connection)
        except BaseException:
            # Stopping the server may take a cancel request that is not answered, so do not wait for it.
            self._release_later(pool, connection)
            raise
        await pool.release(connection, timeout=patience)
        return answer

    def _release_later(self, pool: Pool, connection: Connection) -> None:
        async def release() -> None:
            # If this fails, the pool has ended the connection, and makes another when it needs one.
            with contextlib.suppress(Exception):
                await pool.release(connection, timeout=self._settings.deadline_s)

        task = asyncio.get_running_loop().create_task(release(), name="stm-postgres-release")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)


def _seconds(ttl: float | None | KeepType) -> float | None:
    """Return a time to live for the statements; `KEEP` on an absent record never expires."""
    return None if ttl is None or ttl is KEEP else min(float(ttl), LONGEST_S)


def _is_purging() -> bool:
    # Random instead of counted, so that short-lived processes remove expired records too.
    return random.random() * _PURGE_EVERY < 1

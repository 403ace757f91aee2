"""The PostgreSQL driver: each operation one statement, on the tables of one schema."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeVar

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.checks import LONGEST_S, not_open, require_drop, require_fits, require_limit, require_ttl
from stm_backends.driver import (
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
from stm_backends.edge import Edge
from stm_backends.errors import ConfigurationError, Corrupt, TooLarge, Unavailable
from stm_backends_postgres import statements
from stm_backends_postgres.errors import MISSING, meaning, unsent
from stm_backends_postgres.pool import (
    Connection,
    Pool,
    Row,
    make_pool,
    require_pool,
    require_same_loop,
)
from stm_backends_postgres.settings import PostgresSettings
from stm_backends_postgres.statements import Statements

T = TypeVar("T")

_PURGE_EVERY: Final = 16
"""One write in so many, by chance, removes up to twice as many expired records."""

_MAX_PAGE: Final = 10_000

_DURABILITY: Final = {
    "off": "survives the death of any client; a crash of the server may take the last moments",
    "local": "survives a crash of the server, but perhaps not the loss of the primary",
    "remote_write": "survives a crash of the server, and of its synchronous standbys' PostgreSQL",
    "on": "survives a crash of the server, and the loss of the primary if it has synchronous standbys",
    "remote_apply": "survives a crash of the server, and can be read on its synchronous standbys",
    None: "as `synchronous_commit` has it that the role, the database or the pool is given",
}


class PostgresDriver:
    """The five operations on the tables of one schema.

    `client` is an `asyncpg.Pool` of the caller's: it is used as it is, never closed, and needs no `open()`.
    Without one, `open()` makes a pool and `close()` closes it. `create=True` has `open()` set the tables up.
    Of a pool that was handed in only `schema`, `row_security`, `deadline_s` and the limits are ours to set.
    """

    name = "postgres"

    def __init__(
        self, settings: PostgresSettings, *, client: object | None = None, create: bool = False
    ) -> None:
        self._settings = settings
        self._create = create
        self._own = client is None
        self._pool = self._handed_in = None if client is None else require_pool(client)
        self._opening = asyncio.Lock()
        self._releasing: set[asyncio.Task[None]] = set()
        self._statements = Statements(settings.schema)
        self._edge = Edge(backend=self.name, deadline_s=settings.deadline_s, meaning=meaning)
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

    async def open(self) -> None:
        """Connect, and see that the tables are there, or set them up if told to. Twice is harmless.

        Raises `Unavailable` if the tables are not there, and `ConfigurationError` if they are not such as
        the settings say.
        """
        async with self._opening:
            if self._pool is not None and self._own:
                return
            self._pool = self._handed_in or await make_pool(self._settings)
            try:
                await self._see_to_tables()
            except exceptions.ClientConfigurationError as error:
                await self.close()
                # It speaks of hosts, files and modes; the password is no part of what it says.
                raise ConfigurationError(f"asyncpg cannot connect as told: {error}") from error
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Close the pool if it is ours; one that was handed in stays open. Twice is harmless.

        Waits for operations under way, one deadline at most.
        """
        pool, self._pool = self._pool, None
        if pool is None or not self._own:
            return
        # A pool that is not let wait any longer ends its connections at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.deadline_s):
                await pool.close()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def load(self, key: Key) -> Record | None:
        """Return the record as it is now, or `None` only if it is not there."""
        rows = await self._ask("load", self._statements.load, *key)
        if not rows:
            return None
        version, body, length, size, _ = rows[0].values()
        tail = tuple(row["entry"] for row in rows if row["entry"] is not None)
        if len(tail) != length or sum(map(len, tail), len(body or b"")) != size:
            raise Corrupt("a part of the record is missing", backend=self.name, operation="load")
        return Record(version, body, tail)

    async def append(self, key: Key, entry: bytes, *, birth: str, ttl: float | None) -> int:
        """Add one entry at the end; the version stays, the time to live starts anew."""
        require_ttl(ttl)
        self._require_fits("entry", len(entry), "append")
        limit = self.traits.max_record
        append = self._statements.append_and_purge if _is_purging() else self._statements.append
        (row,) = await self._ask("append", append, *key, birth, entry, _seconds(ttl), limit)
        length: int | None = row["length"]
        if length is None:
            # The size is that of the snapshot; what the entry was refused for may be newer.
            size = max((row["size"] or 0) + len(entry), limit + 1)
            raise TooLarge("record", size=size, limit=limit, backend=self.name, operation="append")
        return length

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
        self._require_fits("entry", len(body), "replace")
        what = (*key, version, body, _seconds(ttl))
        if isinstance(expect, Expect):
            store = self._statements.store_and_purge if _is_purging() else self._statements.store
            (row,) = await self._ask("replace", store, *what, expect is ANY, ttl is KEEP)
            return row["stored"]
        limit = self.traits.max_record
        rows = await self._ask("replace", self._statements.fold, *what, drop, ttl is KEEP, expect, limit)
        for row in rows:
            if row["may"] and not row["stored"]:
                self._require_fits("record", row["size"], "replace")
            return row["stored"]
        return False

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record, if it is there and carries `expect`; returns whether it did."""
        version = None if expect is ANY else expect
        rows = await self._ask("delete", self._statements.delete, *key, version)
        return any(row["alive"] for row in rows)

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        require_limit(limit)
        limit = min(limit, _MAX_PAGE)
        rows = await self._ask("scan", self._statements.scan, scope, after, limit + 1)
        names = tuple(row["name"] for row in rows[:limit])
        return Page(names, names[-1] if len(rows) > limit else None)

    async def purge(self, limit: int) -> int:
        """Remove up to `limit` expired records, which nobody sees any more; returns how many."""
        require_limit(limit)
        (row,) = await self._ask("purge", self._statements.purge, limit)
        return row["purged"]

    async def _ask(self, operation: str, statement: str, *arguments: object) -> list[Row]:
        """Send one statement; returns the rows of its answer."""
        return await self._run(operation, lambda connection: connection.fetch(statement, *arguments))

    async def _run(self, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        """Send something on a connection of the pool, within the deadline."""
        if self._pool is None:
            raise not_open(backend=self.name, operation=operation)
        pool = self._pool
        require_same_loop(pool)
        return await self._edge.run(operation, lambda: self._borrow(pool, operation, send))

    async def _borrow(self, pool: Pool, operation: str, send: Callable[[Connection], Awaitable[T]]) -> T:
        patience = self._settings.deadline_s
        try:
            # The other half is for the statement, so that what ends late has a known end.
            connection = await pool.acquire(timeout=patience / 2)
        except Exception as error:
            ours = unsent(error, operation)
            if ours is None:
                raise
            raise ours from error
        try:
            answer = await send(connection)
        except BaseException:
            # The server may have to be told to stop, and may not answer: nobody waits for that.
            self._release_later(pool, connection)
            raise
        await pool.release(connection, timeout=patience)
        return answer

    def _release_later(self, pool: Pool, connection: Connection) -> None:
        async def release() -> None:
            # Where this fails the pool has ended the connection, and makes another when it needs one.
            with contextlib.suppress(Exception):
                await pool.release(connection, timeout=self._settings.deadline_s)

        task = asyncio.get_running_loop().create_task(release(), name="stm-postgres-release")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _see_to_tables(self) -> None:
        found = await self._look()
        if self._create and not found["comment"]:
            script = statements.setup(self._settings.schema, self._settings.row_security)
            await self._run("open", lambda connection: connection.execute(script))
            found = await self._look()
        if not found["there"]:
            raise Unavailable(MISSING, backend=self.name, operation="open")
        self._require_fitting(found)

    async def _look(self) -> Row:
        (found,) = await self._ask("open", statements.LOOK, self._statements.record)
        if found["encoding"] != "UTF8":
            raise ConfigurationError(
                f"the database stores text as {found['encoding']}; it must be UTF8, or names would not sort "
                "as promised"
            )
        return found

    def _require_fitting(self, found: Row) -> None:
        """Raise `ConfigurationError` for tables of another version, or another security than asked for."""
        if found["comment"] != statements.COMMENT:
            raise ConfigurationError(
                "the tables were set up by another version of this library, or by something else; they were "
                "left as they are"
            )
        if found["secured"] and not found["active"]:
            raise ConfigurationError(
                "the tables have row security, and this role is not bound by it (a superuser, or BYPASSRLS): "
                "it would see the records of all tenants as one; connect as a role that is bound"
            )
        if self._settings.row_security != "off" and not found["secured"]:
            raise ConfigurationError(
                "the tables were set up without row security; it cannot be added to them, so name another "
                "schema, or leave out row_security"
            )
        if self._settings.row_security == "setting" and not found["tenant"]:
            raise ConfigurationError(
                "row_security='setting' needs a tenant: tenant=..., or on a pool handed in "
                "server_settings={'stm.tenant': ...}"
            )

    def _require_fits(self, what: Literal["entry", "record"], size: int, operation: str) -> None:
        limit = self.traits.max_entry if what == "entry" else self.traits.max_record
        require_fits(what, size, limit, backend=self.name, operation=operation)


def _seconds(ttl: float | None | KeepType) -> float | None:
    """Return a time to live as the statements want it; `KEEP` on nothing is for ever."""
    return None if ttl is None or ttl is KEEP else min(float(ttl), LONGEST_S)


def _is_purging() -> bool:
    # By chance and not by a count, so that processes that write once each remove something too.
    return random.random() * _PURGE_EVERY < 1

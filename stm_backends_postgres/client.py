"""The pool of asyncpg, made here or handed in, and the parts of asyncpg that the driver uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.errors import ConfigurationError
from stm_backends_postgres.settings import PostgresSettings


class Row(Protocol):
    """What the driver uses of an `asyncpg.Record`."""

    def __getitem__(self, column: str) -> Any: ...
    def values(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """What the driver uses of an `asyncpg.Connection`."""

    async def execute(self, query: str) -> str: ...
    async def fetch(self, query: str, *arguments: object) -> list[Row]: ...


class Pool(Protocol):
    """What the driver uses of an `asyncpg.Pool`."""

    async def acquire(self, *, timeout: float) -> Connection: ...
    async def release(self, connection: Connection, *, timeout: float) -> None: ...
    async def expire_connections(self) -> None: ...
    async def close(self) -> None: ...


def require_client(client: object) -> Pool:
    """Return a pool that was handed in; raises `ConfigurationError` for anything else."""
    if isinstance(client, asyncpg.Connection):
        raise ConfigurationError(
            "an asyncpg.Connection runs one statement at a time; hand in an asyncpg.Pool"
        )
    if not isinstance(client, asyncpg.Pool):
        raise ConfigurationError(f"client must be an asyncpg.Pool, not {type(client).__name__}")
    return cast("Pool", client)


def require_same_loop(pool: Pool) -> None:
    """Raise `ConfigurationError` in another event loop than the pool's, where it would hang or fail."""
    running = asyncio.get_running_loop()
    # asyncpg has no public attribute for this; without it, asyncpg raises its own errors.
    if getattr(pool, "_loop", running) is not running:
        raise ConfigurationError(
            "an asyncpg pool belongs to the event loop that created it; open a backend in each loop"
        )


async def make_client(settings: PostgresSettings) -> Pool:
    """Return a new pool; it connects when it is used.

    Behind PgBouncer, a connection keeps neither settings nor prepared statements.
    """
    options: dict[str, Any] = {"statement_cache_size": 0} if settings.pgbouncer else {}
    if settings.password is not None:
        options["password"] = settings.password
    if settings.ssl is not None:
        options["ssl"] = settings.ssl
    pool = cast(
        "Awaitable[Pool]",
        asyncpg.create_pool(  # pyright: ignore[reportUnknownMemberType]
            settings.dsn or None,
            min_size=0,
            max_size=settings.pool_size,
            # Our statements leave no state on a connection, and a reset costs a round trip.
            reset=_leave,
            # For cancel requests, which have no other time limit.
            command_timeout=settings.deadline_s,
            server_settings=settings.server_settings(),
            **options,
        ),
    )
    return await pool


async def _leave(connection: object) -> None:
    """Do not reset a connection."""

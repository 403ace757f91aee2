"""The parts of asyncpg that the driver uses, connecting, and pools that were passed in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends import handed_in
from stm_backends.drivers.waiting import WaitingLine
from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends_postgres.errors import unsent
from stm_backends_postgres.settings import PostgresSettings

logger = logging.getLogger("stm_backends")

GROW_AGAIN_S: Final = 1.0
"""Seconds that a pool waits to grow after it failed to."""


class Row(Protocol):
    """The part of `asyncpg.Record` that the driver uses."""

    def __getitem__(self, column: str) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """The part of `asyncpg.Connection` that the driver uses."""

    async def execute(self, query: str) -> str: ...
    async def fetch(self, query: str, *arguments: object) -> list[Row]: ...
    async def close(self) -> None: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...
    def add_log_listener(self, callback: Callable[[object, Any], None]) -> None: ...
    def remove_log_listener(self, callback: Callable[[object, Any], None]) -> None: ...


class Standby:
    """Notes whether the server stopped waiting for a synchronous standby after it had committed.

    That happens if the statement is cancelled at that time. The server answers as usual, after a warning.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_missed = False

    def __enter__(self) -> Standby:
        self._connection.add_log_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        # A lost connection is no longer the borrower's; the loss is the error, not this.
        with contextlib.suppress(asyncpg.InterfaceError):
            self._connection.remove_log_listener(self._note)

    def _note(self, _: object, message: Any) -> None:
        # Its text depends on the server's language.
        self.is_missed |= getattr(message, "server_source_filename", None) == "syncrep.c"


class Lender(Protocol):
    """Lends a connection to one operation at a time.

    After `take`, an operation calls `give_back` if it was answered, or `give_up` if it raised an error.
    `take` waits for a connection no longer than `until`, a time of the event loop. `loop` is the event loop
    that the connections belong to.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    async def take(self, until: float = math.inf) -> Connection: ...
    async def give_back(self, connection: Connection) -> None: ...
    def give_up(self, connection: Connection, error: BaseException) -> None: ...
    async def expire(self) -> None: ...
    async def close(self, patience_s: float) -> None: ...


class _Pool(Protocol):
    """The part of `asyncpg.Pool` that the driver uses."""

    async def acquire(self, *, timeout: float) -> Connection: ...
    async def release(self, connection: Connection, *, timeout: float) -> None: ...
    def get_size(self) -> int: ...
    def get_max_size(self) -> int: ...
    def get_idle_size(self) -> int: ...
    async def expire_connections(self) -> None: ...


class HandedIn:
    """A pool that was passed in; it is never closed.

    Raises `ConfigurationError` for any other object. An operation waits for a connection at most `patience_s`
    seconds. If the pool can open no more, operations share its connections in order of arrival, and one of
    them tries to open another after a while.
    """

    def __init__(self, client: object, *, patience_s: float) -> None:
        if isinstance(client, asyncpg.Connection):
            raise ConfigurationError(
                "an asyncpg.Connection runs one statement at a time; pass an asyncpg.Pool"
            )
        if not isinstance(client, asyncpg.Pool):
            raise ConfigurationError(f"client must be an asyncpg.Pool, not {type(client).__name__}")
        self._pool = cast("_Pool", client)
        self._patience_s = patience_s
        self._releasing: set[asyncio.Task[None]] = set()
        # The number of operations asking the pool now, for which this many idle connections are reserved.
        self._asking = 0
        self._waiting = WaitingLine[None]()
        # The time at which the pool may grow again; before the first refusal, any time.
        self._grow_at = -math.inf

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the pool; asyncpg has no public attribute for it."""
        return getattr(self._pool, "_loop", None) or asyncio.get_running_loop()

    async def take(self, until: float = math.inf) -> Connection:
        """Return a connection for one operation. Raises asyncpg's error if the pool has none."""
        pool, now = self._pool, asyncio.get_running_loop().time
        async with asyncio.timeout(min(self._patience_s, until - now())):
            while True:
                await self._turn()
                size = pool.get_size()
                try:
                    connection = await pool.acquire(timeout=self._patience_s)
                    if self._grow_at > -math.inf and pool.get_size() > size:
                        self._grow_at = now()  # there may be room for more
                    return connection
                except asyncpg.InterfaceError:  # the pool is closed
                    raise
                except Exception as error:
                    if not pool.get_size():
                        raise
                    if self._grow_at == -math.inf:
                        warn_of_size(pool.get_max_size(), error)
                    self._grow_at = now() + GROW_AGAIN_S
                finally:
                    self._asked()

    async def _turn(self) -> None:
        """Wait until a connection is idle, or the pool may grow by one."""
        now = asyncio.get_running_loop().time
        while not self._is_one_idle():
            if now() >= self._grow_at:
                self._grow_at = now() + GROW_AGAIN_S  # only one operation tries
                break
            # Others may use the pool, too, and this driver does not see the connections that they return.
            with contextlib.suppress(TimeoutError):
                await self._waiting.wait(self._grow_at - now(), unused=lambda _: self._asked())
                return
        self._asking += 1

    def _is_one_idle(self) -> bool:
        """Return whether an operation may ask the pool; true if its ability to grow is unknown."""
        pool = self._pool
        return self._grow_at == -math.inf or not pool.get_size() or pool.get_idle_size() > self._asking

    def _asked(self) -> None:
        self._asking -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        """Let the operations that have waited longest ask the pool before a new one does."""
        while self._waiting and self._is_one_idle():
            self._asking += 1
            self._waiting.serve(None)

    async def give_back(self, connection: Connection) -> None:
        """Release a connection, which may include a reset by the server."""
        try:
            await self._pool.release(connection, timeout=self._patience_s)
        finally:
            self._pass_on()

    def give_up(self, connection: Connection, error: BaseException) -> None:
        """Release a connection in a task, because the server may not answer a cancel request."""

        async def release() -> None:
            # If this fails, the pool has ended the connection, and opens another when it needs one.
            with contextlib.suppress(Exception):
                try:
                    await self.give_back(connection)
                except TimeoutError:
                    # The same cause may have broken all connections.
                    await self.expire()

        task = asyncio.get_running_loop().create_task(release(), name="stm-postgres-release")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def expire(self) -> None:
        """Make the pool replace all connections."""
        await self._pool.expire_connections()

    async def close(self, patience_s: float) -> None:
        """Leave the pool open, and wait for its connections that are being released."""
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=patience_s)


def warn_of_size(most: int, error: Exception) -> None:
    """Log the reason why a pool has fewer connections than it may have."""
    logger.warning(
        "postgres: the pool has fewer than %d connections, because no more can be opened: %s",
        *(most, unsent(error, "open") or type(error).__name__),
    )


def connect_options(settings: PostgresSettings) -> dict[str, Any]:
    """Return the arguments of `asyncpg.connect` or of a pool, except its time limit.

    Behind PgBouncer, a connection keeps neither settings nor prepared statements.
    """
    options: dict[str, Any] = {"statement_cache_size": 0} if settings.pgbouncer else {}
    if settings.password is not None:
        password = settings.password
        options["password"] = _guarded(password, settings.deadline_s) if callable(password) else password
    if settings.ssl is not None:
        options["ssl"] = settings.ssl
    elif settings.trusts_system:
        options["ssl"] = ssl.create_default_context()
    return {"dsn": settings.dsn or None, "server_settings": settings.server_settings(), **options}


def _guarded(password: Callable[[], object], deadline_s: float) -> Callable[[], Awaitable[str]]:
    """Return a function that gets the password from the user's function, within the time to connect."""

    async def ask() -> str:
        try:
            answer = await handed_in.call(password, within=0.4 * deadline_s)
            if not isinstance(answer, str):
                raise handed_in.WrongType("it", answer, "a text")
        except Exception as error:
            raise Unavailable(f"the function `password` failed ({handed_in.described(error)})") from error
        return answer

    return ask


async def connect(settings: PostgresSettings) -> Connection:
    """Return a new connection, within half of the deadline and the connect timeout."""
    options = connect_options(settings)
    patience_s = min(settings.connect_timeout_s or math.inf, settings.deadline_s / 2)
    return await asyncpg.connect(timeout=cast("Any", patience_s), **options)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- it has no types

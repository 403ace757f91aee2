"""The connections of a driver that was opened with a URL."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Awaitable, Callable
from typing import Final

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.drivers.waiting import WaitingLine
from stm_backends_postgres.client import GROW_AGAIN_S, Connection, warn_of_size

LIFETIME_S: Final = 1800.0
"""Maximum age of a connection, so that a new password, address or certificate reaches every connection."""

IDLE_S: Final = 300.0
"""Maximum time for which a connection stays open unused."""

LONGEST_PAUSE_S: Final = 30.0
"""Maximum pause before the pool tries to grow again; the pause doubles after each attempt."""


class Connections:
    """Opens at most `size` connections on demand, and lends each to one operation at a time.

    The most recently used connection is lent first, so unneeded ones become idle. If all are in use,
    operations wait in order of arrival, at most `patience_s` seconds. Meanwhile a task opens another
    connection, and an operation takes the first one that it can get. If no more can be opened, for example
    because the server accepts fewer than `size`, operations share the existing ones, and the pool grows
    later. Operations fail only if there are none.

    `asyncpg.Pool` does the same with five timers for each operation and a task for each release; here, an
    operation that does not wait needs neither. The caller sets an operation's deadline: cancelling the
    operation cancels the statement on the server.
    """

    def __init__(self, connect: Callable[[], Awaitable[Connection]], *, size: int, patience_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._connect = connect
        self._size = size
        self._patience_s = patience_s
        self._unopened = size
        # When each connection began to open, and since when a free one has been unused, oldest first.
        self._opened: dict[Connection, float] = {}
        self._free: dict[Connection, float] = {}
        self._waiting = WaitingLine[Connection]()
        self._growing: set[asyncio.Task[None]] = set()
        # The number of consecutive failures to grow, and the time of the next attempt.
        self._refusals = 0
        self._grow_at = -math.inf
        self._checks: set[asyncio.Task[None]] = set()
        self._expired = -math.inf
        self._tidying: asyncio.TimerHandle | None = None
        self._unused: asyncio.Future[None] | None = None
        self._is_closed = False

    async def take(self, until: float = math.inf) -> Connection:
        """Return a connection for one operation. Raises `TimeoutError` if none becomes free in time.

        The wait ends at `until`, a time of the event loop, if not before. Raises the error of `connect` if
        there is no connection and none can be opened.
        """
        while self._free:
            connection, _ = self._free.popitem()
            if not connection.is_closed():
                return connection
            self._drop(connection)
        self._grow(coming=1)
        try:
            patience_s = min(self._patience_s, until - self.loop.time())
            return await self._waiting.wait(patience_s, unused=self._pass_on)
        finally:
            self._report_unused()

    async def give_back(self, connection: Connection) -> None:
        """Make a connection available after an operation that was answered. Never waits."""
        self._reuse(connection)

    def give_up(self, connection: Connection, error: BaseException) -> None:
        """Decide whether a connection is reused after an operation that raised `error`.

        An error from the server is an answer. After anything else, such as a cancellation, a task waits for
        the server to stop the statement, and the connection is reused only if it then answers another one. If
        it does not answer for `patience_s` seconds, all connections opened before are replaced.
        """
        if isinstance(error, exceptions.PostgresError) or connection.is_closed():
            self._reuse(connection)
            return
        task = self.loop.create_task(self._check(connection), name="stm-postgres-check")
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def expire(self) -> None:
        """Replace all connections, each one when it is no longer in use."""
        self._expire(self.loop.time())

    async def close(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds until no connection is in use, and close all."""
        self._unused = self.loop.create_future()
        self._report_unused()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._unused
                    await asyncio.gather(*(one.close() for one in self._free), return_exceptions=True)
        finally:
            self._is_closed = True
            if self._tidying is not None:
                self._tidying.cancel()
            for task in self._growing:
                task.cancel()
            self._waiting.fail(lambda: exceptions.InterfaceError("the connections are closed"))
            for connection in self._opened:
                connection.terminate()
        await asyncio.gather(*self._growing, *self._checks, return_exceptions=True)

    def _grow(self, *, coming: int = 0) -> None:
        """Start to open a connection if operations wait for one, unless that just failed.

        `coming` operations are about to wait.
        """
        opening = self._size - self._unopened - len(self._opened)
        may_grow = not self._opened or self.loop.time() >= self._grow_at
        if opening < len(self._waiting) + coming and self._unopened and may_grow and not self._is_closed:
            self._unopened -= 1
            # Not in one caller's context, because its timeouts and traces do not apply to the others.
            task = self.loop.create_task(
                self._open(), name="stm-postgres-open", context=contextvars.Context()
            )
            self._growing.add(task)
            task.add_done_callback(self._growing.discard)

    async def _open(self) -> None:
        began = self.loop.time()
        try:
            connection = await self._connect()
        except BaseException as error:
            self._unopened += 1
            self._refuse(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._refusals, self._grow_at = 0, -math.inf
            self._opened[connection] = began
            self._reuse(connection)

    def _refuse(self, error: BaseException) -> None:
        """Let the pool grow later if it has a connection; otherwise end the wait, unless one is opening."""
        if self._opened:
            pause = min(GROW_AGAIN_S * 2**self._refusals, LONGEST_PAUSE_S)
            self._refusals, self._grow_at = self._refusals + 1, self.loop.time() + pause
            if self._refusals == 1 and isinstance(error, Exception):
                warn_of_size(self._size, error)
        elif self._unopened == self._size:
            self._waiting.fail(lambda: error)

    def _reuse(self, connection: Connection) -> None:
        if self._is_closed or connection.is_closed() or self._is_old(connection):
            self._drop(connection)
        else:
            self._pass_on(connection)

    def _pass_on(self, connection: Connection) -> None:
        """Give a connection to the operation that has waited longest."""
        if self._waiting.serve(connection):
            return
        self._free[connection] = self.loop.time()
        if self._tidying is None:
            self._tidying = self.loop.call_later(IDLE_S, self._tidy)
        self._report_unused()

    async def _check(self, connection: Connection) -> None:
        is_clean, began = False, self.loop.time()
        try:
            # The limit covers the whole call, which first waits for the cancelled statement to end.
            async with asyncio.timeout(self._patience_s):
                # A cancel request that arrives late stops this statement, never that of an operation.
                await connection.execute("SELECT")
            is_clean = True
        except TimeoutError:
            # The same cause, such as a firewall that drops connections, may have broken all that were open
            # when the check began. A connection already due for replacement says nothing about newer ones:
            # otherwise ten checks ending one after another would replace the healthy ones ten times.
            if self._opened[connection] > self._expired:
                self._expire(began)
        except Exception:  # noqa: BLE001, S110 -- another connection takes its place
            pass
        finally:
            # An event loop that was closed before its tasks ended can no longer close connections.
            if not self.loop.is_closed():
                if not is_clean:
                    connection.terminate()
                self._reuse(connection)

    def _expire(self, opened_by: float) -> None:
        self._expired = opened_by
        self._close_free()

    def _is_old(self, connection: Connection) -> bool:
        return self._opened[connection] <= max(self._expired, self.loop.time() - LIFETIME_S)

    def _drop(self, connection: Connection) -> None:
        del self._opened[connection]
        connection.terminate()
        self._unopened += 1
        self._grow()
        self._report_unused()

    def _tidy(self) -> None:
        """Close the connections that are too old or have been unused for too long."""
        self._close_free(unused_since=self.loop.time() - IDLE_S)
        self._tidying = self.loop.call_later(IDLE_S, self._tidy) if self._free else None

    def _close_free(self, *, unused_since: float = -math.inf) -> None:
        for connection, since in [*self._free.items()]:
            if since <= unused_since or self._is_old(connection):
                del self._free[connection]
                self._drop(connection)

    def _report_unused(self) -> None:
        """Let `close` continue if every connection is free and no operation waits."""
        is_unused = len(self._free) == len(self._opened) and not self._waiting
        if self._unused and not self._unused.done() and is_unused:
            self._unused.set_result(None)

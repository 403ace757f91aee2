"""One server, and sending commands to it: on a shared connection, or on separate ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.credentials import StreamingCredentialProvider
from redis.exceptions import MaxConnectionsError, RedisError, ResponseError

from stm_backends.drivers.edge import ConcurrencyLimit
from stm_backends.drivers.waiting import WaitingLine
from stm_backends_redis.errors import is_read_only, not_connected, unconnected

if TYPE_CHECKING:
    from stm_backends_redis.stream import Connections, Stream

Argument: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Argument]
Exchange: TypeAlias = Callable[..., Awaitable[list[Any]]]
"""The method `exchange` of one server."""

T = TypeVar("T")

_ASKING: Final[Command] = ("ASKING",)

_GROW_AGAIN_S: Final = 5.0
"""Seconds without attempts to open more connections after one could not be opened."""

logger = logging.getLogger("stm_backends")

_POOLS: Final = (ConnectionPool, SentinelConnectionPool)
_CONNECTIONS: Final = (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)


class Closes(Protocol):
    """An object that is closed together with a client created here."""

    async def aclose(self) -> None: ...


class Connected(Protocol):
    """A destination for commands: one server, or the nodes of a cluster."""

    is_cluster: bool

    async def exchange(self, key: bytes, *commands: Command, apart: bool = False) -> list[Any]:
        """Send commands in one packet on one connection to the server that has this key.

        With `apart`, no other task shares the connection or waits for a large answer. Returns the answers in
        order: bytes, never decoded, and server errors as values. Raises the client library's error if there
        is no connection or it breaks.
        """
        ...

    async def masters(self) -> Sequence[Exchange]:
        """Return a sender for each of the servers that together have all keys."""
        ...

    async def close(self) -> None:
        """Wait for operations in progress, each limited by its deadline, and close what was created here."""
        ...


class Node(Connected, Protocol):
    """One server, which may be a node of a cluster."""

    async def exchange(
        self, key: bytes, *commands: Command, apart: bool = False, asking: bool = False
    ) -> list[Any]:
        """As `Connected.exchange`. `asking` sends ASKING just before the commands, and drops its answer."""
        ...


class Capacity:
    """Makes commands share connections when no more can be opened.

    The server may accept fewer connections than the client may open, and a client that was passed in may open
    fewer than there are commands. Then commands share the open connections, and more are opened later. A
    finished command passes its place to the one that has waited longest, so that no newcomer takes it. Only
    without any connection do the waiting commands fail. A command waits until `patience_s` seconds after it
    began, however often it got none.
    """

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._in_use = 0
        self._most = math.inf
        self._grow_at = -math.inf
        self._ended = 0
        self._waiting = WaitingLine[None]()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call `work` when it may have a connection, and again each time that it got none."""
        now = asyncio.get_running_loop().time
        until = now() + self._patience_s
        while True:
            if self._in_use >= self._most and now() < self._grow_at:
                await self._turn(until)
            else:
                self._in_use += 1
                self._most = max(self._most, self._in_use)
            ended = self._ended
            try:
                return await work()
            except (RedisError, OSError) as error:
                why = unconnected(error)
                if why is None:
                    raise
                if self._in_use == 1 and self._ended == ended:
                    # A shared error would keep the frames, and so the data, of each command.
                    self._waiting.fail(partial(not_connected, error))
                    raise
                self._refuse(why, until=now() + _GROW_AGAIN_S)
            finally:
                self._end()

    def _refuse(self, why: str, *, until: float) -> None:
        if self._most == math.inf:
            logger.warning("redis: commands share connections because no more can be opened: %s", why)
        self._most, self._grow_at = max(1, self._in_use - 1), until

    async def _turn(self, until: float) -> None:
        """Wait for the place of another command. Raises `MaxConnectionsError` if none is free in time."""
        # The waiting line's error would be the context of this one, and look like its cause.
        with contextlib.suppress(TimeoutError):
            seconds = until - asyncio.get_running_loop().time()
            return await self._waiting.wait(seconds, unused=lambda _: self._end())
        raise MaxConnectionsError

    def _end(self) -> None:
        # A refused command has no place to pass on: more are in use than allowed.
        if self._in_use <= self._most:
            self._ended += 1
            if self._waiting.serve(None):
                return
        self._in_use -= 1


class _Sending:
    """Sends the commands of both kinds of clients on connections of their `pool`, each at most once.

    Commands of concurrent tasks share one connection, a stream, if the client `can_spare` one. Related
    commands, large ones and those sent `apart` each get a connection of the pool, because other commands
    would wait behind them. The client's own retries apply to no command: a write repeated blindly may be done
    twice, or be done and then count as refused.
    """

    is_cluster = False

    def __init__(
        self,
        pool: Connections,
        connection_class: type[Any],
        options: Mapping[str, Any],
        *,
        silence_s: float,
        can_spare: bool,
        limit: ConcurrencyLimit | None = None,
    ) -> None:
        self._pool = pool
        self._capacity = Capacity(patience_s=silence_s / 2)
        patient = _PatientPool(pool, self._capacity)
        self._stream = _stream(patient, connection_class, options, silence_s) if can_spare else None
        self._limit = limit
        self._renewals = 0

    async def exchange(
        self, key: bytes, *commands: Command, apart: bool = False, asking: bool = False
    ) -> list[Any]:
        """Send commands in one packet on one connection. The key is ignored: one server has all keys."""
        renewals = self._renewals
        answer = None
        # The second command is WAIT, which blocks its connection.
        if self._stream is not None and len(commands) == 1 and not apart:
            answer = self._stream.send(commands[0], asking=asking)
        if answer is not None:
            answers = [await answer]
        else:
            sent = (_ASKING, *commands) if asking else commands
            answers = (await self._capacity.run(lambda: self._send(sent)))[len(sent) - len(commands) :]
        # A late answer from a replica says nothing about newer connections.
        if renewals == self._renewals and any(map(_is_refusal, answers)):
            self._renewals += 1
            await self._renew()
        return answers

    async def masters(self) -> Sequence[Exchange]:
        """Return the sender for this server."""
        return (self.exchange,)

    async def close(self) -> None:
        """Wait for operations in progress, and return the stream's connection."""
        if self._stream is not None:
            await self._stream.close()

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands on a separate connection."""
        async with self._limit or contextlib.nullcontext():
            connection: Any = await self._connection()
            try:
                await connection.check_health()  # it may repeat its PING
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                return [await _answer(connection) for _ in commands]
            except BaseException:
                # An answer may still come, and the next command must not read it as its own.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await self._pool.release(connection)

    async def _connection(self) -> AbstractConnection:
        try:
            return await self._pool.get_connection()
        except (OSError, RedisError):
            raise
        except BaseException:
            # The client keeps a connection that did not log in because its credential provider failed.
            with contextlib.suppress(OSError, RedisError):
                await self._pool.disconnect(inuse_connections=False)
            raise

    async def _renew(self) -> None:
        """Discard idle connections, because they lead to a replica."""


class Server(_Sending):
    """One server, through a client of `redis.asyncio`.

    A client created here comes with a `limit` for the connections other than the stream's. Only such a client
    is closed, together with those in `also`.
    """

    def __init__(
        self,
        client: Redis,
        *,
        silence_s: float,
        limit: ConcurrencyLimit | None = None,
        also: Sequence[Closes] = (),
    ) -> None:
        pool: Any = client.connection_pool
        is_single = client.single_connection_client
        super().__init__(
            _OneConnection(client) if is_single else pool,
            pool.connection_class,
            pool.connection_kwargs,
            silence_s=silence_s,
            # A small pool has no connection to spare.
            can_spare=type(pool) in _POOLS and pool.max_connections > 2 and not is_single,
            limit=limit,
        )
        self._client = client
        self._also = also

    async def _renew(self) -> None:
        # A master that became a replica keeps its connections, while its host name may now lead to the new
        # master. A new connection resolves the name again.
        if self._stream is not None:
            self._stream.leave()
        with contextlib.suppress(OSError, RedisError):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Wait for operations in progress, and close the client unless it was passed in."""
        async with contextlib.AsyncExitStack() as stack:
            if self._limit is not None:
                # Also if the caller stops waiting, because no later `close` would.
                for client in (self._client, *self._also):
                    stack.push_async_callback(client.aclose)
            await super().close()
            if self._limit is not None:
                await self._limit.drain()


class NodeOfClient(_Sending):
    """A node of the caller's `RedisCluster`, on the connections that this client keeps to it."""

    def __init__(self, node: ClusterNode, *, silence_s: float) -> None:
        found: Any = node
        super().__init__(
            _PoolOfNode(found),
            found.connection_class,
            found.connection_kwargs,
            silence_s=silence_s,
            can_spare=hasattr(found, "release"),  # in version 8 of the client library or later
        )


class _PatientPool:
    """A pool that makes the stream wait for a connection, as commands with a separate one do."""

    def __init__(self, pool: Connections, capacity: Capacity) -> None:
        self._capacity = capacity
        self._get = pool.get_connection
        self.release = pool.release
        self.disconnect = pool.disconnect

    async def get_connection(self) -> AbstractConnection:
        return await self._capacity.run(self._get)


class _OneConnection:
    """The connection of a client with `single_connection_client`, for one exchange at a time."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client

    async def get_connection(self) -> AbstractConnection:
        await self._client.initialize()
        lock: asyncio.Lock = self._client._single_conn_lock  # noqa: SLF001 -- no public API
        await lock.acquire()
        return self._client.connection

    async def release(self, connection: AbstractConnection) -> None:
        self._client._single_conn_lock.release()  # noqa: SLF001

    async def disconnect(self, inuse_connections: bool = False) -> None:
        """Do nothing: the connection is never idle in a pool."""


class _PoolOfNode:
    """The connections that a `RedisCluster` keeps to one node."""

    def __init__(self, node: Any) -> None:
        self._node = node

    async def get_connection(self) -> AbstractConnection:
        connection: AbstractConnection = self._node.acquire_connection()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect()
            await self.release(connection)
            raise
        return connection

    async def disconnect(self, inuse_connections: bool = False) -> None:
        """Do nothing: a connection that fails to log in is not kept."""

    async def release(self, connection: AbstractConnection) -> None:
        if hasattr(self._node, "release"):
            self._node.release(connection)
        else:
            self._node._free.append(connection)  # noqa: SLF001 -- as the library does before version 8


async def _answer(connection: Any) -> Any:
    """Return the next answer: bytes, never decoded, or the server's error as a value."""
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def _is_refusal(answer: object) -> bool:
    """Return whether an answer is a replica's refusal of a write."""
    return isinstance(answer, Exception) and is_read_only(answer)


def _stream(
    pool: Connections, connection_class: type[Any], options: Mapping[str, Any], silence_s: float
) -> Stream | None:
    """Return a stream on the connections of a pool; `None` if such connections cannot be shared."""
    suits = (
        # A subclass may do anything with sent commands.
        connection_class in _CONNECTIONS
        # Such a provider does not log in again on a connection in use.
        and not isinstance(options.get("credential_provider"), StreamingCredentialProvider)
        and hasattr(AbstractConnection, "_writer")
        and find_spec("hiredis")
    )
    if not suits:
        return None
    from stm_backends_redis.stream import Stream  # noqa: PLC0415 -- it imports hiredis

    return Stream(pool, silence_s=silence_s)

"""One server, and how commands are sent to it: related commands in one packet on one connection."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias, cast

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.client import NEVER_DECODE
from redis.exceptions import RedisError, ResponseError

from stm_backends.drivers.edge import ConcurrencyLimit
from stm_backends_redis.errors import is_read_only
from stm_backends_redis.stream import Stream

Argument: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Argument]


LARGE: Final = 64 * 1024
"""Bytes of a command or an answer from which on it does not share a connection: others would wait for it."""

LARGE_KEPT: Final = 1_000
"""How many keys with large answers are remembered."""


class Connected(Protocol):
    """Where commands are sent: one server, or the nodes of a cluster."""

    async def exchange(self, key: bytes, *commands: Command) -> list[Any]:
        """Send commands in one packet on one connection to the server that has this key.

        Returns their answers in order: bytes, never decoded, and errors of the server as values. Raises the
        client library's error if there is no connection, or if it breaks.
        """
        ...

    async def close(self) -> None:
        """Wait for operations in progress, each limited by its deadline, and close what was made here."""
        ...


class Server:
    """One server, through a client of `redis.asyncio`.

    A client that was made here comes with a `limit` for its connections. Only such a client is closed,
    together with those in `also`. Commands of concurrent tasks share one connection, a stream. Related
    commands, and those that are large or have large answers, each have a connection for themselves.
    """

    def __init__(
        self,
        client: Redis,
        *,
        silence_s: float,
        limit: ConcurrencyLimit | None = None,
        also: Sequence[Redis] = (),
    ) -> None:
        self._client = client
        self._limit = limit
        self._also = also
        pool: Any = client.connection_pool
        shares = isinstance(pool, ConnectionPool) and pool.max_connections > 1
        self._stream = Stream(pool, silence_s=silence_s) if shares else None
        # Keys whose last answer was large, oldest first.
        self._large: dict[bytes, None] = {}

    async def exchange(self, key: bytes, *commands: Command) -> list[Any]:
        """Send commands in one packet on one connection; one server has all keys."""
        if self._stream is None or len(commands) > 1 or key in self._large or _size(commands[0]) > LARGE:
            async with self._limit or contextlib.nullcontext():
                answers = await self._send(commands)
        else:
            answers = [await self._stream.send(commands[0])]
        if isinstance(answers[0], list):
            self._note(key, is_large=_size(cast("list[Any]", answers[0])) > LARGE)
        if any(isinstance(answer, Exception) and is_read_only(answer) for answer in answers):
            # A master that became a replica keeps its connections, while its host name may lead to the new
            # master. A new connection resolves the name again.
            with contextlib.suppress(OSError, RedisError):
                await self._client.connection_pool.disconnect(inuse_connections=False)
            if self._stream is not None:
                self._stream.leave()
        return answers

    def _note(self, key: bytes, *, is_large: bool) -> None:
        self._large.pop(key, None)
        if is_large:
            self._large[key] = None
            if len(self._large) > LARGE_KEPT:
                del self._large[next(iter(self._large))]

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        client: Any = self._client
        if len(commands) == 1:
            try:
                return [await client.execute_command(*commands[0], **{NEVER_DECODE: True})]
            except ResponseError as error:
                return [error]
        async with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command, **{NEVER_DECODE: True})
            return await pipeline.execute(raise_on_error=False)

    async def close(self) -> None:
        """Wait for operations in progress, and close the client unless it was handed in."""
        if self._stream is not None:
            await self._stream.close()
        if self._limit is None:
            return
        try:
            await self._limit.drain()
        finally:
            async with contextlib.AsyncExitStack() as stack:
                for client in (self._client, *self._also):
                    stack.push_async_callback(client.aclose)


def _size(parts: Sequence[Any]) -> int:
    """Return how many bytes the byte strings of a command or an answer have."""
    return sum(len(part) for part in parts if isinstance(part, bytes))


class NodeOfClient:
    """A node of a `RedisCluster` that was handed in, on the connections that this client keeps to it."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node

    async def exchange(self, key: bytes, *commands: Command) -> list[Any]:
        """Send commands in one packet on one connection."""
        del key
        node: Any = self._node
        if len(commands) == 1:
            try:
                return [await node.execute_command(*commands[0], **{NEVER_DECODE: True})]
            except ResponseError as error:
                return [error]
        sent: list[Any] = [
            PipelineCommand(place, *command, **{NEVER_DECODE: True}) for place, command in enumerate(commands)
        ]
        await node.execute_pipeline(sent)
        for command in sent:
            if isinstance(command.result, Exception) and not isinstance(command.result, ResponseError):
                raise command.result
        return [command.result for command in sent]

    async def close(self) -> None:
        """Do nothing; the connections belong to the caller's client."""

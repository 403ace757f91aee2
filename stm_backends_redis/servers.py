"""One server, and how commands reach it: those that belong together in one packet on one connection."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.client import NEVER_DECODE
from redis.exceptions import RedisError, ResponseError

from stm_backends.drivers.edge import ConcurrencyLimit
from stm_backends_redis.errors import is_read_only

Argument: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Argument]


class Connected(Protocol):
    """Where commands go: one server, or the nodes of a cluster."""

    async def exchange(self, key: bytes, *commands: Command) -> list[Any]:
        """Send commands in one packet on one connection to the server that has this key.

        Returns their answers in order: bytes, never decoded, and an error of the server's as a value. Raises
        what the client library raises if there is no connection, or if it breaks.
        """
        ...

    async def close(self) -> None:
        """Wait until nothing is under way, as the deadline sees to, and close what is ours."""
        ...


class Server:
    """One server, through a client of `redis.asyncio`.

    `limit` is given for a client that is ours: how many operations it takes at once. Only such a client is
    closed, and `close` may be told what else is to be closed with it.
    """

    def __init__(
        self, client: Redis, *, limit: ConcurrencyLimit | None = None, also: Sequence[Redis] = ()
    ) -> None:
        self._client = client
        self._limit = limit
        self._also = also

    async def exchange(self, key: bytes, *commands: Command) -> list[Any]:
        """Send commands in one packet on one connection; one server has all keys."""
        del key
        async with self._limit or contextlib.nullcontext():
            answers = await self._send(commands)
        if any(isinstance(answer, Exception) and is_read_only(answer) for answer in answers):
            # A master that became a replica keeps its connections, while the name of the server may have
            # moved on. A connection that is made now goes where the name leads.
            with contextlib.suppress(OSError, RedisError):
                await self._client.connection_pool.disconnect(inuse_connections=False)
        return answers

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
        """Wait until nothing is under way, as the deadline sees to, and close the client if it is ours."""
        if self._limit is None:
            return
        try:
            await self._limit.drain()
        finally:
            async with contextlib.AsyncExitStack() as stack:
                for client in (self._client, *self._also):
                    stack.push_async_callback(client.aclose)


class NodeOfClient:
    """A node of a `RedisCluster` that is the caller's, on the connections which that client keeps to it."""

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
        """Leave the connections to whoever has the client."""

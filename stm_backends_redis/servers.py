"""One server, and how commands are sent to it: related commands in one packet on one connection."""

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

    A client that was made here comes with a `limit` for its operations. Only such a client is closed,
    together with those in `also`.
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
            # A master that became a replica keeps its connections, while its host name may lead to the new
            # master. A new connection resolves the name again.
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
        """Wait for operations in progress, and close the client unless it was handed in."""
        if self._limit is None:
            return
        try:
            await self._limit.drain()
        finally:
            async with contextlib.AsyncExitStack() as stack:
                for client in (self._client, *self._also):
                    stack.push_async_callback(client.aclose)


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

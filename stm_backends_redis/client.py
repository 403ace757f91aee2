"""The Redis client, created here or passed in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeAlias, cast

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from stm_backends.drivers.edge import ConcurrencyLimit
from stm_backends.drivers.tls_files import require_authorities, require_files
from stm_backends.errors import ConfigurationError
from stm_backends_redis.cluster import Cluster
from stm_backends_redis.errors import NotConnected
from stm_backends_redis.servers import Closes, Connected, Node, NodeOfClient, Server
from stm_backends_redis.settings import Address, RedisSettings

Client: TypeAlias = "Redis | RedisCluster"


class Sentinels(Sentinel):
    """redis-py's sentinels of one service, asked once for all callers that wait for the answer.

    redis-py asks for each connection that it opens; after a failover, that is the whole pool. It would open
    as many connections to each sentinel, and keep them. It also moves the sentinel that answered to the
    front of the list, where concurrent calls overwrite each other's entries, until a dead sentinel may be
    the only one left.
    """

    _asking: asyncio.Future[Any] | None = None

    async def discover_master(self, service_name: str) -> Any:
        """Return the address of the master."""
        asking = self._asking
        if asking is None:
            question: Awaitable[Any] = cast("Any", super()).discover_master(service_name)
            asking = self._asking = asyncio.ensure_future(question)
            asking.add_done_callback(self._answered)
        # Others may wait for the same answer, so cancelling one caller does not end the query.
        await asyncio.wait({asking})
        if asking.cancelled():
            raise NotConnected("closed while asking the sentinels")
        return asking.result()

    def _answered(self, asking: asyncio.Future[Any]) -> None:
        self._asking = None
        if not asking.cancelled():
            asking.exception()  # all callers may have been cancelled

    async def aclose(self) -> None:
        """Stop asking, and close the connections."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        # A connection that fails to close does not keep others open.
        closing = (sentinel.aclose() for sentinel in cast("Any", self).sentinels)
        await asyncio.gather(*closing, return_exceptions=True)


def require_client(client: object, *, silence_s: float) -> Connected:
    """Return a connection on the caller's client, which is never closed. Raises for other objects."""
    if isinstance(client, Redis):
        return Server(client, silence_s=silence_s)
    if not isinstance(client, RedisCluster):
        raise ConfigurationError(
            "client must be a redis.asyncio.Redis or a redis.asyncio.RedisCluster, not a "
            f"{type(client).__module__}.{type(client).__qualname__}"
        )
    cluster = client

    async def seeds() -> Iterable[Address]:
        await cluster.initialize()
        return [(node.host, int(node.port)) for node in cluster.get_nodes()]

    manager: Any = cluster.nodes_manager

    def node_at(address: Address) -> Node:
        host, port = address
        node = cluster.get_node(host, port)
        if node is None:  # not in the client's topology yet; added there, so that the client closes it
            node = ClusterNode(host, port, **cast("Any", cluster.get_connection_kwargs()))
            manager.nodes_cache[node.name] = node
        return NodeOfClient(node, silence_s=silence_s)

    return Cluster(node_at, seeds, remap=lambda address: manager.remap_host_port(*address))


def make_client(settings: RedisSettings) -> Connected:
    """Return a connection to the servers of these settings, which connects on first use."""
    common = client_options(settings)
    # The client's own limit is never reached: our limit makes operations wait first. The stream keeps one
    # connection, and briefly two when it switches to another.
    common |= {"max_connections": settings.pool_size + 1, "redis_connect_func": _greeting(settings)}
    count = max(1, settings.pool_size - 1)

    def server(client: Redis, *, also: Sequence[Closes] = ()) -> Server:
        return Server(
            client,
            silence_s=settings.deadline_s,
            limit=ConcurrencyLimit(count, patience_s=settings.deadline_s / 2),
            also=also,
        )

    if settings.mode == "cluster":

        async def seeds() -> Iterable[Address]:
            return settings.hosts

        return Cluster(lambda address: server(Redis(host=address[0], port=address[1], **common)), seeds)
    common["db"] = settings.db
    if settings.mode == "sentinel":
        login = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        # A sentinel that hangs must leave time to ask the others.
        share = _connect_timeout(settings) / len(settings.hosts)
        patience = {"socket_timeout": share, "socket_connect_timeout": share}
        options = {**client_options(settings), **login, **patience}
        sentinel = Sentinels(settings.hosts, sentinel_kwargs=options)
        return server(cast("Any", sentinel).master_for(settings.service, **common), also=[sentinel])
    host, port = settings.hosts[0]
    return server(Redis(host=host, port=port, **common))


def client_options(settings: RedisSettings) -> dict[str, Any]:
    """Return the options of all clients created here, including those for sentinels."""
    common: dict[str, Any] = {
        "username": settings.username or None,
        "password": settings.password or None,
        "socket_connect_timeout": _connect_timeout(settings),
        # Only the operation's deadline limits the wait for its answer.
        "socket_timeout": None,
        # To notice the loss of an idle connection.
        "socket_keepalive": True,
        # The core retries writes whose outcome is unknown, because it knows which are safe to repeat.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if settings.tls:
        require_authorities({"tls_ca_file": settings.tls_ca_file})
        require_files({"tls_cert_file": settings.tls_cert_file, "tls_key_file": settings.tls_key_file})
        common |= {
            "ssl": True,
            "ssl_ca_certs": settings.tls_ca_file or None,
            "ssl_certfile": settings.tls_cert_file or None,
            "ssl_keyfile": settings.tls_key_file or None,
            "ssl_check_hostname": settings.tls_check_hostname,
        }
    return common


def _connect_timeout(settings: RedisSettings) -> float:
    return min(settings.connect_timeout_s, settings.deadline_s / 2)


def _greeting(settings: RedisSettings) -> Any:
    """Return the first steps of a new connection: log in, and select a database."""

    async def greet(connection: AbstractConnection) -> None:
        try:
            async with asyncio.timeout(_connect_timeout(settings)):
                await connection.on_connect()
        except Exception as error:
            raise NotConnected from error

    return greet

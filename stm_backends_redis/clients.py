"""The clients that we make: no retries of their own, bytes as they are, a new connection in good time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from stm_backends.edge import Places
from stm_backends.errors import ConfigurationError
from stm_backends_redis.errors import NotConnected
from stm_backends_redis.settings import NO_WAIT_IN_A_CLUSTER, RedisSettings

Client: TypeAlias = "Redis | RedisCluster"


class Connected:
    """A client in use; one that is ours is closed with it, and takes only so many operations at once."""

    def __init__(
        self,
        client: Client,
        *,
        places: Places | None = None,
        close: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self.client = client
        self._places = places
        self._close = close

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold a place among the operations under way; raises `Unavailable` if none becomes free."""
        return contextlib.nullcontext() if self._places is None else self._places

    async def close(self) -> None:
        """Wait until nothing is under way, as the deadline sees to, and close what is ours."""
        try:
            if self._places is not None:
                await self._places.drain()
        finally:
            async with contextlib.AsyncExitStack() as stack:
                for close in self._close:
                    stack.push_async_callback(close)


def borrowed(client: object, settings: RedisSettings) -> Connected:
    """Return a client that is the caller's, ready for use and never closed."""
    if not isinstance(client, (Redis, RedisCluster)):
        raise ConfigurationError(
            "client is a redis.asyncio.Redis or a redis.asyncio.RedisCluster, not a "
            f"{type(client).__module__}.{type(client).__qualname__}"
        )
    if isinstance(client, RedisCluster) and (settings.wait_replicas or settings.wait_fsync):
        raise ConfigurationError(NO_WAIT_IN_A_CLUSTER)
    return Connected(client)


def connect(settings: RedisSettings) -> Connected:
    """Return a client for these settings; it connects when it is first used."""
    common = _common(settings)
    places = Places(settings.pool_size, patience_s=settings.deadline_s / 2)
    if settings.mode == "cluster":
        cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in settings.hosts],
            max_connections=settings.pool_size,
            # Else every fifth redirection closes all connections, those with a write under way too.
            reinitialize_steps=0,
            **common,
        )
        return Connected(cluster, places=places, close=[cluster.aclose])
    common |= {"db": settings.db, "redis_connect_func": _greeting(common["socket_connect_timeout"])}
    if settings.mode == "sentinel":
        login = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        sentinel = Sentinel(settings.hosts, sentinel_kwargs={**_common(settings), **login})
        master: Redis = cast("Any", sentinel).master_for(settings.service, **common)
        asked: list[Redis] = cast("Any", sentinel).sentinels
        return Connected(master, places=places, close=[one.aclose for one in (master, *asked)])
    host, port = settings.hosts[0]
    single = Redis(host=host, port=port, **common)
    return Connected(single, places=places, close=[single.aclose])


def _common(settings: RedisSettings) -> dict[str, Any]:
    common: dict[str, Any] = {
        "username": settings.username or None,
        "password": settings.password or None,
        "socket_connect_timeout": min(settings.connect_timeout_s, settings.deadline_s / 2),
        # The deadline of an operation is the only limit to waiting for its answer.
        "socket_timeout": None,
        # A write that was perhaps done is sent again by the core, which knows what bears repetition.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if settings.tls:
        common |= {
            "ssl": True,
            "ssl_ca_certs": settings.tls_ca_file or None,
            "ssl_certfile": settings.tls_cert_file or None,
            "ssl_keyfile": settings.tls_key_file or None,
            "ssl_check_hostname": settings.tls_check_hostname,
        }
    return common


def _greeting(timeout: float) -> Any:
    """Return what a new connection does first: log in, and choose a database."""

    async def greet(connection: AbstractConnection) -> None:
        try:
            async with asyncio.timeout(timeout):
                await connection.on_connect()
        except Exception as error:
            raise NotConnected from error

    return greet

"""One Redis, with each write on the disk before it is acknowledged."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import redis

from tests.chaos.stands import Fault
from tests.chaos.stands.common import Base, asked, libraries, repeated
from tests.support import redis_server
from tests.support.redis_server import ALWAYS_SYNCED, RedisServer


class RedisStand(Base):
    name = "redis"

    async def _start(self) -> None:
        server = new_server(self.disk.folder)
        await self._run(server)
        proxy = await self._lead_to(server.port)
        self.url, self.direct_url = f"redis://{proxy.address}", server.url
        self.versions = await versions_of(server)

    def _faults(self) -> Mapping[str, Fault]:
        return redis_faults(self)


stand = RedisStand


def new_server(folder: Path, *options: str, config: str | None = None) -> RedisServer:
    """Return a server in a folder, with durable settings unless it has a configuration of its own.

    The server writes to its configuration, as that of a sentinel and of what a sentinel watches has to be.
    """
    program = redis_server.find("Redis 8.2")
    path = program.path if program else redis_server.find_binary()
    assert path, "no redis-server: install the packages of the group `services`"
    folder.mkdir(exist_ok=True)
    if config is None:
        return RedisServer(path, folder, *ALWAYS_SYNCED, *options)
    file = folder / "redis.conf"
    file.write_text(config)
    return RedisServer(path, folder, *options, config=file)


async def versions_of(server: RedisServer) -> dict[str, str]:
    """Return the versions of a server and of its client library."""
    version = (await asked(server, "INFO", "server"))["redis_version"]
    return {"redis-server": version, "redis-py": libraries("redis")["redis"]}


def redis_faults(stand: Base) -> dict[str, Fault]:
    """Return what can be done to each of a stand's servers while it runs."""

    async def on_each(*command: str | int) -> int:
        done = 0
        for server in stand.servers:
            with contextlib.suppress(redis.RedisError):
                answer = await asked(server, *command)
                done += answer if isinstance(answer, int) else 1
        return done

    async def flush(_: random.Random) -> int:
        return await on_each("SCRIPT", "FLUSH") + await on_each("FUNCTION", "FLUSH")

    async def kill_clients(_: random.Random) -> int:
        return await on_each("CLIENT", "KILL", "TYPE", "normal")

    async def rewrite(_: random.Random) -> int:
        return await on_each("BGREWRITEAOF")

    @contextlib.asynccontextmanager
    async def full(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Leave no memory: each write is refused, as with the policy `noeviction`."""
        await on_each("CONFIG", "SET", "maxmemory", 1)
        try:
            yield {}
        finally:
            await on_each("CONFIG", "SET", "maxmemory", 0)

    @contextlib.asynccontextmanager
    async def busy(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Hold all commands back, reads too, as a long script of another program does."""
        await on_each("CLIENT", "PAUSE", round(seconds * 1000), "ALL")
        try:
            yield {}
        finally:
            await on_each("CLIENT", "UNPAUSE")

    return {
        "scripts-flushed": repeated(flush),
        "clients-killed": repeated(kill_clients),
        "log-rewritten": repeated(rewrite),
        "memory-full": full,
        "server-busy": busy,
    }

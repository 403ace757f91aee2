"""Where a library stores, and how many bytes it has stored there."""

# ruff: noqa: PLC0415 -- each process imports only the client libraries that it needs

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

TOGETHER = 32
"""How many conversations are held at once, and so how many connections a pool may have."""

REGION = "eu-west-1"


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
            "memory": "memory://",
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
    import redis

    with redis.Redis.from_url(place.url) as client:
        keys = list(client.scan_iter(count=1000))
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.memory_usage(key, samples=0)
        return sum(size or 0 for size in pipeline.execute())


def psql(url: str, statement: str) -> list[Any]:
    """Return the rows of one statement."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return cursor.fetchall() if cursor.description else []


def _stored_postgres(place: Place) -> int:
    tables = psql(
        place.url,
        "SELECT quote_ident(table_schema) || '.' || quote_ident(table_name),"
        " string_agg(format('coalesce(pg_column_size(%I), 0)', column_name), ' + ')"
        " FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)"
        " WHERE table_schema NOT IN ('pg_catalog', 'information_schema') AND table_type = 'BASE TABLE'"
        " GROUP BY 1",
    )
    # Names are quoted above.
    each = (f"SELECT coalesce(sum({lengths}), 0) FROM {table}" for table, lengths in tables)  # noqa: S608
    return int(sum(row[0] for row in psql(place.url, " UNION ALL ".join(each)))) if tables else 0


def _stored_mongo(place: Place) -> int:
    from pymongo import MongoClient

    with MongoClient[dict[str, Any]](place.url) as client:
        database = client[place.name]
        return sum(
            int(database.command("collStats", name)["size"]) for name in database.list_collection_names()
        )


def _stored_dynamo(place: Place) -> int:
    import boto3

    client: Any = boto3.client("dynamodb", region_name=REGION, endpoint_url=place.url)
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

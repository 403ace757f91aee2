"""The driver keeps the contract of stm-backends, also when its connections, locks and records are interfered with."""

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncmy
import pytest
from stm_backends_mariadb.driver import key_bytes
from stm_backends_mariadb.settings import MariadbSettings

from stm_backends.drivers import Driver, Key, Record
from stm_backends.testing import Datastore, DriverContract, open_at
from stm_backends.testing.faults import Proxy

HERE = MariadbSettings.from_url(os.environ.get("MARIADB_URL", "mariadb://stm:secret@127.0.0.1:13306/stm"))
SERVER = f"{HERE.host}:{HERE.port}"


def url(address: str, deadline_s: float = 5.0) -> str:
    return f"mariadb://{HERE.user}:{HERE.password}@{address}/{HERE.database}?deadline_s={deadline_s}"


async def through(address: str) -> Driver:
    return await open_at(url(address, deadline_s=2.0))


@contextlib.asynccontextmanager
async def cursor() -> AsyncIterator[Any]:
    """A connection that is not the driver's."""
    connection = await asyncmy.connect(
        host=HERE.host,
        port=HERE.port,
        user=HERE.user,
        password=HERE.password,
        database=HERE.database,
        autocommit=True,
        binary_prefix=True,
    )
    try:
        yield connection.cursor()
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def hold(key: Key) -> AsyncIterator[None]:
    async with cursor() as own:
        await own.execute("START TRANSACTION")
        await own.execute(
            "SELECT id FROM stm_record WHERE scope = %s AND name = %s FOR UPDATE", key_bytes(key)
        )
        yield


async def transactions() -> int:
    async with cursor() as own:
        await own.execute(
            "SELECT COUNT(*) FROM information_schema.innodb_trx JOIN information_schema.processlist"
            " ON id = trx_mysql_thread_id WHERE db = DATABASE()"
        )
        return (await own.fetchone())[0]


async def damage(key: Key) -> None:
    """Remove the oldest entry of the tail, or cut off a byte of the body if there is no entry."""
    async with cursor() as own:
        await own.execute("SELECT id, first FROM stm_record WHERE scope = %s AND name = %s", key_bytes(key))
        record, first = await own.fetchone()
        if not await own.execute(
            "DELETE FROM stm_entry WHERE record = %s AND seq >= %s ORDER BY seq LIMIT 1", (record, first)
        ):
            await own.execute(
                "UPDATE stm_record SET body = LEFT(body, LENGTH(body) - 1) WHERE id = %s", (record,)
            )


async def cut(key: Key) -> None:
    """Cut off a byte of the newest entry."""
    async with cursor() as own:
        await own.execute(
            "UPDATE stm_entry JOIN stm_record ON record = id SET entry = LEFT(entry, LENGTH(entry) - 1)"
            " WHERE scope = %s AND name = %s AND seq = next - 1",
            key_bytes(key),
        )


async def stored(key: Key) -> list[Any]:
    """Return the row of the record, and entries of which no record knows."""
    async with cursor() as own:
        await own.execute(
            "SELECT 'record', id FROM stm_record WHERE scope = %s AND name = %s UNION ALL"
            " SELECT 'entry', record FROM stm_entry WHERE record NOT IN (SELECT id FROM stm_record)",
            key_bytes(key),
        )
        return list(await own.fetchall())


async def peek(key: Key) -> Record | None:
    async with cursor() as own:
        await own.execute(
            "SELECT version, body, id, first FROM stm_record"
            " WHERE scope = %s AND name = %s AND (expires IS NULL OR expires > UTC_TIMESTAMP(6))",
            key_bytes(key),
        )
        row = await own.fetchone()
        if row is None:
            return None
        await own.execute("SELECT entry FROM stm_entry WHERE record = %s AND seq >= %s ORDER BY seq", row[2:])
        return Record(row[0].decode(), row[1], tuple(entry for (entry,) in await own.fetchall()))


class TestMariadbDriver(DriverContract):
    @pytest.fixture
    def datastore(self) -> Iterator[Datastore]:
        with Proxy(SERVER) as proxy:
            yield Datastore(
                open=functools.partial(open_at, url(proxy.address), create=True),
                address=SERVER,
                through=through,
                outage=proxy.cut,
                hold=hold,
                transactions=transactions,
                damage=damage,
                cut=cut,
                stored=stored,
                peek=peek,
            )

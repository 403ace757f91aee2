"""A driver on optimistic transactions, written from the page for authors, keeps the contract."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading

import pytest

from stm_backends.drivers import Record
from stm_backends.testing import Datastore, DriverContract

pytest.importorskip("duckdb", reason="the dependency group `strangers` brings it")
import duckdb

from tests.strangers.duck import open_duck


@pytest.mark.full
class TestDuckDriver(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        path = f"{tmp_path}/file.duckdb"

        def ask(statement, key):
            with contextlib.closing(duckdb.connect(path)) as connection:
                ours = "(SELECT id FROM stm_record WHERE scope = ? AND name = ?)"
                return connection.execute(statement.format(ours), [part.encode() for part in key]).fetchall()

        async def damage(key):
            ask("DELETE FROM stm_entry WHERE record = {} AND seq % 2 = 0", key)

        async def peek(key):
            rows = ask("SELECT version, body, first FROM stm_record WHERE id = {}", key)
            tail = ask("SELECT entry FROM stm_entry WHERE record = {} ORDER BY seq", key)
            return Record(*rows[0][:2], tuple(entry for (entry,) in tail)) if rows else None

        return Datastore(
            open=functools.partial(open_duck, f"duck:///{path}"),
            damage=damage,
            peek=peek,
            server=f"DuckDB {duckdb.__version__}",
        )


async def test_a_close_that_is_cancelled_is_done_nevertheless(tmp_path):
    driver, busy = await open_duck(f"duck:///{tmp_path}/file.duckdb"), threading.Event()
    database, threads = (vars(driver)[name] for name in ("_database", "_threads"))
    threads.submit(busy.wait, 30)
    closing = asyncio.create_task(driver.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    busy.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    with pytest.raises(duckdb.ConnectionException):
        database.execute("SELECT 1")

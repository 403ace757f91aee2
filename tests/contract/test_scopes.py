"""`next_scope` of the drivers that come with the library."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.plugins import open_driver
from stm_backends.drivers.scopes import NextScope, next_scope_of
from stm_backends.drivers.sqlite import statements
from stm_backends.errors import StorageError

SCOPES = ["a", "a:b", "a;", "é", "\uffff", "\U0001f680"]
"""In the order of their UTF-8 bytes, which is not that of UTF-16."""


@pytest.fixture(params=["memory", "sqlite"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Driver]:
    driver = open_driver({"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/stm.db"}[request.param])
    await driver.open()
    yield driver
    await driver.close()


@pytest.fixture
def next_scope(driver: Driver) -> NextScope:
    found = next_scope_of(driver)
    assert found is not None
    return found


async def test_scopes_are_found_in_the_order_of_their_bytes(driver: Driver, next_scope: NextScope) -> None:
    assert await next_scope("") is None
    for scope in reversed(SCOPES):
        for name in ("x", "y"):
            await driver.append(Key(scope, name), b"", initial_version="v", ttl=None)
    found, after = list[str](), ""
    while (scope := await next_scope(after)) is not None:
        found.append(scope)
        after = scope
    assert found == SCOPES
    assert await next_scope("a:a") == "a:b"


async def test_a_scope_without_records_is_not_found(driver: Driver, next_scope: NextScope) -> None:
    await driver.append(Key("a", "x"), b"", initial_version="v", ttl=None)
    assert await next_scope("") == "a"
    await driver.delete(Key("a", "x"))
    assert await next_scope("") is None


async def test_a_closed_driver_finds_no_scope(driver: Driver, next_scope: NextScope) -> None:
    await driver.close()
    with pytest.raises(StorageError):
        await next_scope("")


async def test_sqlite_finds_a_scope_by_one_search_of_an_index(tmp_path: Path) -> None:
    driver = open_driver(f"sqlite:///{tmp_path}/stm.db")
    await driver.open()
    await driver.close()
    with closing(sqlite3.connect(tmp_path / "stm.db")) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statements.NEXT_SCOPE}", ("a",)).fetchall()
    (step,) = (row[-1] for row in plan)
    assert step.startswith("SEARCH stm_record USING COVERING INDEX")
    assert "(scope>?)" in step

"""A missing table is one message that says how to create it, and `create` creates it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.drivers.sqlite import SqliteDriver
from stm_backends.errors import Unavailable
from stm_backends.testing import open_at
from tests.conformance.running import TABLES, command, install, pytest_in


@pytest.fixture
def url(tmp_path: Path) -> str:
    install(tmp_path, "tables", TABLES)
    return f"tables:///{tmp_path}/x.db"


def test_the_plugin_creates_tables_only_with_its_option(tmp_path: Path, url: str) -> None:
    options = ("--stm-backend=tables", f"--stm-url={url}", "--stm-clause=driver.fold")
    status, printed = pytest_in(tmp_path, *options, "--pyargs", "stm_backends.testing", path=tmp_path)
    assert status == 1
    assert printed.count("could not be run: the datastore cannot be used: Unavailable: tables.load:") == 1
    assert "`--stm-create` with pytest" in printed
    assert "broken:" not in printed
    options += ("--stm-create",)
    status, printed = pytest_in(tmp_path, *options, "--pyargs", "stm_backends.testing", path=tmp_path)
    assert status == 0, printed


def test_the_command_creates_tables_only_with_its_option(tmp_path: Path, url: str) -> None:
    options = ("tables", "--url", url, "--clause", "driver.fold")
    status, printed = command(tmp_path, *options, path=tmp_path)
    assert status == 1
    assert "no table" in printed
    assert "Run the command again with --create" in printed
    status, printed = command(tmp_path, *options, "--create", path=tmp_path)
    assert status == 0, printed


async def test_open_at_creates_tables_only_if_it_is_asked_to(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    without, created = await open_at(url), await open_at(url.replace("x.db", "y.db"), create=True)
    with pytest.raises(Unavailable, match="create=True"):
        await without.load(Key("s", "n"))
    assert await created.load(Key("s", "n")) is None
    await without.close()
    await created.close()


async def test_open_at_closes_a_driver_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[SqliteDriver] = []

    async def refuse(driver: SqliteDriver) -> None:
        raise Unavailable("no connection")

    async def close(driver: SqliteDriver) -> None:
        closed.append(driver)
        raise Unavailable("no connection to close")

    monkeypatch.setattr(SqliteDriver, "open", refuse)
    monkeypatch.setattr(SqliteDriver, "close", close)
    with pytest.raises(Unavailable, match=r"no connection$"):
        await open_at(f"sqlite:///{tmp_path}/x.db")
    assert len(closed) == 1

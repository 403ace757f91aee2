"""A problem that would fail every check is reported once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stm_backends.testing.driver_checks import first_look
from tests.conformance.running import command, install, pytest_in

MINE = """
import asyncio
import pytest
from stm_backends.testing import Datastore, DriverContract, open_at
from stm_backends.drivers.sqlite.driver import SqliteDriver

def without(name):
    class Lacking(SqliteDriver):
        def __getattribute__(self, asked):
            if asked == name:
                raise AttributeError(asked)
            return super().__getattribute__(asked)
    return Lacking

class Misnamed(SqliteDriver):
    async def append(self, key, value, *, initial_version, ttl, atomic): ...

class Vague(SqliteDriver):
    def __init__(self, settings):
        super().__init__(settings)
        self.traits = {{"reach": "process"}}

class Refusing(SqliteDriver):
    async def load(self, key, *rest, **named):
        raise KeyError("pool")
    append = replace = delete = scan = load

class Silent(SqliteDriver):
    async def load(self, key):
        await asyncio.Event().wait()

async def leave(path):
    raise SystemExit("no licence")

async def refuse(path):
    raise ConnectionRefusedError("no answer")

async def private():
    return await open_at("memory://")

async def make(path, kind):
    from stm_backends.drivers.sqlite.settings import SqliteSettings
    driver = kind(SqliteSettings.from_url(f"sqlite:///{{path}}"))
    await driver.open()
    return driver

class TestMine(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        path = tmp_path / "x.db"
        return Datastore(open={open})
"""


@pytest.mark.parametrize(
    ("open_one", "complaint"),
    [
        (
            "lambda: make(path, without('scan'))",
            "the driver Lacking lacks scan; see `stm_backends.drivers.Driver`",
        ),
        ("lambda: make(path, without('traits'))", "the driver Lacking lacks traits"),
        ("lambda: make(path, without('close'))", "the driver Lacking lacks close"),
        ("lambda: make(path, without('open'))", "`Datastore.open` failed: AttributeError: open"),
        (
            "lambda: make(path, Misnamed)",
            "Misnamed.append cannot be called as `stm_backends.drivers.Driver` says",
        ),
        (
            "lambda: make(path, Vague)",
            "the traits of the driver Vague are not a `stm_backends.drivers.Traits`",
        ),
        ("lambda: refuse(path)", "`Datastore.open` failed: ConnectionRefusedError: no answer"),
        ("lambda: leave(path)", "`Datastore.open` failed: SystemExit: no licence (raised at test_mine.py:"),
        (
            "lambda: make(path, Refusing)",
            "every operation fails: KeyError: 'pool' (raised at test_mine.py:",
        ),
        (
            "lambda: make(path, Silent)",
            "`load` does not end within 5.01 s; the deadline in the driver's traits",
        ),
        ("private", "two instances do not see each other's records, because each has its own store."),
        (
            "lambda: open_at(f'sqlite:///{path}')",
            "`Datastore.open` must be importable by other processes; use `open_at` or a module-level",
        ),
    ],
)
def test_what_cannot_be_tested_is_one_message_and_no_failure_of_a_check(
    tmp_path: Path, open_one: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "_SLACK_S", 0.01)
    path = tmp_path / "test_mine.py"
    path.write_text(MINE.format(open=open_one), "utf-8")
    status, printed = pytest_in(tmp_path, "-q", "--stm-clause=driver.fold", path)
    assert status == 1
    assert f"could not be run: TestMine: {complaint}" in printed
    assert "3 skipped" in printed
    assert "1 error" in printed
    assert "failed" not in printed.replace("`Datastore.open` failed", "")
    assert "Clause " not in printed


HALF = """
class Made(SqliteDriver):
    async def scan(self, scope, *, after="", limit):
        {body}
"""
"""A backend of which one operation is not written yet."""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise NotImplementedError", "`scan` fails: NotImplementedError (raised at half.py:"),
        ("return self.pool", "`scan` fails: AttributeError: 'Made' object has no attribute 'pool' (raised"),
        ("pass", "`scan` returned None, and not `Page`"),
    ],
)
def test_an_operation_that_is_not_written_yet_fails_only_its_own_checks(
    tmp_path: Path, body: str, told: str
) -> None:
    found = tmp_path / "report.json"
    status, printed = command(
        tmp_path,
        *("half", "--url", f"half:///{tmp_path}/x.db", "--quick", "--json", found),
        *("--clause", "driver.append", "--clause", "driver.fold", "--clause", "driver.scan"),
        path=install(tmp_path, "half", HALF.format(body=body)),
    )
    assert status == 1
    assert printed.splitlines()[0].startswith(f"x {told}")
    assert "half does not keep the contract" in printed
    assert "idying up" not in printed
    report = json.loads(found.read_text())
    assert len(report["findings"]) == 1
    outcomes = {clause["id"]: clause["outcome"] for clause in report["clauses"] if clause["id"] in SELECTED}
    assert outcomes == {"driver.append": "passed", "driver.fold": "passed", "driver.scan": "failed"}


SELECTED = ("driver.append", "driver.fold", "driver.scan")

LITTERS = """
from stm_backends.drivers.sqlite.driver import SqliteDriver

class Litters(SqliteDriver):
    async def delete(self, key, **how):
        if (record := await self.load(key)) and record.tail:
            raise RuntimeError("a bug")
        return await super().delete(key, **how)
"""


def test_what_tidying_up_meets_after_many_checks_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "test_mine.py"
    source = MINE.format(open="functools.partial(make, path, Litters)")
    path.write_text(f"import functools\n{LITTERS}\n{source}", "utf-8")
    status, printed = pytest_in(
        tmp_path, "-q", "--stm-clause=driver.append", "--stm-clause=driver.fold", path
    )
    assert status == 1
    assert "8 passed, " in printed
    assert "1 error" in printed
    summed_up = printed.partition("= conformance =")[2]
    assert "x TestMine: tidying up after a check fails: RuntimeError: a bug" in summed_up
    assert "TestMine does not keep the contract" in summed_up
    assert "First after: " in printed
    assert "driver1.append(" in printed

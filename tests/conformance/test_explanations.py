"""What a failed check says beside its finding: the usual cause, and what a busy machine may have done."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.driver_checks import steps
from stm_backends.testing.workbench import check as workbench_check
from stm_backends.testing.workbench.check import check
from stm_backends.testing.workbench.failures import alone
from stm_backends.testing.workbench.faulty import FaultyDriver, faulty_datastore
from stm_backends.testing.workbench.history import History
from tests.conformance.running import install, pytest_in
from tests.mutants.waiting import SendsWhatWaitsAgain

CHECK = "test_acknowledged_writes_are_in_the_datastore_not_in_the_driver"
KEY = Key("scope", "name")
DEADLINE_S = 0.2
BUSY = "On a busy machine it may be the driver's deadline of 0.2 s."


class FailsAtOnce(FaultyDriver):
    """Translates an error of the system that has nothing to do with time."""

    async def load(self, key: Key) -> Record | None:
        raise Unavailable("no such device", backend=self.name, operation="load")


class FailsLate(FaultyDriver):
    """Gives up when the time is over."""

    async def load(self, key: Key) -> Record | None:
        await asyncio.sleep(DEADLINE_S)
        raise Unavailable("no answer in time", backend=self.name, operation="load")


class Crashes(FaultyDriver):
    """Has a bug."""

    async def load(self, key: Key) -> Record | None:
        raise RuntimeError("a bug")


def explanation(kind: type[FaultyDriver]) -> str:
    datastore = faulty_datastore(kind, clock=FakeClock(), deadline_s=DEADLINE_S)
    with pytest.raises((Unavailable, RuntimeError)) as caught:
        DriverContract.checks()[CHECK](DriverContract(), Bench(datastore, quick=True))
    return "\n".join(caught.value.__notes__)


def test_an_error_at_once_is_not_blamed_on_a_busy_machine() -> None:
    assert "busy machine" not in explanation(FailsAtOnce)


def test_an_error_at_the_deadline_may_be_that_of_a_busy_machine() -> None:
    assert BUSY in explanation(FailsLate)


@pytest.mark.parametrize("kind", [FailsAtOnce, FailsLate])
def test_an_error_of_the_contract_is_told_with_the_usual_cause(kind: type[FaultyDriver]) -> None:
    assert "Usual cause: " in explanation(kind)


@pytest.mark.parametrize(
    "check",
    [
        "test_a_write_that_had_to_wait_does_not_bring_back_what_has_expired",
        "test_an_append_that_waits_long_for_a_lock_is_stored_once",
        "test_no_entry_appears_before_one_that_a_load_has_seen",
    ],
)
def test_an_entry_that_stands_twice_is_the_cause_whatever_check_meets_it(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "HELD_S", 0.4)
    datastore = replace(faulty_datastore(SendsWhatWaitsAgain, clock=FakeClock(), deadline_s=2.0), races_s=0.1)
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        DriverContract.checks()[check](DriverContract(), Bench(datastore, quick=True))
    explained = "\n".join(caught.value.__notes__)
    assert "stands twice, and this entry was appended once: the driver or its client sends" in explained
    assert "Usual cause: " not in explained


def test_an_entry_that_was_sent_twice_may_stand_twice() -> None:
    history = History()
    history.sends(KEY, b"same", b"same", b"other")
    history.found(
        KEY, Record("v", None, (b"same", b"same", b"other", b"of another process", b"of another process"))
    )
    assert not history.stored_again()
    history.found(KEY, Record("v", None, (b"same", b"same", b"same")))
    assert history.stored_again().startswith("b'same' stands 3 times, and these entries were appended twice")


def test_a_bug_of_the_driver_is_not_told_with_the_usual_cause() -> None:
    assert "Usual cause: " not in explanation(Crashes)


EDGE = """
from stm_backends.drivers.edge import Edge
from stm_backends.errors import Unavailable

def meaning(error):
    return Unavailable, "the cache is locked"

class Made(SqliteDriver):
    async def append(self, key, entry, **how):
        if entry == b"b":
            return await self.run("append", self.find)
        return await super().append(key, entry, **how)

    async def run(self, operation, work):
        return await Edge(backend="edge", traits=self.traits, meaning=meaning).run(operation, work)

    async def find(self):
        raise KeyError("pool")
"""
"""A backend built as the page says, of which an append fails within `Edge.run`."""


def test_an_error_of_a_driver_is_shown_without_the_source_of_this_library(tmp_path: Path) -> None:
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=edge", f"--stm-url=edge:///{tmp_path}/x.db", "-k", "test_a_fold_removes_exactly"),
        *("--pyargs", "stm_backends.testing"),
        path=install(tmp_path, "edge", EDGE),
    )
    assert status == 1
    shown = printed.partition("= FAILURES =")[2].partition("= conformance of")[0]
    assert 'raise KeyError("pool")' in shown
    assert 'return await self.run("append", self.find)' in shown
    assert 'await append_all(driver, key, b"a", b"b"' in shown
    for hidden in ("edge.py", "deadlines.py", "asyncio/", "check.py", "history.py", "steps.py", "runners.py"):
        assert f"/{hidden}" not in shown.replace(f"{tmp_path}/edge.py", "")
    assert len(shown.splitlines()) < 80


def test_the_only_error_of_a_group_is_told_alone() -> None:
    error = AssertionError("the only one")
    assert alone(ExceptionGroup("", [ExceptionGroup("", [error])])) is error
    both = ExceptionGroup("", [error, ValueError()])
    assert alone(both) is both


class Lasting(DriverContract):
    """Checks that last longer than they usually may."""

    @check("driver.load")
    async def test_it_works_all_the_time(self, bench: Bench) -> None:
        driver = await bench.driver()
        for _ in range(11):
            await asyncio.sleep(0.1)
            await driver.load(KEY)

    @check("driver.load")
    async def test_it_waits_for_nothing(self, bench: Bench) -> None:
        await bench.driver()
        await asyncio.Event().wait()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench_check, "LONGEST_CHECK_S", 1.0)
    monkeypatch.setattr(workbench_check, "AT_WORK_S", 0.8)


@pytest.mark.usefixtures("brief")
def test_a_check_that_is_at_work_when_its_time_is_over_has_it_once_more() -> None:
    Lasting.checks()["test_it_works_all_the_time"](Lasting(), Bench(faulty_datastore(), quick=True))


@pytest.mark.usefixtures("brief")
def test_a_check_that_waits_in_vain_ends_with_its_time() -> None:
    with pytest.raises(AssertionError, match=r"the check did not end within 1 s"):
        Lasting.checks()["test_it_waits_for_nothing"](Lasting(), Bench(faulty_datastore(), quick=True))


class Groups(DriverContract):
    """A check that fails in a task of a group."""

    @check("driver.load")
    async def test_it_fails_in_a_task(self, bench: Bench) -> None:
        async def fail() -> None:
            raise AssertionError("as it should")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())


def test_a_failure_in_a_task_has_its_explanation_and_no_group_around_it() -> None:
    with pytest.raises(AssertionError, match="as it should") as caught:
        Groups.checks()["test_it_fails_in_a_task"](Groups(), Bench(faulty_datastore(), quick=True))
    assert caught.value.__context__ is None
    assert any("Clause driver.load" in note for note in caught.value.__notes__)

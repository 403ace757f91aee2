"""What a failed check says beside its finding: the usual cause, and what a busy machine may have done."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.driver_checks import steps
from stm_backends.testing.workbench.faulty import FaultyDriver, faulty_datastore
from stm_backends.testing.workbench.history import History
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

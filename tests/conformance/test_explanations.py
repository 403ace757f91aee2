"""What a failed check says beside its finding: the usual cause, and what a busy machine may have done."""

from __future__ import annotations

import asyncio

import pytest

from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.workbench.faulty import FaultyDriver, faulty_datastore

CHECK = "test_acknowledged_writes_are_in_the_datastore_not_in_the_driver"
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


def test_a_bug_of_the_driver_is_not_told_with_the_usual_cause() -> None:
    assert "Usual cause: " not in explanation(Crashes)

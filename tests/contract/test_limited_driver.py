"""A driver with limits that are never reached keeps the contract as the driver within it does."""

from __future__ import annotations

from typing import ClassVar

import pytest

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records import limited
from stm_backends.records.limited import LimitedDriver
from stm_backends.records.limits import Guard, Limits
from stm_backends.testing import Datastore, DriverContract, FakeClock

AMPLE = Guard(Limits(conversation_turns=10**6, conversation_bytes=10**9, user_conversations=10**6))


class TestLimitedDriver(DriverContract):
    quick: ClassVar = True  # the slow checks are asked of the driver below

    @pytest.fixture
    def datastore(self, monkeypatch: pytest.MonkeyPatch) -> Datastore:
        # The limits apply to all records of the checks.
        monkeypatch.setattr(limited, "_kind", lambda key: "memory")  # pyright: ignore[reportUnknownLambdaType] -- any key
        clock, store = FakeClock(), MemoryStore()

        async def open_one() -> Driver:
            inner = MemoryDriver(store, clock=clock, max_entry_bytes=50_000, max_record_bytes=200_000)
            driver = LimitedDriver(inner, AMPLE, steady=clock)
            await driver.open()
            return driver

        return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0, histories=5, races_s=0.3)

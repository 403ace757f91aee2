"""A sealed driver keeps the driver contract as the driver within it does."""

from __future__ import annotations

import pytest

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records.large.driver import LargeEntries
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import Sealing, StaticKeys
from stm_backends.testing import Datastore, DriverContract, FakeClock

LONGEST_ID = "k" * 32
"""With it, sealing takes exactly the room that the traits allow for."""

SEALING = Sealing(StaticKeys({LONGEST_ID: bytes(range(32))}, primary=LONGEST_ID))


def sealed(inner: Driver) -> SealedDriver:
    return SealedDriver(inner, SEALING, clear_met=lambda: None)


class TestSealedDriver(DriverContract):
    @pytest.fixture
    def datastore(self) -> Datastore:
        clock, store = FakeClock(), MemoryStore()

        async def open_one() -> Driver:
            driver = sealed(
                MemoryDriver(store, clock=clock, max_entry_bytes=12_000, max_record_bytes=100_000)
            )
            await driver.open()
            return driver

        return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0)


class TestSealedLargeEntries(DriverContract):
    """Pointers and parts are sealed too: large values are split above the seal."""

    @pytest.fixture
    def datastore(self) -> Datastore:
        clock, store = FakeClock(), MemoryStore()

        async def open_one() -> Driver:
            inner = MemoryDriver(store, clock=clock, max_entry_bytes=12_000, max_record_bytes=100_000)
            driver = LargeEntries(sealed(inner), largest=40_000, clock=clock, steady=clock)
            await driver.open()
            return driver

        return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0, histories=10)

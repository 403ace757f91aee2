"""A sealed driver keeps the driver contract as the driver within it does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar

import pytest

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records.large.driver import LargeEntries
from stm_backends.testing import Datastore, DriverContract, FakeClock
from tests.support.sealed import open_sealed, sealed


class TestSealedDriver(DriverContract):
    quick: ClassVar = True  # the slow checks are asked of the driver below

    @pytest.fixture
    def datastore(self) -> Datastore:
        clock, store = FakeClock(), MemoryStore()

        async def open_one() -> Driver:
            driver = sealed(
                MemoryDriver(store, clock=clock, max_entry_bytes=12_000, max_record_bytes=100_000)
            )
            await driver.open()
            return driver

        return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0, races_s=0.3)


@pytest.mark.full
class TestSealedLargeEntries(DriverContract):
    """Pointers and parts are sealed too: large values are split above the seal."""

    quick: ClassVar = True  # the slow checks are asked of large values without a seal

    @pytest.fixture
    def datastore(self) -> Datastore:
        clock, store = FakeClock(), MemoryStore()

        async def open_one() -> Driver:
            inner = MemoryDriver(store, clock=clock, max_entry_bytes=12_000, max_record_bytes=100_000)
            driver = LargeEntries(sealed(inner), largest=40_000, clock=clock, steady=clock)
            await driver.open()
            return driver

        return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0, histories=10, races_s=0.3)


@pytest.mark.full
class TestSealedSqlite(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path: Path) -> Datastore:
        clock = FakeClock()
        opening = functools.partial(
            open_sealed,
            f"sqlite:///{tmp_path}/stm.db",
            clock=clock,
            max_entry_bytes=50_000,
            max_record_bytes=200_000,
        )
        return Datastore(open=opening, pass_time=clock.pass_time, tick=60.0, histories=10)

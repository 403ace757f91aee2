"""A driver that keeps large values beside their records keeps the contract as the driver within it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stm_backends.drivers.contract import Driver
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records.large.driver import LargeEntries
from stm_backends.testing import Datastore, DriverContract, FakeClock
from stm_backends.testing.workbench.drivers import HandedIn
from stm_backends.testing.workbench.faulty import SMALL, faulty_datastore


class TestLargeEntries(DriverContract):
    """Around a driver whose largest entry is so small that most that is larger than a word is kept beside."""

    @pytest.fixture
    def datastore(self) -> Datastore:
        clock = FakeClock()
        within = faulty_datastore(clock=clock, **SMALL)

        async def open_one() -> Driver:
            return LargeEntries(await within.open(), largest=40_000, clock=clock, steady=clock)

        async def handed_in() -> HandedIn:
            assert within.handed_in is not None
            found = await within.handed_in()
            return replace(found, driver=LargeEntries(found.driver))

        return replace(within, open=open_one, handed_in=handed_in, histories=10, races_s=4.0)


class Eager(LargeEntries):
    """Stores every value of more than four bytes in parts."""

    def _fits(self, value: bytes) -> bool:
        return len(value) <= 4 and super()._fits(value)


@pytest.mark.full
class TestNearlyAllBesideTheRecord(DriverContract):
    """What the suite stores in passing is kept in parts, too: in random histories, races and expiry."""

    @pytest.fixture
    def datastore(self) -> Datastore:
        clock, store = FakeClock(), MemoryStore()

        async def open_one() -> Driver:
            # No check fills a record of this size: its traits do not say what `Eager` keeps beside it.
            inner = MemoryDriver(store, clock=clock, max_entry_bytes=12_000, max_record_bytes=2**30)
            await inner.open()
            return Eager(inner, clock=clock, steady=clock)

        return Datastore(open=open_one, pass_time=clock.pass_time, tick=60.0, histories=10, races_s=4.0)

"""A driver that keeps large values beside their records keeps the contract as the driver within it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stm_backends.driver import Driver
from stm_backends.large import LargeEntries
from stm_backends.testing import Datastore, DriverContract, FakeClock
from stm_backends.testing.bench import HandedIn
from stm_backends.testing.faulty import SMALL, faulty_datastore


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

        return replace(within, open=open_one, handed_in=handed_in, histories=10)

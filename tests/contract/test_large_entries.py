from dataclasses import replace

import pytest

from stm_backends.large import LargeEntries
from stm_backends.testing import DriverContract, FakeClock
from stm_backends.testing.faulty import SMALL, faulty_datastore


class TestLarge(DriverContract):
    @pytest.fixture
    def datastore(self):
        clock = FakeClock()
        inner = faulty_datastore(clock=clock, **SMALL)

        async def opened():
            return LargeEntries(await inner.open(), largest=40_000, clock=clock, steady=clock)

        async def handed():
            h = await inner.handed_in()
            return replace(h, driver=LargeEntries(h.driver))

        return replace(inner, open=opened, handed_in=handed)

"""A driver that telemetry listens to keeps the contract as the driver within it does."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

import pytest

from stm_backends.testing import Datastore, DriverContract, FakeClock, open_at

pytest.importorskip("opentelemetry")

from stm_backends.telemetry.opentelemetry import Telemetry


class TestObservedDriver(DriverContract):
    quick: ClassVar = True  # the slow checks are asked of the driver below

    @pytest.fixture
    def datastore(self) -> Datastore:
        clock, telemetry, url = FakeClock(), Telemetry(), f"memory://{uuid.uuid4().hex}"

        async def opened(**options: Any) -> Any:
            small = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}
            return telemetry.driver(await open_at(url, clock=clock, **small, **options))

        return Datastore(open=opened, pass_time=clock.pass_time, tick=60.0, histories=5, races_s=0.3)

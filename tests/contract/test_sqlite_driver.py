"""The SQLite driver keeps the contract."""

import functools

import pytest

from stm_backends.testing import Datastore, DriverContract, FakeClock, open_at

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}


class TestSqliteDriver(DriverContract):
    @pytest.fixture
    def datastore(self, tmp_path):
        clock = FakeClock()
        return Datastore(
            open=functools.partial(open_at, f"sqlite:///{tmp_path}/stm.db", clock=clock, **SMALL),
            pass_time=clock.pass_time,
            tick=60.0,
        )


class TestSqliteDriverAsUsersHaveIt(DriverContract):
    """The real clock and the default settings."""

    @pytest.fixture
    def datastore(self, tmp_path):
        return Datastore(open=functools.partial(open_at, f"sqlite:///{tmp_path}/stm.db"), tick=0.3)

"""The in-memory driver keeps the contract."""

import functools
import uuid

import pytest

from stm_backends.driver import Key
from stm_backends.errors import ConfigurationError, Unavailable
from stm_backends.reference import MemoryDriver, MemoryStore, open_driver
from stm_backends.testing import Datastore, DriverContract, FakeClock, open_at

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}


class TestMemoryDriver(DriverContract):
    @pytest.fixture
    def datastore(self):
        clock = FakeClock()
        url = f"memory://{uuid.uuid4().hex}"
        return Datastore(
            open=functools.partial(open_at, url, clock=clock, **SMALL), pass_time=clock.pass_time, tick=60.0
        )


class TestMemoryDriverOnARealClock(DriverContract):
    """The checks that let time pass, on the clock that users have."""

    @pytest.fixture
    def datastore(self):
        return Datastore(open=functools.partial(open_at, f"memory://{uuid.uuid4().hex}", **SMALL), tick=0.1)


async def test_a_driver_that_was_never_opened_is_unavailable():
    with pytest.raises(Unavailable, match=r"memory\.load: the driver is not open"):
        await MemoryDriver().load(Key("s", "n"))


async def test_a_url_without_a_name_is_a_store_of_its_own_and_one_with_a_name_is_shared():
    key = Key("s", "n")
    shared = f"memory://{uuid.uuid4().hex}"
    for url, expected in ((None, None), ("memory://", None), (shared, 1)):
        one, two = open_driver(url), open_driver(url)
        await one.open()
        await two.open()
        await one.append(key, b"a", birth="v", ttl=None)
        record = await two.load(key)
        assert (record and len(record.tail)) == expected


async def test_expired_records_that_nobody_touches_are_forgotten():
    clock = FakeClock()
    store = MemoryStore()
    driver = MemoryDriver(store, clock=clock)
    await driver.open()
    for number in range(10_000):
        await driver.append(Key("s", str(number)), b"a", birth="v", ttl=1.0)
        await clock.pass_time(0.1)
    assert len(store.scopes["s"].records) < 200


@pytest.mark.parametrize("url", ["memory://a/b", "memory://a?x=1", "memory://a#b"])
def test_a_url_that_says_more_than_a_name_is_refused(url):
    with pytest.raises(ConfigurationError, match="memory://NAME"):
        open_driver(url)


def test_an_unknown_setting_is_refused_with_a_near_miss():
    with pytest.raises(ConfigurationError, match="did you mean 'max_entry_bytes'"):
        open_driver(None, max_entry_byte=1)

"""The in-memory driver keeps the contract."""

import asyncio
import functools
import inspect
import uuid
from typing import ClassVar

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore, open_driver
from stm_backends.errors import ConfigurationError, TooLarge
from stm_backends.testing import Datastore, DriverContract, FakeClock, open_at
from stm_backends.testing.workbench.check import check_of
from stm_backends.testing.workbench.drivers import Bench

SMALL = {"max_entry_bytes": 50_000, "max_record_bytes": 200_000}


class TestMemoryDriver(DriverContract):
    @pytest.fixture
    def datastore(self):
        clock = FakeClock()
        url = f"memory://{uuid.uuid4().hex}"

        async def stored(key):
            store = vars(open_driver(url))["_store"]
            return [name for name in store.scope(key.scope).records if name == key.name]

        return Datastore(
            open=functools.partial(open_at, url, clock=clock, **SMALL),
            pass_time=clock.pass_time,
            tick=60.0,
            stored=stored,
        )


def lets_time_pass(check):
    return check_of(check).timed or "bench.tick" in inspect.getsource(check)


class TestMemoryDriverOnARealClock(DriverContract):
    """The checks that let time pass, on the clock that users have."""

    opted_out: ClassVar = {
        name: "asked above, and lets no time pass"
        for name, check in DriverContract.checks().items()
        if not lets_time_pass(check)
    }

    @pytest.fixture
    def datastore(self):
        opening = functools.partial(open_at, f"memory://{uuid.uuid4().hex}", **SMALL)
        return Datastore(open=opening, tick=0.1, histories=10)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
async def driver(clock, store):
    made = MemoryDriver(store, clock=clock)
    await made.open()
    return made


async def test_a_driver_that_was_never_opened_says_how_to_open_it():
    with pytest.raises(ConfigurationError, match=r"memory\.load: the backend was never opened; use"):
        await MemoryDriver().load(Key("s", "n"))


async def test_a_url_without_a_name_is_a_store_of_its_own_and_one_with_a_name_is_shared():
    key = Key("s", "n")
    shared = f"memory://{uuid.uuid4().hex}"
    for url, expected in ((None, None), ("memory://", None), (shared, 1)):
        one, two = open_driver(url), open_driver(url)
        await one.open()
        await two.open()
        await one.append(key, b"a", initial_version="v", ttl=None)
        record = await two.load(key)
        assert (record and len(record.tail)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": "5"},
        {"deadline_s": -1},
        {"deadline_s": float("inf")},
        {"max_entry_bytes": "5"},
        {"max_entry_bytes": 0},
        {"max_record_bytes": None},
        {"clock": 5},
    ],
    ids=repr,
)
def test_an_option_that_cannot_work_is_refused_by_its_name(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        open_driver(None, **options)


async def test_other_tasks_run_while_a_loop_only_reads_and_adds(driver):
    ran = 0

    async def other():
        nonlocal ran
        while True:
            ran += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    for _ in range(100):
        await driver.append(Key("s", "n"), b"a", initial_version="v", ttl=None)
        await driver.load(Key("s", "n"))
    task.cancel()
    assert ran >= 200


async def test_the_size_that_is_kept_is_that_of_body_and_tail_whatever_was_done():
    driver = MemoryDriver(max_record_bytes=100)
    await driver.open()
    key = Key("s", "n")

    async def room():
        """Return how many bytes the record still takes."""
        record = await driver.load(key)
        return 100 - len(record.body or b"") - sum(map(len, record.tail))

    async def is_exact():
        left = await room()
        with pytest.raises(TooLarge):
            await driver.append(key, b"x" * (left + 1), initial_version="v", ttl=None)
        before = await driver.load(key)
        await driver.append(key, b"x" * left, initial_version="v", ttl=None)
        await driver.replace(key, before.body or b"", version="again", expect=before.version, ttl=None)
        assert await room() == 0
        entries = (await driver.load(key)).tail
        await driver.replace(key, b"", version="anew", expect=ANY, ttl=None)
        for entry in entries[:-1]:
            await driver.append(key, entry, initial_version="v", ttl=None)
        await driver.replace(key, before.body or b"", version=before.version, expect="anew", ttl=None)
        assert await driver.load(key) == Record(before.version, before.body or b"", before.tail)

    for size in (5, 7, 11):
        await driver.append(key, b"a" * size, initial_version="v1", ttl=None)
    await is_exact()
    assert await driver.replace(key, b"b" * 20, version="v2", expect="v1", drop=2, ttl=None)
    await is_exact()
    assert await driver.replace(key, b"c" * 3, version="v3", expect="v2", ttl=None)
    await is_exact()
    assert await driver.replace(key, b"d", version="v4", expect=ANY, ttl=None)
    await is_exact()


async def test_expired_records_that_nobody_touches_are_forgotten(clock, store, driver):
    for number in range(10_000):
        await driver.append(Key("s", str(number)), b"a", initial_version="v", ttl=1.0)
        await clock.pass_time(0.1)
    assert len(store.scopes["s"].records) < 200


def held(store: MemoryStore) -> int:
    """Return how many records a store holds, the expired ones included, once its books agree."""
    records = {
        Key(scope, name): one for scope, found in store.scopes.items() for name, one in found.records.items()
    }
    assert set(store.mortal) == {key for key, stored in records.items() if stored.expires is not None}
    assert all(found.records for found in store.scopes.values())
    return len(records)


async def test_what_expired_in_scopes_that_nobody_uses_again_is_forgotten_by_writes_elsewhere(
    clock, store, driver
):
    for number in range(1_000):
        await driver.append(Key(f"user{number}", "chat"), b"a", initial_version="v", ttl=60.0)
    for number in range(1_000):
        await driver.append(Key(f"lasting{number}", "chat"), b"a", initial_version="v", ttl=None)
    assert held(store) == 2_000
    await clock.pass_time(61.0)
    for _ in range(1_000 // 8):
        await driver.append(Key("busy", "chat"), b"a", initial_version="v", ttl=None)
    assert held(store) == 1_001
    assert len(store.scopes) == 1_001


async def test_a_write_frees_no_more_than_a_few_records(clock, store, driver):
    for number in range(100):
        await driver.append(Key(f"user{number}", "chat"), b"a", initial_version="v", ttl=60.0)
    await clock.pass_time(61.0)
    await driver.load(Key("user0", "chat"))
    assert held(store) == 100
    await driver.append(Key("busy", "chat"), b"a", initial_version="v", ttl=None)
    assert held(store) == 93


async def test_what_expires_does_not_add_up_beside_what_lives_long(clock, store, driver):
    for number in range(500):
        await driver.append(Key(f"user{number}", "chat"), b"a", initial_version="v", ttl=1e6)
    for number in range(5_000):
        await driver.append(Key(f"brief{number}", "chat"), b"a", initial_version="v", ttl=10.0)
        await clock.pass_time(1.0)
    assert held(store) < 500 + 10 + 500 // 7 + 10


async def test_leases_that_are_taken_and_released_leave_nothing_behind(store, driver):
    for number in range(100):
        key = Key("leases", f"{number % 3}")
        assert await driver.replace(key, b"", version=f"v{number}", expect=ABSENT, ttl=60.0)
        assert await driver.delete(key, expect=f"v{number}")
    assert held(store) == 0
    # An end that is taken away, or set again, is noted as well.
    key = Key("s", "n")
    for ttl in (60.0, 30.0, None, 60.0):
        await driver.append(key, b"a", initial_version="v", ttl=ttl)
        assert (held(store), len(store.mortal)) == (1, ttl is not None)


async def test_a_name_is_an_option_too_and_names_the_same_store_as_the_url():
    key, name = Key("s", "n"), uuid.uuid4().hex
    one, two = open_driver(None, name=name), open_driver(f"memory://{name}")
    await one.open()
    await two.open()
    await one.append(key, b"a", initial_version="v", ttl=None)
    assert await two.load(key) is not None
    assert open_driver(f"memory://{name}", name=name)
    with pytest.raises(ConfigurationError, match="give name differently"):
        open_driver(f"memory://{name}", name="another")
    for wrong in ("", 5):
        with pytest.raises(ConfigurationError, match="the name of a store"):
            open_driver(None, name=wrong)


@pytest.mark.parametrize("url", ["memory://a/b", "memory://a?x=1", "memory://a#b", "memory://[a", "memory:a"])
def test_a_url_that_says_more_than_a_name_is_refused(url):
    with pytest.raises(ConfigurationError, match="memory://NAME"):
        open_driver(url)


def test_an_unknown_setting_is_refused_with_a_near_miss():
    with pytest.raises(ConfigurationError, match="did you mean 'max_entry_bytes'"):
        open_driver(None, max_entry_byte=1)


def test_a_driver_of_small_records_is_not_asked_for_many_entries():
    clock = FakeClock()
    opening = functools.partial(open_at, f"memory://{uuid.uuid4().hex}", clock=clock, max_record_bytes=500)
    bench = Bench(Datastore(open=opening, pass_time=clock.pass_time, tick=60.0))
    DriverContract().test_a_record_of_many_entries_is_removed_as_a_whole(bench)

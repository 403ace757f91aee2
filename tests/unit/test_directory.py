"""Which users a tenant has."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.contract import ANY, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.scopes import next_scope_of
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import ConfigurationError, InvalidKey, OutcomeUnknown, Unavailable
from stm_backends.races import ATTEMPTS
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.directory import REMEMBERED_FOR_S, REMEMBERED_USERS, Directory
from stm_backends.testing.workbench.spy import SpyDriver


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(driver: Driver, clock: Clock) -> Directory:
    return Directory(driver, Codec(), clock=clock)


async def users(directory: Directory, tenant: str) -> list[str]:
    return [user async for user in directory.users(tenant)]


async def test_a_noted_user_is_listed_once(directory: Directory) -> None:
    for user in ("u2", "u1", "u2"):
        await directory.note("acme", user)
    await directory.note("acme", "u1", fresh=True)
    assert await users(directory, "acme") == ["u1", "u2"]


async def test_no_tenant_sees_anothers_users(directory: Directory) -> None:
    for tenant in ("acme", "acme:u", "acme%3Au", "a", "acme::users"):
        await directory.note(tenant, f"user of {tenant}")
    for tenant in ("acme", "acme:u", "acme%3Au", "a", "acme::users"):
        assert await users(directory, tenant) == [f"user of {tenant}"]


async def test_users_with_difficult_names_come_back_as_they_are(directory: Directory) -> None:
    names = ["a:b", "%", "%3A", " padded ", "nul\0", "\ud800", "日本語", "x" * 1000]
    for name in names:
        await directory.note("acme", name)
    assert sorted(await users(directory, "acme")) == sorted(names)


async def test_many_users_are_listed_over_pages(directory: Directory) -> None:
    names = [f"u{number:04}" for number in range(450)]
    for name in names:
        await directory.note("acme", name)
    assert await users(directory, "acme") == names


async def test_noting_again_costs_nothing_for_a_minute(
    directory: Directory, clock: Clock, calls: list[str]
) -> None:
    await directory.note("acme", "u")
    clock.now = REMEMBERED_FOR_S - 1
    await directory.note("acme", "u")
    assert calls == ["load", "replace"]
    clock.now = REMEMBERED_FOR_S
    await directory.note("acme", "u")
    assert calls == ["load", "replace", "load"]


async def test_a_fresh_note_lists_a_user_that_another_process_removed(
    driver: Driver, directory: Directory
) -> None:
    await directory.note("acme", "u")
    await Directory(driver, Codec()).forget("acme", "u")
    await directory.note("acme", "u")
    assert await users(directory, "acme") == []
    await directory.note("acme", "u", fresh=True)
    assert await users(directory, "acme") == ["u"]


async def test_a_forgotten_user_is_noted_again(directory: Directory) -> None:
    await directory.note("acme", "u")
    assert await directory.forget("acme", "u") == math.inf
    assert await directory.forget("acme", "u") is None
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_a_process_remembers_a_bounded_number_of_users(directory: Directory, calls: list[str]) -> None:
    directory._noted.most = 3  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- 10,000 take long
    for user in ("u1", "u2", "u3", "u4"):
        await directory.note("acme", user)
    calls.clear()
    for user in ("u4", "u3", "u2"):
        await directory.note("acme", user)
    assert calls == []
    await directory.note("acme", "u1")
    assert calls == ["load"]
    assert REMEMBERED_USERS >= 1_000


@pytest.mark.parametrize("done", [True, False])
async def test_a_lost_answer_is_asked_for_once_more(directory: Directory, lose: Any, done: bool) -> None:
    lose("replace", done=done)
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_what_was_perhaps_not_noted_is_not_taken_for_noted(
    directory: Directory, lose: Any, calls: list[str]
) -> None:
    lose("replace", done=False, times=ATTEMPTS)
    with pytest.raises(OutcomeUnknown):
        await directory.note("acme", "u")
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


@pytest.mark.parametrize(("tenant", "user"), [("", "u"), (" ", "u"), ("acme", ""), ("acme", "\t")])
async def test_a_blank_tenant_or_user_is_refused(directory: Directory, tenant: str, user: str) -> None:
    with pytest.raises(InvalidKey):
        await directory.note(tenant, user)


async def test_the_record_of_a_user_says_nothing_about_them(driver: Driver, directory: Directory) -> None:
    await directory.note("acme", "u")
    record = await driver.load(keys.directory_key("acme", "u"))
    assert record is not None
    assert Codec().open("user", record.body or b"") == {}


# Tenants


async def test_the_tenants_with_a_listed_user_are_listed_once(driver: Driver, directory: Directory) -> None:
    tenants = ["acme", "acme!", "acme;", "a:b", "%", "%3A", "nul\0", "\ud800", "日本語", "x" * 900]
    for tenant in tenants:
        for user in ("u1", "u2"):
            await directory.note(tenant, user)
        await driver.append(Key(keys.scope(tenant, "u1", "memory"), "s"), b"x", initial_version="1", ttl=None)
    for scope in (keys.OTHER_BLOBS, keys.PAUSED_RUNS, "no colon", "gone:u:memory", "%ZZ:u:memory"):
        await driver.append(Key(scope, "s"), b"x", initial_version="1", ttl=None)
    listed = [tenant async for tenant in directory.tenants()]
    assert sorted(listed) == sorted(tenants)


async def test_listing_tenants_costs_two_operations_for_each(directory: Directory, calls: list[str]) -> None:
    for user in range(50):
        await directory.note("acme", f"u{user}")
    calls.clear()
    assert [tenant async for tenant in directory.tenants()] == ["acme"]
    assert calls == ["scan"]


async def test_a_driver_that_finds_no_scopes_lists_no_tenants(driver: Driver) -> None:
    class Renamed(WrapperDriver):
        next_scope = None

    directory = Directory(WrapperDriver(Renamed(driver)), Codec())
    with pytest.raises(ConfigurationError, match="cannot list its tenants"):
        await anext(directory.tenants())
    assert next_scope_of(WrapperDriver(driver)) is not None


# Writing for a user


async def test_a_user_is_listed_before_a_write_and_again_after_a_creation(
    driver: Driver, directory: Directory
) -> None:
    async with directory.listed(("acme", "u")) as listing:
        assert await users(directory, "acme") == ["u"]
        await Directory(driver, Codec()).forget("acme", "u")
        listing.created = True
    assert await users(directory, "acme") == ["u"]


async def test_a_write_that_creates_nothing_lists_its_user_once(
    directory: Directory, calls: list[str]
) -> None:
    for _ in range(3):
        async with directory.listed(("acme", "u")):
            calls.append("write")
    assert calls == ["load", "replace", "write", "write", "write"]


async def test_a_write_for_no_user_lists_no_user(directory: Directory, calls: list[str]) -> None:
    async with directory.listed(None) as listing:
        listing.created = True
    assert calls == []


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), asyncio.CancelledError()])
async def test_a_write_with_an_unknown_outcome_lists_its_user_again(
    driver: Driver, directory: Directory, error: BaseException
) -> None:
    async def write() -> None:
        async with directory.listed(("acme", "u")):
            await Directory(driver, Codec()).forget("acme", "u")
            raise error

    with pytest.raises(type(error)):
        await write()
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_a_write_succeeds_though_its_user_could_not_be_listed_again(
    driver: Driver, directory: Directory, lose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with directory.listed(("acme", "u")) as listing:
        await Directory(driver, Codec()).forget("acme", "u")
        lose("replace", done=False, times=ATTEMPTS)
        listing.created = True
    assert "could not refresh" in caplog.text


async def test_a_fresh_note_that_fails_or_is_cancelled_is_tried_again(
    driver: Driver, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, reached = driver.load, asyncio.Event()

    async def hanging(*args: Any, **options: Any) -> bool:
        reached.set()
        return await asyncio.Event().wait()

    await directory.note("acme", "u")
    await Directory(driver, Codec()).forget("acme", "u")
    monkeypatch.setattr(driver, "load", hanging)
    noting = asyncio.create_task(directory.note("acme", "u", fresh=True))
    await reached.wait()
    noting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await noting
    monkeypatch.setattr(driver, "load", load)
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_no_write_waits_for_a_fresh_note_of_its_user(
    driver: Driver, directory: Directory, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await directory.note("acme", "u")
    load, reached, go = driver.load, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        reached.set()
        await go.wait()
        return await load(*args, **options)

    monkeypatch.setattr(driver, "load", slow)
    noting = asyncio.create_task(directory.note("acme", "u", fresh=True))
    await reached.wait()
    calls.clear()
    await directory.note("acme", "u")
    assert calls == []
    go.set()
    await noting
    # A user who is listed already costs a read, which waits for no other write.
    assert calls == ["load"]


async def test_a_note_answered_during_a_forget_is_not_remembered(
    driver: Driver, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = driver.delete

    async def noted_meanwhile(*args: Any, **options: Any) -> bool:
        await directory.note("acme", "u", fresh=True)
        return await delete(*args, **options)

    await directory.note("acme", "u")
    monkeypatch.setattr(driver, "delete", noted_meanwhile)
    assert await directory.forget("acme", "u") == math.inf
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


# The time to live of an entry

HOUR, DAY = 3600.0, 86_400.0


class Aging:
    """A directory on a store whose clock can be moved; `process()` is the directory of another process."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.driver = SpyDriver(MemoryDriver(clock=self.clock))
        self.directory = self.process()

    def process(self, *, ahead: float = 0.0) -> Directory:
        """Return another directory, with epoch seconds that are so many seconds ahead."""
        return Directory(self.driver, Codec(), clock=self.clock, epoch=lambda: 1e9 + self.clock.now + ahead)

    @property
    def writes(self) -> int:
        return self.driver.count("replace", "users")

    async def listed(self) -> bool:
        return await users(self.directory, "acme") == ["u"]

    async def write(self, ttl: float | None, by: Directory | None = None) -> None:
        """Store a conversation as a memory does."""
        async with (by or self.directory).listed(("acme", "u"), ttl):
            await self.driver.append(keys.Key("acme:u:memory", "s"), b"x", initial_version="v", ttl=ttl)


@pytest.fixture
async def aging() -> Aging:
    made = Aging()
    await made.driver.open()
    return made


async def test_the_entry_of_a_user_expires_after_the_last_conversation(aging: Aging) -> None:
    await aging.write(30 * DAY)
    aging.clock.now = 30 * DAY - 1
    assert await aging.listed()
    aging.clock.now = 34 * DAY
    assert not await aging.listed()


async def test_an_entry_outlives_every_conversation_of_its_user(aging: Aging) -> None:
    """Writes at any distance, by processes whose clocks differ by an hour; the entry is always there."""
    processes = [aging.process(ahead=ahead) for ahead in (0.0, HOUR / 2, -HOUR / 2)]
    for number in range(300):
        ttl = (HOUR, 3 * HOUR, 2 * DAY)[number * 7 % 3]
        await aging.write(ttl, by=processes[number % 3])
        aging.clock.now += number * 397 % 7200
        if await aging.driver.load(keys.Key("acme:u:memory", "s")) is not None:
            assert await aging.listed()


async def test_an_active_user_is_written_to_the_directory_rarely(aging: Aging) -> None:
    for _ in range(30 * 24 * 6):
        await aging.write(30 * DAY)
        aging.clock.now += 600
    # 30 days with a write every ten minutes: once in about two days.
    assert aging.writes <= 17


async def test_the_entry_of_a_user_with_an_endless_conversation_never_expires(aging: Aging) -> None:
    await aging.write(HOUR)
    await aging.write(None)
    await aging.write(HOUR)
    aging.clock.now = 10_000 * DAY
    assert await aging.listed()


async def test_a_shorter_time_to_live_never_shortens_an_entry(aging: Aging) -> None:
    await aging.write(30 * DAY)
    for _ in range(48):
        aging.clock.now += HOUR / 2
        async with aging.process().listed(("acme", "u"), HOUR):
            pass
    aging.clock.now = 30 * DAY - 1
    assert await aging.listed()


@pytest.mark.parametrize("body", [b"sealed with an erased key", b'stm/1 user\n{"until":NaN}'])
async def test_an_entry_that_cannot_be_read_is_replaced_by_an_endless_one(aging: Aging, body: bytes) -> None:
    where = keys.directory_key("acme", "u")
    await aging.driver.replace(where, body, version="v", expect=ANY, ttl=60)
    await aging.write(HOUR)
    aging.clock.now = 10_000 * DAY
    assert await aging.listed()


async def test_parts_that_outlive_their_record_keep_their_user_listed() -> None:
    clock = Clock()
    driver = MemoryDriver(clock=clock, max_entry_bytes=20_000, max_record_bytes=50_000)
    backend = Backend(driver)
    await backend.open()
    store = backend.state_store
    await store.save_memory_state("acme:u:s", {"text": "x" * 30_000}, ttl=DAY)
    clock.now = 2 * DAY
    assert [user async for user in backend.sessions.users("acme")] == ["u"]
    assert (await backend.sessions.erase_with_receipt("acme")).erased["parts"] > 0


# Users without records


async def test_a_user_without_records_is_removed(aging: Aging) -> None:
    await aging.write(None)
    assert not await aging.directory.forget_if_unused("acme", "u")
    assert await aging.listed()
    await aging.driver.delete(keys.Key("acme:u:memory", "s"))
    assert await aging.directory.forget_if_unused("acme", "u")
    assert not await aging.listed()
    assert not await aging.directory.forget_if_unused("acme", "u")


async def test_a_note_removed_while_a_conversation_is_created_comes_back(aging: Aging) -> None:
    other = aging.process()
    async with aging.directory.listed(("acme", "u"), HOUR) as listing:
        assert await other.forget_if_unused("acme", "u")
        await aging.driver.append(keys.Key("acme:u:memory", "s"), b"x", initial_version="v", ttl=HOUR)
        listing.created = True
    assert await aging.listed()


async def test_a_conversation_created_before_the_removal_is_found_again(aging: Aging) -> None:
    """The other side has looked for records, and removes the entry after the creation was noted."""
    other = aging.process()
    await aging.directory.note("acme", "u", ttl=HOUR)
    delete = aging.driver.delete

    async def deleting(key: keys.Key, **options: Any) -> bool:
        async with aging.directory.listed(("acme", "u"), HOUR) as listing:
            await aging.driver.append(keys.Key("acme:u:memory", "s"), b"x", initial_version="v", ttl=HOUR)
            listing.created = True
        return await delete(key, **options)

    aging.driver.delete = deleting
    assert not await other.forget_if_unused("acme", "u")
    assert await aging.listed()
    aging.clock.now = 10 * HOUR
    assert not await aging.listed()


async def test_an_entry_that_never_settles_is_an_error(
    driver: Driver, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*args: Any, **options: Any) -> bool:
        return False

    monkeypatch.setattr(driver, "replace", lost)
    with pytest.raises(Unavailable, match="kept changing"):
        await directory.note("acme", "u")

"""Which users a tenant has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.drivers.scopes import next_scope_of
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import ConfigurationError, InvalidKey, OutcomeUnknown
from stm_backends.records import keys
from stm_backends.records.codec import Codec
from stm_backends.records.directory import REMEMBERED_FOR_S, REMEMBERED_USERS, Directory
from stm_backends.records.operations import ATTEMPTS


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
    assert calls == ["replace"]
    clock.now = REMEMBERED_FOR_S
    await directory.note("acme", "u")
    assert calls == ["replace", "replace"]


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
    assert await directory.forget("acme", "u")
    assert not await directory.forget("acme", "u")
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_a_process_remembers_a_bounded_number_of_users(
    directory: Directory, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.records.directory.REMEMBERED_USERS", 3)
    for user in ("u1", "u2", "u3", "u4"):
        await directory.note("acme", user)
    calls.clear()
    for user in ("u4", "u3", "u2"):
        await directory.note("acme", user)
    assert calls == []
    await directory.note("acme", "u1")
    assert calls == ["replace"]
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
    assert calls == ["replace", "write", "write", "write"]


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
    directory: Directory, lose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with directory.listed(("acme", "u")) as listing:
        lose("load", done=False, times=ATTEMPTS)
        listing.created = True
    assert "could not refresh" in caplog.text


async def test_a_fresh_note_that_fails_or_is_cancelled_is_tried_again(
    driver: Driver, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, reached = driver.replace, asyncio.Event()

    async def hanging(*args: Any, **options: Any) -> bool:
        reached.set()
        return await asyncio.Event().wait()

    await directory.note("acme", "u")
    await Directory(driver, Codec()).forget("acme", "u")
    monkeypatch.setattr(driver, "replace", hanging)
    noting = asyncio.create_task(directory.note("acme", "u", fresh=True))
    await reached.wait()
    noting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await noting
    monkeypatch.setattr(driver, "replace", replace)
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_no_write_waits_for_a_fresh_note_of_its_user(
    driver: Driver, directory: Directory, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await directory.note("acme", "u")
    load, reached, go = driver.load, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Record | None:
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

    monkeypatch.setattr(driver, "delete", noted_meanwhile)
    assert await directory.forget("acme", "u")
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]

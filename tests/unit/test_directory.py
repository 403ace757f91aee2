"""Which users a tenant has."""

from __future__ import annotations

from typing import Any

import pytest

from stm_backends import keys
from stm_backends.codec import Codec
from stm_backends.directory import REMEMBERED_FOR_S, REMEMBERED_USERS, Directory
from stm_backends.driver import Driver
from stm_backends.errors import InvalidKey, OutcomeUnknown
from stm_backends.records import SENDS


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


async def test_noting_afresh_puts_back_what_another_process_took_away(
    driver: Driver, directory: Directory
) -> None:
    await directory.note("acme", "u")
    await Directory(driver, Codec()).forget("acme", "u")
    await directory.note("acme", "u")
    assert await users(directory, "acme") == []
    await directory.note("acme", "u", fresh=True)
    assert await users(directory, "acme") == ["u"]


async def test_a_forgotten_user_is_noted_anew(directory: Directory) -> None:
    await directory.note("acme", "u")
    assert await directory.forget("acme", "u")
    assert not await directory.forget("acme", "u")
    await directory.note("acme", "u")
    assert await users(directory, "acme") == ["u"]


async def test_a_process_remembers_a_bounded_number_of_users(
    directory: Directory, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.directory.REMEMBERED_USERS", 3)
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
    lose("replace", done=False, times=SENDS)
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

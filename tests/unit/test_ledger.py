"""The ledger: appends, changes, folds and erasures of records, each with its retries and its condition."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stm_backends import races
from stm_backends.drivers.contract import ABSENT, ANY, Driver, Key, Record
from stm_backends.errors import Corrupt, LimitReached, OutcomeUnknown, TooLarge
from stm_backends.records import keys, ledger
from stm_backends.records.ledger import Appended, Change
from tests.support.replicated import ReplicatedDriver

KEY = Key("acme:u:memory", "chat")


@pytest.fixture(autouse=True)
def races_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_time(*_: float) -> float:
        return 0.0

    monkeypatch.setattr(races, "pause", no_time)


async def stored(driver: Driver, key: Key = KEY) -> tuple[bytes | None, tuple[bytes, ...]]:
    record = await driver.load(key)
    assert record is not None
    return record.body, record.tail


async def make(driver: Driver, *tail: bytes, body: bytes | None = None, key: Key = KEY) -> Record:
    """Store a record, and return it."""
    if body is not None:
        assert await driver.replace(key, body, version="v", expect=ANY, ttl=None)
    for entry in tail:
        await driver.append(key, entry, initial_version="v", ttl=None)
    record = await driver.load(key)
    assert record is not None
    return record


class Listing:
    """A listing that tells what it has learned."""

    def __init__(self) -> None:
        self.learned: list[bool] = []
        self.created = False

    async def __aenter__(self) -> Listing:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.learned.append(self.created)


# Append


async def test_only_the_first_entry_of_a_record_creates_it(driver: Driver) -> None:
    assert await ledger.append(driver, KEY, b"one", ttl=None) == (1, True)
    assert await ledger.append(driver, KEY, b"two", ttl=None) == (2, False)


async def test_a_creation_with_a_lost_answer_counts_despite_later_entries(driver: Driver, lose: Any) -> None:
    async def others() -> None:
        for _ in range(races.ATTEMPTS):
            await ledger.append(driver, KEY, b"theirs", ttl=None)

    lose("append", done=True, then=others)
    length, created = await ledger.append(driver, KEY, b"ours", ttl=None)
    assert length > races.ATTEMPTS
    assert created


async def test_a_process_that_was_stopped_does_not_retry_an_append(
    driver: Driver, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    right, stopped = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: right() + stopped)

    async def stop() -> None:
        nonlocal stopped
        stopped = (races.ATTEMPTS + 1) * driver.traits.deadline + 0.001

    lose("append", done=True, then=stop)
    with pytest.raises(OutcomeUnknown):
        await ledger.append(driver, KEY, b"one", ttl=None)
    record = await driver.load(KEY)
    assert record is not None
    assert record.tail == (b"one",)


async def test_a_listing_learns_whether_an_append_created_the_record(driver: Driver) -> None:
    listing = Listing()
    assert await ledger.append(driver, KEY, b"one", ttl=None, listing=listing) == (1, True)
    assert await ledger.append(driver, KEY, b"two", ttl=None, listing=listing) == (2, False)
    assert listing.learned == [True, False]


async def test_a_slow_answer_does_not_end_the_retries_of_an_append(
    driver: Driver, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    right, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: right() + passed)

    async def wait() -> None:
        nonlocal passed
        passed = races.ATTEMPTS * driver.traits.deadline

    lose("append", done=False, then=wait)
    assert await ledger.append(driver, KEY, b"one", ttl=None) == (1, True)


# Append to a full record


@pytest.mark.parametrize(
    "error", [TooLarge("record", size=2, limit=1), LimitReached("full", given=2, most=1)]
)
@pytest.mark.parametrize("rooms", [1, races.CONTENDED])
async def test_an_append_to_a_full_record_follows_once_there_is_room(
    error: Exception, rooms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(races, "RACES", races.CONTENDED)
    made = 0

    async def send() -> Appended:
        if made < rooms:
            raise error
        return Appended(1, created=False)

    async def make_room() -> bool:
        nonlocal made
        made += 1
        return True

    assert await ledger.append_to_full(send, make_room) == Appended(1, created=False)
    assert made == rooms


@pytest.mark.parametrize(
    ("error", "rooms"), [(TooLarge("entry", size=2, limit=1), 0), (TooLarge("record", size=2, limit=1), 1)]
)
async def test_an_append_that_no_room_helps_raises(error: TooLarge, rooms: int) -> None:
    made = 0

    async def send() -> Appended:
        raise error

    async def make_room() -> bool:
        nonlocal made
        made += 1
        return False

    with pytest.raises(TooLarge) as raised:
        await ledger.append_to_full(send, make_room)
    assert raised.value is error
    assert made == rooms


def joined(record: Record) -> bytes:
    return (record.body or b"") + b"".join(record.tail)


async def test_a_long_tail_is_folded_after_the_append_that_makes_it_long(driver: Driver) -> None:
    for number in range(1, ledger.FOLD_AT + 2):
        assert (await ledger.append_and_fold(driver, KEY, b".", joined)).created is (
            number % ledger.FOLD_AT == 1
        )
        body, tail = await stored(driver)
        assert (body is None) is (number < ledger.FOLD_AT)
        assert len(body or b"") + len(tail) == number
    assert (await stored(driver))[1] == (b".",)


async def test_a_full_record_is_folded_before_the_append(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(driver, b"1", b"2")
    append = driver.append

    async def full(*args: Any, **options: Any) -> int:
        if len((await stored(driver))[1]) == 2:
            raise TooLarge("record", size=2, limit=1)
        return await append(*args, **options)

    monkeypatch.setattr(driver, "append", full)
    assert await ledger.append_and_fold(driver, KEY, b"3", joined) == (1, True)
    assert await stored(driver) == (b"12", (b"3",))


async def test_a_full_record_without_entries_stays_full(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> int:
        raise TooLarge("record", size=2, limit=1)

    monkeypatch.setattr(driver, "append", full)
    await make(driver, body=b"body")
    with pytest.raises(TooLarge):
        await ledger.append_and_fold(driver, KEY, b"1", joined)


async def test_an_append_succeeds_although_the_fold_after_it_fails(
    driver: Driver, lose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await make(driver, *[b"."] * (ledger.FOLD_AT - 1))
    lose("replace", done=False, times=races.ATTEMPTS)
    assert await ledger.append_and_fold(driver, KEY, b".", joined) == (ledger.FOLD_AT, False)
    assert "could not fold the entries of a record" in caplog.text
    assert len((await stored(driver))[1]) == ledger.FOLD_AT


# Update


def always(change: Change | ledger.Deletion | None, seen: list[Record | None]) -> Any:
    """Return a decision for each record, with the number of its calls as the result."""

    async def decide(record: Record | None) -> tuple[Change | ledger.Deletion | None, int]:
        seen.append(record)
        return change, len(seen)

    return decide


@pytest.mark.parametrize("tail", [(), (b"one",)])
async def test_an_update_changes_the_record_that_it_decided_on(
    driver: Driver, tail: tuple[bytes, ...]
) -> None:
    before, seen = await make(driver, *tail, body=b"old"), list[Record | None]()
    assert await ledger.update(driver, KEY, always(Change(b"new", drop=len(tail)), seen)) == 1
    assert seen == [before]
    assert await stored(driver) == (b"new", ())


async def test_an_update_creates_a_record_and_tells_the_listing(driver: Driver) -> None:
    listing, seen = Listing(), list[Record | None]()
    for body in (b"first", b"second"):
        assert await ledger.update(driver, KEY, always(Change(body), seen), listing=listing)
        assert await stored(driver) == (body, ())
    assert seen[0] is None
    assert listing.learned == [True, False]


async def test_an_update_that_decides_on_nothing_writes_nothing(driver: Driver, calls: list[str]) -> None:
    assert await ledger.update(driver, KEY, always(None, [])) == 1
    assert await ledger.update(driver, KEY, always(ledger.DELETE, [])) == 1
    assert calls == ["load", "load"]


@pytest.mark.parametrize("change", [Change(b"new"), ledger.DELETE])
async def test_an_update_that_lost_a_race_decides_again(
    driver: Driver, change: Change | ledger.Deletion
) -> None:
    await make(driver, body=b"old")
    seen: list[bytes | None] = []

    async def decide(record: Record | None) -> tuple[Change | ledger.Deletion, str]:
        seen.append(record and record.body)
        if len(seen) < 3:
            other = b"other %d" % len(seen)
            assert await driver.replace(KEY, other, version=f"w{len(seen)}", expect=ANY, ttl=None)
        return change, "done"

    assert await ledger.update(driver, KEY, decide) == "done"
    assert seen == [b"old", b"other 1", b"other 2"]
    record = await driver.load(KEY)
    assert (record and record.body) == (b"new" if isinstance(change, Change) else None)


async def test_an_update_that_loses_all_races_returns_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = replace(await make(driver, body=b"old"), version="stale")

    async def load(key: Key) -> Record:
        del key
        return stale

    monkeypatch.setattr(driver, "load", load)
    seen: list[Record | None] = []
    assert await ledger.update(driver, KEY, always(Change(b"new"), seen)) is None
    assert seen == [stale] * races.RACES


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_lost_race_after_a_lost_answer_is_unknown_unless_repeatable(
    driver: Driver, lose: Any, *, repeatable: bool
) -> None:
    await make(driver, body=b"old")

    async def another() -> None:
        assert await driver.replace(KEY, b"another", version="w", expect=ANY, ttl=None)

    lose("replace", done=True, then=another)
    update = ledger.update(driver, KEY, always(Change(b"new"), []), repeatable=repeatable)
    if repeatable:
        assert await update == 2
        assert await stored(driver) == (b"new", ())
        return
    with pytest.raises(OutcomeUnknown):
        await update
    assert await stored(driver) == (b"another", ())


async def test_entries_without_a_body_are_confirmed_only_by_a_body_that_says_the_same(
    driver: Driver,
) -> None:
    """Where loads may show what is not confirmed; `fold` and `update` take it as `unchanged`."""
    await make(driver, b"one")
    with pytest.raises(ValueError, match="confirmed by `unchanged` alone"):
        await ledger.update(ReplicatedDriver(driver), KEY, always(Change(b"new", drop=1), []))
    assert await ledger.fold_tail(ReplicatedDriver(driver), KEY, joined)
    assert await stored(driver) == (b"one", ())
    await make(driver, b"two")
    assert await ledger.update(ReplicatedDriver(driver), KEY, always(Change(b"new", drop=1), [])) == 1
    assert await stored(driver) == (b"new", ())


# Erase


PARTS = keys.parts_of(KEY)


def part(number: int, prefix: str = PARTS.name) -> Key:
    return Key(PARTS.scope, f"{prefix}{number}")


async def test_an_erasure_removes_a_record_and_its_parts_alone(driver: Driver) -> None:
    foreign = part(1, prefix="other:")
    for key in (KEY, part(1), part(2), foreign):
        await make(driver, b"one", key=key)
    assert await ledger.erase(driver, KEY)
    for key in (KEY, part(1), part(2)):
        assert await driver.load(key) is None
    assert await driver.load(foreign) is not None
    assert not await ledger.erase(driver, KEY)


async def test_the_parts_of_a_record_are_counted_as_they_are_erased(driver: Driver) -> None:
    for number in range(3):
        await make(driver, b"one", key=part(number))
    assert await ledger.erase_parts(driver, KEY) == 3
    assert await ledger.erase_parts(driver, KEY) == 0


async def test_an_erasure_removes_a_record_that_came_back_without_its_parts(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process stores a record that points to parts, and the erasure takes these."""
    load, delete = driver.load, driver.delete
    await make(driver, b"value", key=part(1))

    async def returns(key: Key, **options: Any) -> bool:
        deleted = await delete(key, **options)
        if key == part(1):
            await driver.append(KEY, b"pointer", initial_version="v", ttl=None)
        return deleted

    async def dangling(key: Key) -> Record | None:
        if await load(key) is not None:
            raise Corrupt("a part is missing")
        return None

    monkeypatch.setattr(driver, "delete", returns)
    monkeypatch.setattr(driver, "load", dangling)
    assert await ledger.erase(driver, KEY)
    assert await load(KEY) is None


# Delete


async def test_a_delete_removes_only_what_was_read(driver: Driver) -> None:
    await make(driver, body=b"body")
    assert not await ledger.delete(driver, KEY, expect="another")
    assert await ledger.delete(driver, KEY, expect="v")
    assert not await ledger.delete(driver, KEY, expect="v")


@pytest.mark.parametrize("done", [True, False])
async def test_a_delete_with_a_lost_answer_is_done(driver: Driver, lose: Any, *, done: bool) -> None:
    await make(driver, body=b"body")
    lose("delete", done=done)
    assert await ledger.delete(driver, KEY, expect="v")
    assert await driver.load(KEY) is None


async def test_a_delete_with_a_lost_answer_and_another_record_is_unknown(driver: Driver, lose: Any) -> None:
    await make(driver, body=b"body")

    async def another() -> None:
        assert await driver.replace(KEY, b"another", version="w", expect=ABSENT, ttl=None)

    lose("delete", done=True, then=another)
    with pytest.raises(OutcomeUnknown):
        await ledger.delete(driver, KEY, expect="v")
    assert await stored(driver) == (b"another", ())

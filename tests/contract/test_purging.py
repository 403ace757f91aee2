"""Retention on the embedded drivers: what a purge removes, what it never loses, and what it leaves alone."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stm_backends.sync
from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    Corrupt,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    TooLarge,
)
from stm_backends.admin import purging
from stm_backends.admin.purging import Purge, Purged
from stm_backends.drivers.contract import ANY, Driver, Key, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.purges import purges_of
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.history import items
from stm_backends.history.items import Add
from stm_backends.history.log import ItemLog
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys, operations
from stm_backends.records.body import Body, Forgotten, Lease
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.large.driver import LargeEntries
from stm_backends.testing import FakeClock
from stm_backends.types import StoredTurn
from tests.mutants.purging import LOG_PURGES, PURGES

NOW = 1_800_000_000.0
DAY = 86_400.0
KEY = MemoryKey("acme", "u", "s")
WHERE = keys.memory_key(KEY)
CODEC = Codec()
CONFIG = ShortTermMemoryConfig("truncation")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture(params=["memory", "sqlite"])
async def driver(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock, writes_purge_nothing: None
) -> AsyncIterator[Driver]:
    del writes_purge_nothing
    driver: Driver = MemoryDriver(MemoryStore(), clock=clock)
    if request.param == "sqlite":
        driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "stm.db")), clock=clock)
    await driver.open()
    yield driver
    await driver.close()


def turn(name: str, ts: float) -> bytes:
    return CODEC.seal_turn(StoredTurn(name, ConversationTurn(f"question {name}", f"answer {name}", ts=ts)))


async def add(driver: Driver, name: str, ts: float, *, where: Key = WHERE, ttl: float | None = None) -> None:
    await Directory(driver, CODEC).note("acme", "u")
    await driver.append(where, turn(name, ts), initial_version="v", ttl=ttl)


async def ids(driver: Driver, where: Key = WHERE) -> list[str]:
    return [stored.id for stored in Snapshot.of(await driver.load(where), CODEC).turns]


async def purge(
    driver: Driver, clock: FakeClock, *, kind: type[Purge] = Purge, days: float | None = 90, **options: Any
) -> Purged:
    older_than = None if days is None else days * DAY
    one = kind(driver, CODEC, Directory(driver, CODEC), older_than=older_than, clock=clock, **options)
    await one.expired()
    await one.tenant("acme")
    return one.purged


# What is removed, and what is kept


async def test_an_old_conversation_is_emptied_and_its_record_expires(
    driver: Driver, clock: FakeClock
) -> None:
    await driver.replace(WHERE, CODEC.seal_body(Body(summary="secret")), version="v", expect=ANY, ttl=None)
    for number in range(3):
        await add(driver, f"t{number}", NOW - 91 * DAY)
    found: list[purging.Found] = []
    assert await purge(driver, clock, on_found=found.append) == Purged(conversations=1)
    assert found == [purging.Found("acme", "u", "memory", "s")]
    record = await driver.load(WHERE)
    assert record is not None
    assert record.tail == ()
    assert CODEC.open_body(record.body) == Body(extra={"purged_at": NOW})
    assert await purge(driver, clock) == Purged(empty=1)
    await clock.pass_time(90 * DAY)
    assert await driver.load(WHERE) is None


@pytest.mark.parametrize(
    ("times", "outcome"),
    [
        ([NOW - 91 * DAY], "conversations"),
        ([NOW - 91 * DAY, NOW - 89 * DAY], "kept"),
        # In the order of their clocks, which differ.
        ([NOW - 89 * DAY, NOW - 91 * DAY], "kept"),
        ([0.0], "undated"),
        ([float("nan")], "undated"),
        ([NOW - 91 * DAY, 0.0], "undated"),
        ([-5.0], "undated"),
        # Seconds since the host was started.
        ([86_400.0], "undated"),
        ([NOW * 2], "undated"),
        # Milliseconds.
        ([NOW * 1000], "kept"),
        ([(NOW - 91 * DAY) * 1000], "conversations"),
        ([0.0, NOW - 91 * DAY], "conversations"),
    ],
)
async def test_the_newest_turn_says_how_old_a_conversation_is(
    driver: Driver, clock: FakeClock, times: list[float], outcome: str
) -> None:
    for number, ts in enumerate(times):
        await add(driver, f"t{number}", ts)
    assert await purge(driver, clock) == Purged(**{outcome: 1})


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (Body(summary="s", folded=1, forgotten=Forgotten(",a,", ((NOW - 91 * DAY, 1),))), "conversations"),
        (Body(summary="s", folded=1, forgotten=Forgotten(",a,", ((NOW - 89 * DAY, 1),))), "kept"),
        (Body(summary="s", folded=1, forgotten=Forgotten(",a,", ((0.0, 1),))), "undated"),
        (Body(summary="s"), "undated"),
        (Body(), "undated"),
        (Body(lease=Lease(NOW, 60.0)), "kept"),
    ],
)
async def test_a_conversation_without_turns_is_as_old_as_its_last_fold(
    driver: Driver, clock: FakeClock, body: Body, outcome: str
) -> None:
    await Directory(driver, CODEC).note("acme", "u")
    await driver.replace(WHERE, CODEC.seal_body(body), version="v", expect=ANY, ttl=None)
    assert await purge(driver, clock) == Purged(**{outcome: 1})


async def test_logs_are_purged_by_the_times_of_their_entries(driver: Driver, clock: FakeClock) -> None:
    await Directory(driver, CODEC).note("acme", "u")
    for session, at in (("old", NOW - 91 * DAY), ("new", NOW - DAY), ("undated", 0.0)):
        where = keys.log_key(MemoryKey("acme", "u", session), "langchain")
        entry = items.seal_entry(Add("e", [{"text": session}], at), CODEC)
        await driver.append(where, entry, initial_version="v", ttl=None)
    assert await purge(driver, clock) == Purged(logs=1, kept=1, undated=1)
    assert await purge(driver, clock) == Purged(empty=1, kept=1, undated=1)


async def test_an_item_added_through_a_log_has_a_time(driver: Driver) -> None:
    async with Backend(driver) as backend:
        await backend.item_log(KEY, "langchain").add([{"text": "hello"}])
        found = await backend.sessions.purge("acme", older_than=DAY)
        assert (found.kept, found.undated) == (1, 0)


async def test_what_cannot_be_read_is_kept_and_counted(driver: Driver, clock: FakeClock) -> None:
    await add(driver, "t", NOW - 91 * DAY)
    await driver.append(WHERE, b"damaged", initial_version="v", ttl=None)
    before = await driver.load(WHERE)
    assert await purge(driver, clock) == Purged(unreadable=1)
    assert await driver.load(WHERE) == before


async def test_without_an_age_no_conversation_is_touched(driver: Driver, clock: FakeClock) -> None:
    await add(driver, "t", NOW - 5_000 * DAY)
    assert await purge(driver, clock, days=None) == Purged()
    assert await ids(driver) == ["t"]


async def test_other_users_and_tenants_are_left_alone(driver: Driver, clock: FakeClock) -> None:
    directory = Directory(driver, CODEC)
    for tenant, user in (("acme", "u"), ("acme", "v"), ("other", "u")):
        await directory.note(tenant, user)
        await add(driver, "t", NOW - 91 * DAY, where=keys.memory_key(MemoryKey(tenant, user, "s")))
    one = Purge(driver, CODEC, directory, older_than=90 * DAY, clock=clock)
    await one.user("acme", "u")
    assert one.purged == Purged(conversations=1)
    await one.tenant("acme")
    assert one.purged == Purged(conversations=2, empty=1)
    assert await ids(driver, keys.memory_key(MemoryKey("other", "u", "s"))) == ["t"]


async def test_a_sealed_conversation_is_purged(driver: Driver) -> None:
    sealing = Sealing(StaticKeys({"k": bytes(32)}, primary="k"))
    async with Backend(driver, sealing=sealing) as backend:
        await backend.memory(KEY, CONFIG).add_turn(ConversationTurn("question", "answer", ts=NOW - 900 * DAY))
        assert (await backend.sessions.purge("acme", older_than=90 * DAY)).conversations == 1
        assert (await backend.sessions.export(KEY))["turns"] == []


async def test_a_purged_conversation_begins_again_with_the_next_turn(driver: Driver) -> None:
    async with Backend(driver) as backend:
        memory = backend.memory(KEY, CONFIG)
        await memory.add_turn(ConversationTurn("old", "answer", ts=NOW - 900 * DAY))
        assert (await backend.sessions.purge("acme", older_than=90 * DAY)).conversations == 1
        await memory.add_turn(ConversationTurn("new", "answer"))
        turns = (await backend.sessions.export(KEY))["turns"]
        assert [one["user_message"] for one in turns] == ["new"]


async def test_ages_need_a_tenant(driver: Driver) -> None:
    async with Backend(driver) as backend:
        with pytest.raises(ConfigurationError, match="tenant"):
            await backend.sessions.purge(older_than=DAY)
        with pytest.raises(ConfigurationError, match="tenant"):
            await backend.sessions.purge(user="u")


async def test_a_program_without_an_event_loop_purges_too() -> None:
    def work() -> tuple[int, int]:
        with stm_backends.sync.open_backend("memory://") as backend:
            memory = backend.memory(KEY, CONFIG)
            memory.add_turn(ConversationTurn("old", "answer", ts=NOW - 900 * DAY))
            sessions = backend.asynchronous.sessions
            purged = backend.run(sessions.purge("acme", older_than=90 * DAY))
            return purged.conversations, backend.run(sessions.expire("acme", ttl=DAY)).conversations

    assert await asyncio.to_thread(work) == (1, 1)


async def test_a_name_that_is_no_part_is_left_alone(driver: Driver, clock: FakeClock) -> None:
    await Directory(driver, CODEC).note("acme", "u")
    await driver.append(Key(keys.scope("acme", "u", "part"), "?"), b"", initial_version="v", ttl=None)
    assert await purge(driver, clock) == Purged()


# A turn that is added at any moment


class Meddling(WrapperDriver):
    """Before its n-th operation, lets `meddle` happen. `max_drop` is 2, so that emptying takes steps."""

    def __init__(self, inner: Driver, at: int, meddle: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self.calls = 0
        self._at = at
        self._meddle = meddle

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, max_drop=2)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        if self.calls == self._at:
            await self._meddle()
        self.calls += 1
        return await send()


@asynccontextmanager
async def old_conversation(turns: int = 5) -> AsyncIterator[tuple[Driver, FakeClock]]:
    clock = FakeClock(NOW)
    driver = MemoryDriver(MemoryStore(), clock=clock)
    await driver.open()
    for number in range(turns):
        await add(driver, f"old{number}", NOW - 100 * DAY)
    yield driver, clock


async def turn_added_at_each_moment(kind: type[Purge]) -> int:
    """Add a turn between any two operations of a purge; it must be there for the time asked for."""
    moment, calls = 0, 1
    while moment <= calls:
        async with old_conversation() as (driver, clock):
            meddling = Meddling(driver, moment, lambda driver=driver: add(driver, "new", NOW))
            await purge(meddling, clock, kind=kind)
            calls = meddling.calls
            if moment == calls:
                await add(driver, "new", NOW)
            assert "new" in await ids(driver), f"the turn that was added at moment {moment} is lost"
            await clock.pass_time(90 * DAY - 1)
            assert "new" in await ids(driver), f"the turn that was added at moment {moment} expired early"
        moment += 1
    return moment


async def test_a_turn_added_between_any_two_operations_stays() -> None:
    assert await turn_added_at_each_moment(Purge) > 6


@pytest.mark.parametrize("mutant", PURGES)
async def test_purges_that_lose_a_turn_are_rejected(mutant: type[Purge]) -> None:
    with pytest.raises(AssertionError, match="the turn that was added"):
        await turn_added_at_each_moment(mutant)


async def test_a_turn_added_during_a_killed_purge_stays() -> None:
    moment, was_killed = 0, True
    while was_killed:
        async with old_conversation() as (driver, clock):
            was_killed = False

            async def added_and_killed(driver: Driver = driver) -> None:
                await add(driver, "new", NOW)
                raise asyncio.CancelledError

            try:
                await purge(Meddling(driver, moment, added_and_killed), clock)
            except asyncio.CancelledError:
                was_killed = True
                await clock.pass_time(90 * DAY - 1)
                assert "new" in await ids(driver)
        moment += 1
    assert moment > 6


# An item that is added to a log at any moment

LOG = keys.log_key(KEY, "langchain")
OLD = [{"n": number} for number in range(5)]
NEW = {"n": "new"}


async def old_log(max_record_bytes: int = 1_000_000) -> tuple[Driver, FakeClock, str]:
    """Return a log of items from 100 days ago, and the moment after them."""
    clock, tip = FakeClock(NOW), ""
    driver = MemoryDriver(MemoryStore(), clock=clock, max_record_bytes=max_record_bytes)
    await driver.open()
    log = ItemLog(driver, KEY, "langchain", clock=lambda: NOW - 100 * DAY)
    for item in OLD:
        tip = await log.add_after(tip, [item]) or ""
    return driver, clock, tip


async def added_at_each_moment(kind: type[Purge], *, conditional: bool) -> list[bool]:
    """Add an item between any two operations of a purge; returns at which moments it was accepted."""
    accepted, calls = list[bool](), 1
    while len(accepted) <= calls:
        driver, clock, tip = await old_log()
        log = ItemLog(driver, KEY, "langchain", clock=lambda: NOW)
        added = list[bool]()

        async def add_item(log: ItemLog = log, tip: str = tip, added: list[bool] = added) -> None:
            if added:
                return  # Of several operations at once, before the first.
            added.append(True)
            if conditional:
                added[0] = await log.add_after(tip, [NEW]) is not None
            else:
                await log.add([NEW])

        meddling = Meddling(driver, len(accepted), add_item)
        await purge(meddling, clock, kind=kind)
        calls = meddling.calls
        await add_item()
        for later in (0.0, 90 * DAY - 1):
            await clock.pass_time(later)
            found = await log.items()
            assert (NEW in found) == added[0], "an acknowledged item is lost, or a refused one is there"
        # What follows the old items stands after them, and nothing stands there once they are gone.
        assert found in ([[], OLD, [*OLD, NEW]] if conditional else [[NEW], [*OLD, NEW]]), "the past is gone"
        assert await log.add_after(tip, [NEW]) is None, "a moment is valid that is over"
        accepted += added
    return accepted


async def test_an_item_added_between_any_two_operations_stays_or_is_refused() -> None:
    accepted = await added_at_each_moment(Purge, conditional=True)
    assert accepted == sorted(accepted, reverse=True)
    assert {*accepted} == {True, False}
    assert len(await added_at_each_moment(Purge, conditional=False)) > 6


@pytest.mark.parametrize(
    ("mutant", "conditional", "reason"),
    [*zip(LOG_PURGES, (True, True, False), ("the past is gone", "is lost", "is lost"), strict=True)],
)
async def test_purges_that_lose_an_item_or_leave_a_moment_are_rejected(
    mutant: type[Purge], conditional: bool, reason: str
) -> None:
    with pytest.raises(AssertionError, match=reason):
        await added_at_each_moment(mutant, conditional=conditional)


async def test_a_killed_purge_of_a_log_is_completed_by_the_next() -> None:
    async def killed() -> None:
        raise asyncio.CancelledError

    moment, was_killed = 0, True
    while was_killed:
        driver, clock, tip = await old_log()
        was_killed = False
        try:
            await purge(Meddling(driver, moment, killed), clock)
        except asyncio.CancelledError:
            was_killed = True
        log = ItemLog(driver, KEY, "langchain", clock=lambda: NOW)
        # Readers see all of it or nothing.
        assert await log.items() in ([], OLD)
        await purge(Meddling(driver, -1, killed), clock)
        record = await driver.load(LOG)
        assert record is not None
        assert (record.tail, items.open_folded(record.body, CODEC).items) == ((), [])
        assert await purge(driver, clock) == Purged(empty=1)
        assert await log.add_after(tip, [NEW]) is None
        assert await log.add_after("", [NEW]) is not None
        moment += 1
    assert moment > 6


async def test_a_log_that_is_full_is_purged_too() -> None:
    driver, clock, tip = await old_log(max_record_bytes=2_000)
    repeat = items.seal_entry(Add("r", [], NOW - 100 * DAY), CODEC)
    with suppress(TooLarge):
        while True:
            await driver.append(LOG, repeat, initial_version="v", ttl=None)
    assert await purge(driver, clock) == Purged(logs=1)
    assert await purge(driver, clock) == Purged(empty=1)
    log = ItemLog(driver, KEY, "langchain", clock=lambda: NOW)
    assert await log.items() == []
    assert await log.add_after(tip, [NEW]) is None


async def test_a_user_stays_listed_while_a_purged_record_exists(driver: Driver, clock: FakeClock) -> None:
    directory = Directory(driver, CODEC, clock=clock, epoch=clock)
    await directory.note("acme", "u", ttl=100 * DAY)
    await driver.append(WHERE, turn("t", NOW), initial_version="v", ttl=100 * DAY)
    await clock.pass_time(95 * DAY)
    await Purge(driver, CODEC, directory, older_than=90 * DAY, clock=clock).user("acme", "u")
    await clock.pass_time(80 * DAY)
    assert await driver.load(WHERE) is not None
    assert [user async for user in directory.users("acme")] == ["u"]


async def test_an_interrupted_purge_is_completed_by_the_next(driver: Driver, clock: FakeClock) -> None:
    for number in range(6):
        await add(driver, f"t{number}", NOW - 100 * DAY)

    async def killed() -> None:
        raise asyncio.CancelledError

    for moment in range(6):
        with pytest.raises(asyncio.CancelledError):
            await purge(Meddling(driver, moment, killed), clock)
    await purge(driver, clock)
    assert await ids(driver) == []
    assert await purge(driver, clock) == Purged(empty=1)


async def test_a_conversation_that_is_folded_at_that_moment_is_kept() -> None:
    body, changed = CODEC.seal_body(Body(summary="s")), 0
    for moment in range(5):
        async with old_conversation() as (driver, clock):

            async def fold(driver: Driver = driver) -> None:
                await driver.replace(WHERE, body, version="w", expect="v", drop=1, ttl=None)

            purged = await purge(Meddling(driver, moment, fold), clock)
            changed += purged.changed
            if purged.changed:
                assert len(await ids(driver)) == 4
    # After the conversation was read: before the user is listed, and before the write.
    assert changed == 2


async def test_each_record_is_named_once_though_one_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "PAGE", 2)
    moment, calls, outcomes = 0, 1, set[bool]()
    names = [f"s{number}" for number in range(5)]
    where = [keys.memory_key(MemoryKey("acme", "u", name)) for name in names]
    while moment <= calls:
        clock, found = FakeClock(NOW), list[purging.Found]()
        driver = MemoryDriver(MemoryStore(), clock=clock)
        await driver.open()
        for key in where:
            await add(driver, "old", NOW - 100 * DAY, where=key)

        async def change(driver: Driver = driver) -> None:
            # As a repeated turn of an import, and as a fold: the record is as old as before, and another.
            await add(driver, "older", NOW - 99 * DAY, where=where[2])
            body = CODEC.seal_body(Body(summary="s"))
            await driver.replace(where[2], body, version="w", expect=ANY, ttl=None)
            await add(driver, "older", NOW - 99 * DAY, where=where[2])

        meddling = Meddling(driver, moment, change)
        purged = await purge(meddling, clock, on_found=found.append)
        calls = meddling.calls
        outcomes.add(bool(purged.changed))
        listed = sorted(one.name for one in found)
        assert listed == [name for name in names if name != "s2" or not purged.changed]
        assert purged == Purged(conversations=len(listed), changed=purged.changed)
        moment += 1
    assert outcomes == {True, False}


# Parts of large values


async def test_parts_of_an_old_conversation_are_removed_with_it(driver: Driver, clock: FakeClock) -> None:
    clock.now = NOW - 100 * DAY
    large = LargeEntries(driver, clock=clock)
    text = "x" * (driver.traits.max_record // 8)
    await Directory(large, CODEC).note("acme", "u")
    entry = CODEC.seal_turn(StoredTurn("t", ConversationTurn(text, "a", ts=clock.now)))
    await large.append(WHERE, entry, initial_version="v", ttl=None)
    parts = keys.parts_of(WHERE).scope
    assert (await driver.scan(parts, limit=10)).names
    clock.now = NOW
    assert (await purge(large, clock)).conversations == 1
    assert not (await driver.scan(parts, limit=10)).names


async def test_left_over_parts_go_and_those_in_use_or_new_stay(driver: Driver, clock: FakeClock) -> None:
    large = LargeEntries(driver, clock=clock)
    await Directory(large, CODEC).note("acme", "u")
    text = "x" * (driver.traits.max_record // 8)
    parts = keys.parts_of(WHERE).scope
    for session in ("in use", "left over"):
        where = keys.memory_key(MemoryKey("acme", "u", session))
        entry = CODEC.seal_turn(StoredTurn("t", ConversationTurn(text, "a", ts=clock.now)))
        await large.append(where, entry, initial_version="v", ttl=None)
    await driver.delete(keys.memory_key(MemoryKey("acme", "u", "left over")))
    before = (await driver.scan(parts, limit=100)).names
    assert (await purge(large, clock, days=None)).parts == 0
    await clock.pass_time(2 * 3600)
    assert (await purge(large, clock, days=None, dry_run=True)).parts == len(before) // 2
    assert (await driver.scan(parts, limit=100)).names == before
    assert (await purge(large, clock, days=None)).parts == len(before) // 2
    assert await large.load(keys.memory_key(MemoryKey("acme", "u", "in use"))) is not None


# Expired records, and dry runs


async def test_expired_records_are_removed_in_bounded_steps(
    driver: Driver, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "STEP", 10)
    for number in range(35):
        await driver.append(Key("s", str(number)), b"e", initial_version="v", ttl=60.0)
    await driver.append(Key("s", "stays"), b"e", initial_version="v", ttl=600.0)
    await clock.pass_time(120)
    purges = purges_of(LargeEntries(WrapperDriver(driver)))
    assert purges is driver
    assert await purges.expired() == 35
    steps: list[int] = []
    purged = await purge(
        LargeEntries(driver), clock, days=None, on_step=lambda counts: steps.append(counts.expired)
    )
    assert purged == Purged(expired=35)
    assert steps == [10, 20, 30, 35]
    assert await purges.expired() == 0
    assert (await driver.scan("s", limit=9)).names == ("stays",)


async def test_a_driver_whose_datastore_expires_by_itself_needs_nothing(clock: FakeClock) -> None:
    class Minimal:
        """The contract alone, as a driver of another package."""

        name = "minimal"

        def __init__(self, driver: Driver) -> None:
            self.traits = driver.traits
            for operation in ("open", "close", "load", "append", "replace", "delete", "scan"):
                setattr(self, operation, getattr(driver, operation))

    async with old_conversation() as (driver, _):
        minimal: Any = Minimal(driver)
        assert purges_of(minimal) is None
        assert (await purge(minimal, clock)).conversations == 1


async def test_a_dry_run_counts_the_same_and_writes_nothing(driver: Driver, clock: FakeClock) -> None:
    await add(driver, "expired", NOW, where=keys.memory_key(MemoryKey("acme", "u", "expired")), ttl=60.0)
    await clock.pass_time(120)
    await add(driver, "t", NOW - 91 * DAY)
    await add(driver, "t", NOW - DAY, where=keys.memory_key(MemoryKey("acme", "u", "new")))
    before = await raw(driver)
    dry = await purge(driver, clock, dry_run=True)
    assert dry.conversations == dry.kept == 1
    assert await raw(driver) == before
    assert await purge(driver, clock) == dry
    assert await raw(driver) != before


async def raw(driver: Any) -> object:
    """Return everything that the datastore has."""
    if isinstance(driver, MemoryDriver):
        return {name: repr(scope.records) for name, scope in driver._store.scopes.items()}  # noqa: SLF001 -- past the driver
    with closing(sqlite3.connect(driver._path)) as connection:  # noqa: SLF001 -- past the driver
        return [*connection.iterdump()]


# A time to live for what exists


async def test_expire_keeps_all_content_and_gives_it_a_time_to_live(driver: Driver, clock: FakeClock) -> None:
    async with Backend(driver) as backend:
        await backend.memory(KEY, CONFIG).add_turn(ConversationTurn("question", "answer"))
        await backend.item_log(KEY, "openai-agents").add([{"text": "hello"}])
        await backend.state_store.save_memory_state("acme:u:s", {"a": 1})
        before = await backend.sessions.export(KEY)
        found = await backend.sessions.expire("acme", ttl=90 * DAY)
        assert (found.conversations, found.logs, found.states, found.failed) == (1, 1, 1, 0)
        assert await backend.sessions.export(KEY) == before
        assert await backend.item_log(KEY, "openai-agents").items() == [{"text": "hello"}]
        assert await backend.state_store.load_memory_state("acme:u:s") == {"a": 1}
        await clock.pass_time(90 * DAY - 1)
        assert [key async for key in backend.sessions.list("acme", "u")] == [KEY]
        await clock.pass_time(2)
        assert not [key async for key in backend.sessions.list("acme", "u")]
        assert await backend.item_log(KEY, "openai-agents").items() == []
        assert await backend.state_store.load_memory_state("acme:u:s") is None


async def test_a_turn_added_between_any_two_operations_of_expire_stays() -> None:
    for moment in range(8):
        async with old_conversation() as (driver, clock):
            meddling = Meddling(driver, moment, lambda driver=driver: add(driver, "new", NOW))
            found = await Backend(meddling).sessions.expire("acme", "u", ttl=90 * DAY)
            assert found.conversations == 1
            if meddling.calls <= moment:
                await add(driver, "new", NOW)
            assert await ids(driver) == [*(f"old{number}" for number in range(5)), "new"]
            await clock.pass_time(90 * DAY - 1)
            assert "new" in await ids(driver)


async def test_a_turn_added_after_expire_resets_the_time_to_live(driver: Driver, clock: FakeClock) -> None:
    await add(driver, "t", NOW)
    found = await Backend(driver).sessions.expire("acme", ttl=DAY)
    assert found.conversations == 1
    await add(driver, "u", NOW)
    await clock.pass_time(1_000 * DAY)
    assert await ids(driver) == ["t", "u"]


async def test_a_user_stays_listed_for_a_time_to_live_made_longer(driver: Driver, clock: FakeClock) -> None:
    directory = Directory(driver, CODEC, clock=clock, epoch=clock)
    await directory.note("acme", "u", ttl=DAY)
    await driver.append(WHERE, turn("t", NOW), initial_version="v", ttl=DAY)
    sessions = Backend(driver).sessions
    await sessions.expire("acme", ttl=90 * DAY)
    await clock.pass_time(89 * DAY)
    assert await ids(driver) == ["t"]
    assert [user async for user in sessions.users("acme")] == ["u"]


async def test_expire_lists_no_user_without_records(driver: Driver) -> None:
    sessions = Backend(driver).sessions
    await sessions.expire("acme", "u", ttl=DAY)
    assert not [user async for user in sessions.users("acme")]


async def test_expire_reports_what_it_cannot_read_and_goes_on(driver: Driver) -> None:
    class Damaged(WrapperDriver):
        async def load(self, key: Key) -> Any:
            if key == WHERE:
                raise Corrupt("a part of the record is missing")
            return await self.inner.load(key)

    await add(driver, "t", NOW)
    await add(driver, "t", NOW, where=keys.memory_key(MemoryKey("acme", "u", "other")))
    found = await Backend(Damaged(driver)).sessions.expire("acme", ttl=DAY)
    assert (found.conversations, found.failed) == (1, 1)


async def test_parts_of_large_values_expire_with_their_record(driver: Driver, clock: FakeClock) -> None:
    large = LargeEntries(driver, clock=clock)
    await Directory(large, CODEC).note("acme", "u")
    text = "x" * (driver.traits.max_record // 8)
    entry = CODEC.seal_turn(StoredTurn("t", ConversationTurn(text, "a", ts=NOW)))
    await large.append(WHERE, entry, initial_version="v", ttl=None)
    sessions = Backend(driver).sessions
    assert (await sessions.expire("acme", ttl=90 * DAY)).conversations == 1
    await clock.pass_time(89 * DAY)
    assert await large.load(WHERE) is not None
    await clock.pass_time(1_000 * DAY)
    assert not (await driver.scan(keys.parts_of(WHERE).scope, limit=10)).names

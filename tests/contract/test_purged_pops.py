"""What was popped from a log that stays: a purge removes it from record and pages, and loses no item."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stm_backends.admin.purging import Purge
from stm_backends.drivers.contract import ANY, Driver, Key, Record, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.history import items
from stm_backends.history import log as item_log
from stm_backends.history.log import REMEMBERED_FOR, ItemLog
from stm_backends.records import keys, operations, pages
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.pages import Pages
from stm_backends.testing import FakeClock
from stm_backends.types import MemoryKey
from tests.support.at_nth import AtNth

KEY = MemoryKey("acme", "u", "s")
WHERE = keys.log_key(KEY, "openai-agents")
CODEC = Codec()
DAY = 86_400.0
LATER = REMEMBERED_FOR * 5.0 + 1


class Former(WrapperDriver):
    """Shows a log as a former master has it, until something is to be confirmed."""

    def __init__(self, inner: Driver, former: Record) -> None:
        super().__init__(inner)
        self._former: Record | None = former

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, shows_unconfirmed=True)

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        shows_former = self._former is not None and (key, last) == (WHERE, 0)
        return self._former if shows_former else await self.inner.load(key, last=last)

    async def delete(self, key: Key, **options: Any) -> bool:
        self._former = None
        return await self.inner.delete(key, **options)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_800_000_000.0)


@pytest.fixture(params=["memory", "sqlite"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Driver]:
    driver: Driver = MemoryDriver(clock=clock)
    if request.param == "sqlite":
        driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "stm.db")), clock=clock)
    await driver.open()
    yield driver
    await driver.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small logs go to small pages."""
    for name, value in (("LONG", 8), ("KEPT", 4)):
        monkeypatch.setattr(item_log, name, value)
    monkeypatch.setattr(pages, "TURNS", 4)


def log_on(driver: Driver, clock: FakeClock) -> ItemLog:
    return ItemLog(driver, KEY, "openai-agents", clock=clock)


def item(number: int) -> dict[str, Any]:
    return {"text": f"item {number:03}"}


async def fill(log: ItemLog, *numbers: int) -> None:
    for number in numbers:
        await log.add([item(number)])


async def stored(driver: Driver) -> set[str]:
    """Return the texts of items that are stored anywhere."""
    texts = list[str]()
    record = await driver.load(WHERE) or pytest.fail("gone")
    texts += [value.decode() for value in [record.body or b"", *record.tail]]
    scope, prefix = keys.pages_of(WHERE)
    opened = Pages(driver, CODEC)
    async for name in operations.names_of(driver, scope, prefix):
        page = await driver.load(Key(scope, name)) or pytest.fail("gone")
        texts += [json.dumps(content) for content in opened.opened(page)]
    found = set[str]()
    for text in texts:
        found |= {text[at : at + 8] for at in range(len(text)) if text.startswith("item ", at)}
    return found


async def purge(driver: Driver, clock: FakeClock, **options: Any) -> None:
    options = {"older_than": 90 * DAY, **options}
    await Purge(driver, CODEC, Directory(driver, CODEC), clock=clock, **options).user("acme", "u")


async def test_a_purge_removes_what_was_popped_from_a_log_that_stays(
    driver: Driver, clock: FakeClock
) -> None:
    log = log_on(driver, clock)
    await fill(log, *range(40))
    assert [await log.pop() for _ in range(30)] == [item(number) for number in range(39, 9, -1)]
    await fill(log, *range(100, 115))
    assert len(await stored(driver)) > 25, "what was popped is still in pages"
    await clock.pass_time(LATER)

    await purge(driver, clock)

    there = [*range(10), *range(100, 115)]
    assert await log.items() == [item(number) for number in there]
    assert await stored(driver) == {item(number)["text"] for number in there}
    # And what is added to these pages later is there.
    await fill(log, *range(200, 230))
    there += range(200, 230)
    assert await log.items() == [item(number) for number in there]
    assert (await log.transcript(limit=100)).missing == ()


async def test_what_was_popped_from_a_short_log_is_removed(driver: Driver, clock: FakeClock) -> None:
    log = log_on(driver, clock)
    await fill(log, 1, 2, 3)
    assert await log.pop() == item(3)
    await clock.pass_time(LATER)
    assert await stored(driver) == {"item 001", "item 002", "item 003"}
    # Nobody asks for an age.
    await purge(driver, clock, older_than=None)
    await purge(driver, clock, dry_run=True)
    assert await stored(driver) == {"item 001", "item 002", "item 003"}
    await purge(driver, clock, older_than=None, transcripts_older_than=90 * DAY)
    assert await stored(driver) == {"item 001", "item 002"}
    assert await log.items() == [item(1), item(2)]


async def test_what_was_popped_just_now_stays_for_its_process(driver: Driver, clock: FakeClock) -> None:
    log = log_on(driver, clock)
    await fill(log, *range(40))
    assert [await log.pop() for _ in range(30)]
    await fill(log, *range(100, 115))
    before = await stored(driver)
    await purge(driver, clock)
    assert await stored(driver) == before


async def test_an_erasure_leaves_nothing_of_what_was_popped(driver: Driver, clock: FakeClock) -> None:
    log = log_on(driver, clock)
    await fill(log, *range(40))
    assert [await log.pop() for _ in range(30)]
    await log.clear()
    assert await driver.load(WHERE) is None
    assert [name async for name in operations.names(driver, keys.pages_of(WHERE).scope)] == []


# While others pop and add


async def used(log: ItemLog) -> None:
    assert await log.pop() == item(105)
    await fill(log, *range(300, 312))


async def with_purges(clock: FakeClock, *, purges_first: bool) -> int:
    """Let somebody use a log before each operation of a purge, or purge before each operation of its use."""
    number = 0
    while True:
        number += 1
        store = MemoryStore()
        plain = MemoryDriver(store, clock=clock)
        await plain.open()
        log = log_on(plain, clock)
        await fill(log, *range(24))
        for _ in range(20):
            await log.pop()
        await fill(log, *range(100, 106))
        await clock.pass_time(LATER)

        async def use(log: ItemLog = log) -> None:
            await used(log)

        async def purged(plain: Driver = plain) -> None:
            await purge(plain, clock)

        driver = AtNth(MemoryDriver(store, clock=clock), number, use if purges_first else purged)
        await driver.open()
        await (purge(driver, clock) if purges_first else used(log_on(driver, clock)))
        if not driver.reached:
            return number
        there = [*range(4), *range(100, 105), *range(300, 312)]
        assert await log.items() == [item(one) for one in there], number
        assert (await log.transcript(limit=100)).missing == (), number


@pytest.mark.parametrize("purges_first", [True, False])
async def test_a_purge_loses_no_item_that_others_pop_or_add(clock: FakeClock, purges_first: bool) -> None:
    assert await with_purges(clock, purges_first=purges_first) > 20


async def test_a_purge_that_takes_items_under_way_is_noticed(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = Pages.forget_removed

    async def too_much(self: Pages, key: Key, transcript: Transcript) -> bool:
        return await forget(self, key, replace(transcript, rev=transcript.rev + 1))

    monkeypatch.setattr(Pages, "forget_removed", too_much)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await with_purges(clock, purges_first=False)


def test_pops_of_before_are_folded_with_all_that_stands_before_them() -> None:
    adds = [items.Add(f"{number}", [item(number)], 1.0) for number in range(3)]
    log = items.Log("v", items.Folded(), [*adds, items.Pop("p", 5.0), adds[0]])
    assert (log.with_pops_until(4.0), log.with_pops_until(5.0)) == (None, 4)
    folded = items.Log("v", log.fold(4, now=5.0, keep_for=10.0), [])
    assert (folded.with_pops_until(4.0), folded.with_pops_until(5.0)) == (None, 0)


async def test_pops_that_only_a_former_master_shows_remove_nothing(driver: Driver, clock: FakeClock) -> None:
    log = log_on(driver, clock)
    await fill(log, *range(24))
    while await log.fold():
        pass
    kept = await driver.load(WHERE) or pytest.fail("gone")
    for _ in range(4):
        await log.pop()
    while await log.fold():
        pass
    former = await driver.load(WHERE, last=0) or pytest.fail("gone")
    await driver.replace(WHERE, kept.body or b"", version=kept.version, expect=ANY, ttl=None)
    for entry in kept.tail:
        await driver.append(WHERE, entry, initial_version="v", ttl=None)
    await clock.pass_time(LATER)
    assert not await log_on(Former(driver, former), clock).forget_popped()
    assert await log_on(driver, clock).items() == [item(number) for number in range(24)]

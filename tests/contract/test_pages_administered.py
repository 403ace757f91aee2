"""Copies, purges and times to live of conversations with transcripts, on the embedded drivers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stm_backends import Backend, Limits, MemoryBudget, MemoryKey, Sealing, StaticKeys
from stm_backends.admin.copying import Copy, Item, Owner
from stm_backends.admin.purging import Purge, Purged
from stm_backends.drivers.contract import ANY, Driver, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import (
    Corrupt,
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    SessionExists,
    SessionNotFound,
    Unavailable,
)
from stm_backends.history import log as item_log
from stm_backends.history.log import ItemLog
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys, operations, pages
from stm_backends.records.body import Transcript
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.pages import Leaving, Pages
from stm_backends.testing import FakeClock
from tests.support.transcripts import KEPT, converse, numbered, pages_in, pages_of, reading, told

NOW = 1_800_000_000.0
DAY = 86_400.0
KEY = MemoryKey("acme", "u", "s")
OTHER = MemoryKey("acme", "u", "other")
WHERE = keys.memory_key(KEY)
CODEC = Codec()


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of few turns, so that many are completed."""
    monkeypatch.setattr(pages, "TURNS", 4)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture(params=["memory", "sqlite"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Driver]:
    driver: Driver = MemoryDriver(MemoryStore(), clock=clock)
    if request.param == "sqlite":
        driver = SqliteDriver(SqliteSettings(path=str(tmp_path / "stm.db")), clock=clock)
    await driver.open()
    yield driver
    await driver.close()


@pytest.fixture
async def target() -> AsyncIterator[Driver]:
    driver = MemoryDriver(MemoryStore())
    await driver.open()
    yield driver
    await driver.close()


async def transcript_in(driver: Driver) -> Transcript:
    found = Snapshot.of(await driver.load(WHERE), CODEC).body.transcript
    assert found is not None
    return found


# Copy


async def copied(source: Driver, target: Driver, **options: Any) -> tuple[Copy, list[str]]:
    problems: list[str] = []

    def problem(item: Item, problem: str, error: object) -> None:
        del error
        problems.append(f"{item.kind} {problem}")

    copy = Copy(source, target, [Owner("acme")], on_problem=problem, **options)
    await copy.copy()
    await copy.verify()
    return copy, problems


async def test_a_copy_has_the_whole_conversation(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    copy, problems = await copied(driver, target)
    assert copy.ok
    assert not problems
    assert await pages_in(target, KEY) == await pages_in(driver, KEY)
    assert await told(Backend(target), KEY) == numbered(range(30))


async def test_a_copy_of_a_conversation_in_use_lacks_no_page_that_its_record_needs(
    driver: Driver, target: Driver
) -> None:
    source = Backend(driver)
    await converse(source, KEY, range(20))

    class InUse(WrapperDriver):
        """Adds turns whenever the copy loads something."""

        added = 20

        async def load(self, key: Key) -> Record | None:
            record = await self.inner.load(key)
            await converse(source, KEY, range(self.added, self.added + 3))
            self.added += 3
            return record

    await Copy(InUse(driver), target, [Owner("acme")]).copy()
    found = await told(Backend(target), KEY)
    assert found == numbered(range(len(found)))
    assert len(found) >= 20


async def test_pages_of_a_record_that_was_left_are_not_copied(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(20))
    await converse(Backend(target), KEY, range(100, 109))
    before = await pages_in(target, KEY)
    copy, problems = await copied(driver, target)
    assert problems == ["memory left"]
    assert not copy.ok
    assert await pages_in(target, KEY) == before


async def test_a_record_that_is_replaced_takes_its_pages_along(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(20))
    await converse(Backend(target), KEY, range(100, 109))
    copy, problems = await copied(driver, target, replace=True)
    assert copy.ok
    assert not problems
    assert copy.tally["extra"] == 0
    assert await told(Backend(target), KEY) == numbered(range(20))


async def test_a_record_whose_removal_is_answered_too_late_takes_its_pages_along(target: Driver) -> None:
    source = MemoryDriver()
    await source.open()
    await converse(Backend(source), KEY, range(3), config=replace(KEPT, transcript=False))
    await converse(Backend(target), KEY, range(100, 109))

    class LosesTheAnswer(WrapperDriver):
        armed = True

        async def delete(self, key: Key, *, expect: Any = ANY) -> bool:
            done = await self.inner.delete(key, expect=expect)
            if self.armed and key == WHERE:
                self.armed = False
                raise OutcomeUnknown("the answer was lost", backend=self.name, operation="delete")
            return done

    copy, problems = await copied(source, LosesTheAnswer(target), replace=True)
    assert copy.ok
    assert not problems
    assert not await pages_of(target, KEY)


async def test_an_interrupted_copy_is_completed_with_its_pages(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))

    class Ends(WrapperDriver):
        async def load(self, key: Key) -> Record | None:
            if key.scope.endswith(":page") and key.name.endswith("3"):
                raise asyncio.CancelledError
            return await self.inner.load(key)

    with pytest.raises(asyncio.CancelledError):
        await Copy(Ends(driver), target, [Owner("acme")]).copy()
    assert len(await pages_of(target, KEY)) < len(await pages_of(driver, KEY))
    copy, _ = await copied(driver, target)
    assert copy.ok
    assert await told(Backend(target), KEY) == numbered(range(30))


# Purge


async def purge(driver: Driver, clock: FakeClock, **options: Any) -> Purged:
    one = Purge(driver, CODEC, Directory(driver, CODEC), clock=clock, **options)
    await one.tenant("acme")
    return one.purged


def days_ago(number: int) -> float:
    """Return the time of a turn: that of number 0 is 100 days ago, that of number 100 is now."""
    return NOW - (100 - number) * DAY


async def test_a_purge_of_a_conversation_takes_its_pages_along(driver: Driver, clock: FakeClock) -> None:
    await converse(Backend(driver), KEY, range(30), ts=days_ago)
    found = await purge(driver, clock, older_than=10 * DAY)
    assert (found.conversations, found.pages) == (1, 7)
    assert not await pages_of(driver, KEY)
    assert await told(Backend(driver), KEY) == []
    await converse(Backend(driver), KEY, range(200, 210))
    assert [name for _, name in await told(Backend(driver), KEY)] == [f"t{n}" for n in range(200, 210)]


async def test_old_pages_go_and_the_rest_stays(driver: Driver, clock: FakeClock) -> None:
    await converse(Backend(driver), KEY, range(40), ts=days_ago)
    dry = await purge(driver, clock, transcripts_older_than=80 * DAY, dry_run=True)
    assert await told(Backend(driver), KEY) == numbered(range(40))
    found = await purge(driver, clock, transcripts_older_than=80 * DAY)
    assert (found.pages, found.conversations) == (5, 0)
    assert dry == found
    assert await told(Backend(driver), KEY) == numbered(range(20, 40))
    assert (await transcript_in(driver)).first == 20
    page = await reading(Backend(driver), KEY).transcript(before=10)
    assert (page.turns, page.oldest, page.newest, page.missing) == ((), 20, 39, ())
    assert (await purge(driver, clock, transcripts_older_than=80 * DAY)).pages == 0
    await converse(Backend(driver), KEY, range(40, 60), ts=days_ago)
    assert await told(Backend(driver), KEY) == numbered(range(20, 60))


async def test_a_page_that_may_grow_is_emptied_and_grows_on(driver: Driver, clock: FakeClock) -> None:
    await converse(Backend(driver), KEY, range(12), ts=days_ago)
    base = (await transcript_in(driver)).base
    assert base % pages.TURNS
    found = await purge(driver, clock, transcripts_older_than=10 * DAY)
    assert found.pages == base // pages.TURNS + 1
    assert await told(Backend(driver), KEY) == numbered(range(base, 12))
    assert len(await pages_of(driver, KEY)) == 1
    await converse(Backend(driver), KEY, range(12, 30), ts=days_ago)
    assert await told(Backend(driver), KEY) == numbered(range(base, 30))


async def test_turns_that_a_fold_has_put_into_an_old_page_stay(driver: Driver, clock: FakeClock) -> None:
    backend = Backend(driver)
    await converse(backend, KEY, range(12), ts=days_ago)
    snapshot = Snapshot.of(await driver.load(WHERE), CODEC)
    assert snapshot.body.transcript is not None
    # As a process does between its two writes of a fold.
    leaving = [Leaving(snapshot.turns[0].id, CODEC.open_encoded("turn", snapshot.tail[0]))]
    await Pages(driver, CODEC).put(WHERE, snapshot.body.transcript, leaving, summary="", ttl=None)
    await purge(driver, clock, transcripts_older_than=10 * DAY)
    moved = replace(
        snapshot.body,
        forgotten=snapshot.body.forgotten.adding([snapshot.turns[0].id], now=NOW, keep_for=60.0),
        transcript=replace(
            snapshot.body.transcript.moved([snapshot.turns[0].id], summarized=True),
            first=snapshot.body.transcript.base,
        ),
    )
    record = await driver.load(WHERE)
    assert record is not None
    body = CODEC.seal_body(moved)
    assert await driver.replace(WHERE, body, version="next", expect=record.version, drop=1, ttl=None)
    found = await told(backend, KEY)
    assert found == numbered(range(snapshot.body.transcript.base, 12))


async def test_turns_without_a_usable_time_keep_their_page(driver: Driver, clock: FakeClock) -> None:
    await converse(Backend(driver), KEY, range(20), ts=lambda number: number + 1.0)
    assert (await purge(driver, clock, transcripts_older_than=DAY)).pages == 0
    assert await told(Backend(driver), KEY) == numbered(range(20))


async def test_turns_that_no_summary_covers_keep_their_pages(driver: Driver, clock: FakeClock) -> None:
    await converse(Backend(driver), KEY, range(30), ts=days_ago)
    snapshot = Snapshot.of(await driver.load(WHERE), CODEC)
    assert snapshot.body.transcript is not None
    body = replace(snapshot.body, transcript=replace(snapshot.body.transcript, gap=9))
    assert await driver.replace(
        WHERE, CODEC.seal_body(body), version="gap", expect=snapshot.version or "", ttl=None
    )
    await purge(driver, clock, transcripts_older_than=10 * DAY)
    transcript = await transcript_in(driver)
    assert (transcript.first, transcript.gap) == (9, 9)
    assert await told(Backend(driver), KEY) == numbered(range(9, 30))


@pytest.mark.parametrize("reached", range(1, 9))
async def test_an_interrupted_purge_of_pages_is_completed_by_the_next(
    driver: Driver, clock: FakeClock, reached: int
) -> None:
    await converse(Backend(driver), KEY, range(40), ts=days_ago)

    class Ends(WrapperDriver):
        writes = 0

        def _count(self) -> None:
            self.writes += 1
            if self.writes >= reached:
                raise asyncio.CancelledError

        async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
            self._count()
            return await self.inner.replace(key, body, **options)

        async def delete(self, key: Key, *, expect: Any = ANY) -> bool:
            self._count()
            return await self.inner.delete(key, expect=expect)

    try:
        await purge(Ends(driver), clock, transcripts_older_than=80 * DAY)
    except asyncio.CancelledError:
        first = (await transcript_in(driver)).first
        assert await told(Backend(driver), KEY) == numbered(range(first, 40))
    await purge(driver, clock, transcripts_older_than=80 * DAY)
    assert await told(Backend(driver), KEY) == numbered(range(20, 40))
    assert all(keys.page_number(name) >= 5 for name in await pages_of(driver, KEY))


async def test_pages_whose_record_is_gone_are_removed(driver: Driver, clock: FakeClock) -> None:
    backend = Backend(driver)
    await converse(backend, KEY, range(20))
    await converse(backend, OTHER, range(20))
    await driver.delete(WHERE)
    found = await purge(driver, clock)
    assert found.pages == len(await pages_of(driver, OTHER))
    assert not await pages_of(driver, KEY)
    assert await told(backend, OTHER) == numbered(range(20))


async def test_a_page_that_a_fold_after_expire_has_stored_goes_with_a_purge(
    driver: Driver, clock: FakeClock
) -> None:
    backend = Backend(driver)
    await converse(backend, KEY, range(20), config=replace(KEPT, budget=MemoryBudget(full_zone_turns=20)))
    await backend.sessions.expire("acme", ttl=DAY)
    # Folds what is there, and adds nothing.
    await converse(backend, KEY, range(0))
    await clock.pass_time(DAY + 1)
    assert await driver.load(WHERE) is None
    left = len(await pages_of(driver, KEY))
    assert left > 0
    assert (await purge(driver, clock)).pages == left
    assert not await pages_of(driver, KEY)


async def test_the_pages_of_a_sealed_conversation_are_purged(driver: Driver, clock: FakeClock) -> None:
    backend = Backend(driver, sealing=Sealing(StaticKeys({"k": bytes(32)}, primary="k")))
    await converse(backend, KEY, range(40), ts=lambda number: 1_000_000_000.0)
    found = await backend.sessions.purge("acme", transcripts_older_than=DAY)
    assert found.pages > 5
    assert (await reading(backend, KEY).transcript()).oldest > 30
    without = await purge(driver, clock, transcripts_older_than=DAY)
    assert (without.pages, without.unreadable) == (0, 1)


# Times to live, and sealing with another key


async def test_expire_gives_record_and_pages_one_time_to_live(driver: Driver, clock: FakeClock) -> None:
    backend = Backend(driver)
    await converse(backend, KEY, range(30))
    found = await backend.sessions.expire("acme", ttl=90 * DAY)
    assert (found.conversations, found.pages, found.failed) == (1, len(await pages_of(driver, KEY)), 0)
    assert await told(backend, KEY) == numbered(range(30))
    await clock.pass_time(90 * DAY - 1)
    assert await told(backend, KEY) == numbered(range(30))
    await clock.pass_time(2)
    assert await told(backend, KEY) == []
    assert not await pages_of(driver, KEY)


async def test_a_conversation_and_its_pages_live_as_long_as_its_setting_says(
    driver: Driver, clock: FakeClock
) -> None:
    config = replace(KEPT, transcript_ttl_s=DAY)
    backend = Backend(driver)
    await converse(backend, KEY, range(20), config=config)
    await clock.pass_time(DAY - 1)
    assert await told(backend, KEY) == numbered(range(20))
    await clock.pass_time(2)
    assert not await pages_of(driver, KEY)


async def test_resealed_pages_need_the_new_key_alone(driver: Driver) -> None:
    old, new = {"old": bytes(32)}, {"new": bytes([1] * 32)}
    await converse(Backend(driver, sealing=Sealing(StaticKeys(old, primary="old"))), KEY, range(30))
    both = Backend(driver, sealing=Sealing(StaticKeys({**old, **new}, primary="new")))
    report = await both.sessions.reseal("acme")
    assert report.ok
    assert report.records > 5
    assert await told(Backend(driver, sealing=Sealing(StaticKeys(new, primary="new"))), KEY) == numbered(
        range(30)
    )


async def test_a_sealed_conversation_is_copied_without_its_keys(driver: Driver, target: Driver) -> None:
    sealing = Sealing(StaticKeys({"k": bytes(32)}, primary="k"))
    await converse(Backend(driver, sealing=sealing), KEY, range(30))
    copy, problems = await copied(LargeEntries(driver), LargeEntries(target))
    assert copy.ok
    assert not problems
    assert await told(Backend(target, sealing=sealing), KEY) == numbered(range(30))


# Export and import


async def exported(backend: Backend, key: MemoryKey = KEY, **options: Any) -> list[dict[str, Any]]:
    # As a file has them.
    return json.loads(json.dumps([line async for line in backend.sessions.export_lines(key, **options)]))


async def imported(backend: Backend, lines: list[dict[str, Any]], **options: Any) -> list[MemoryKey]:
    importing = backend.sessions.importing(**options)
    return [key for line in lines if (key := await importing.add(line)) is not None]


async def test_an_export_brings_the_whole_conversation(driver: Driver, target: Driver) -> None:
    source = Backend(driver)
    await converse(source, KEY, range(30))
    lines = await exported(source)
    assert [line["first"] for line in lines[:-1]] == [0, 4, 8, 12, 16, 20, 24]
    assert lines[-1]["transcript"] == {"first": 0, "base": 28, "missing": 0}
    assert await imported(Backend(target), lines) == [KEY]
    assert await told(Backend(target), KEY) == numbered(range(30))
    assert await exported(Backend(target)) == lines
    await converse(Backend(target), KEY, range(30, 50))
    assert await told(Backend(target), KEY) == numbered(range(50))


async def test_a_page_that_was_imported_is_one_body(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(31))
    await imported(Backend(target), await exported(Backend(driver)))
    records = [record for record in (await pages_in(target, KEY)).values() if isinstance(record, Record)]
    assert [(record.body is not None, len(record.tail)) for record in records] == [(True, 0)] * 7 + [
        (False, 1)
    ]


async def test_a_shortened_transcript_and_a_gap_are_imported(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30), ts=days_ago)
    snapshot = Snapshot.of(await driver.load(WHERE), CODEC)
    assert snapshot.body.transcript is not None
    body = replace(snapshot.body, transcript=replace(snapshot.body.transcript, gap=17, first=6))
    await driver.replace(WHERE, CODEC.seal_body(body), version="v", expect=snapshot.version or "", ttl=None)
    lines = await exported(Backend(driver))
    assert lines[-1]["transcript"] == {"first": 6, "base": 28, "missing": 0, "gap": 17}
    await imported(Backend(target), lines)
    found = await transcript_in(target)
    assert (found.first, found.gap, found.base) == (6, 17, 28)
    page = await reading(Backend(target), KEY).transcript(after=-1, limit=100)
    assert [turn.id for turn in page.turns] == [f"t{number}" for number in range(6, 30)]


async def test_a_hole_is_exported_and_imported_as_one(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    names = await pages_of(driver, KEY)
    await driver.delete(Key(keys.pages_of(WHERE).scope, names[2]))
    lines = await exported(Backend(driver))
    assert lines[-1]["transcript"]["missing"] == 4
    await imported(Backend(target), lines)
    page = await reading(Backend(target), KEY).transcript(after=-1, limit=100)
    assert page.missing == (8, 9, 10, 11)
    assert len(page.turns) == 26


async def test_a_conversation_whose_pages_are_all_gone_is_exported_without_them(
    driver: Driver, target: Driver
) -> None:
    await converse(Backend(driver), KEY, range(30))
    await pages.erase(driver, WHERE)
    await imported(Backend(target), await exported(Backend(driver)))
    assert await told(Backend(target), KEY) == [(28, "t28"), (29, "t29")]


async def damage(driver: Driver, record: Key, *numbers: int) -> None:
    scope, prefix = keys.pages_of(record)
    names = [name async for name in operations.names_of(driver, scope, prefix)]
    for number in numbers:
        where = Key(scope, names[number])
        await driver.replace(where, b"stm/1 page turns1\nnot", version="v", expect=ANY, ttl=None)


class Unread:
    """What an export was told of."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, error: Corrupt, numbers: Sequence[int]) -> None:
        assert "could not read the stored bytes" in str(error)
        self.numbers += numbers


async def test_a_damaged_page_is_named_and_all_others_are_exported(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    await damage(driver, WHERE, 0, 2)
    unread = Unread()
    lines = await exported(Backend(driver), unreadable=unread)
    assert unread.numbers == [0, 1, 2, 3, 8, 9, 10, 11]
    assert lines[-1]["transcript"] == {"first": 0, "base": 28, "missing": 8}
    await imported(Backend(target), lines)
    page = await reading(Backend(target), KEY).transcript(after=-1, limit=100)
    assert (page.oldest, page.missing) == (4, (8, 9, 10, 11))
    assert [(turn.number, turn.id) for turn in page.turns] == numbered(range(4, 8)) + numbered(range(12, 30))


async def test_a_program_is_not_given_a_conversation_without_its_damaged_page(driver: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    await damage(driver, WHERE, 2)
    with pytest.raises(Corrupt):
        await exported(Backend(driver))
    with pytest.raises(Corrupt):
        await Backend(driver).sessions.copy(KEY, Backend(driver).sessions, under=OTHER)
    assert await told(Backend(driver), OTHER) == []


@pytest.mark.parametrize("on_conflict", ["refuse", "merge", "replace"])
async def test_a_conversation_without_a_page_is_imported(
    driver: Driver, target: Driver, on_conflict: str
) -> None:
    await converse(Backend(driver), KEY, range(30))
    await damage(driver, WHERE, *range(7))
    *before, last = await exported(Backend(driver), unreadable=Unread())
    assert (before, last["transcript"]["missing"]) == ([], 28)
    await converse(Backend(driver), OTHER, range(30))
    others = await exported(Backend(driver), OTHER)
    assert await imported(Backend(target), [*others, last], on_conflict=on_conflict) == [OTHER, KEY]
    assert await told(Backend(target), OTHER) == numbered(range(30))
    page = await reading(Backend(target), KEY).transcript(after=-1, limit=100)
    assert (page.oldest, page.missing) == (28, ())
    assert [turn.number for turn in page.turns] == [28, 29]
    await converse(Backend(target), KEY, range(30, 50))
    assert await told(Backend(target), KEY) == numbered(range(28, 50))


async def test_no_other_copy_stands_in_for_a_turn_that_cannot_be_read(driver: Driver) -> None:
    await converse(Backend(driver), KEY, range(33))
    transcript = await transcript_in(driver)
    assert transcript.base == 31
    where = keys.page_key(WHERE, transcript.epoch, 7)
    await driver.delete(where)
    # What another process took for these turns, before those that count.
    stale = [Leaving(name, b'{"turn_id":"%b"}' % name.encode()) for name in ("a", "b", "c")]
    start = replace(transcript, base=28, last="")
    await Pages(driver, CODEC).put(WHERE, start, stale, summary=None, ttl=None)
    assert [turn["turn_id"] for turn in (await exported(Backend(driver)))[-2]["turns"]] == ["a", "b", "c"]
    await driver.append(where, b"stm/1 page turns1\nnot", initial_version="v", ttl=None)
    unread = Unread()
    lines = await exported(Backend(driver), unreadable=unread)
    assert (unread.numbers, lines[-1]["transcript"]["missing"]) == ([28, 29, 30], 3)


@pytest.mark.parametrize("without", [0, 3, 6, 7])
async def test_lines_without_all_pages_are_refused(driver: Driver, target: Driver, without: int) -> None:
    await converse(Backend(driver), KEY, range(30))
    lines = await exported(Backend(driver))
    with pytest.raises(InvalidState):
        await imported(Backend(target), [*lines[:without], *lines[without + 1 :], lines[0]])
    assert await told(Backend(target), KEY) == []


async def test_an_interrupted_import_shows_nothing_and_can_be_repeated(
    driver: Driver, clock: FakeClock, target: Driver
) -> None:
    await converse(Backend(target), KEY, range(30))
    lines = await exported(Backend(target))
    backend = Backend(driver)
    await imported(backend, lines[:5])
    with pytest.raises(SessionNotFound):
        await exported(backend)
    assert [key async for key in backend.sessions.list("acme", "u")] == []
    await purge(driver, FakeClock(time.time() + 60))
    assert len(await pages_of(driver, KEY)) == 5
    assert await imported(backend, lines) == [KEY]
    assert await told(backend, KEY) == numbered(range(30))
    await backend.sessions.erase_user("acme", "u")
    await imported(backend, lines[:5])
    await purge(driver, FakeClock(time.time() + 2 * DAY))
    assert await pages_of(driver, KEY) == []


async def test_an_import_refuses_merges_or_replaces_with_the_pages(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    lines = await exported(Backend(driver))
    backend = Backend(target)
    await converse(backend, KEY, range(100, 120))
    with pytest.raises(SessionExists):
        await imported(backend, lines)
    before = await pages_in(target, KEY)
    await imported(backend, lines, on_conflict="merge")
    assert await pages_in(target, KEY) == before
    assert [name for _, name in await told(backend, KEY)][:20] == [f"t{n}" for n in range(100, 120)]
    await imported(backend, lines, on_conflict="replace")
    assert await told(backend, KEY) == numbered(range(30))
    assert len(await pages_of(target, KEY)) == 7
    await imported(backend, lines, on_conflict="merge")
    assert await told(backend, KEY) == numbered(range(30))


async def test_a_merge_into_a_new_conversation_brings_the_pages(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    await converse(Backend(target), KEY, range(30, 31))
    await imported(Backend(target), await exported(Backend(driver)), on_conflict="merge")
    found = [name for _, name in await told(Backend(target), KEY)]
    assert sorted(found) == sorted(f"t{number}" for number in range(31))
    assert found[:28] == [f"t{number}" for number in range(28)]


async def test_a_conversation_is_copied_under_another_key_with_its_pages(driver: Driver) -> None:
    backend = Backend(driver)
    await converse(backend, KEY, range(30))
    assert await backend.sessions.copy(KEY, backend.sessions, under=OTHER) == OTHER
    await backend.sessions.erase(KEY)
    assert await told(backend, OTHER) == numbered(range(30))


async def document_of(driver: Driver, **options: Any) -> dict[str, Any]:
    # As a file has it.
    return json.loads(json.dumps(await Backend(driver).sessions.export(KEY, **options)))


def named_as_other(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "key": {**document["key"], "session_id": OTHER.session_id}}


async def test_a_document_has_the_whole_conversation(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    document = await document_of(driver)
    assert [page["first"] for page in document["pages"]] == [0, 4, 8, 12, 16, 20, 24]
    assert [turn["turn_id"] for turn in document["turns"]] == ["t28", "t29"]
    # A version that knows no pages would import the turns of the record alone.
    assert document["version"] == 2
    sessions = Backend(target).sessions
    assert await sessions.import_(document) == KEY
    assert await sessions.import_(named_as_other(document)) == OTHER
    assert await told(Backend(target), KEY) == await told(Backend(target), OTHER) == numbered(range(30))
    assert await document_of(target) == document
    with pytest.raises(SessionExists):
        await sessions.import_(document)


async def test_a_document_may_leave_the_transcript_out(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    await damage(driver, WHERE, 2)
    with pytest.raises(Corrupt):
        await document_of(driver)
    document = await document_of(driver, transcript=False)
    assert document.keys().isdisjoint(("transcript", "pages"))
    assert document["version"] == 1
    assert "transcript" not in document["body"]
    await Backend(target).sessions.import_(document)
    assert [name for _, name in await told(Backend(target), KEY)] == ["t28", "t29"]


async def test_a_document_without_all_of_its_pages_stores_nothing(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    document = await document_of(driver)
    *first, last = document["pages"]
    junk: list[Any] = [first, None, [*first, {**last, "turns": 3}], [*first, None], [*first, last, last]]
    for wrong in junk:
        with pytest.raises(InvalidState):
            await Backend(target).sessions.import_({**document, "pages": wrong})
    with pytest.raises(InvalidState, match="imports exports up to version"):
        await Backend(target).sessions.import_({**document, "version": 3})
    page = {**last, "format": "stm-transcript", "version": 1, "key": document["key"]}
    with pytest.raises(InvalidState, match="comes before its conversation"):
        await Backend(target).sessions.import_(page)
    assert await pages_of(target, KEY) == []


async def test_an_import_that_fails_leaves_no_page_of_its_document(driver: Driver, target: Driver) -> None:
    await converse(Backend(driver), KEY, range(30))
    document = await document_of(driver)
    document["pages"][5]["turns"][2]["user_message"] = "long " * 100
    sessions = Backend(target, limits=Limits(turn_characters=200)).sessions
    with pytest.raises(LimitReached):
        await sessions.import_(document)
    assert await pages_of(target, KEY) == []
    assert [user async for user in sessions.users("acme")] == []


# Item logs


LOG = keys.log_key(KEY, "langchain")


async def noted(driver: Driver, numbers: range, *, ts: Callable[[int], float] = lambda number: NOW) -> None:
    """Add an item for each number to a log, which goes to pages but for the newest two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_log, "LONG", 4)
        patch.setattr(item_log, "KEPT", 2)
        for number in numbers:
            log = ItemLog(driver, KEY, "langchain", clock=partial(ts, number))
            await log.add([{"content": f"item {number}"}])


async def noted_in(driver: Driver) -> list[int]:
    log = ItemLog(driver, KEY, "langchain")
    return [int(item["content"].removeprefix("item ")) for item in await log.items()]


async def log_pages(driver: Driver) -> list[str]:
    return [name async for name in operations.names_of(driver, *keys.pages_of(LOG))]


async def test_a_copy_has_the_whole_log(driver: Driver, target: Driver) -> None:
    await noted(driver, range(30))
    copy, problems = await copied(driver, target)
    assert copy.ok
    assert not problems
    assert await log_pages(target) == await log_pages(driver) != []
    assert await noted_in(target) == [*range(30)]


async def test_the_pages_of_a_log_that_was_left_are_not_copied(driver: Driver, target: Driver) -> None:
    await noted(driver, range(20))
    await noted(target, range(100, 109))
    _, problems = await copied(driver, target)
    assert problems == ["langchain left"]
    assert await noted_in(target) == [*range(100, 109)]
    copy, _ = await copied(driver, target, replace=True)
    assert copy.ok
    assert await noted_in(target) == [*range(20)]


async def test_a_purge_of_a_log_takes_its_pages_along(driver: Driver, clock: FakeClock) -> None:
    await noted(driver, range(30), ts=days_ago)
    kept = await purge(driver, clock, older_than=90 * DAY)
    assert (kept.logs, kept.pages, kept.kept) == (0, 0, 1)
    found = await purge(driver, clock, older_than=10 * DAY)
    assert (found.logs, found.pages) == (1, 7)
    assert not await log_pages(driver)
    await noted(driver, range(200, 210))
    assert await noted_in(driver) == [*range(200, 210)]


async def test_old_items_of_a_log_go_and_the_rest_stays(driver: Driver, clock: FakeClock) -> None:
    await noted(driver, range(40), ts=days_ago)
    dry = await purge(driver, clock, transcripts_older_than=80 * DAY, dry_run=True)
    assert await noted_in(driver) == [*range(40)]
    found = await purge(driver, clock, transcripts_older_than=80 * DAY)
    assert (found.pages, found.logs, dry) == (5, 0, found)
    assert await noted_in(driver) == [*range(20, 40)]
    page = await ItemLog(driver, KEY, "langchain").transcript(after=-1, limit=2)
    assert ([one.number for one in page.items], page.oldest, page.missing) == ([20, 21], 20, ())
    log = ItemLog(driver, KEY, "langchain")
    assert [await log.pop() is not None for _ in range(21)] == [True] * 20 + [False]
    await noted(driver, range(40, 60), ts=days_ago)
    assert await noted_in(driver) == [*range(40, 60)]


async def test_pages_of_a_log_that_is_gone_are_removed_and_others_stay(
    driver: Driver, clock: FakeClock
) -> None:
    await noted(driver, range(20))
    assert (await purge(driver, clock)).pages == 0
    assert await noted_in(driver) == [*range(20)]
    await driver.delete(LOG)
    assert (await purge(driver, clock)).pages == 5
    assert not await log_pages(driver)


async def test_expire_gives_a_log_and_its_pages_one_time_to_live(driver: Driver, clock: FakeClock) -> None:
    await noted(driver, range(30))
    backend = Backend(driver)
    found = await backend.sessions.expire("acme", ttl=90 * DAY)
    assert (found.logs, found.pages, found.failed) == (1, len(await log_pages(driver)), 0)
    await clock.pass_time(90 * DAY - 1)
    assert await noted_in(driver) == [*range(30)]
    await clock.pass_time(2)
    assert await noted_in(driver) == []
    assert not await log_pages(driver)


async def test_a_damaged_page_of_a_log_is_named_and_all_others_are_exported(
    driver: Driver, target: Driver
) -> None:
    await noted(driver, range(30))
    await damage(driver, LOG, 2)
    unread, sessions = Unread(), Backend(driver).sessions
    lines = [line async for line in sessions.export_log_lines(KEY, "langchain", unreadable=unread)]
    assert (unread.numbers, lines[-1]["missing"]) == ([8, 9, 10, 11], 4)
    with pytest.raises(Corrupt):
        assert [line async for line in sessions.export_log_lines(KEY, "langchain")]
    await imported(Backend(target), json.loads(json.dumps(lines)))
    page = await ItemLog(target, KEY, "langchain").transcript(after=-1, limit=100)
    assert page.missing == (8, 9, 10, 11)
    assert [one.item["content"] for one in page.items] == [
        f"item {number}" for number in range(30) if number not in page.missing
    ]


async def test_the_receipt_of_an_erasure_counts_the_pages_of_a_log(driver: Driver) -> None:
    await noted(driver, range(30))
    receipt = await Backend(driver).sessions.erase_with_receipt("acme", "u", "s")
    assert (receipt.erased["logs"], receipt.erased["pages"], receipt.complete) == (1, 7, True)
    assert not await log_pages(driver)


async def test_a_log_in_pages_is_sealed_with_another_key(driver: Driver) -> None:
    one, two = bytes(32), bytes([1] * 32)
    async with Backend(driver, sealing=Sealing(StaticKeys({"one": one}, primary="one"))) as backend:
        await noted(backend.driver, range(30))
    both = Sealing(StaticKeys({"one": one, "two": two}, primary="two"))
    async with Backend(driver, sealing=both) as backend:
        assert (await backend.sessions.reseal("acme")).ok
    async with Backend(driver, sealing=Sealing(StaticKeys({"two": two}, primary="two"))) as backend:
        assert await noted_in(backend.driver) == [*range(30)]


async def lines_of_log(driver: Driver) -> list[dict[str, Any]]:
    return [line async for line in Backend(driver).sessions.export_log_lines(KEY, "langchain")]


async def test_what_lacks_a_page_that_was_refused_is_refused_too(
    driver: Driver, target: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a caller goes on after the error."""
    await converse(Backend(driver), KEY, range(30))
    await noted(driver, range(30))
    lines = [*await exported(Backend(driver)), *await lines_of_log(driver)]
    put, failures = Pages.put_new, [False, True]

    async def failing(self: Pages, *given: Any, **options: Any) -> None:
        if failures and failures.pop(0):
            raise Unavailable("away", backend="memory", operation="replace")
        await put(self, *given, **options)

    monkeypatch.setattr(Pages, "put_new", failing)
    importing, refused = Backend(target).sessions.importing(), list[Exception]()
    for line in lines:
        if line is lines[-1] or line["format"] == "stm-session":
            failures[:] = [False, True]
        try:
            assert await importing.add(line) is None
        except (Unavailable, InvalidState) as error:
            refused.append(error)
    assert {str(error) for error in refused if isinstance(error, InvalidState)} == {
        "a page before this line was refused, so this line is refused, too"
    }
    assert [type(error) for error in refused] == [
        Unavailable,
        *[InvalidState] * 6,
        Unavailable,
        *[InvalidState] * 7,
    ]
    assert await told(Backend(target), KEY) == []
    assert await noted_in(target) == []
    failures.clear()
    for line in lines:
        await importing.add(line)
    assert await told(Backend(target), KEY) == numbered(range(30))
    assert await noted_in(target) == [*range(30)]


@pytest.mark.parametrize("change", [*({"at": at} for at in (10**400, 1e308, math.inf, math.nan, -1.0)), {}])
async def test_lines_of_a_log_that_no_export_writes_are_refused(
    driver: Driver, target: Driver, change: dict[str, Any]
) -> None:
    await noted(driver, range(10))
    line, *_ = await lines_of_log(driver)
    line["items"][1] |= change
    line["first"] += 0 if change else 1
    with pytest.raises(InvalidState):
        await Backend(target).sessions.importing().add(line)
    assert await log_pages(target) == []

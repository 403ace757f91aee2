"""A removal of pages leaves those that a record has, or comes to have meanwhile."""

from __future__ import annotations

import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from stm_backends import Backend, MemoryKey
from stm_backends.admin import importing
from stm_backends.admin.exporting import Export
from stm_backends.admin.purging import Purge, Purged
from stm_backends.drivers.contract import ANY, Driver, Key, Page, Record
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.errors import InvalidState, OutcomeUnknown, SessionExists, SessionNotFound, Unavailable
from stm_backends.records import keys, pages
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from tests.support.transcripts import converse, numbered, pages_of, reading, told

DAY = 86_400.0
LATER = time.time() + 100 * DAY
KEY = MemoryKey("acme", "u", "s")
WHERE = keys.memory_key(KEY)
PAGES = keys.pages_of(WHERE).scope

Meanwhile = Callable[[], Awaitable[object]]
Removal = Callable[[Backend], Awaitable[object]]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of few turns, so that many are completed."""
    monkeypatch.setattr(pages, "TURNS", 4)


@pytest.fixture
async def driver() -> AsyncIterator[MemoryDriver]:
    driver = MemoryDriver()
    await driver.open()
    yield driver
    await driver.close()


class Meets(WrapperDriver):
    """Lets something else happen before it first lists pages, or removes one."""

    def __init__(self, inner: Driver, operation: str, meanwhile: Meanwhile) -> None:
        super().__init__(inner)
        self._operation = operation
        self._meanwhile: Meanwhile | None = meanwhile

    async def _reach(self, operation: str, scope: str) -> None:
        if self._meanwhile is not None and operation == self._operation and scope == PAGES:
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile()

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        await self._reach("scan", scope)
        return await self.inner.scan(scope, after=after, limit=limit)

    async def delete(self, key: Key, *, expect: Any = ANY) -> bool:
        await self._reach("delete", key.scope)
        return await self.inner.delete(key, expect=expect)


async def erase(backend: Backend) -> None:
    await backend.sessions.erase(KEY)


async def erase_user(backend: Backend) -> None:
    await backend.sessions.erase_user("acme", "u")


async def purged(backend: Backend, *, dry_run: bool = False) -> Purged:
    """Purge 100 days from now, when all is old."""
    codec, driver = Codec(), backend.driver
    one = Purge(
        driver, codec, Directory(driver, codec), older_than=90 * DAY, dry_run=dry_run, clock=lambda: LATER
    )
    await one.user("acme", "u")
    return one.purged


async def purge(backend: Backend) -> None:
    await purged(backend)


async def purge_left_over(backend: Backend) -> None:
    await backend.driver.delete(WHERE)
    await backend.sessions.purge("acme", "u")


async def conversation(driver: Driver, count: int = 20) -> None:
    await converse(Backend(driver), KEY, range(count))


async def lines_of_one(count: int = 20) -> list[dict[str, Any]]:
    async with Backend(MemoryDriver()) as source:
        await converse(source, KEY, range(count))
        return [line async for line in source.sessions.export_lines(KEY)]


async def whole(driver: Driver) -> tuple[list[tuple[int, str]], int]:
    page = await reading(Backend(driver), KEY).transcript(after=-1, limit=1000)
    return [(turn.number, turn.id) for turn in page.turns], len(page.missing)


@pytest.mark.parametrize("operation", ["scan", "delete"])
@pytest.mark.parametrize("removal", [erase, erase_user, purge, purge_left_over])
async def test_a_life_that_begins_during_a_removal_keeps_its_pages(
    driver: MemoryDriver, removal: Removal, operation: str
) -> None:
    await conversation(driver)

    async def begin() -> None:
        await converse(Backend(driver), KEY, range(100, 110))

    await removal(Backend(Meets(driver, operation, begin)))
    turns, missing = await whole(driver)
    assert not missing
    assert [turn_id for _, turn_id in turns] == [f"t{number}" for number in range(100, 110)]


@pytest.mark.parametrize("removal", [purge, purge_left_over])
async def test_a_purge_leaves_the_pages_of_an_import_under_way(
    driver: MemoryDriver, removal: Removal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await conversation(driver)
    backend, lines = Backend(driver), await lines_of_one()
    if removal is purge:
        monkeypatch.setattr(importing, "time", SimpleNamespace(time=lambda: LATER))
    one = backend.sessions.importing(on_conflict="replace")
    for line in lines[:-1]:
        await one.add(line)
    await removal(backend)
    await one.add(lines[-1])
    assert await whole(driver) == (numbered(range(20)), 0)


@pytest.mark.parametrize("removal", [erase, erase_user])
async def test_an_import_whose_pages_are_erased_meanwhile_stores_no_record_without_them(
    driver: MemoryDriver, removal: Removal
) -> None:
    backend, lines = Backend(driver), await lines_of_one()
    one = backend.sessions.importing()
    for line in lines[:-1]:
        await one.add(line)
    await removal(backend)
    with pytest.raises(Unavailable, match="import it again"):
        await one.add(lines[-1])
    assert await driver.load(WHERE) is None
    for line in lines:
        await one.add(line)
    assert await whole(driver) == (numbered(range(20)), 0)


@pytest.mark.parametrize("removal", [erase, erase_user])
async def test_an_erasure_takes_along_an_import_that_stores_its_record_meanwhile(
    driver: MemoryDriver, removal: Removal
) -> None:
    backend, lines = Backend(driver), await lines_of_one()
    one = backend.sessions.importing()
    for line in lines[:-1]:
        await one.add(line)

    async def store() -> None:
        await one.add(lines[-1])

    await removal(Backend(Meets(driver, "delete", store)))
    assert await whole(driver) == ([], 0)
    assert not await pages_of(driver, KEY)


class AtPage(WrapperDriver):
    """Lets something else happen before its n-th load of a page; `reached` says whether that came."""

    def __init__(self, inner: Driver, number: int, meanwhile: Meanwhile) -> None:
        super().__init__(inner)
        self._left, self._meanwhile = number, meanwhile

    @property
    def reached(self) -> bool:
        return self._left <= 0

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        if key.scope == PAGES:
            self._left -= 1
            if self._left == 0:
                await self._meanwhile()
        return await self.inner.load(key, last=last)


async def shorten(backend: Backend) -> None:
    """Purge the oldest two pages of a transcript 100 days from now."""
    codec, driver = Codec(), backend.driver
    one = Purge(driver, codec, Directory(driver, codec), transcripts_older_than=90 * DAY, clock=lambda: LATER)
    await one.user("acme", "u")


async def erase_and_begin(backend: Backend) -> None:
    await erase(backend)
    await converse(backend, KEY, range(100, 120))


@pytest.mark.parametrize("removal", [erase, erase_user, erase_and_begin, purge, shorten])
async def test_a_copy_during_a_removal_is_complete_or_there_is_none(removal: Removal) -> None:
    errors: list[type[Exception]] = []
    for number in itertools.count(1):
        async with Backend(MemoryDriver()) as source, Backend(MemoryDriver()) as target:
            await conversation(source.driver)

            async def meanwhile(source: Backend = source) -> None:
                await removal(source)

            driver = AtPage(source.driver, number, meanwhile)
            try:
                await Backend(driver).sessions.copy(KEY, target.sessions)
            except (SessionNotFound, Unavailable) as error:
                errors.append(type(error))
                assert await target.driver.load(WHERE) is None
                assert await pages_of(target.driver, KEY) == []
                assert [user async for user in target.sessions.users("acme")] == []
                assert (await target.conversations.list("acme", "u")).cards == ()
            else:
                assert await whole(target.driver) == (numbered(range(20)), 0)
                if not driver.reached:
                    break
    assert {*errors} == {SessionNotFound if removal in (erase, erase_user) else Unavailable}


@pytest.mark.parametrize("removal", [erase, erase_and_begin, purge, shorten])
async def test_a_copy_that_does_not_look_again_is_noticed(
    removal: Removal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trusting(self: Export, transcript: object) -> None:
        del self, transcript

    monkeypatch.setattr(Export, "_require_unchanged", trusting)
    with pytest.raises(AssertionError):
        await test_a_copy_during_a_removal_is_complete_or_there_is_none(removal)


async def test_an_export_of_a_log_during_its_removal_is_complete_or_fails() -> None:
    errors = 0
    for number in itertools.count(1):
        async with Backend(MemoryDriver()) as source:
            noted = [{"n": n} for n in range(150)]
            log = source.item_log(KEY, "langchain")
            for item in noted:
                await log.add([item])
            driver = AtPage(source.driver, number, log.clear)
            exported = Backend(driver).sessions.export_log_lines(KEY, "langchain")
            try:
                lines = [line async for line in exported]
            except Unavailable:
                errors += 1
            else:
                assert [one["item"] for line in lines[:-1] for one in line["items"]] == noted
                if not driver.reached:
                    break
    assert errors > 1


async def test_an_export_of_many_goes_on_after_one_whose_turns_are_removed_meanwhile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    transfer = pytest.importorskip("stm_backends.cli.transfer")
    async with Backend(MemoryDriver()) as source:
        other = MemoryKey("acme", "u", "t")
        await conversation(source.driver)
        await converse(source, other, range(2))
        driver = AtPage(source.driver, 2, partial(shorten, source))
        exported, out = transfer.Exported(None), io.StringIO()

        async def both() -> AsyncIterator[tuple[MemoryKey, None]]:
            for key in (KEY, other):
                yield key, None

        await transfer.write_export(Backend(driver), both(), out, exported)
        assert (exported.count, exported.say_unread()) == (1, True)
        assert "1 conversation could not be exported" in capsys.readouterr().err
        importing = source.sessions.importing(on_conflict="replace")
        assert [await importing.add(json.loads(line)) for line in out.getvalue().splitlines()] == [other]


async def test_a_dry_run_counts_the_pages_that_a_purge_removes(driver: MemoryDriver) -> None:
    await conversation(driver)
    backend = Backend(driver)
    dry = await purged(backend, dry_run=True)
    assert await told(backend, KEY) == numbered(range(20))
    assert (await purged(backend)).pages == dry.pages > 0


async def test_an_import_whose_lost_answer_another_process_follows_keeps_its_pages(
    driver: MemoryDriver,
) -> None:
    class LosesTheAnswer(WrapperDriver):
        """Has another process change the record before the answer is lost."""

        armed = True

        async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
            done = await self.inner.replace(key, body, **options)
            if key == WHERE and self.armed:
                self.armed = False
                await converse(Backend(self.inner), KEY, range(100, 110))
                raise OutcomeUnknown("the answer was lost", backend=self.name, operation="replace")
            return done

    one = Backend(LosesTheAnswer(driver)).sessions.importing()
    *before, last = await lines_of_one()
    for line in before:
        await one.add(line)
    with pytest.raises(SessionExists):
        await one.add(last)
    turns, missing = await whole(driver)
    assert (len(turns), missing) == (30 - 2, 0)


async def test_an_import_that_replaces_removes_the_pages_of_a_life_that_it_has_not_seen(
    driver: MemoryDriver,
) -> None:
    await conversation(driver)

    class Begins(WrapperDriver):
        """Has another life begin before the record is replaced."""

        armed = True

        async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
            if key == WHERE and self.armed:
                self.armed = False
                await self.inner.delete(WHERE)
                await converse(Backend(self.inner), KEY, range(100, 120))
            return await self.inner.replace(key, body, **options)

    lines = await lines_of_one()
    one = Backend(Begins(driver)).sessions.importing(on_conflict="replace")
    for line in lines:
        await one.add(line)
    assert await whole(driver) == (numbered(range(20)), 0)
    assert len({keys.page_epoch(name) for name in await pages_of(driver, KEY)}) == 1


async def test_erasing_left_over_pages_says_that_there_was_something(driver: MemoryDriver) -> None:
    await conversation(driver)
    await driver.delete(WHERE)
    backend = Backend(driver)
    assert await backend.sessions.erase(KEY)
    assert not await backend.sessions.erase(KEY)


async def test_a_refused_conversation_does_not_keep_the_next_one_from_being_imported(
    driver: MemoryDriver,
) -> None:
    backend, lines = Backend(driver), await lines_of_one()
    await conversation(driver, 12)
    one = backend.sessions.importing(on_conflict="merge")
    for line in lines[:-1]:
        await one.add(line)
    with pytest.raises(InvalidState):
        await one.add({**lines[-1], "transcript": {**lines[-1]["transcript"], "missing": 1}})
    other = MemoryKey("acme", "u", "other")
    for line in lines:
        await one.add({**line, "key": {**line["key"], "session_id": "other"}})
    assert await told(backend, other) == numbered(range(20))

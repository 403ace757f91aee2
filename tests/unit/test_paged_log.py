"""Long logs of items: what leaves their record is in pages, and every item is there once and in order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.admin.describing import describe
from stm_backends.admin.purging import Purge
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key, Traits
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import ConfigurationError, Corrupt, OutcomeUnknown
from stm_backends.history import items
from stm_backends.history import log as item_log
from stm_backends.history.items import Add, Pop
from stm_backends.history.log import LONG, ItemLog
from stm_backends.records import codec, keys, operations, pages
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.pages import Copy
from stm_backends.records.shortening import Shortening
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.types import MemoryKey
from tests.unit.test_item_log import (
    OTHERS,
    Action,
    append_entries,
    log_on,
    numbered,
    numbers,
    on_list,
    on_log,
    possible,
    raw,
)
from tests.unit.test_transcript import UNREADABLE, stored_in_pages

KEY = MemoryKey("acme", "u", "s")
WHERE = keys.log_key(KEY, "langchain")
CODEC = Codec()
T = TypeVar("T")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def shrink(patch: pytest.MonkeyPatch, *, long: int = 4, kept: int = 2, turns: int = 4) -> None:
    """Let small logs go to small pages."""
    patch.setattr(item_log, "LONG", long)
    patch.setattr(item_log, "KEPT", kept)
    patch.setattr(item_log, "TOLERATED_WASTE", 2)
    patch.setattr(pages, "TURNS", turns)


async def filled(log: ItemLog, count: int) -> None:
    for number in range(count):
        await log.add(numbered(number))


async def pages_of(driver: Driver) -> list[str]:
    scope, prefix = keys.pages_of(WHERE)
    return [name async for name in operations.names_of(driver, scope, prefix)]


async def opened(store: MemoryStore | None = None, **options: Any) -> MemoryDriver:
    driver = MemoryDriver(store, **options)
    await driver.open()
    return driver


# One process


async def test_a_long_log_keeps_a_short_record_and_all_items(driver: Driver) -> None:
    log = log_on(driver)
    await filled(log, 400)
    assert len((await raw(driver)).tail) < LONG
    assert numbers(await log.items()) == [*range(400)]
    for limit in (1, 20, 64, 65, 200, 399, 400, 1000):
        assert numbers(await log.items(limit)) == [*range(max(0, 400 - limit), 400)]


async def test_the_latest_items_take_one_request_and_older_ones_one_more() -> None:
    spy = SpyDriver(await opened())
    log = log_on(spy)
    await filled(log, 1_000)
    spy.calls.clear()
    assert len(await log.items(20)) == 20
    assert spy.calls == [("load", "langchain")]
    spy.calls.clear()
    page = await log.transcript(before=520, limit=50)
    assert [(one.number, one.item["n"]) for one in page.items] == [(n, n) for n in range(470, 520)]
    assert (page.oldest, page.newest, page.missing) == (0, 999, ())
    assert spy.calls == [("load", "langchain"), ("load", "page"), ("load", "page")]


async def test_an_addition_takes_little_more_than_one_request_on_average() -> None:
    spy = SpyDriver(await opened())
    log = log_on(spy)
    await filled(log, 128)
    spy.calls.clear()
    await filled(log, 640)
    assert len([one for one in spy.calls if one[1] in ("langchain", "page")]) <= 1.15 * 640


async def test_a_log_that_has_grown_long_before_goes_to_pages_step_by_step(driver: Driver) -> None:
    await append_entries(driver, *(Add(f"e{n}", numbered(n), 1000.0 + n) for n in range(1_400)))
    log = log_on(driver)
    assert numbers(await log.items()) == [*range(1_400)]
    await filled(log, 256)
    assert len((await raw(driver)).tail) < LONG
    assert numbers(await log.items()) == [*range(1_400), *range(256)]


async def test_a_step_moves_few_items_even_where_entries_have_many(
    driver: Driver, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_log, "AT_ONCE", 8)
    entries = [Add(f"e{n}", numbered(*range(4 * n, 4 * n + 4)), 1000.0 + n) for n in range(5)]
    await append_entries(driver, *entries, Add("large", numbered(*range(20, 40)), 1010.0))
    left = list[int]()
    while await log_on(driver).fold():
        left.append(len((await raw(driver)).tail))
    assert left == [4, 2, 1, 0]
    assert numbers(await log_on(driver).items()) == [*range(40)]


class Stuck(WrapperDriver):
    """A driver whose appends to pages do not end."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.reached = asyncio.Event()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if operation == "append" and isinstance(key, Key) and key.scope.endswith(":page"):
            self.reached.set()
            await asyncio.Event().wait()
        return await send()


async def test_an_addition_that_is_cancelled_as_others_move_is_done_and_noted(
    driver: Driver, small: None
) -> None:
    noted: list[Any] = []
    touches: Any = SimpleNamespace(note=lambda *given, **_: noted.append(given))
    stuck = Stuck(driver)
    log = log_on(stuck, touches=touches)
    await filled(log, 3)
    adding = asyncio.create_task(log.add(numbered(3)))
    await stuck.reached.wait()
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert numbers(await log_on(driver).items()) == [*range(4)]
    assert len(noted) == 4


async def test_large_items_move_before_there_are_many() -> None:
    driver = await opened()
    log = log_on(driver)
    for number in range(20):
        await log.add([{"n": number, "text": "x" * 900_000}])
    assert sum(map(len, (await raw(driver)).tail)) < 5 * 1024 * 1024
    assert numbers(await log.items()) == [*range(20)]


async def test_removals_reach_back_into_pages(driver: Driver, small: None) -> None:
    log = log_on(driver)
    await filled(log, 20)
    assert numbers([await log.pop() or {} for _ in range(15)]) == [*reversed(range(5, 20))]
    assert numbers(await log.items()) == [*range(5)]
    for number in range(100, 120):
        await log.add(numbered(number))
    assert numbers(await log.items()) == [*range(5), *range(100, 120)]
    page = await log.transcript(after=3, limit=4)
    assert [(one.number, one.item["n"]) for one in page.items] == [(4, 4), (5, 100), (6, 101), (7, 102)]
    for _ in range(25):
        assert await log.pop() is not None
    assert await log.pop() is None
    assert await log.items() == []
    await log.add(numbered(7))
    assert numbers(await log.items()) == [7]


@settings(max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["pop", "pop", "pop", "clear", "items", "fold"]), st.just(0)),
            st.tuples(st.just("add"), st.integers(0, 1000)),
            st.tuples(st.just("add"), st.integers(0, 1000)),
            st.tuples(st.just("add"), st.integers(0, 1000)),
        ),
        max_size=80,
    ),
    st.integers(0, 12),
)
def test_a_log_in_pages_is_a_list_too(actions: list[Action], limit: int) -> None:
    async def run() -> None:
        driver = await opened()
        state: list[int] = []
        for action in actions:
            assert await on_log(driver, action) == on_list(state, action)
            assert numbers(await log_on(driver).items()) == state
            assert numbers(await log_on(driver).items(limit)) == state[max(0, len(state) - limit) :]
            page = await log_on(driver).transcript(at=limit, limit=6)
            assert [(one.number, one.item["n"]) for one in page.items] == [
                (number, state[number])
                for number in range(max(0, limit - 3), min(max(0, limit - 3) + 6, len(state)))
            ]
        assert [one.item["n"] async for one in log_on(driver).each_item()] == state
        activity = await log_on(driver).activity()
        assert ({} if activity is None else activity.counts) == ({"langchain": len(state)} if state else {})

    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        asyncio.run(run())


async def test_what_cannot_be_asked_for_is_refused(driver: Driver) -> None:
    for asked in ({"before": 1, "after": 1}, {"limit": 0}, {"limit": 1_001}):
        with pytest.raises(ConfigurationError):
            await log_on(driver).transcript(**asked)
    limit: Any = "x"
    with pytest.raises(ConfigurationError):
        await log_on(driver).items(limit)


@UNREADABLE
async def test_pages_of_logs_are_sealed_and_transformed_as_all_else(
    options: dict[str, Any], small: None
) -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store), **options) as backend:
        log = backend.item_log(KEY, "langchain")
        for number in range(20):
            await log.add([{"content": f"secret {number}"}])
        assert [item["content"] for item in await log.items()] == [f"secret {n}" for n in range(20)]
        everything = stored_in_pages(store)
        assert everything
        assert b"secret" not in everything


async def test_a_card_has_the_count_beginning_and_end_of_a_long_log(small: None) -> None:
    driver = await opened()
    log = log_on(driver)
    for number in range(20):
        await log.add([{"content": f"message {number}"}])
    while await log.fold():
        pass
    found = await describe(driver, CODEC, KEY)
    assert found is not None
    assert (found.counts, found.opening, found.preview) == ({"langchain": 20}, "message 0", "message 19")


# What is stored, and by whom


async def test_an_earlier_version_neither_shows_nor_changes_a_log_with_pages(
    driver: Driver, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_on(driver)
    await filled(log, 20)
    before = await raw(driver)
    # It reads the first major version alone.
    monkeypatch.setattr(codec, "_NEWER", {})

    def never(*_: object) -> bool:
        return False

    monkeypatch.setattr(Codec, "is_of", never)
    earlier = log_on(driver)
    for work in (earlier.items, earlier.pop, earlier.fold):
        with pytest.raises(Corrupt, match="format '2' by another version"):
            await work()
    assert await raw(driver) == before


async def test_erasing_a_long_log_leaves_no_page(driver: Driver, small: None) -> None:
    log = log_on(driver)
    await filled(log, 20)
    assert await pages_of(driver)
    await log.clear()
    assert await pages_of(driver) == []
    assert await driver.load(WHERE) is None


async def test_the_pages_of_a_log_that_is_cleared_while_items_move_are_removed(small: None) -> None:
    spy = Stepping(await opened())
    log = log_on(spy)
    await filled(log, 3)
    spy.step = ("replace", WHERE, log_on(spy.inner).clear)
    await log.add(numbered(3))
    assert spy.step is None
    assert await pages_of(spy) == []
    assert await log.items() == []


@pytest.mark.parametrize("moment", range(8))
async def test_clearing_a_log_leaves_the_pages_of_the_next_one(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, long=1, kept=1, turns=2)
    driver = await opened()
    for number in range(4):
        await log_on(driver).add(numbered(number))

    async def begin_again() -> None:
        for number in (200, 210, 220):
            await log_on(driver).add(numbered(number))

    interrupted = Interrupted(driver, moment, begin_again)
    await log_on(interrupted).clear()
    assert interrupted.moments > 5
    # Before the record is gone, they are of the log that is cleared.
    assert numbers(await log_on(driver).items()) == ([] if not moment else [200, 210, 220])


class Demoted(WrapperDriver):
    """A former master, which hides the log that begins after an erasure until a write shows what it is."""

    def __init__(self, inner: Driver, then: Callable[[], Awaitable[object]]) -> None:
        super().__init__(inner)
        self._then, self.hides = then, False

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, shows_unconfirmed=True)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if operation == "load" and key == WHERE and self.hides:
            return cast("T", None)
        answer = await send()
        if operation == "delete":
            self.hides = key == WHERE
            if self.hides:
                await self._then()
        return answer


async def test_clearing_a_log_on_a_former_master_leaves_the_pages_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shrink(monkeypatch, long=1, kept=1, turns=2)
    driver = await opened()
    await filled(log_on(driver), 4)
    await log_on(Demoted(driver, lambda: filled(log_on(driver), 3))).clear()
    assert numbers(await log_on(driver).items()) == [*range(3)]


async def test_items_older_than_expired_pages_are_gone_and_reported(driver: Driver, small: None) -> None:
    log = log_on(driver)
    await filled(log, 20)
    first, second, *_ = await pages_of(driver)
    await driver.delete(Key(keys.pages_of(WHERE).scope, first))
    assert numbers(await log.items()) == [*range(4, 20)]
    assert (await log.transcript(after=-1, limit=8)).missing == (0, 1, 2, 3)
    await driver.delete(Key(keys.pages_of(WHERE).scope, second))
    assert numbers(await log.items(14)) == [*range(8, 20)]
    for after in (None, -1, 3):
        assert [one.number async for one in log.each_item(after=after)] == [*range(8, 20)]
    assert numbers([await log.pop() or {} for _ in range(12)]) == [*reversed(range(8, 20))]
    assert await log.pop() is None


async def test_a_log_whose_oldest_pages_have_expired_is_read_once(small: None) -> None:
    spy = SpyDriver(await opened())
    log = log_on(spy)
    await filled(log, 20)
    names = await pages_of(spy)
    await spy.delete(Key(keys.pages_of(WHERE).scope, names[0]))
    spy.calls.clear()
    assert numbers(await log.items()) == [*range(4, 20)]
    assert spy.count("load", "page") == len(names)
    spy.calls.clear()
    assert (await log.transcript(after=-1, limit=8)).missing == (0, 1, 2, 3)
    assert spy.count("load", "page") == 2


async def test_a_page_that_holds_no_item_is_corrupt(driver: Driver, small: None) -> None:
    log = log_on(driver)
    await filled(log, 20)
    where = Key(keys.pages_of(WHERE).scope, (await pages_of(driver))[0])
    content = {"first": 0, "rev": 0, "turns": [{"turn_id": "x"}] * 4}
    await driver.delete(where)
    entry = Codec().after(pages.Preset()).seal("page", content)
    await driver.append(where, entry, initial_version="v", ttl=None)
    with pytest.raises(Corrupt, match=driver.name):
        await log.items()


# Many processes


class Stepping(WrapperDriver):
    """Lets something happen once before an operation on a record, or on any with `None`."""

    step: tuple[Operation, Key | None, Callable[[], Awaitable[object]]] | None = None

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if self.step is not None and self.step[0] == operation and self.step[1] in (None, key):
            then, self.step = self.step[2], None
            await then()
        return await send()


class Interrupted(WrapperDriver):
    """Lets something happen before or after its n-th operation on a log or its pages."""

    def __init__(self, inner: Driver, at: int, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._at, self._then = at, then
        self.moments = 0

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        scope = key if isinstance(key, str) else key.scope
        if scope not in (WHERE.scope, keys.pages_of(WHERE).scope):
            return await send()
        await self._moment()
        answer = await send()
        await self._moment()
        return answer

    async def _moment(self) -> None:
        self.moments += 1
        if self.moments - 1 == self._at:
            await self._then()


@pytest.mark.parametrize("others", OTHERS, ids="-".join)
@pytest.mark.parametrize("name", ["items", "add", "pop", "clear", "fold"])
async def test_concurrent_calls_on_pages_have_the_results_of_some_order(
    name: str, others: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, long=1, kept=1, turns=2)
    one: Action = (name, 100)
    others_actions = [(other, 200 + 10 * index) for index, other in enumerate(others)]
    for length in (0, 4):
        for moment in itertools.count():
            driver = await opened()
            state = list(range(length))
            for number in state:
                await log_on(driver).add(numbered(number))
            answers: list[object] = []

            async def interfere(driver: Driver = driver, answers: list[object] = answers) -> None:
                answers.extend([await on_log(driver, action) for action in others_actions])

            interrupted = Interrupted(driver, moment, interfere)
            own = await on_log(interrupted, one)
            if moment >= interrupted.moments:
                assert moment, "nothing was interrupted"
                break
            left = numbers(await log_on(driver).items())
            assert (own, answers, left) in list(possible(state, one, others_actions)), (length, moment)
            if not left and await driver.load(WHERE) is None:
                assert await pages_of(driver) == [], (length, moment)


class Killed(BaseException):
    """The end of a process: no handler of a storage error sees it."""


class Dying(WrapperDriver):
    """Ends its process before or after its n-th write, or loses the answer."""

    def __init__(self, inner: Driver, at: int, *, done: bool, lost: bool = False) -> None:
        super().__init__(inner)
        self._at, self._done, self._lost = at, done, lost
        self.writes = 0

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if operation not in ("append", "replace", "delete"):
            return await send()
        self.writes += 1
        if self.writes - 1 != self._at:
            return await send()
        if self._done:
            await send()
        if self._lost:
            raise OutcomeUnknown("the answer was lost", backend=self.name, operation=operation)
        raise Killed


SCRIPT: list[Action] = [
    *(("add", 10 * number) for number in range(4)),
    *[("pop", 0)] * 5,
    *(("add", 100 + 10 * number) for number in range(5)),
    *[("pop", 0)] * 9,
    *(("add", 200 + 10 * number) for number in range(6)),
]
"""Goes to pages, comes back into them twice, and fills them again with other items."""


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
async def test_a_kill_at_every_write_loses_no_item_and_repeats_none(*, done: bool, small: None) -> None:
    for at in itertools.count():
        driver, state = await opened(), list[int]()
        dying = Dying(driver, at, done=done)
        killed = False
        for action in SCRIPT:
            before = [*state]
            expected = on_list(state, action)
            try:
                assert await on_log(driver if killed else dying, action) == expected
            except Killed:
                # The call was done or not; the others go on from what is there.
                killed, found = True, numbers(await log_on(driver).items())
                assert found in (before, state), (at, action)
                state = found
            assert numbers(await log_on(driver).items()) == state, (at, action)
        assert numbers(await log_on(driver).items(5)) == state[-5:]
        if not killed:
            assert at > 40
            return


@pytest.mark.parametrize("done", [False, True], ids=["not-done", "done"])
async def test_a_lost_answer_to_any_write_changes_no_result(
    *, done: bool, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    for at in itertools.count():
        driver, state = await opened(), list[int]()
        losing = Dying(driver, at, done=done, lost=True)
        for action in SCRIPT:
            assert await on_log(losing, action) == on_list(state, action), at
            assert numbers(await log_on(driver).items()) == state, (at, action)
        if losing.writes <= at:
            return


async def no_sleep(delay: float, result: object = None) -> object:
    del delay
    return result


async def test_what_a_dead_process_put_into_a_page_is_not_shown_after_removals(small: None) -> None:
    """It had seen items that were removed before its write; their numbers are those of others now."""
    driver = await opened()
    for number in range(4):
        await append_entries(driver, Add(f"e{number}", numbered(number), 1.0))
    with pytest.raises(Killed):
        await log_on(Dying(driver, 1, done=False)).fold()
    assert await pages_of(driver)
    for number in range(4):
        await append_entries(driver, Pop(f"pop {number}", 2.0))
    for number in range(50, 60):
        await log_on(driver).add(numbered(number))
    assert numbers(await log_on(driver).items()) == [*range(50, 60)]
    page = await log_on(driver).transcript(after=-1, limit=3)
    assert [one.item["n"] for one in page.items] == [50, 51, 52]


async def beginning_after_a_late_copy() -> list[int]:
    """Return the first items once a slow process has put items into a page that were removed long ago."""
    driver = Stepping(await opened())
    for number in range(4):
        await append_entries(driver, Add(f"e{number}", numbered(number), 1.0))

    async def meanwhile() -> None:
        for number in range(4):
            await append_entries(driver.inner, Pop(f"pop {number}", 2.0))
        for number in range(50, 60):
            await log_on(driver.inner).add(numbered(number))

    driver.step = ("append", None, meanwhile)
    await log_on(driver).fold()
    page = await log_on(driver).transcript(after=-1, limit=3)
    return [one.item["n"] for one in page.items]


async def test_a_late_copy_of_removed_items_is_not_shown(small: None) -> None:
    assert await beginning_after_a_late_copy() == [50, 51, 52]


@pytest.mark.parametrize(("named", "shown"), [(True, [50, 51, 52]), (False, [0, 1, 2])])
async def test_without_revisions_only_the_names_of_those_before_hide_a_late_copy(
    *, named: bool, shown: list[int], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unrevised(rev: int, turn: Mapping[str, Any], prev: str, notes: Mapping[str, Any]) -> Copy:
        del rev
        return Copy(0, turn, prev if named else "", notes)

    monkeypatch.setattr(pages, "Copy", unrevised)
    assert await beginning_after_a_late_copy() == shown


async def test_a_removal_is_answered_after_the_page_was_filled_again(small: None) -> None:
    """Another process adds and moves between the removal and the load that tells what was removed."""
    driver = Stepping(await opened())
    await filled(log_on(driver.inner), 12)
    while await log_on(driver.inner).fold():
        pass

    async def refill() -> None:
        driver.step = ("load", None, meanwhile)

    async def meanwhile() -> None:
        for number in range(100, 110):
            await log_on(driver.inner).add(numbered(number))

    driver.step = ("append", WHERE, refill)
    assert await log_on(driver).pop() == {"n": 11}
    assert numbers(await log_on(driver).items()) == [*range(11), *range(100, 110)]


def test_folding_entries_of_a_log_in_pages_keeps_what_is_read(small: None) -> None:
    paged = items.Folded(transcript=pages.Transcript("e", base=8, last="x", rev=2))
    entries: list[Add | Pop] = [Add("a", numbered(8)), Pop("p", 1.0), Pop("q", 1.0), Add("b", numbered(9))]
    log = items.Log("v", paged, entries)
    assert (log.low, log.rev, numbers(log.items), log.count) == (7, 4, [9], 8)
    assert log.popped["q"] == items.Removal(1.0, None, 7)
    folded = log.fold(4, now=1.0, keep_for=9.0, transcript=paged.transcript, paged={7: {"n": 7}})
    assert folded.popped["q"].item == {"n": 7}
    read = items.open_folded(items.seal_folded(folded, CODEC), CODEC)
    assert (read.transcript, read.popped) == (folded.transcript, folded.popped)


async def test_a_purge_beside_removals_hides_nothing_that_is_added_later(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes items between what a purge has read and what it writes."""
    driver = await opened()
    log, raised = log_on(driver), Shortening._raise  # noqa: SLF001 -- the write

    async def later(self: Shortening, *given: Any) -> bool:
        for _ in range(8):
            await log.pop()
        while await log.fold():
            pass
        return await raised(self, *given)

    await filled(log, 12)
    while await log.fold():
        pass
    monkeypatch.setattr(Shortening, "_raise", later)
    await Purge(
        driver, CODEC, Directory(driver, CODEC), transcripts_older_than=60.0, clock=lambda: time.time() + 1e6
    ).user("acme", "u")
    await filled(log, 8)
    assert (await log.transcript(limit=100)).missing == ()
    assert numbers(await log.items())[-8:] == [*range(8)]


async def test_a_page_is_not_rewritten_with_copies_that_the_record_may_never_come_to(small: None) -> None:
    """A slow process rewrites a page to which another one, which loses, has added what came later."""
    store = MemoryStore()
    slow, popping, ahead, inner = [Stepping(await opened(store)) for _ in range(4)]

    async def met(barrier: asyncio.Barrier) -> None:
        """Wait until the test is there, and until it goes on."""
        await barrier.wait()
        await barrier.wait()

    for number in range(6):
        await append_entries(inner, Add(f"e{number}", numbered(number), 1.0))
    moves, removes, loses = asyncio.Barrier(2), asyncio.Barrier(2), asyncio.Barrier(2)
    slow.step = ("replace", WHERE, partial(met, moves))
    moving = asyncio.create_task(log_on(slow).fold())
    await moves.wait()
    for number in range(2):
        await append_entries(inner, Pop(f"pop {number}", 2.0))

    async def appended() -> None:
        popping.step = ("load", None, partial(met, removes))

    popping.step = ("append", WHERE, appended)
    removing = asyncio.create_task(log_on(popping).pop())
    await removes.wait()
    for number in range(100, 104):
        await append_entries(inner, Add(f"late {number}", numbered(number), 3.0))
    ahead.step = ("replace", WHERE, partial(met, loses))
    losing = asyncio.create_task(log_on(ahead).fold())
    await loses.wait()
    for barrier, task in (moves, moving), (loses, losing):
        await barrier.wait()
        await task
    await removes.wait()
    assert await removing == {"n": 3}
    assert numbers(await log_on(inner).items()) == [0, 1, 2, 100, 101, 102, 103]

"""Changes of a log on the condition that nothing came in between: all readers decide alike, folds or not."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.admin.copying import Copy, Owner
from stm_backends.admin.expiring import Expire
from stm_backends.admin.purging import Purge
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Driver, Key, Record, Traits, first_of, new_version, version_after
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    TooLarge,
    Unavailable,
)
from stm_backends.history import items
from stm_backends.history.items import NOWHERE, Add, End, Entry, Folded, Log, Place, Pop, Tip
from stm_backends.history.log import ItemLog
from stm_backends.records import codec
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.limits import Limits
from stm_backends.records.shortening import Shortening
from stm_backends.sealing.keys import Sealing, StaticKeys
from tests.support.replicated import FailsOver
from tests.unit.conftest import Lose
from tests.unit.test_item_log import CODEC, KEY, WHERE, log_on, numbered, numbers, raw
from tests.unit.test_paged_log import Interrupted, Stepping, filled, no_sleep, opened, pages_of, shrink

T = TypeVar("T")


@pytest.fixture
def log(driver: Driver) -> ItemLog:
    return log_on(driver)


async def contents(driver: Driver) -> list[int]:
    return numbers(await log_on(driver).items())


# One process


async def test_what_is_read_names_the_moment_and_an_addition_goes_on_from_it(log: ItemLog) -> None:
    await log.add(numbered(0, 1, 2))
    state = await log.read(2)
    assert (numbers(state.items), state.count, state.exists) == ([1, 2], 3, True)
    tip = await log.add_after(state.tip, numbered(3))
    assert tip
    assert tip == (await log.read()).tip != state.tip
    assert await log.add_after(tip, numbered(4))
    assert numbers(await log.items()) == [0, 1, 2, 3, 4]


async def test_an_addition_after_an_earlier_moment_stores_nothing_that_a_reader_sees(log: ItemLog) -> None:
    await log.add(numbered(0))
    tip = (await log.read()).tip
    await log.add(numbered(1))
    assert await log.add_after(tip, numbered(2)) is None
    assert await log.rewrite(tip, numbered(3)) is None
    assert await log.clear_after(tip) is False
    assert numbers(await log.items()) == [0, 1]
    while await log.fold():
        pass
    assert numbers(await log.items()) == [0, 1]


async def test_a_repeat_is_known_as_one_though_the_log_was_cleared_and_begun_anew(driver: Driver) -> None:
    log, other = log_on(driver), log_on(driver)
    for number in range(10):
        await log.add(numbered(number))
    tip = (await log.read()).tip
    await other.clear()
    for number in range(10):
        await other.add(numbered(number), id="X" if number == 3 else None)
    assert await log.add_after(tip, numbered(3), id="X")
    assert await log_on(driver).add_after(tip, numbered(3), id="X")
    assert await contents(driver) == [*range(10)]


async def test_a_log_that_does_not_exist_is_begun_once(driver: Driver, log: ItemLog) -> None:
    state = await log.read()
    assert (state.items, state.tip, state.count, state.exists) == ((), "", 0, False)
    assert await driver.load(WHERE) is None
    assert await log.add_after("", numbered(0))
    assert await log.add_after("", numbered(1)) is None
    assert numbers(await log.items()) == [0]


async def test_an_empty_log_that_exists_is_told_from_one_that_does_not(log: ItemLog) -> None:
    tip = await log.add_after("", [])
    assert tip
    state = await log.read()
    assert (state.items, state.count, state.exists, state.tip) == ((), 0, True, tip)
    assert await log.add_after("", []) is None
    await log.add(numbered(0))
    await log.pop()
    assert (await log.read()).exists


@pytest.fixture
def entries_read(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each load has read."""
    read, load = list[int](), driver.load

    async def counting(key: Key, **options: Any) -> Record | None:
        record = await load(key, **options)
        read.append(0 if record is None else len(record.tail))
        return record

    monkeypatch.setattr(driver, "load", counting)
    return read


@pytest.mark.parametrize("named", [False, True])
async def test_an_addition_is_two_round_trips_however_long_the_log_is(
    named: bool, log: ItemLog, entries_read: list[int], calls: list[str]
) -> None:
    await filled(log, 100)
    tip = (await log.read()).tip
    entries_read.clear()
    calls.clear()
    for number in range(100, 103):
        tip = await log.add_after(tip, numbered(number), id=f"id {number}" if named else None) or ""
        assert tip
    assert calls == ["append", "load"] * 3
    assert entries_read == [4] * 3


async def test_a_removal_is_a_change_unless_there_was_nothing_to_remove(driver: Driver, log: ItemLog) -> None:
    await log.add(numbered(0))
    tip = (await log.read()).tip
    await log.pop()
    assert await log.add_after(tip, numbered(1)) is None
    tip = (await log.read()).tip
    await driver.append(WHERE, items.seal_entry(Pop("p", 1.0), CODEC), initial_version="v", ttl=None)
    assert await log.add_after(tip, numbered(2))


async def test_a_rewrite_replaces_all_items_and_leaves_nothing_of_them(driver: Driver, log: ItemLog) -> None:
    await log.add([{"text": "to be taken back"}])
    tip = await log.rewrite((await log.read()).tip, [{"n": 1}, {"n": 2}])
    assert tip
    assert numbers(await log.items()) == [1, 2]
    assert b"taken back" not in str(await raw(driver)).encode()
    assert await log.add_after(tip, numbered(3))
    assert numbers(await log.items(2)) == [2, 3]


@pytest.mark.parametrize("pops", [0, 3])
async def test_a_rewrite_of_a_long_log_leaves_no_page(
    driver: Driver, pops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    log = log_on(driver)
    await filled(log, 20)
    for _ in range(pops):
        await log.pop()
    assert await pages_of(driver)
    assert await log.rewrite((await log.read()).tip, numbered(1, 2, 3))
    assert await pages_of(driver) == []
    await filled(log, 12)
    assert numbers(await log.items()) == [1, 2, 3, *range(12)]
    page = await log.transcript(after=-1, limit=4)
    assert [(one.number, one.item["n"]) for one in page.items] == [(0, 1), (1, 2), (2, 3), (3, 0)]


async def test_a_log_that_is_cleared_at_a_moment_is_as_one_that_never_was(
    driver: Driver, log: ItemLog
) -> None:
    await log.add([{"text": "secret"}], id="first")
    await log.pop()
    await log.add([{"text": "secret"}])
    tip = (await log.read()).tip
    assert await log.clear_after(tip)
    assert b"secret" not in str(await raw(driver)).encode()
    state = await log.read()
    assert (state.items, state.tip, state.count, state.exists) == ((), "", 0, False)
    assert await log.clear_after(tip) is False
    assert await log.clear_after("")
    assert await log.add_after("", numbered(1), id="first")
    assert await log.clear_after("") is False
    assert numbers(await log.items()) == [1]


@pytest.mark.parametrize("erase", ["clear", "clear_after"])
async def test_nothing_stays_of_what_is_refused_for_a_log_that_is_no_more(
    driver: Driver, log: ItemLog, erase: str
) -> None:
    tip = await log.add_after("", numbered(0)) or ""
    await act(log, erase, 0, tip)
    for call in (log.add_after, log.rewrite):
        assert await call(tip, [{"text": "secret"}]) is None
        record = await driver.load(WHERE)
        assert record is not None
        assert record.tail == ()
        assert b"secret" not in (record.body or b"")
        assert not (await log.newest(0)).exists
    assert await log.clear_after(tip) is False
    assert await log.add_after("", numbered(1))
    assert await contents(driver) == [1]


async def test_the_moment_of_an_erased_log_is_none_of_the_next(log: ItemLog) -> None:
    await log.add(numbered(0))
    tip = (await log.read()).tip
    await log.clear()
    assert await log.add_after(tip, numbered(1)) is None
    assert (await log.read()).exists is False
    assert await log.add_after("", numbered(2))
    assert await log.add_after(tip, numbered(3)) is None
    assert numbers(await log.items()) == [2]


@pytest.mark.parametrize("tip", ["0", "x:y", "1:", ":v", "-1:v", "9" * 30 + ":v", None, 7, b"1:v", "²:v"])
async def test_what_is_no_tip_is_refused(log: ItemLog, tip: Any) -> None:
    for call in (log.add_after(tip, []), log.rewrite(tip, []), log.clear_after(tip)):
        with pytest.raises(ConfigurationError, match="tip was not returned"):
            await call


@pytest.mark.parametrize("given_id", ["", 1, b"x"])
async def test_an_id_is_a_text(log: ItemLog, given_id: Any) -> None:
    with pytest.raises(InvalidState, match="id of an addition"):
        await log.add(numbered(1), id=given_id)
    with pytest.raises(InvalidState, match="id of an addition"):
        await log.add_after("", numbered(1), id=given_id)


# Repeats


async def test_a_repeat_of_an_id_adds_nothing_also_after_a_fold(log: ItemLog) -> None:
    await log.add(numbered(1), id="one")
    await log.add(numbered(1), id="one")
    assert await log.fold()
    await log.add(numbered(1), id="one")
    assert numbers(await log.items()) == [1]


def test_a_repeat_that_stays_keeps_its_id_whatever_is_forgotten() -> None:
    """Else it would become an item, and what was accepted after it would be refused."""
    first = [Add("repeated", numbered(0), 1.0), *(Add(f"a{n}", numbered(n), 1.0) for n in range(300))]
    body = Log("v", Folded(), first).fold(len(first), now=1.0, keep_for=60.0)
    more: list[Entry] = [Add(f"b{n}", numbered(n), 1.0) for n in range(300)]
    tail = [*more, first[0], Add("after", numbered(7), 1.0, Tip("v", len(first) + len(more)))]
    log = Log("w", body, tail)
    assert "after" in log.ids
    folded = log.fold(len(more), now=1e6, keep_for=60.0)
    assert "a0" not in folded.forgotten
    after = Log("x", folded, tail[len(more) :])
    assert (after.items, [*after.ids]) == (log.items, ["after"])


async def test_an_id_that_is_given_again_much_later_is_told_from_a_new_one(
    driver: Driver, log: ItemLog
) -> None:
    """The entry that has the id is none of those that a read of the latest ones, or an addition, looks at."""
    for number in range(100):
        await log.add(numbered(number), id=f"id {number}")
    for limit in (1, 3, 40):
        assert numbers(await log.items(limit)) == [*range(100 - limit, 100)]
    await log.add(numbered(7), id="id 7")
    state = await log.read(1)
    # Nothing came since the tip but this: it is done already, and changes nothing.
    assert await log.add_after(state.tip, numbered(8), id="id 8") == state.tip
    assert numbers(await log.items(2)) == numbers((await log.newest(2)).items) == [98, 99]
    assert (await log.read(0)).count == 100
    assert await log.add_after(state.tip, numbered(100), id="id 100") not in (None, state.tip)
    assert await contents(driver) == [*range(101)]


async def test_an_object_that_adds_on_and_on_with_ids_reads_few_entries_and_tells_each_repeat(
    driver: Driver, log: ItemLog, entries_read: list[int]
) -> None:
    tip, count = await log.add_after("", numbered(0), id="id 0") or "", 400
    for number in range(1, count):
        tip = await log.add_after(tip, numbered(number), id=f"id {number}") or ""
        assert tip
    # A few for each addition; now and then all, for a move to pages, and when many ids are known.
    assert sum(entries_read) < 10 * count
    for number in (0, 7, 200, count - 70, count - 2, count - 1):
        assert await log.add_after(tip, numbered(number), id=f"id {number}") == tip
        tip = (await log.read(1)).tip
    assert await contents(driver) == [*range(count)]


async def test_an_id_that_another_object_has_added_meanwhile_is_a_repeat(
    driver: Driver, log: ItemLog, entries_read: list[int]
) -> None:
    await filled(log, 40)
    tip = (await log.read()).tip
    await log_on(driver).add(numbered(40), id="theirs")
    # What this object knows of the moment before says nothing of what came after it.
    assert await log.add_after(tip, numbered(41), id="ours") is None
    state = await log_on(driver).read(2)
    entries_read.clear()
    assert await log.add_after(state.tip, numbered(41), id="theirs") not in (None, "")
    assert entries_read == [43]
    assert numbers(await log.items(2)) == [39, 40]


async def test_an_addition_that_was_done_is_done_when_it_is_sent_again(log: ItemLog) -> None:
    tip = await log.add_after("", numbered(0), id="a")
    assert tip
    assert await log.add_after("", numbered(0), id="a") == tip
    assert await log.add_after(tip, numbered(1), id="b")
    # Others have come since: nothing is accepted after what it returns.
    again = await log.add_after("", numbered(0), id="a")
    assert again
    assert await log.add_after(again, numbered(9)) is None
    assert numbers(await log.items()) == [0, 1]


async def test_an_id_that_was_refused_may_be_added_later(log: ItemLog) -> None:
    await log.add(numbered(0))
    assert await log.add_after("", numbered(1), id="x") is None
    assert await log.add_after((await log.read()).tip, numbered(1), id="x")
    assert numbers(await log.items()) == [0, 1]


async def test_a_refused_entry_that_arrives_again_after_folds_stays_refused(
    driver: Driver, log: ItemLog
) -> None:
    await log.add(numbered(0))
    tip = Tip.of((await log.read()).tip)
    await log.add(numbered(1))
    late = items.seal_entry(Add("late", numbered(7), 1.0, tip), CODEC)
    for _ in range(2):
        await driver.append(WHERE, late, initial_version="v", ttl=None)
        while await log.fold():
            pass
    assert numbers(await log.items()) == [0, 1]


@pytest.mark.parametrize("done", [True, False])
async def test_a_lost_answer_to_an_addition_is_settled(log: ItemLog, lose: Lose, done: bool) -> None:
    await log.add(numbered(0))
    tip = (await log.read()).tip
    lose("append", done=done)
    assert await log.add_after(tip, numbered(1))
    assert numbers(await log.items()) == [0, 1]


async def test_an_addition_whose_entry_was_folded_meanwhile_is_done(driver: Driver, log: ItemLog) -> None:
    tip = await log.add_after("", numbered(0))
    stepping = Stepping(driver)

    async def fold() -> None:
        await log.fold()

    stepping.step = ("load", WHERE, fold)
    assert await log_on(stepping).add_after(tip or "", numbered(1))
    assert stepping.step is None
    assert await contents(driver) == [0, 1]


async def test_a_refused_addition_that_was_folded_meanwhile_is_refused(driver: Driver, log: ItemLog) -> None:
    await log.add(numbered(0))
    stepping = Stepping(driver)

    async def fold() -> None:
        await log.fold()

    stepping.step = ("load", WHERE, fold)
    assert await log_on(stepping).add_after("", numbered(1)) is None
    assert await contents(driver) == [0]


async def test_a_length_that_looks_right_by_chance_accepts_nothing(driver: Driver, log: ItemLog) -> None:
    """A fold and an addition of another process leave the tail as long as a writer expects it."""
    await log.add(numbered(0))
    tip = (await log.read()).tip

    async def meanwhile() -> None:
        await log.fold()
        await log.add(numbered(1))

    stepping = Stepping(driver)
    stepping.step = ("append", WHERE, meanwhile)
    assert await log_on(stepping).add_after(tip, numbered(2)) is None
    assert await contents(driver) == [0, 1]


async def test_a_load_that_fails_after_the_addition_is_an_unknown_outcome(
    driver: Driver, log: ItemLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = driver.load

    async def down(key: Key, **options: Any) -> Record | None:
        if key != WHERE:
            return await load(key, **options)
        raise Unavailable("down", backend=driver.name, operation="load")

    monkeypatch.setattr(driver, "load", down)
    with pytest.raises(OutcomeUnknown, match="an entry was stored"):
        await log.add_after("", numbered(1))
    monkeypatch.undo()
    assert numbers(await log.items()) == [1]


class Demoted(FailsOver):
    """A former master that answers some loads, while the new one does all writes."""

    answers = 0

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        if self.answers:
            self.answers -= 1
            return await self.inner.load(key, last=last)
        return await self.new.load(key, last=last)

    async def append(self, key: Key, entry: bytes, **options: Any) -> int:
        return await self.new.append(key, entry, **options)


async def test_an_entry_that_a_former_master_does_not_show_is_looked_for_again() -> None:
    driver = Demoted()
    await driver.open()
    for server in (driver.inner, driver.new):
        entry = items.seal_entry(Add("first", numbered(0)), CODEC)
        await server.append(WHERE, entry, initial_version="v", ttl=None)
    log = log_on(driver, directory=Directory(driver.new, CODEC))
    tip = (await log.read()).tip
    driver.answers = 1
    assert await log.add_after(tip, numbered(1))
    assert await contents(driver.new) == [0, 1]


# Who else writes: deterministic races


async def test_of_two_writers_with_one_tip_exactly_one_gets_another(driver: Driver, log: ItemLog) -> None:
    for moment in range(4):
        await log.clear()
        await log.add(numbered(0))
        tip, won = (await log.read()).tip, list[str | None]()

        async def other(tip: str = tip, won: list[str | None] = won) -> None:
            won.append(await log.add_after(tip, numbered(2)))

        interrupted = Interrupted(driver, moment, other)
        won.append(await log_on(interrupted).add_after(tip, numbered(1)))
        assert len([one for one in won if one]) == 1, moment
        assert await contents(driver) == [0, 2 if won[0] else 1], moment


async def test_many_writers_that_go_on_from_what_they_read_lose_nothing(driver: Driver) -> None:
    stored = list[int]()

    async def writer(name: int) -> None:
        log, tip, number = log_on(driver), "", 0
        while number < 10:
            await asyncio.sleep(0)
            done = await log.add_after(tip, numbered(100 * name + number))
            if done is None:
                state = await log.read()
                tip = state.tip
                continue
            stored.append(100 * name + number)
            tip, number = done, number + 1

    await asyncio.gather(*map(writer, range(4)))
    found = await contents(driver)
    assert found == stored
    assert sorted(found) == sorted(100 * name + number for name in range(4) for number in range(10))


@dataclass
class Model:
    """A log as one process would have it: what was said, and how often it has changed in which life."""

    said: list[int] = field(default_factory=list[int])
    life: int = 0
    changes: int = 0
    exists: bool = False

    @property
    def tip(self) -> tuple[int, int] | None:
        return (self.life, self.changes) if self.exists else None

    def change(self, *, exists: bool = True) -> None:
        self.changes += 1
        self.exists = exists

    def do(self, name: str, number: int, tip: tuple[int, int] | None) -> object:
        match name:
            case "add":
                self.said += [number, number + 1]
                self.change()
            case "pop" if self.said:
                self.change()
                return self.said.pop()
            case "clear":
                self.said, self.life, self.exists = [], self.life + 1, False
            case "add_after" | "rewrite" | "clear_after":
                if tip != self.tip:
                    return False
                if name == "clear_after":
                    if self.exists:
                        self.change(exists=False)
                    self.said = []
                    return True
                self.said = [number] if name == "rewrite" else [*self.said, number]
                self.change()
                return True
            case _:
                pass
        return None


async def act(log: ItemLog, name: str, number: int, tip: str) -> object:
    match name:
        case "add":
            await log.add(numbered(number, number + 1))
        case "pop":
            item = await log.pop()
            return item and item["n"]
        case "clear":
            await log.clear()
        case "fold":
            await log.fold()
        case "add_after":
            return await log.add_after(tip, numbered(number)) is not None
        case "rewrite":
            return await log.rewrite(tip, numbered(number)) is not None
        case _:
            return await log.clear_after(tip)
    return None


CALLS = ["add", "pop", "clear", "fold", "add_after", "rewrite", "clear_after"]

OTHERS = [
    *itertools.product(CALLS, repeat=1),
    *itertools.product(["add", "add_after", "rewrite"], ["clear", "clear_after", "fold"]),
    ("pop", "clear"),
]


def orders(
    model: Model, own: str, tip: tuple[int, int] | None, others: Sequence[str]
) -> list[tuple[object, list[object], list[int]]]:
    """Return the answers and what is left for each place of one call among the others.

    These read before they write. Who removes an item that is erased before it could be read gets none, and
    what is erased before it could be read is not in the log.
    """
    found: list[tuple[object, list[object], list[int]]] = []
    for place in range(len(others) + 1):
        now, answers = copy.deepcopy(model), list[object]()
        for index, name in enumerate(others[:place]):
            answers.append(now.do(name, 200 + 10 * index, now.tip))
        answer = now.do(own, 100, tip)
        for index, name in enumerate(others[place:], place):
            answers.append(now.do(name, 200 + 10 * index, now.tip))
        found.append((answer, answers, now.said))
        if {"clear", "clear_after"} & {*others[place:]}:
            found.append((None if own == "pop" else False, answers, now.said))
    return found


@pytest.mark.parametrize("paged", [False, True], ids=["in-the-record", "in-pages"])
@pytest.mark.parametrize("others", OTHERS, ids="-".join)
@pytest.mark.parametrize("own", ["add_after", "rewrite", "clear_after", "pop"])
async def test_conditional_calls_have_the_results_of_some_order(
    own: str, others: Sequence[str], paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    if paged:
        shrink(monkeypatch, long=1, kept=1, turns=2)
    for length in (0, 3) if paged else (0, 1):
        for moment in itertools.count():
            driver, model = await opened(), Model()
            for number in range(length):
                await log_on(driver, clock=lambda: 0.0).add(numbered(10 * number, 10 * number + 1))
                model.do("add", 10 * number, None)
            tip, answers = (await log_on(driver).read()).tip, list[object]()

            async def interfere(driver: Driver = driver, answers: list[object] = answers) -> None:
                for index, name in enumerate(others):
                    log = log_on(driver, clock=lambda: 0.0)
                    answers.append(await act(log, name, 200 + 10 * index, (await log.read()).tip))

            interrupted = Interrupted(driver, moment, interfere)
            answer = await act(log_on(interrupted, clock=lambda: 0.0), own, 100, tip)
            if moment >= interrupted.moments:
                break
            left = await contents(driver)
            assert (answer, answers, left) in orders(model, own, model.tip, others), (length, moment)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from([*CALLS, "add_after", "add_after", "read"]), st.integers(0, 1)), max_size=40
    ),
    st.booleans(),
)
def test_two_processes_whose_tips_may_be_old_see_one_log(calls: list[tuple[str, int]], paged: bool) -> None:
    async def run() -> None:
        driver, model = await opened(), Model()
        logs = [log_on(driver, clock=lambda: 0.0) for _ in range(2)]
        tips: list[tuple[str, tuple[int, int] | None]] = [("", None)] * 2
        for number, (name, who) in enumerate(calls):
            if name == "read":
                state = await logs[who].read()
                tips[who] = state.tip, model.tip
                assert (numbers(state.items), state.count) == (model.said, len(model.said))
                assert state.exists == model.exists
                continue
            expected = model.do(name, 10 * number, tips[who][1])
            assert await act(logs[who], name, 10 * number, tips[who][0]) == expected, (number, name)
            assert await contents(driver) == model.said
            assert (await log_on(driver).read()).exists == model.exists
            assert numbers(await log_on(driver).items(3)) == model.said[-3:]

    with pytest.MonkeyPatch.context() as patch:
        if paged:
            shrink(patch)
        asyncio.run(run())


# The pure log


@dataclass(frozen=True)
class Decided:
    """What an entry does by its definition, which looks at all entries before it."""

    said: list[int]
    ids: list[str]
    exists: bool


def decided(entries: Sequence[Entry]) -> Decided:
    said, ids, effective, exists = list[int](), list[str](), list[int](), False
    for position, entry in enumerate(entries):
        if entry.id in ids:
            continue
        if not isinstance(entry, Pop) and entry.after is not None:
            after = entry.after
            in_time = after.life == "v" and not [one for one in effective if one >= after.position]
            if not (not exists if after == NOWHERE else in_time):
                continue
        ids.append(entry.id)
        match entry:
            case Pop():
                if not said:
                    continue
                said.pop()
            case End():
                said, ids = [], [entry.id]
            case Add():
                new = [item["n"] for item in entry.items]
                said = new if entry.instead else said + new
        effective.append(position)
        exists = not isinstance(entry, End)
    return Decided(said, ids, exists)


@st.composite
def many_entries(draw: st.DrawFn) -> list[Entry]:
    """Return entries of writers who know the last moment, an old one, one of another life, or none."""
    found = list[Entry]()
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["add", "pop", "after", "after", "after", "set", "end", "again"]))
        position = draw(st.one_of(st.just(number), st.just(number), st.integers(0, number)))
        tip = draw(st.sampled_from([Tip("v", position), Tip("v", position), Tip("w", position), NOWHERE]))
        entry_id, said = f"e{number}", numbered(number)
        match kind:
            case "add":
                found.append(Add(entry_id, said, 1.0))
            case "pop":
                found.append(Pop(entry_id, 1.0))
            case "after" | "set":
                found.append(Add(entry_id, said, 1.0, tip, instead=kind == "set"))
            case "end":
                found.append(End(entry_id, 1.0, tip))
            case _ if found:
                found.append(draw(st.sampled_from(found)))
            case _:
                found.append(Add(entry_id, said, 1.0))
    return found


def is_decided(log: Log, entries: Sequence[Entry]) -> bool:
    expected = decided(entries)
    end = Tip("v", len(entries)) if expected.exists else NOWHERE
    return (numbers(log.items), log.place.exists, log.tip) == (expected.said, expected.exists, end)


@settings(max_examples=300)
@given(many_entries())
def test_a_log_decides_by_what_took_effect_before(entries: list[Entry]) -> None:
    log = Log("v", Folded(), entries)
    assert is_decided(log, entries)
    assert [*log.ids] == decided(entries).ids
    assert log.waste <= log.length


@settings(max_examples=300)
@given(many_entries(), st.lists(st.integers(0, 10), max_size=6))
def test_folds_of_any_beginning_change_no_decision(entries: list[Entry], counts: list[int]) -> None:
    record = Record("v", None, tuple(items.seal_entry(entry, CODEC) for entry in entries))
    for asked in counts:
        log = items.read(record, CODEC)
        count = min(asked, log.length)
        body = items.seal_folded(log.fold(count, now=1.0, keep_for=60.0), CODEC)
        # As another process has it once it was sealed again.
        record = Record(version_after(record.version), body, record.tail[count:])
        again = items.read(record, CODEC)
        assert is_decided(again, entries)
        ids = decided(entries).ids
        assert all(again.has(entry.id) for entry in again.entries)
        assert [one for one in ids if not again.has(one)] == []


@given(many_entries(), st.integers(0, 25))
def test_an_entry_right_after_its_place_is_decided_by_the_newest_entries(
    entries: list[Entry], asked: int
) -> None:
    skipped = min(asked, len(entries))
    part, whole = Log("v", Folded(), entries[skipped:], skipped), Log("v", Folded(), entries)
    for entry in entries[skipped:]:
        if not isinstance(entry, Pop) and entry.after is not None and part.follows(entry.id, entry.after):
            assert (part.taken(entry.id, entry.after) is None) == (whole.taken(entry.id, entry.after) is None)


@settings(max_examples=200)
@given(st.data())
def test_the_latest_items_among_conditional_entries_are_those_of_the_whole(data: st.DataObject) -> None:
    entries = list[Entry]()
    for number in range(90):
        kind = data.draw(st.sampled_from(["after"] * 12 + ["add", "late", "pop", "set"]))
        tip = Tip("v", number - data.draw(st.integers(1, 40)) if kind == "late" else number)
        if kind == "pop":
            entries.append(Pop(f"e{number}", 1000.0 + number))
        elif kind == "add":
            entries.append(Add(f"e{number}", numbered(number), 1000.0 + number))
        else:
            entries.append(Add(f"e{number}", numbered(number), 1000.0 + number, tip, instead=kind == "set"))
    whole = Log("v", Folded(), entries)
    count, skipped = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 60))
    found = Log("v", Folded(), entries[skipped:], skipped).newest(count)
    assert found is None or found == whole.items[max(0, len(whole.items) - count) :]


def test_an_entry_of_an_earlier_version_counts_as_one_that_took_effect() -> None:
    old = CODEC.seal("log", {"items": [], "forgotten": {"digests": ",", "ages": []}, "popped": {}})
    log = items.read(Record("version", old, ()), CODEC)
    assert (log.place, log.tip) == (Place("version", 1, 1, exists=True), Tip("version", 1))
    folded = items.read(
        Record("other", items.seal_folded(log.fold(0, now=0.0, keep_for=1.0), CODEC), ()), CODEC
    )
    assert folded.place == log.place


def test_what_an_earlier_version_has_folded_counts_as_gone() -> None:
    """It keeps the place that it does not know, and adds the ids that it folds."""
    log = Log("v", Folded(), [Add("a", numbered(1)), Add("b", numbered(2))])
    mine = log.fold(1, now=1.0, keep_for=60.0)
    theirs = replace(mine, forgotten=mine.forgotten.adding(["b", "c"], now=1.0, keep_for=60.0))
    content = CODEC.open("log", items.seal_folded(theirs, CODEC))
    content["place"] = CODEC.open("log", items.seal_folded(mine, CODEC))["place"]
    found = items.open_folded(CODEC.seal("log", content), CODEC)
    assert found.place == Place("v", 3, 3, exists=True)
    # Of which it remembers nothing that was there before.
    content["place"]["newest"] = "gone"
    assert items.open_folded(CODEC.seal("log", content), CODEC).place == Place("v", 4, 4, exists=True)


def test_a_version_tells_with_which_one_the_record_began() -> None:
    first = new_version()
    later = version_after(version_after(first))
    assert first_of(later) == first_of(first) == first
    assert later != first
    assert len(later) <= 64


# What is stored


async def test_an_earlier_version_refuses_a_log_with_conditional_entries(
    driver: Driver, log: ItemLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.add(numbered(0))
    await log.add_after("", numbered(1))
    before = await raw(driver)
    monkeypatch.setattr(codec, "_NEWER", {})

    def never(*_: object) -> bool:
        return False

    monkeypatch.setattr(Codec, "is_of", never)
    earlier = log_on(driver)
    for work in (earlier.items, earlier.pop, earlier.fold):
        with pytest.raises(Corrupt, match="format '2' by another version"):
            await work()
    assert await raw(driver) == before


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"id": "x", "add": [], "after": None},
        {"id": "x", "add": [], "after": ["v"]},
        {"id": "x", "add": [], "after": [1, "v"]},
        {"id": "x", "add": [], "set": [], "after": ["v", 1]},
        {"id": "x", "add": [1], "after": ["v", 1]},
        {"id": "x", "pop": 1.0, "after": ["v", 1]},
        {"id": 1, "add": [], "after": ["v", 1]},
        {"id": "x", "end": "now", "after": ["v", 1]},
        {"id": "x", "add": [], "at": "now", "after": ["v", 1]},
    ],
)
async def test_an_entry_that_is_none_of_these_is_corrupt(
    driver: Driver, log: ItemLog, content: dict[str, Any]
) -> None:
    await driver.append(WHERE, CODEC.seal("items-after", content), initial_version="v", ttl=None)
    with pytest.raises(Corrupt, match=driver.name):
        await log.items()


@pytest.mark.parametrize(
    "place",
    [1, {}, {"life": "v", "gone": 1}, {"life": "v", "gone": "x", "settled": 1, "newest": ""}, []],
)
async def test_a_place_of_another_type_is_corrupt(driver: Driver, log: ItemLog, place: object) -> None:
    content = {"items": [], "forgotten": {"digests": ",", "ages": []}, "popped": {}, "place": place}
    body = CODEC.seal("log", content)
    await log.add(numbered(1))
    assert await driver.replace(WHERE, body, version="w", expect=(await raw(driver)).version, ttl=None)
    with pytest.raises(Corrupt):
        await log.items()


# Full records, limits, time to live


async def test_a_full_record_makes_room_for_a_conditional_addition() -> None:
    driver = await opened(max_entry_bytes=4_000, max_record_bytes=8_000)
    log, tip = log_on(driver), ""
    for number in range(30):
        done = await log.add_after(tip, [{"n": number, "text": "x" * 1_000}])
        assert done
        tip = done
    assert numbers(await log.items()) == [*range(30)]
    assert (await log.pop() or {})["n"] == 29
    assert await log.clear_after((await log.read()).tip)
    assert await log.items() == []


async def test_a_log_whose_items_fill_its_body_goes_to_pages() -> None:
    driver = await opened(max_entry_bytes=8_000, max_record_bytes=8_000)
    log = log_on(driver)
    for number in range(30):
        await log.add([{"n": number, "text": "x" * 1_500}])
    assert numbers(await log.items()) == [*range(30)]
    assert numbers([await log.pop() or {} for _ in range(30)]) == [*reversed(range(30))]


async def test_an_addition_that_fits_no_entry_raises_and_changes_nothing() -> None:
    driver = await opened(max_entry_bytes=500, max_record_bytes=8_000)
    log = log_on(driver)
    tip = await log.add_after("", numbered(1)) or ""
    for call in (log.add_after(tip, [{"text": "x" * 600}]), log.rewrite(tip, [{"text": "x" * 600}])):
        with pytest.raises(TooLarge):
            await call
    assert (await log.read()).tip == tip


async def test_limits_hold_for_conditional_additions() -> None:
    async with Backend(MemoryDriver(), limits=Limits(turn_characters=10)) as backend:
        log = backend.item_log(KEY, "langchain")
        for call in (log.add_after("", [{"text": "x" * 20}]), log.rewrite("", [{"text": "x" * 20}])):
            with pytest.raises(LimitReached):
                await call
        assert (await log.read()).exists is False


class Few(WrapperDriver):
    """A driver whose writes drop few entries."""

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, max_drop=3)


async def test_a_rewrite_of_more_than_one_write_drops_is_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    shrink(monkeypatch)
    driver = Few(await opened())
    log = log_on(driver)
    await filled(log, 20)
    assert await log.rewrite((await log.read()).tip, numbered(1))
    assert await log.rewrite((await log.read()).tip, numbered(2))
    await log.add(numbered(3))
    assert numbers(await log.items()) == [2, 3]
    while await log.fold():
        pass
    assert numbers(await log.items()) == [2, 3]


# A cancelled call has ended when the cancellation is raised


class Slow(WrapperDriver):
    """Does each write of a log some time after the caller was cancelled."""

    def __init__(self, inner: Driver, operation: Operation) -> None:
        super().__init__(inner)
        self._operation = operation
        self.reached, self.goes_on = asyncio.Event(), asyncio.Event()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if operation == self._operation and key == WHERE:
            self.reached.set()
            await self.goes_on.wait()
        return await send()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("name", "operation", "left"),
    [
        ("add", "append", [0, 1, 100, 101]),
        ("pop", "append", [0]),
        ("clear", "delete", []),
        ("add_after", "append", [0, 1, 100]),
        ("rewrite", "append", [100]),
        ("clear_after", "append", []),
    ],
)
async def test_a_cancelled_call_has_ended_when_the_cancellation_is_raised(
    driver: Driver, name: str, operation: Operation, left: list[int], times: int
) -> None:
    await log_on(driver).add(numbered(0, 1))
    tip = (await log_on(driver).read()).tip
    slow = Slow(driver, operation)
    calling = asyncio.create_task(act(log_on(slow), name, 100, tip))
    await slow.reached.wait()
    for _ in range(times):
        calling.cancel()
        await asyncio.sleep(0)
        assert not calling.done()
    slow.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert await contents(driver) == left


async def test_a_time_limit_around_a_call_holds_once_it_has_ended(driver: Driver) -> None:
    slow = Slow(driver, "append")

    async def late() -> None:
        await slow.reached.wait()
        await asyncio.sleep(0.05)
        slow.goes_on.set()

    going = asyncio.create_task(late())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await log_on(slow).add(numbered(1))
    assert await contents(driver) == [1]
    await going


# Administration keeps the moments of a log


async def test_what_administration_does_to_a_log_leaves_its_moments(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    log = log_on(driver)
    tip = await log.add_after("", numbered(0)) or ""
    directory = Directory(driver, CODEC)

    async def expire() -> None:
        await Expire(driver, CODEC, directory, ttl=1000.0).user("acme", "u")

    async def shorten() -> None:
        transcript = items.open_folded((await raw(driver)).body, CODEC).transcript
        if transcript is not None:
            bodies = Purge(driver, CODEC, directory)._bodies("langchain")  # noqa: SLF001 -- a part of a purge
            await Shortening(driver, CODEC).to(WHERE, bodies, transcript, transcript.first + 1)

    for number, work in enumerate([expire, log.fold, expire, shorten, log.fold, shorten] * 4, 1):
        assert await log.add_after("", numbered(-1)) is None
        await work()
        done = await log.add_after(tip, numbered(number))
        assert done, number
        tip = done
    found = await contents(driver)
    assert -1 not in found
    assert found[-5:] == [*range(20, 25)]


# A refused addition removes its entry, and all that has ended with it: the purge only finds a changed record.
@pytest.mark.parametrize(("operation", "left"), [("append", [0, 1]), ("replace", [])])
async def test_a_purge_keeps_what_is_added_on_a_moment_or_the_addition_is_refused(
    driver: Driver, operation: Operation, left: list[int]
) -> None:
    log = log_on(driver, clock=lambda: 1e9)
    tip = await log.add_after("", numbered(0)) or ""
    purge = Purge(driver, CODEC, Directory(driver, CODEC), older_than=3600.0)
    stepping = Stepping(driver)
    purge._driver = stepping  # noqa: SLF001 -- somebody adds between its load and its write

    async def add() -> None:
        assert bool(await log_on(driver).add_after(tip, numbered(1))) == bool(left)

    stepping.step = (operation, WHERE, add)
    await purge.user("acme", "u")
    assert stepping.step is None
    assert purge.purged.changed == 1
    assert await contents(driver) == left
    assert await log.add_after(tip, numbered(2)) is None
    assert (await log.read()).exists == bool(left)


async def test_resealing_a_log_without_a_body_leaves_its_moments() -> None:
    store, old, new = MemoryStore(), bytes(range(32)), bytes(range(32, 64))
    async with Backend(MemoryDriver(store), sealing=Sealing(StaticKeys({"k1": old}, primary="k1"))) as before:
        log = before.item_log(KEY, "langchain")
        tip = await log.add_after("", numbered(0)) or ""
        assert await log.add_after("", numbered(1)) is None
    rotated = Sealing(StaticKeys({"k1": old, "k2": new}, primary="k2"))
    async with Backend(MemoryDriver(store), sealing=rotated) as backend:
        log = backend.item_log(KEY, "langchain")
        assert (await backend.sessions.reseal("acme")).ok
        assert (await backend.sessions.reseal("acme")).records == 0
        assert (await log.read()).tip == Tip(Tip.of(tip).life, 2).text
        assert numbers(await log.items()) == [0]
        assert await log.add_after(tip, numbered(2))
        assert await log.add_after(tip, numbered(3)) is None
        assert numbers(await log.items()) == [0, 2]


async def test_a_copy_has_the_moments_and_an_import_the_items_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    log, target = log_on(driver), await opened()
    await Directory(driver, CODEC).note("acme", "u")
    tip = await log.add_after("", numbered(0)) or ""
    for number in range(1, 12):
        assert await log.add_after("", numbered(-1)) is None
        tip = await log.add_after(tip, numbered(number)) or ""
    moving = Copy(driver, target, [Owner("acme")])
    await moving.copy()
    await moving.verify()
    assert moving.ok
    assert await contents(target) == [*range(12)]
    assert await log_on(target).add_after(tip, numbered(12))
    other = Backend(await opened())
    importing = other.sessions.importing()
    async for line in Backend(driver).sessions.export_log_lines(KEY, "langchain"):
        await importing.add(line)
    imported = other.item_log(KEY, "langchain")
    state = await imported.read()
    assert (numbers(state.items), state.exists) == ([*range(12)], True)
    assert await imported.add_after(tip, numbered(13)) is None
    assert await imported.add_after(state.tip, numbered(14))


async def test_a_log_that_was_purged_or_ended_leaves_no_record_once_its_user_is_erased(
    driver: Driver,
) -> None:
    backend = Backend(driver)
    log = backend.item_log(KEY, "langchain")
    await log.add_after("", numbered(0))
    assert await log.clear_after((await log.read()).tip)
    assert await driver.load(WHERE) is not None
    assert await backend.sessions.erase_user("acme", "u") == 1
    assert await driver.load(WHERE) is None
    await log.add_after("", numbered(0))
    assert await backend.sessions.erase(KEY)
    assert await log.items() == []


def test_an_emptied_log_has_ended() -> None:
    log = Log("v", Folded(), [Add("a", numbered(1)), Add("b", numbered(2), 1.0, Tip("v", 1))])
    assert log.emptied(2, {}).place == Place("v", 2, 2, exists=False)
    assert log.emptied(1, {}).place == Place("v", 1, 1, exists=False)

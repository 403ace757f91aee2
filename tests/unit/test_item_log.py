"""A log of items that many share: in any interleaving it is the list that some order of the calls makes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.backend import Backend
from stm_backends.drivers.contract import ABSENT, Driver, Key, Record, new_version
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidState,
    OutcomeUnknown,
    TooLarge,
    Unavailable,
)
from stm_backends.history import items
from stm_backends.history import log as item_log
from stm_backends.history.items import Add, Pop
from stm_backends.history.log import ItemLog
from stm_backends.records import keys
from stm_backends.records.body import REMEMBERED_IDS
from stm_backends.records.codec import Codec
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.types import MemoryKey
from tests.support.replicated import FailsOver, StillAnswersLoads
from tests.unit.conftest import Lose

KEY = MemoryKey("acme", "u", "s")
WHERE = keys.log_key(KEY, "langchain")
CODEC = Codec()


def log_on(driver: Driver, **options: Any) -> ItemLog:
    return ItemLog(driver, KEY, "langchain", **options)


@pytest.fixture
def log(driver: Driver) -> ItemLog:
    return log_on(driver)


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in numbers]


def numbers(found: Sequence[dict[str, Any]]) -> list[int]:
    return [item["n"] for item in found]


async def fold(driver: Driver, *, now: float = 0.0, codec: Codec = CODEC) -> bool:
    """Fold as another process would that has just read the log; returns whether it came through."""
    # As if at a time when every pop is young.
    return await log_on(driver, codec=codec, clock=lambda: now).fold()


async def raw(driver: Driver) -> Record:
    record = await driver.load(WHERE)
    assert record is not None
    return record


# One process


async def test_items_come_back_as_they_were_added(log: ItemLog) -> None:
    added = [{"a": [1, 2.5, None, {"b": "\0 é \ud800"}]}, {}, {"n": 2**70}]
    await log.add(added)
    assert await log.items() == added


async def test_a_missing_log_is_empty_and_reading_it_writes_nothing(driver: Driver, log: ItemLog) -> None:
    await log.add([])
    assert (await log.items(), await log.pop()) == ([], None)
    await log.clear()
    assert await driver.load(WHERE) is None


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [0, 1, 2]), (-1, []), (0, []), (2, [1, 2]), (9, [0, 1, 2])]
)
async def test_a_limit_keeps_the_latest(log: ItemLog, limit: int | None, expected: list[int]) -> None:
    await log.add(numbered(0, 1, 2))
    assert numbers(await log.items(limit)) == expected


# The latest items of a long log


def read_by(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of entries that each load returns."""
    load, read = driver.load, list[int]()

    async def counting(key: Key, **options: Any) -> Record | None:
        record = await load(key, **options)
        read.append(0 if record is None else len(record.tail))
        return record

    monkeypatch.setattr(driver, "load", counting)
    return read


async def append_entries(driver: Driver, *entries: Add | Pop) -> None:
    for entry in entries:
        await driver.append(WHERE, items.seal_entry(entry, CODEC), initial_version="v", ttl=None)


def added(*numbers: int) -> list[Add]:
    """Return entries with one item each, a second apart."""
    return [Add(f"add {number}", numbered(number), 1000.0 + number) for number in numbers]


async def test_a_limit_reads_as_much_of_a_long_log_as_of_a_short_one(
    driver: Driver, log: ItemLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await append_entries(driver, *added(*range(400)))
    read = read_by(driver, monkeypatch)
    assert numbers(await log.items(20)) == [*range(380, 400)]
    assert numbers(await log.items(1)) == [399]
    assert read == [20 + items.MARGIN, 1 + items.MARGIN]


async def test_removals_among_the_latest_entries_are_minded(
    driver: Driver, log: ItemLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await append_entries(driver, *added(*range(300)), *(Pop(f"pop {n}", 2000.0) for n in range(30)))
    read = read_by(driver, monkeypatch)
    assert numbers(await log.items(20)) == [*range(250, 270)]
    assert read == [20 + items.MARGIN, 4 * (20 + items.MARGIN)]


async def test_a_repeat_of_an_entry_that_is_not_read_is_no_item(driver: Driver, log: ItemLog) -> None:
    entries = added(*range(300))
    await append_entries(driver, *entries, entries[200], *added(*range(300, 310)))
    for limit in (1, 10, 11, 20):
        assert numbers(await log.items(limit)) == [*range(310 - limit, 310)]


async def test_an_entry_without_a_time_is_found_among_later_ones(driver: Driver, log: ItemLog) -> None:
    await append_entries(driver, *added(*range(100)), Add("an older version's", numbered(100)))
    assert numbers(await log.items(2)) == [99, 100]


@given(st.data())
def test_the_latest_items_of_a_part_are_those_of_the_whole(data: st.DataObject) -> None:
    entries: list[Add | Pop] = [*added(*range(120))]
    for at in data.draw(st.lists(st.integers(0, 119), max_size=10)):
        entries[at] = Pop(f"pop {at}", 1000.0 + at)
    # Each is sent again by its writer, later on.
    for at, later in data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 100)), max_size=10)):
        entries.insert(at + later, entries[at])
    whole = items.Log("v", items.Folded(), entries)
    count, skipped = data.draw(st.integers(0, 30)), data.draw(st.integers(0, len(entries)))
    found = items.Log("v", items.Folded(), entries[skipped:], skipped).newest(count)
    assert found is None or found == whole.items[len(whole.items) - count :]


async def test_adding_and_reading_are_one_round_trip_and_removing_is_three(
    log: ItemLog, calls: list[str]
) -> None:
    await log.add(numbered(0))
    calls.clear()
    await log.add(numbered(1, 2))
    assert calls == ["append"]
    calls.clear()
    await log.items()
    assert calls == ["load"]
    calls.clear()
    await log.pop()
    assert calls == ["load", "append", "load"]


async def test_reading_does_not_grow_with_what_was_removed(driver: Driver, log: ItemLog) -> None:
    await log.add(numbered(0, 1, 2))
    for number in range(200):
        await log.add(numbered(number))
        assert await log.pop() == {"n": number}
        assert len((await raw(driver)).tail) <= 2 * item_log.TOLERATED_WASTE
    assert numbers(await log.items()) == [0, 1, 2]


async def test_a_fold_leaves_nothing_behind_of_what_was_removed_long_ago(driver: Driver) -> None:
    now = 1000.0
    log = log_on(driver, clock=lambda: now)
    await log.add([{"text": "to be taken back"}])
    await log.pop()
    now += 3600
    for number in range(100):
        await log.add(numbered(number))
        await log.pop()
    assert b"to be taken back" not in str(await raw(driver)).encode()


async def test_a_fold_neither_lengthens_the_life_of_a_log_nor_makes_it_endless(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_log, "TOLERATED_WASTE", 1)
    log = log_on(driver, ttl_s=0.5)
    await log.add(numbered(1))
    await log.add(numbered(2))
    assert await log.pop() == {"n": 2}
    assert (await raw(driver)).body is not None
    await asyncio.sleep(0.7)
    assert await log.items() == []


async def test_an_item_that_is_not_a_json_object_raises_before_any_write(
    driver: Driver, log: ItemLog
) -> None:
    for bad, path in (
        ([{}, "text"], r"items\[1\] is str"),
        ([{"a": {1: 2}}], r"items\[0\]\.a has a key"),
        ([{"a": {1, 2}}], r"items\[0\]\.a is set"),
    ):
        with pytest.raises(InvalidState, match=path):
            await log.add(bad)  # pyright: ignore[reportArgumentType]
    assert await driver.load(WHERE) is None


@pytest.mark.parametrize("ttl_s", [0, -1, "60", float("inf")])
def test_a_time_to_live_is_a_number_of_seconds(ttl_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="ttl_s"):
        Backend(MemoryDriver()).item_log(KEY, "langchain", ttl_s=ttl_s)


async def test_a_transform_holds_for_items_too(driver: Driver) -> None:
    class Reverse:
        name = "reverse"

        def encode(self, data: bytes, /) -> bytes:
            return data[::-1]

        def decode(self, data: bytes, limit: int, /) -> bytes:
            return self.encode(data)

    log = Backend(driver, transforms=[Reverse()]).item_log(KEY, "langchain")
    await log.add([{"text": "secret"}, {}])
    await log.pop()
    assert await fold(driver, codec=Codec([Reverse()]))
    assert b"secret" not in str(await raw(driver)).encode()
    assert await log.items() == [{"text": "secret"}]


# Full records, unreadable ones


async def test_a_full_record_is_folded_to_make_room() -> None:
    driver = MemoryDriver(max_entry_bytes=4_000, max_record_bytes=8_000)
    await driver.open()
    log = log_on(driver)
    await log.add([{"n": 0}])
    for _ in range(20):
        await log.add([{"text": "x" * 2_000}])
        assert await log.pop() == {"text": "x" * 2_000}
    assert await log.items() == [{"n": 0}]


async def test_a_full_record_without_waste_is_folded_too() -> None:
    driver = MemoryDriver(max_entry_bytes=8_000, max_record_bytes=8_000)
    await driver.open()
    log = log_on(driver)
    for number in range(50):
        await log.add([{"n": number, "text": "x" * 50}])
    before = await raw(driver)
    assert before.body is None
    with suppress(TooLarge):
        for number in range(50, 1000):
            await log.add([{"n": number, "text": "x" * 50}])
    assert (await raw(driver)).body is not None
    stored = await log.items()
    assert numbers(stored) == list(range(len(stored)))
    assert len(stored) * len(before.tail[0]) > 8_000


class Between(SpyDriver):
    """Runs what a test gives it once, before the first fold of a log or after it."""

    in_between: Callable[[], Awaitable[object]] | None = None
    after_fold: Callable[[], Awaitable[object]] | None = None

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        if self.in_between is not None and key == WHERE:
            step, self.in_between = self.in_between, None
            await step()
        done = await super().replace(key, body, **options)
        if self.after_fold is not None and key == WHERE:
            step, self.after_fold = self.after_fold, None
            await step()
        return done


async def filled(limit: int) -> tuple[Between, MemoryDriver, int]:
    """Return two drivers on a log that is full to the last byte and not folded, and how many items it has."""
    store = MemoryStore()
    limits = {"max_entry_bytes": limit, "max_record_bytes": limit}
    one, two = MemoryDriver(store, **limits), MemoryDriver(store, **limits)
    await one.open()
    await two.open()
    count, room = 0, limit
    while True:
        entry = items.seal_entry(Add(f"{count:024}", numbered(count)), CODEC)
        if 2 * len(entry) > room:
            entry = items.seal_entry(Add(f"{count:024}" + "x" * (room - len(entry)), numbered(count)), CODEC)
        await two.append(WHERE, entry, initial_version="v", ttl=None)
        count, room = count + 1, room - len(entry)
        if not room:
            return Between(one), two, count


async def test_a_fold_that_loses_the_race_does_not_reject_the_items() -> None:
    driver, other, count = await filled(8_000)
    driver.in_between = lambda: fold(other)
    await log_on(driver).add(numbered(count))
    assert numbers(await log_on(other).items()) == list(range(count + 1))


async def test_a_log_that_is_full_again_is_folded_again() -> None:
    driver, other, count = await filled(8_000)

    async def fold_and_fill() -> None:
        await fold(other)
        with suppress(TooLarge):
            while True:
                entry = items.seal_entry(Add(new_version(), numbered(-1)), CODEC)
                await other.append(WHERE, entry, initial_version="v", ttl=None)

    driver.in_between = fold_and_fill
    await log_on(driver).add(numbered(count))
    assert numbers(await log_on(other).items())[-1] == count


async def test_the_last_item_can_be_removed_from_a_completely_full_log() -> None:
    driver, other, count = await filled(8_000)
    assert await log_on(driver).pop() == {"n": count - 1}
    assert numbers(await log_on(other).items()) == list(range(count - 1))
    assert await log_on(other).pop() == {"n": count - 2}


async def test_of_two_that_remove_from_a_full_log_each_gets_another_item() -> None:
    driver, other, count = await filled(8_000)
    first: list[object] = []

    async def pop() -> None:
        first.append(await log_on(other).pop())

    driver.in_between = pop
    assert await log_on(driver).pop() == {"n": count - 2}
    assert first == [{"n": count - 1}]
    assert numbers(await log_on(other).items()) == list(range(count - 2))


async def test_a_removal_from_a_full_log_whose_answer_is_lost_removes_one_item() -> None:
    driver, other, count = await filled(8_000)

    async def lose() -> None:
        await log_on(other).add(numbered(count))
        await fold(other)
        raise OutcomeUnknown("lost")

    driver.after_fold = lose
    # The log is folded first, and the item removed then.
    assert await log_on(driver).pop() == {"n": count}
    assert numbers(await log_on(other).items()) == [*range(count)]


async def test_a_record_full_of_remaining_items_moves_them_to_pages() -> None:
    driver = MemoryDriver(max_entry_bytes=2_000, max_record_bytes=4_000)
    await driver.open()
    log = log_on(driver)
    for number in range(30):
        await log.add([{"n": number, "text": "x" * 1_000}])
    assert numbers(await log.items()) == [*range(30)]
    assert (await log.pop() or {})["n"] == 29
    assert numbers(await log.items()) == [*range(29)]


async def test_a_log_too_large_for_one_entry_goes_to_pages_and_loses_nothing() -> None:
    driver = MemoryDriver(max_entry_bytes=2_000, max_record_bytes=100_000)
    await driver.open()
    log = log_on(driver)
    for number in range(4):
        await log.add([{"n": number, "text": "x" * 1_000}])
    for number in range(50):
        await log.add(numbered(number))
        assert await log.pop() == {"n": number}
    assert len((await raw(driver)).tail) < 50
    assert numbers(await log.items()) == [0, 1, 2, 3]


async def test_an_item_too_large_for_a_page_stays_and_loses_nothing() -> None:
    driver = MemoryDriver(max_entry_bytes=94, max_record_bytes=100_000)
    await driver.open()
    log = log_on(driver)
    for number in range(140):
        await log.add(numbered(number))
    for number in range(140, 190):
        await log.add(numbered(number))
        assert await log.pop() == {"n": number}
    assert (await raw(driver)).body is None
    assert numbers(await log.items()) == [*range(140)]


@pytest.mark.parametrize(
    "content",
    [
        {"id": "x"},
        {"id": "x", "add": None},
        {"id": "x", "add": ["text"]},
        {"id": "x", "pop": "now"},
        {"id": "x", "add": [], "pop": 1.0},
        {"id": 1, "add": []},
        {"add": []},
        {"id": "x", "insert": {"at": 0}},
    ],
)
async def test_an_unknown_entry_is_corrupt_and_nothing_is_removed(
    driver: Driver, log: ItemLog, content: dict[str, Any]
) -> None:
    await log.add(numbered(1))
    await driver.append(WHERE, CODEC.seal("items", content), initial_version="b", ttl=None)
    before = await raw(driver)
    for work in (log.items(), log.pop()):
        with pytest.raises(Corrupt, match=driver.name):
            await work
    assert await raw(driver) == before


@pytest.mark.parametrize(
    "change",
    [
        {"items": None},
        {"items": [1]},
        {"forgotten": []},
        {"forgotten": {"digests": ",a,", "ages": []}},
        {"popped": []},
        {"popped": {"x": None}},
        {"popped": {"x": [1]}},
        {"popped": {"x": [1, 2]}},
        {"popped": {"x": ["now", {}]}},
    ],
)
async def test_a_body_with_a_field_of_another_type_is_corrupt(
    driver: Driver, log: ItemLog, change: dict[str, Any]
) -> None:
    content = {"items": [], "forgotten": {"digests": ",", "ages": []}, "popped": {}, **change}
    body = CODEC.seal("log", content)
    await driver.replace(WHERE, body, version="v", expect=ABSENT, ttl=None)
    with pytest.raises(Corrupt):
        await log.items()


async def test_fields_of_a_newer_version_survive_a_fold(driver: Driver, log: ItemLog) -> None:
    body = items.seal_folded(items.Folded(numbered(1), extra={"mood": [1]}), CODEC)
    await driver.replace(WHERE, body, version="v", expect=ABSENT, ttl=None)
    await log.add(numbered(2))
    assert await fold(driver)
    folded = (await raw(driver)).body
    assert folded is not None
    assert CODEC.open("log", folded)["mood"] == [1]
    assert numbers(await log.items()) == [1, 2]


# Lost answers


@pytest.mark.parametrize("done", [True, False])
async def test_items_whose_answer_was_lost_are_retried_and_stored_once(
    log: ItemLog, lose: Lose, done: bool
) -> None:
    await log.add(numbered(0))
    lose("append", done=done)
    await log.add(numbered(1, 2))
    assert numbers(await log.items()) == [0, 1, 2]


@pytest.mark.parametrize("done", [True, False])
async def test_a_removal_whose_answer_was_lost_is_sent_again_and_removes_one(
    log: ItemLog, lose: Lose, done: bool
) -> None:
    await log.add(numbered(0, 1, 2))
    lose("append", done=done, times=2)
    assert await log.pop() == {"n": 2}
    assert numbers(await log.items()) == [0, 1]


async def test_a_repeat_that_arrives_after_a_fold_of_its_entry_has_no_effect(
    driver: Driver, log: ItemLog, lose: Lose
) -> None:
    lose("append", done=True, then=lambda: fold(driver))
    await log.add(numbered(1))
    assert numbers(await log.items()) == [1]
    lose("append", done=True, then=lambda: fold(driver))
    assert await log.pop() == {"n": 1}
    assert await log.items() == []


async def test_a_removal_that_cannot_be_read_back_is_of_unknown_outcome(
    driver: Driver, log: ItemLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.add(numbered(1, 2))
    load, loads = driver.load, itertools.count()

    async def down(key: Key, **options: Any) -> Record | None:
        if next(loads) == 1:
            raise Unavailable("down", backend=driver.name, operation="load")
        return await load(key, **options)

    monkeypatch.setattr(driver, "load", down)
    with pytest.raises(OutcomeUnknown, match=r"pop: an item was removed") as raised:
        await log.pop()
    assert isinstance(raised.value.__cause__, Unavailable)
    assert numbers(await log.items()) == [1]


async def test_a_pop_folded_and_forgotten_before_it_was_read_is_unknown(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_on(driver, clock=lambda: 0.0)
    await log.add(numbered(1, 2))
    append = driver.append

    async def slow(*args: Any, **options: Any) -> int:
        length = await append(*args, **options)
        await fold(driver, now=3600.0)
        return length

    monkeypatch.setattr(driver, "append", slow)
    with pytest.raises(OutcomeUnknown):
        await log.pop()


async def test_a_fold_that_fails_does_not_fail_the_pop(
    log: ItemLog, lose: Lose, caplog: pytest.LogCaptureFixture
) -> None:
    await log.add(numbered(*range(40)))
    lose("replace", done=False, times=1000)
    with caplog.at_level(logging.WARNING, "stm_backends"):
        assert numbers([await log.pop() or {} for _ in range(40)]) == [*reversed(range(40))]
    assert "could not fold" in caplog.text
    assert await log.items() == []


# Many processes: every interleaving of one call with the calls of another process

Action: TypeAlias = tuple[str, int]
"""A call by its name, and the number that it adds."""


def on_list(state: list[int], action: Action) -> object:
    name, number = action
    match name:
        case "add":
            state += [number, number + 1]
        case "pop":
            return state.pop() if state else None
        case "clear":
            state.clear()
        case "items":
            return list(state)
        case _:
            pass
    return None


async def on_log(driver: Driver, action: Action) -> object:
    log, (name, number) = log_on(driver, clock=lambda: 0.0), action
    match name:
        case "add":
            await log.add(numbered(number, number + 1))
        case "pop":
            item = await log.pop()
            return item and item["n"]
        case "clear":
            await log.clear()
        case "items":
            return numbers(await log.items())
        case _:
            await fold(driver)
    return None


def possible(state: list[int], one: Action, others: Sequence[Action]) -> Iterator[object]:
    """Yield what all calls answer, and what is left, for each place of the one among the others.

    Who removes an item, and finds that the log was cleared before the item could be read, answers that
    there was none: what was removed is erased with the log.
    """
    for place in range(len(others) + 1):
        left, answers = list(state), list[object]()
        for action in others[:place]:
            answers.append(on_list(left, action))
        own = on_list(left, one)
        for action in others[place:]:
            answers.append(on_list(left, action))
        yield own, answers, left
        if one[0] == "pop" and "clear" in [name for name, _ in others[place:]]:
            yield None, answers, left


class Interrupted:
    """A driver to which something happens before or after its n-th operation on the log."""

    def __init__(self, inner: Driver, at: int, then: Callable[[], Awaitable[None]]) -> None:
        self._inner, self._at, self._then = inner, at, then
        self.moments = 0

    async def _moment(self, operation: str, key: object) -> None:
        if key == WHERE:
            self.moments += 1
            if self.moments - 1 == self._at:
                await self._then()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in ("load", "append", "replace", "delete"):
            return value

        async def through(key: Key, *args: Any, **options: Any) -> Any:
            await self._moment(name, key)
            answer = await value(key, *args, **options)
            await self._moment(name, key)
            return answer

        return through


OTHERS = [
    *itertools.product(["add", "pop", "clear", "fold"], repeat=1),
    *itertools.product(["add", "pop", "clear", "fold"], repeat=2),
]


@pytest.mark.parametrize("others", OTHERS, ids="-".join)
@pytest.mark.parametrize("name", ["items", "add", "pop", "clear"])
@pytest.mark.parametrize("waste", [0, 1000], ids=["folding", "not folding"])
async def test_concurrent_calls_have_the_results_of_some_sequential_order(
    name: str, others: Sequence[str], waste: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_log, "TOLERATED_WASTE", waste)
    one: Action = (name, 100)
    others_actions = [(other, 200 + 10 * index) for index, other in enumerate(others)]
    for length in range(4):
        moment = 0
        while True:
            driver = MemoryDriver()
            await driver.open()
            state = list(range(length))
            if state:
                await log_on(driver).add(numbered(*state))
            answers: list[object] = []

            async def interfere(driver: Driver = driver, answers: list[object] = answers) -> None:
                answers.extend([await on_log(driver, action) for action in others_actions])

            interrupted = Interrupted(driver, moment, interfere)
            own = await on_log(interrupted, one)  # pyright: ignore[reportArgumentType]
            if moment >= interrupted.moments:
                break
            left = numbers(await log_on(driver).items())
            assert (own, answers, left) in list(possible(state, one, others_actions)), (length, moment)
            moment += 1
        assert moment, "nothing was interrupted"


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["pop", "clear", "items", "fold"]), st.just(0)),
            st.tuples(st.just("add"), st.integers(0, 1000)),
        ),
        max_size=40,
    ),
    st.sampled_from([0, 2, 1000]),
)
def test_one_call_after_the_other_it_is_a_list(actions: list[Action], waste: int) -> None:
    async def run() -> None:
        driver = MemoryDriver()
        await driver.open()
        state: list[int] = []
        for action in actions:
            assert await on_log(driver, action) == on_list(state, action)
            assert numbers(await log_on(driver).items()) == state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_log, "TOLERATED_WASTE", waste)
        asyncio.run(run())


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 9), max_size=3), st.none()), max_size=20),
    st.integers(0, 20),
    st.lists(st.integers(0, 19), max_size=5),
)
def test_folding_any_beginning_changes_nothing_that_is_read(
    said: list[list[int] | None], count: int, repeats: list[int]
) -> None:
    entries = [
        Pop(f"e{index}", 0.0) if added is None else Add(f"e{index}", numbered(*added))
        for index, added in enumerate(said)
    ]
    entries += [entries[index] for index in repeats if index < len(entries)]
    tail = tuple(items.seal_entry(entry, CODEC) for entry in entries)
    whole = items.read(Record("v", None, tail), CODEC)
    count = min(count, len(tail))
    body = items.seal_folded(whole.fold(count, now=0.0, keep_for=60.0), CODEC)
    after = items.read(Record("w", body, tail[count:]), CODEC)
    assert (after.items, after.popped) == (whole.items, whole.popped)
    assert (
        list(whole.fold(count, now=0.0, keep_for=60.0).items)
        == items.read(Record("v", None, tail[:count]), CODEC).items
    )
    assert 0 <= whole.waste <= whole.length


async def test_a_user_is_listed_before_and_after_a_log_is_created(driver: Driver, log: ItemLog) -> None:
    backend = Backend(driver)
    append = driver.append

    async def erased_meanwhile(*args: Any, **options: Any) -> int:
        assert [user async for user in backend.sessions.users("acme")] == ["u"]
        await backend.sessions.erase_tenant("acme")
        return await append(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "append", erased_meanwhile)
        await log.add(numbered(1))
    assert [user async for user in backend.sessions.users("acme")] == ["u"]


async def test_no_error_shows_an_item_or_a_key(driver: Driver) -> None:
    log = ItemLog(driver, MemoryKey("ten-ant", "us-er", "sess-ion"), "langchain")
    await log.add([{"text": "con-tent"}])
    where = keys.log_key(MemoryKey("ten-ant", "us-er", "sess-ion"), "langchain")
    await driver.append(where, b'stm/1 items\n{"id":"con-tent"}', initial_version="b", ttl=None)
    for work in (log.items(), log.add([{"con-tent": object()}]), log.pop()):
        with pytest.raises((Corrupt, InvalidState)) as raised:
            await work
        shown = json.dumps([str(raised.value), repr(raised.value)])
        if not isinstance(raised.value, InvalidState):
            assert not [secret for secret in ("ten-ant", "us-er", "sess-ion", "con-tent") if secret in shown]


def test_the_remembered_ids_are_those_of_conversations_too() -> None:
    ids = [f"e{number}" for number in range(REMEMBERED_IDS)]
    log = items.Log("v", items.Folded(), [Add(entry_id, []) for entry_id in ids])
    folded = log.fold(len(ids), now=0.0, keep_for=1.0)
    again = items.Log("w", folded, [Add(entry_id, numbered(1)) for entry_id in ids])
    assert again.items == []
    assert again.waste == len(ids)


@pytest.mark.parametrize(
    ("body", "entry"),
    [
        (None, b'{"id":"x","pop":1%s}' % (b"0" * 400)),
        (
            b'{"items":[],"forgotten":{"digests":",","ages":[]},"popped":{"x":[1%s,null]}}' % (b"0" * 400),
            None,
        ),
        (b'{"items":[],"forgotten":{"digests":",","ages":[[1%s,0]]},"popped":{}}' % (b"0" * 400), None),
        (b'{"items":[],"forgotten":{"digests":",","ages":[]},"popped":{"x":["my secret",null]}}', None),
    ],
)
async def test_numbers_no_float_can_hold_are_corrupt_and_quoted_nowhere(
    body: bytes | None, entry: bytes | None
):
    driver = MemoryDriver()
    await driver.open()
    if body is not None:
        await driver.replace(WHERE, b"stm/1 log\n" + body, version="v", expect=ABSENT, ttl=None)
    if entry is not None:
        await driver.append(WHERE, b"stm/1 items\n" + entry, initial_version="v", ttl=None)
    with pytest.raises(Corrupt) as caught:
        await log_on(driver).items()
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("full", [False, True])
async def test_a_fold_drops_no_item_that_only_the_new_server_has(*, full: bool) -> None:
    """A failover that loses an entry does not change the version, and others come in its place."""
    both, lost, kept = range(40), 40, 41
    adds = (Add(f"id{number}", numbered(number)) for number in (*both, lost, kept))
    entries = [items.seal_entry(one, CODEC) for one in adds]
    there = [*entries[:lost], entries[kept]]
    # Room for the entries, and not for a body beside them.
    driver = FailsOver(MemoryDriver(max_record_bytes=sum(map(len, there)) + 1 if full else 10**6))
    await driver.open()
    for server, tail in (driver.inner, entries[:kept]), (driver.new, there):
        for one in tail:
            await server.append(WHERE, one, initial_version="v", ttl=None)
    log = log_on(driver)
    assert numbers(await log.items()) == [*both, lost]
    assert await log.fold()
    assert numbers(await log.items()) == [*both, kept]


async def test_a_version_that_confirms_items_is_stored_on_one_server_only() -> None:
    """Else the former master shows that version with its own items, and the new one drops others."""
    driver = StillAnswersLoads()
    await driver.open()
    both, kept = range(40), 41
    for server, last in (driver.inner, 40), (driver.new, kept):
        for number in (*both, last):
            entry = items.seal_entry(Add(f"id{number}", numbered(number)), CODEC)
            await server.append(WHERE, entry, initial_version="v", ttl=None)
    with pytest.raises(OutcomeUnknown):
        await log_on(driver).fold()
    assert numbers(await log_on(driver.new).items()) == [*both, kept]

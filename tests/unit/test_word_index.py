"""The index of conversations: what was added is found, and what was forgotten is nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import pytest

from stm_backends import Corrupt
from stm_backends.catalogue import portions, word_index
from stm_backends.catalogue.portions import SUMMARY, TITLE, Logged, Portion, masks_of
from stm_backends.catalogue.word_index import LOG, WordIndex
from stm_backends.drivers.contract import ANY, Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.records import keys, operations
from stm_backends.records.codec import Codec
from stm_backends.records.compression import Preset
from stm_backends.records.directory import Directory
from stm_backends.testing.workbench.spy import SpyDriver

OWNER = ("acme", "u1")
SCOPE = keys.scope(*OWNER, "words")


class Killed(BaseException):
    """The process is gone."""


class Deadly(WrapperDriver):
    """Acts before or after the n-th write to the index."""

    def __init__(
        self, inner: Driver, *, number: int, moment: str, act: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(inner)
        self.writes, self._number, self._moment, self._act = 0, number, moment, act

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        if operation not in ("append", "replace", "delete") or getattr(key, "scope", "") != SCOPE:
            return await send()
        self.writes += 1
        here = self.writes == self._number
        if here and self._moment == "before":
            await self._act()
        done = await send()
        if here and self._moment == "after":
            await self._act()
        return done


async def killed() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def small_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_index, "PORTIONS", 4)


@pytest.fixture
async def opened(driver: Driver) -> AsyncIterator[Driver]:
    await driver.open()
    yield driver
    await driver.close()


def index_on(driver: Driver) -> WordIndex:
    return WordIndex(driver, Codec(), Directory(driver, Codec()), OWNER)


def said(card: str, *texts: str, first: int = 0, title: str = "", summary: str = "") -> Logged:
    portion = Portion(card, first=first, count=len(texts))
    return Logged(portion, masks_of(texts, title=title, summary=summary))


async def found(driver: Driver, *words: str) -> dict[str, list[int]]:
    """Return the numbers with all words, by the name of the card."""
    numbers: dict[str, list[int]] = {}
    for card, some in (await index_on(driver).find(frozenset(words))).items():
        numbers[card] = sorted({n for one in some for n in one.portion.numbers_in(one.bits)})
    return {card: some for card, some in numbers.items() if some}


async def words_in(driver: Driver) -> set[str]:
    """Return all words that are stored, in whatever record."""
    stored: set[str] = set()
    codec = Codec((Preset(),))
    async for name in operations.names(driver, SCOPE):
        record = await driver.load(Key(SCOPE, name))
        assert record is not None
        bucketed = ":" in name and not name.endswith(":list")
        if bucketed:
            stored |= codec.open("postings", record.body or b"")["terms"].keys()
        for one in record.tail:
            stored |= {word.partition(":")[0] for word in codec.open("portion", one).get("add", "").split()}
    return stored


# What is found


async def test_what_was_added_is_found_in_the_log_and_in_generations(opened: Driver) -> None:
    index = index_on(opened)
    for number in range(11):
        await index.add(said(f"c{number}", "shared", f"own{number}", "shared again", first=number))
    assert await found(opened, "shared") == {f"c{n}": [n, n + 2] for n in range(11)}
    for number in range(11):
        assert await found(opened, f"own{number}") == {f"c{number}": [number + 1]}
    names = [name async for name in operations.names(opened, SCOPE)]
    assert len({name.partition(":")[0] for name in names if name != LOG}) == 2


async def test_all_words_have_to_be_in_the_same_turn(opened: Driver) -> None:
    index = index_on(opened)
    for number in range(6):
        await index.add(said(f"c{number}", "one two", "two three"))
    assert await found(opened, "one", "two") == {f"c{n}": [0] for n in range(6)}
    assert not await found(opened, "one", "three")
    assert not await found(opened, "one", "absent")


async def test_titles_and_summaries_have_bits_of_their_own(opened: Driver) -> None:
    index = index_on(opened)
    for number in range(5):
        await index.add(said(f"c{number}", "said", title="named", summary="told"))
    for word, bit in (("named", TITLE), ("told", SUMMARY), ("said", 4)):
        assert {one.bits for some in (await index.find(frozenset([word]))).values() for one in some} == {bit}


async def test_portions_without_the_words_are_returned_as_well(opened: Driver) -> None:
    index = index_on(opened)
    for number in range(5):
        await index.add(said(f"c{number}", "word", first=64))
    everything = await index.find(frozenset(["other"]))
    assert {card: [(one.portion.first, one.bits) for one in some] for card, some in everything.items()} == {
        f"c{n}": [(64, 0)] for n in range(5)
    }


async def test_a_portion_is_one_append_and_a_search_waits_twice(opened: Driver) -> None:
    for number in range(9):
        await index_on(opened).add(said(f"c{number}", "word"))
    spy = SpyDriver(opened)
    await index_on(spy).add(said("c9", "word"))
    assert [call for call in spy.calls if call[1] == "words"] == [("append", "words")]
    before = len(spy.calls)
    await index_on(spy).find(frozenset(["word"]))
    # The log, and of each generation its list and a bucket.
    assert spy.calls[before:] == [("load", "words")] * 5


async def test_no_record_has_more_than_a_generation_of_portions(opened: Driver) -> None:
    await asyncio.gather(*(index_on(opened).add(said(f"c{n}", "word", f"w{n}")) for n in range(40)))
    assert len(await found(opened, "word")) == 40
    record = await opened.load(Key(SCOPE, LOG))
    assert record is not None
    async for name in operations.names_of(opened, SCOPE, ""):
        if name.endswith(":list"):
            body = await opened.load(Key(SCOPE, name))
            assert len(portions.open_list(body, Codec((Preset(),)))) <= 4


# What is forgotten


async def test_a_conversation_that_is_forgotten_leaves_no_word(opened: Driver) -> None:
    index = index_on(opened)
    for number in range(7):
        await index.add(said(f"c{number % 3}", f"secret{number % 3}", "shared", title=f"title{number % 3}"))
    assert await index.forget("c1") == 2
    assert not {"secret1", "title1"} & await words_in(opened)
    assert {*await found(opened, "shared")} == {"c0", "c2"}
    assert await found(opened, "secret2")
    assert await index.forget("c1") == 0


async def test_numbers_below_one_are_forgotten_and_later_ones_kept(opened: Driver) -> None:
    index = index_on(opened)
    for first in range(0, 15, 3):
        await index.add(said("chat", *(f"w{first + place}" for place in range(3)), first=first))
    await index.forget("chat", below=7)
    assert await words_in(opened) == {f"w{number}" for number in range(7, 15)}
    assert await found(opened, "w7") == {"chat": [7]}
    assert await index.forget("chat", below=7) == 1  # the portion that has the numbers 6 to 8


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 9))
async def test_a_process_killed_while_it_indexes_loses_nothing(
    opened: Driver, number: int, moment: str
) -> None:
    for place in range(3):
        await index_on(opened).add(said(f"c{place}", "word"))
    deadly = Deadly(opened, number=number, moment=moment, act=killed)
    with suppress(Killed):
        await index_on(deadly).add(said("c3", "word"))
    before = {"c0", "c1", "c2"}
    assert before <= (await found(opened, "word")).keys() <= before | {"c3"}
    for place in range(4, 9):
        await index_on(opened).add(said(f"c{place}", "word"))
    assert before | {f"c{n}" for n in range(4, 9)} <= (await found(opened, "word")).keys()
    # And what it left goes with the next that is forgotten.
    for place in range(9):
        await index_on(opened).forget(f"c{place}")
    assert not await words_in(opened)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 75, 4))
async def test_a_process_killed_while_it_forgets_is_finished_by_the_next(
    opened: Driver, number: int, moment: str
) -> None:
    for place in range(9):
        await index_on(opened).add(said(f"c{place % 2}", f"secret{place % 2}", "shared"))
    deadly = Deadly(opened, number=number, moment=moment, act=killed)
    with suppress(Killed):
        await index_on(deadly).forget("c1")
    assert await found(opened, "secret0") == {"c0": [0]}
    await index_on(opened).forget("c1")
    assert await words_in(opened) == {"secret0", "shared"}
    assert {*await found(opened, "shared")} == {"c0"}


# Two processes


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 7))
async def test_a_generation_that_is_being_made_does_not_bring_words_back(
    opened: Driver, number: int, moment: str
) -> None:
    for place in range(3):
        await index_on(opened).add(said(f"c{place}", f"secret{place}"))

    async def forget() -> None:
        await index_on(opened).forget("c1")

    deadly = Deadly(opened, number=number, moment=moment, act=forget)
    await index_on(deadly).add(said("c3", "secret3"))
    assert await words_in(opened) == {"secret0", "secret2", "secret3"}
    assert {*await found(opened, "secret0"), *await found(opened, "secret3")} == {"c0", "c3"}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 7))
async def test_a_generation_that_is_being_made_is_not_taken_for_dead(
    opened: Driver, number: int, moment: str
) -> None:
    for place in range(3):
        await index_on(opened).add(said(f"c{place}", f"w{place}"))

    async def forget() -> None:
        await index_on(opened).forget("another")

    deadly = Deadly(opened, number=number, moment=moment, act=forget)
    await index_on(deadly).add(said("c3", "w3"))
    for place in range(4):
        assert await found(opened, f"w{place}") == {f"c{place}": [0]}


async def test_two_processes_make_each_generation_once(opened: Driver) -> None:
    for place in range(3):
        await index_on(opened).add(said(f"c{place}", f"w{place}"))

    async def other() -> None:
        await index_on(opened).add(said("c4", "w4"))

    deadly = Deadly(opened, number=2, moment="before", act=other)
    await index_on(deadly).add(said("c3", "w3"))
    for place in range(5):
        assert await found(opened, f"w{place}") == {f"c{place}": [0]}
    some = await index_on(opened).find(frozenset(["w0"]))
    assert [len(one) for one in some.values()] == [1] * 5


async def test_what_is_damaged_hides_no_other_generation(
    opened: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(9):
        await index_on(opened).add(said(f"c{place}", "word"))
    lists = [name async for name in operations.names(opened, SCOPE) if name.endswith(":list")]
    await opened.replace(Key(SCOPE, lists[0]), b"no envelope", version="v", expect=ANY, ttl=None)
    assert len(await found(opened, "word")) == 5
    assert "a search leaves out words that are damaged" in caplog.text


WHOLE = {"card": "c", "epoch": "", "rev": 0, "first": 0, "count": 1, "settled": ""}


@pytest.mark.parametrize(
    ("changed", "add"),
    [
        ({"count": 10**9}, " "),
        ({"first": -1}, " "),
        ({"card": 1}, " "),
        ({"rev": None}, " "),
        ({}, " w:x "),
        ({}, " w:"),
        ({}, {"w": "4"}),
    ],
)
@pytest.mark.parametrize("only", [None, ["w"]])
def test_an_entry_of_another_form_is_damaged(
    changed: dict[str, Any], add: Any, only: Collection[str] | None
) -> None:
    sealed = Codec().seal("portion", {"portion": {**WHOLE, **changed}, "add": add})
    with pytest.raises(Corrupt):
        portions.open_logged(sealed, Codec(), only=only)
    contents: list[dict[str, Any]] = [{"add": {}}, {"portion": []}, {"portion": {}, "add": " "}]
    for content in contents:
        with pytest.raises(Corrupt):
            portions.open_logged(Codec().seal("portion", content), Codec())


def test_masks_say_where_each_word_is() -> None:
    assert masks_of(["a b", "b"], title="a", summary="c") == {"a": 0b101, "b": 0b1100, "c": 0b10}
    assert Portion("c", first=5, count=2).numbers_in(0b1111) == [5, 6]
    assert not Portion("c", first=5, count=2).numbers_in(0b11)

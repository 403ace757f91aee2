"""Several copies of a turn in a transcript: which of them counts, and what it costs to tell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest

from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Corrupt
from stm_backends.memory.units import read_units
from stm_backends.records import keys, pages
from stm_backends.records.body import Transcript, digest
from stm_backends.records.codec import Codec, encode_turn
from stm_backends.records.pages import Leaving, Pages
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.types import ConversationTurn, MemoryKey, StoredTurn

RECORD = keys.memory_key(MemoryKey("acme", "u1", "chat"))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS", 4)


def leaving(ids: Iterable[str], *, size: int = 1) -> list[Leaving]:
    chance = random.Random(size)
    return [
        Leaving(one, encode_turn(StoredTurn(one, ConversationTurn(chance.randbytes(size).hex(), "ok"))))
        for one in ids
    ]


def mark(ids: Sequence[str], end: int) -> Transcript:
    """Return the transcript of a record whose first turns, up to a number, have these ids."""
    return Transcript("e", base=end, last=digest(ids[end - 1]) if end else "")


async def stored(ids: Sequence[str], driver: MemoryDriver | None = None) -> tuple[SpyDriver, Pages]:
    """Return a driver, and what writes and reads its pages, once these turns are there."""
    spy = SpyDriver(driver or MemoryDriver())
    await spy.open()
    store = Pages(spy, Codec())
    await store.put(RECORD, Transcript("e"), leaving(ids), summary="", ttl=None)
    return spy, store


async def refused(store: Pages, ids: Sequence[str], number: int, others: Iterable[str]) -> None:
    """Add what a process adds that takes other turns for those from a number on."""
    await store.put(RECORD, mark(ids, number), leaving(others), summary="", ttl=None)


async def read(store: Pages, ids: Sequence[str], first: int, end: int) -> list[str]:
    found = await read_units(store, RECORD, mark(ids, len(ids)), first, end)
    return [one.id for one in found.values()]


async def test_of_the_last_turn_of_a_page_that_copy_counts_which_the_next_page_names() -> None:
    ids = [*"abcdefghijkl"]
    _, store = await stored(ids)
    await refused(store, ids, 3, "x")
    await refused(store, ids, 7, "y")
    for base in range(4, 13):
        for first, end in itertools.combinations(range(base + 1), 2):
            assert await read(store, ids[:base], first, end) == ids[first:end]


@pytest.mark.parametrize(("number", "room"), [(1, 900), (3, 600)])
async def test_a_copy_that_counts_may_be_where_the_page_has_spilled_to(number: int, room: int) -> None:
    ids = [*"abcdefgh"]
    driver, store = await stored(ids[:number], MemoryDriver(max_record_bytes=room))
    await store.put(
        RECORD, mark(ids, number), leaving(["x", *ids[number:3]], size=200), summary=None, ttl=None
    )
    for end in range(number, 8):
        await store.put(RECORD, mark(ids, end), leaving(ids[end], size=200), summary=None, ttl=None)
    assert await driver.load(keys.page_key(RECORD, "e", 0, 1)) is not None
    assert await read(store, ids, 0, 8) == ids


async def test_a_page_can_be_read_although_the_next_one_is_damaged() -> None:
    ids = [*"abcdefghij"]
    driver, store = await stored(ids)
    await driver.append(keys.page_key(RECORD, "e", 1), b"damaged", initial_version="v", ttl=None)
    await refused(store, ids, 3, "x")
    assert (await read(store, ids, 0, 4))[:3] == ids[:3]
    with pytest.raises(Corrupt):
        await read(store, ids, 4, 5)


async def test_copies_in_many_pages_cost_one_page_more() -> None:
    ids = [f"t{number}" for number in range(1_200 * pages.TURNS)]
    driver, store = await stored(ids)
    for page in range(1_200):
        await refused(store, ids, page * pages.TURNS + 3, [f"x{page}"])
    driver.calls.clear()
    assert await read(store, ids, 0, 32) == ids[:32]
    # Of each page, the record and what it may have spilled to.
    assert driver.count("load", "page") == 2 * 9

"""The catalogue on each datastore: 300 conversations, listed by their last activity, a page at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import pytest

from stm_backends import Backend, ConversationTurn, MemoryKey, SessionNotFound, ShortTermMemoryConfig
from stm_backends.admin.describing import catalogue_on
from stm_backends.catalogue.card import Card
from stm_backends.catalogue.index import SPARE
from stm_backends.drivers import plugins
from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.memory.touches import Touches
from stm_backends.records import keys, operations
from stm_backends.records.directory import Directory
from tests.support.catalogue import touched
from tests.support.places import EACH, Place

T = TypeVar("T")
PlaceOn = Callable[[str], Place]

LAST_TURNS = ShortTermMemoryConfig("truncation")
APART_S = 1_200.0
"""Three memories were active in an hour."""
LOGS = 20
PAGE = 50

pytestmark = pytest.mark.parametrize(
    ("datastore", "memories"),
    [("redis", 80), *(pytest.param(one, 280, marks=pytest.mark.full) for one in ("sqlite", *EACH))],
)


class Counting(WrapperDriver):
    """Counts operations, and the waits for the datastore: for one operation, or several at once."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.operations = self.waits = self._under_way = 0

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        del operation, key
        self.operations += 1
        self.waits += not self._under_way
        self._under_way += 1
        try:
            return await send()
        finally:
            self._under_way -= 1


def memory_key(number: int, tenant: str = "acme") -> MemoryKey:
    return MemoryKey(tenant, "u:1", f"chat {number:03}")


def log_key(number: int) -> MemoryKey:
    return MemoryKey("acme", "u:1", f"log {number:03}")


async def numbers(count: int) -> AsyncIterator[str]:
    for number in range(count):
        yield str(number)


async def fill(backend: Backend, memories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store conversations as an older version did, and give them their cards."""
    now = time.time()

    async def say(name: str) -> None:
        number = int(name)
        turn = ConversationTurn(f"Question {number}", "x" * 500, ts=now - (number + 1) * APART_S)
        await backend.memory(memory_key(number), LAST_TURNS).add_turn(turn)

    async def note(name: str) -> None:
        number = int(name)
        items = [{"role": "user", "content": f"Item {number}"}]
        await backend.item_log(log_key(number), keys.LOG_KINDS[number % len(keys.LOG_KINDS)]).add(items)

    with monkeypatch.context() as patch:
        patch.setattr(Touches, "note", lambda *_, **__: None)
        await operations.each(numbers(memories), say)
        await operations.each(numbers(LOGS), note)
        other = backend.memory(memory_key(0, "acme:u"), LAST_TURNS)
        await other.add_turn(ConversationTurn("Of another tenant", "Yes"))
    assert await backend.conversations.rebuild("acme", "u:1") == memories + LOGS
    assert await backend.conversations.rebuild("acme:u", "u:1") == 1
    # From their next touch on, how long they live is known, and no record is looked for.
    catalogue = catalogue_on(backend.driver, backend.codec, Directory(backend.driver, backend.codec))

    async def touch(name: str) -> None:
        await catalogue.touch(memory_key(int(name)), ttl=None)

    async def touch_log(name: str) -> None:
        await catalogue.touch(log_key(int(name)), ttl=None)

    await operations.each(numbers(memories), touch)
    await operations.each(numbers(LOGS), touch_log)


async def walked(backend: Backend, limit: int = PAGE) -> list[tuple[Card, ...]]:
    """Return the pages of the user's list."""
    pages, after = list[tuple[Card, ...]](), None
    while True:
        page = await backend.conversations.list("acme", "u:1", after=after, limit=limit)
        pages.append(page.cards)
        if (after := page.after) is None:
            return pages


def ids(cards: Iterable[Card]) -> list[str]:
    return [card.key.session_id for card in cards]


async def left(backend: Backend, key: MemoryKey) -> list[str]:
    """Return the names that the catalogue has of one conversation."""
    found: list[str] = []
    for kind in ("card", "recent"):
        scope = keys.scope(key.tenant_id, key.user_id, kind)
        of = keys.card_key(key).name
        found += [name async for name in operations.names(backend.driver, scope) if name.endswith(of)]
    return found


async def each_page_takes_a_scan_and_the_loads_of_its_cards(backend: Backend, driver: Counting) -> None:
    after = None
    while True:
        driver.operations = driver.waits = 0
        after = (await backend.conversations.list("acme", "u:1", after=after)).after
        assert driver.waits <= 2
        assert driver.operations <= 1 + PAGE + SPARE
        if after is None:
            return


async def test_a_list_of_many_conversations(
    datastore: str, memories: int, place_on: PlaceOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_on(datastore)
    driver = Counting(plugins.open_driver(place.url, create=True))
    async with Backend(driver) as backend:
        conversations = backend.conversations
        await fill(backend, memories, monkeypatch)

        # Latest first, each once, every kind; no other tenant's.
        pages = await walked(backend)
        cards = [card for page in pages for card in page]
        assert sorted(ids(cards[:LOGS])) == [f"log {number:03}" for number in range(LOGS)]
        assert {kind for card in cards[:LOGS] for kind in card.kinds} == {*keys.LOG_KINDS}
        assert ids(cards[LOGS:]) == [f"chat {number:03}" for number in range(memories)]
        assert [card.updated for card in cards] == sorted((card.updated for card in cards), reverse=True)
        assert [len(page) for page in pages] == [PAGE] * (len(cards) // PAGE)
        assert (cards[LOGS].title, len(cards[LOGS].preview)) == ("Question 0", 120)
        assert ids((await conversations.list("acme:u", "u:1")).cards) == ["chat 000"]
        assert (await conversations.list("acme", "u")).cards == ()

        await each_page_takes_a_scan_and_the_loads_of_its_cards(backend, driver)

        # What is set stays, and changes no place.
        changed = memory_key(memories // 2)
        await conversations.update(changed, title="Lisbon", metadata={"model": "small"}, pinned=True)
        card = await conversations.get(changed)
        assert (card.title, card.metadata, card.pinned, card.archived) == (
            "Lisbon",
            {"model": "small"},
            True,
            False,
        )
        again = [card for page in await walked(backend, limit=97) for card in page]
        assert ids(again) == ids(cards)
        assert [one for one in again if one.pinned] == [card]

        # An activity moves a conversation to the front.
        await backend.memory(changed, LAST_TURNS).add_turn(ConversationTurn("And now?", "Later."))

        async with asyncio.timeout(60):
            while True:
                if ids((await conversations.list("acme", "u:1", limit=1)).cards) == [changed.session_id]:
                    break
                await asyncio.sleep(0.01)
        card = await conversations.get(changed)
        assert (card.title, card.preview, card.turns, card.pinned) == ("Lisbon", "Later.", 2, True)

        # What is erased is gone.
        assert (await backend.sessions.erase_with_receipt("acme", "u:1", changed.session_id)).complete
        with pytest.raises(SessionNotFound):
            await conversations.get(changed)
        with pytest.raises(SessionNotFound):
            await conversations.update(changed, title="Lisbon")
        last = [card for page in await walked(backend) for card in page]
        assert ids(last) == [one for one in ids(cards) if one != changed.session_id]
        assert await left(backend, changed) == []
        assert (await backend.sessions.erase_with_receipt("acme", "u:1")).complete
        assert (await conversations.list("acme", "u:1")).cards == ()
        assert [user async for user in backend.sessions.users("acme")] == []
        await touched(backend, memory_key(0, "acme:u"))

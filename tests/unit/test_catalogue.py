"""The catalogue: each conversation once, in order, wherever a process is killed; nothing that is erased."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    Corrupt,
    InvalidKey,
    InvalidState,
    MemoryBudget,
    MemoryKey,
    Sealing,
    SessionNotFound,
    ShortTermMemoryConfig,
    StaticKeys,
    Unavailable,
)
from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.erasing import Erasure
from stm_backends.catalogue.card import GOES_ON_S, SLOT_S, Activity, hour_of, slot_of
from stm_backends.catalogue.conversations import Conversations
from stm_backends.catalogue.index import SPARE, Catalogue
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, MAX_KEY_BYTES, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown
from stm_backends.history.log import ItemLog
from stm_backends.memory.touches import EVERY_S, Touches
from stm_backends.records import keys, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.telemetry.observer import SILENT
from stm_backends.testing import FakeClock
from stm_backends.testing.workbench.spy import SpyDriver
from stm_backends.types import StoredTurn
from tests.mutants.catalogue import CATALOGUES, LosesTheLastTouch
from tests.support import clock as virtual
from tests.support.at_nth import AtNth
from tests.support.catalogue import touched

HOUR = float(SLOT_S)
A, B, C = (MemoryKey("a:b", "u%", f"s:{name}") for name in "abc")
LAST_TURNS = ShortTermMemoryConfig("truncation")


class Killed(BaseException):
    """The process is gone."""


class Deadly(WrapperDriver):
    """Kills the process before or after its n-th write; or lets somebody act there."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.writes = 0
        self.acts: dict[tuple[int, str], Callable[[], Awaitable[None]]] = {}

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        if operation not in ("replace", "delete"):
            return await send()
        self.writes += 1
        number = self.writes
        await self._act(number, "before")
        done = await send()
        await self._act(number, "after")
        return done

    async def _act(self, number: int, moment: str) -> None:
        if act := self.acts.get((number, moment)):
            await act()


class World:
    """One datastore with conversations, and processes that touch and list them."""

    def __init__(self, kind: type[Catalogue] = Catalogue) -> None:
        self.kind = kind
        self.clock = FakeClock()
        self.store = MemoryStore()
        self.there: set[MemoryKey] = {A, B, C}
        self.answered = False

    async def describe(self, key: MemoryKey, kinds: Sequence[str] = ()) -> Activity | None:
        counts = dict.fromkeys(kinds or ("memory",), 1)
        seen = Activity(counts, 0.0, "last", "first", is_answered=self.answered)
        return seen if key in self.there else None

    async def process(self) -> tuple[Catalogue, Deadly]:
        driver = Deadly(MemoryDriver(self.store, clock=self.clock))
        await driver.open()
        directory = Directory(driver, Codec(), clock=self.clock, epoch=self.clock)
        await directory.note("a:b", "u%")
        driver.writes = 0
        catalogue = self.kind(driver, Codec(), directory, describe=self.describe, clock=self.clock)
        return catalogue, driver

    async def touch(self, catalogue: Catalogue, key: MemoryKey) -> None:
        seen = Activity({"memory": 2}, 0.0, "newer")
        await catalogue.touch(key, seen, at=self.clock(), ttl=None)

    async def answer(self, catalogue: Catalogue, key: MemoryKey) -> None:
        seen = Activity({"memory": 2}, 0.0, "answer", is_answered=True)
        await catalogue.touch(key, seen, at=self.clock(), ttl=None)

    async def listed(self, limit: int = 50) -> list[str]:
        """Return the sessions of all pages, as another process lists them."""
        catalogue, driver = await self.process()
        conversations = Conversations(driver, catalogue)
        found, after = list[str](), None
        while True:
            page = await conversations.list("a:b", "u%", after=after, limit=limit)
            found += [card.key.session_id for card in page.cards]
            if (after := page.after) is None:
                return found

    async def names(self) -> list[tuple[str, str]]:
        _, driver = await self.process()
        scope = keys.scope("a:b", "u%", "recent")
        return [keys.slot_and_card(name) async for name in operations.names(driver, scope)]


async def filled(kind: type[Catalogue] = Catalogue) -> World:
    """Return a world in which each conversation was touched once, an hour apart: C is the latest."""
    world = World(kind)
    catalogue, _ = await world.process()
    for key in (A, B, C):
        await world.clock.pass_time(HOUR)
        await world.touch(catalogue, key)
    return world


# The promises that a mutant breaks


async def a_kill_within_a_touch_leaves_each_conversation_once(kind: type[Catalogue]) -> None:
    async def killed() -> None:
        raise Killed

    reached = 0
    for number, moment in itertools.product(range(1, 4), ("before", "after")):
        world = await filled(kind)
        await world.clock.pass_time(HOUR)
        catalogue, driver = await world.process()
        driver.acts[number, moment] = killed
        with pytest.raises(Killed):
            await world.touch(catalogue, A)
        reached += 1
        card_is_new = number == 3 or (number, moment) == (2, "after")
        expected = ["s:a", "s:c", "s:b"] if card_is_new else ["s:c", "s:b", "s:a"]
        for limit in (1, 2, 50):
            assert await world.listed(limit) == expected
        # The next touch of any process settles the rest.
        await world.clock.pass_time(HOUR)
        await world.touch((await world.process())[0], A)
        assert await world.listed() == ["s:a", "s:c", "s:b"]
        assert len(await world.names()) == 3
    assert reached == 6


async def a_left_over_name_is_removed(kind: type[Catalogue]) -> None:
    async def killed() -> None:
        raise Killed

    world = await filled(kind)
    await world.clock.pass_time(HOUR)
    catalogue, driver = await world.process()
    driver.acts[2, "after"] = killed
    with pytest.raises(Killed):
        await world.touch(catalogue, A)
    assert len(await world.names()) == 4
    assert await world.listed() == ["s:a", "s:c", "s:b"]
    assert len(await world.names()) == 3


async def crowd(kind: type[Catalogue] = Catalogue, *, count: int = 200) -> tuple[World, list[MemoryKey]]:
    """Return a world in which a user had so many answers in one hour, each in a conversation of its own."""
    world = World(kind)
    catalogue, _ = await world.process()
    crowded = [MemoryKey("a:b", "u%", f"{number * 7 % 1_009:04}") for number in range(count)]
    world.there, world.answered = {*crowded}, True
    await world.clock.pass_time(HOUR - world.clock() % HOUR)
    for key in crowded:
        await world.answer(catalogue, key)
        await world.clock.pass_time(1)
    return world, crowded


async def a_conversation_that_goes_on_in_a_crowded_hour_is_first(kind: type[Catalogue]) -> None:
    world, crowded = await crowd(kind)
    catalogue, _ = await world.process()
    expected = [key.session_id for key in reversed(crowded)]
    for _ in range(3):
        await world.clock.pass_time(2 * GOES_ON_S)
        await world.answer(catalogue, crowded[0])
        expected = [expected[-1], *expected[:-1]] if expected[0] != crowded[0].session_id else expected
        for limit in (1, 20, 50):
            assert await world.listed(limit) == expected
        assert len(await world.names()) == len(crowded)


async def a_list_during_a_touch_loses_nothing(kind: type[Catalogue]) -> None:
    async def killed() -> None:
        raise Killed

    for number, moment in itertools.product(range(1, 4), ("before", "after")):
        world = await filled(kind)
        await world.clock.pass_time(HOUR)
        catalogue, driver = await world.process()

        async def look(world: World = world) -> None:
            assert sorted(await world.listed(1)) == ["s:a", "s:b", "s:c"]

        driver.acts[number, moment] = look
        await world.touch(catalogue, A)
        assert await world.listed() == ["s:a", "s:c", "s:b"]
        # And if the touch is killed once its card is written.
        await world.clock.pass_time(HOUR)
        driver.writes = 0
        driver.acts = {(1, "after"): look, (2, "after"): killed}
        with pytest.raises(Killed):
            await world.touch(catalogue, B)
        for _ in range(2):
            assert await world.listed() == ["s:b", "s:a", "s:c"]


async def a_conversation_that_begins_again_while_it_is_erased_is_listed(kind: type[Catalogue]) -> None:
    for number, moment in itertools.product(range(1, 3), ("before", "after")):
        world = World(kind)
        catalogue, driver = await world.process()
        _, other = await world.process()

        async def erased(driver: Driver = other) -> None:
            """Do what an erasure does, of a conversation that others go on with."""
            erasure = Erasure(driver, Codec(), Directory(driver, Codec()), no_keys)
            assert (await erasure.erase("a:b", "u%", "s:a")).backend

        driver.acts[number, moment] = erased
        await world.touch(catalogue, A)
        if (number, moment) == (2, "after"):
            assert await catalogue.load(A) is None, "the next touch writes another card"
            await world.touch(catalogue, A)
        assert await world.listed() == ["s:a"]
        assert len(await world.names()) == 1


async def no_keys(tenant: str, user: str) -> int:
    del tenant, user
    return 0


async def a_conversation_that_begins_again_while_its_card_is_removed_is_listed(kind: type[Catalogue]) -> None:
    for number, moment in itertools.product(range(1, 3), ("before", "after")):
        world = World(kind)
        catalogue, driver = await world.process()
        await world.touch(catalogue, A)
        world.there.discard(A)

        async def again(world: World = world) -> None:
            world.there.add(A)
            await world.touch((await world.process())[0], A)

        driver.acts[driver.writes + number, moment] = again
        await catalogue.touch(A, ttl=None)
        assert await world.listed() == (["s:a"] if A in world.there else [])
        assert len(await world.names()) == len(await world.listed())


async def an_erasure_during_a_first_touch_leaves_no_card(kind: type[Catalogue]) -> None:
    for number, moment in itertools.product(range(1, 3), ("before", "after")):
        world = World(kind)
        catalogue, driver = await world.process()

        async def erased(world: World = world) -> None:
            world.there.discard(A)

        driver.acts[number, moment] = erased
        await catalogue.touch(A, ttl=None)
        assert await world.names() == []
        assert await catalogue.load(A) is None


CHECKS = {
    check.__name__: check
    for check in (
        a_kill_within_a_touch_leaves_each_conversation_once,
        a_left_over_name_is_removed,
        a_conversation_that_goes_on_in_a_crowded_hour_is_first,
        a_list_during_a_touch_loses_nothing,
        a_conversation_that_begins_again_while_it_is_erased_is_listed,
        a_conversation_that_begins_again_while_its_card_is_removed_is_listed,
        an_erasure_during_a_first_touch_leaves_no_card,
    )
}


@pytest.mark.parametrize("name", CHECKS)
async def test_a_promise_of_the_catalogue_is_kept(name: str) -> None:
    await CHECKS[name](Catalogue)


@pytest.mark.parametrize("kind", CATALOGUES, ids=lambda kind: kind.__name__)
async def test_a_mutant_of_the_catalogue_is_rejected(kind: type[Catalogue]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await CHECKS[CATALOGUES[kind]](kind)


# Touches


async def shown_a_minute_later(kind: type[Touches]) -> tuple[list[str], int]:
    """Return the previews after each of three additions and a minute later, and how many writes it took."""
    world = World()
    catalogue, driver = await world.process()
    catalogue.clock = virtual.now
    touches, said = kind(catalogue, observer=SILENT), list[str]()

    def look() -> Activity:
        return Activity({"memory": 2}, 0.0, said[-1])

    previews: list[str] = []
    for text in ("first", "second", "third"):
        said.append(text)
        touches.note(A, "memory", look, ttl=None)
        await asyncio.sleep(1)
        previews.append((await catalogue.load(A) or {})["preview"])
    await asyncio.sleep(EVERY_S)
    previews.append((await catalogue.load(A) or {})["preview"])
    return previews, driver.writes


@virtual.virtually
async def test_a_touch_is_made_at_once_and_then_once_a_minute_with_the_last_text() -> None:
    previews, writes = await shown_a_minute_later(Touches)
    # The first one is of what the records say. A name and a card at first, and a card a minute later.
    assert previews == ["last", "last", "last", "third"]
    assert writes == 3


@virtual.virtually
async def test_a_process_that_loses_the_last_touch_is_noticed() -> None:
    previews, _ = await shown_a_minute_later(LosesTheLastTouch)
    assert previews[-1] != "third"


@virtual.virtually
async def test_closing_makes_the_touch_that_waits() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as backend:
        memory = backend.memory(A, LAST_TURNS)
        await memory.add_turn(ConversationTurn("Hello", "Hi"))
        await asyncio.sleep(1)
        await memory.add_turn(ConversationTurn("And now?", "Later."))
    async with Backend(MemoryDriver(store)) as backend:
        card = await backend.conversations.get(A)
        assert (card.title, card.preview, card.turns) == ("Hello", "Later.", 2)


@virtual.virtually
async def test_a_conversation_that_begins_again_is_listed_at_once() -> None:
    async with Backend(MemoryDriver()) as backend:
        memory = backend.memory(A, LAST_TURNS)
        for text in ("Hello", "Still there?"):
            await memory.add_turn(ConversationTurn(text, "Hi"))
            await asyncio.sleep(1)
        await backend.sessions.erase(A)
        await memory.add_turn(ConversationTurn("Again", "Hi"))
        await asyncio.sleep(1)
        cards = (await backend.conversations.list("a:b", "u%")).cards
        assert [(card.key, card.title, card.turns) for card in cards] == [(A, "Again", 1)]


@virtual.virtually
async def test_rebuilding_mends_the_card_that_a_killed_process_left_behind() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as killed, Backend(MemoryDriver(store)) as backend:
        memory = killed.memory(A, LAST_TURNS)
        for text in ("Hello", "And now?"):
            await memory.add_turn(ConversationTurn(text, f"{text} Hi."))
            await asyncio.sleep(1)
        assert (await backend.conversations.get(A)).turns == 1
        assert await backend.conversations.rebuild("a:b", "u%") == 1
        card = await backend.conversations.get(A)
        assert (card.title, card.preview, card.turns) == ("Hello", "And now? Hi.", 2)
        assert await backend.conversations.rebuild("a:b", "u%") == 0


class Slow(Catalogue):
    """Takes a while for a touch, and lists the sessions of those that were made."""

    def __init__(self) -> None:
        self.clock = virtual.now
        self.made: list[str] = []

    async def touch(self, key: MemoryKey, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0.02)
        if key.session_id.startswith("bad"):
            raise TypeError("a mistake")
        self.made.append(key.session_id)


def note(touches: Touches, *sessions: str) -> None:
    for session in sessions:
        touches.note(MemoryKey("a", "u", session), "memory", None, ttl=None)


@virtual.virtually
async def test_touches_of_more_conversations_than_are_remembered_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Slow()
    touches = Touches(slow, observer=SILENT, most=50)
    for _ in range(40):
        note(touches, *(f"{number}" for number in range(100)))
        await asyncio.sleep(0.001)
    await asyncio.sleep(2 * EVERY_S)
    made = len(slow.made)
    assert made < 300, "not at each of 4,000 activities"
    assert {*slow.made} == {f"{number}" for number in range(100)}
    assert not caplog.messages
    # Of more than twice as many, those that were active first are given up.
    note(touches, *(f"{number}" for number in range(1_000)))
    await touches.close(timeout=60)
    assert {*slow.made[made:]} == {f"{number}" for number in range(900, 1_000)}
    assert any("more conversations are active" in message for message in caplog.messages)


@virtual.virtually
async def test_the_last_touch_of_what_is_displaced_meanwhile_is_made_on_closing() -> None:
    slow = Slow()
    touches = Touches(slow, observer=SILENT, most=2)
    note(touches, "x")
    await asyncio.sleep(0.01)
    note(touches, "x", "y", "z")
    await asyncio.sleep(1)
    await touches.close(timeout=1)
    assert sorted(slow.made) == ["x", "x", "y", "z"]


@virtual.virtually
async def test_a_touch_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    touches = Touches(slow, observer=SILENT)
    note(touches, *(f"bad{number}" for number in range(8)), *(f"good{number}" for number in range(8)))
    await asyncio.sleep(1)
    assert len(slow.made) == 8
    assert "could not write to the catalogue: TypeError" in caplog.messages
    await touches.close(timeout=1)


async def counted(backend: Backend, key: MemoryKey = A) -> tuple[str, str, int]:
    """Return what the card says a minute later, when all touches were made."""
    await asyncio.sleep(2 * EVERY_S)
    card = await backend.conversations.get(key)
    return card.title, card.preview, card.turns


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@virtual.virtually
async def test_items_are_counted_once_whichever_objects_add_them() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as one, Backend(MemoryDriver(store)) as other:
        for number in range(5):
            for backend in (one, other):
                # As a program does that opens a log for each request.
                await backend.item_log(A, "openai-agents").add([said(f"{number}"), said("Yes.")])
                await asyncio.sleep(0.01)
        assert await counted(one) == ("0", "Yes.", 20)
        await other.item_log(A, "openai-agents").pop()
        assert await counted(one) == ("0", "4", 19)


@virtual.virtually
async def test_two_processes_that_begin_a_log_at_once_count_each_item_once() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as one, Backend(MemoryDriver(store)) as other:
        logs = [backend.item_log(A, "langchain") for backend in (one, other)]
        await asyncio.gather(*(log.add([{"data": {"content": "Hello"}}]) for log in logs))
        assert await counted(one) == ("Hello", "Hello", 2)


@virtual.virtually
async def test_pops_that_fail_take_nothing_off_the_count() -> None:
    driver = Deadly(MemoryDriver())
    async with Backend(driver) as backend:
        log = backend.item_log(A, "langchain")
        await log.add([{"data": {"content": "Hello"}}] * 4)

        async def refused(*_: Any, **__: Any) -> int:
            raise Unavailable("away")

        driver.append = refused  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(3):
            with pytest.raises(Unavailable):
                await log.pop()
        del driver.append  # pyright: ignore[reportAttributeAccessIssue]
        assert await counted(backend) == ("Hello", "Hello", 4)


@virtual.virtually
async def test_the_turns_and_the_items_of_a_conversation_are_counted_together() -> None:
    async with Backend(MemoryDriver()) as backend:
        memory, log = backend.memory(A, LAST_TURNS), backend.item_log(A, "openai-agents")
        for number in range(3):
            await memory.add_turn(ConversationTurn(f"{number}", "Yes."))
            await log.add([said("And now?")] * 2)
            await asyncio.sleep(0.01)
        assert (await counted(backend))[2] == 9
        assert (await backend.conversations.get(A)).kinds == ("memory", "openai-agents")
        await log.clear()
        assert await counted(backend) == ("0", "Yes.", 3)
        assert (await backend.conversations.get(A)).kinds == ("memory",)


@virtual.virtually
async def test_a_touch_reads_what_the_card_knows_of_and_no_other_kind() -> None:
    spy = SpyDriver(MemoryDriver())
    kinds = ("memory", *keys.LOG_KINDS)

    def read() -> set[str]:
        found = {kind for operation, kind in spy.calls if operation == "load" and kind in kinds}
        spy.calls.clear()
        return found

    async with Backend(spy) as backend:
        memory, log = backend.memory(A, LAST_TURNS), backend.item_log(A, "openai-agents")
        await log.add([said("Hello")])
        await counted(backend)
        assert read() == {"openai-agents"}
        await memory.add_turn(ConversationTurn("And", "Yes."))
        await counted(backend)
        assert read() <= {"memory"}
        await log.add([said("More")])
        assert (await counted(backend))[2] == 3
        assert read() == {"openai-agents"}
        await log.clear()
        assert (await counted(backend))[2] == 1
        assert read() == {"openai-agents", "memory"}


@virtual.virtually
async def test_a_card_goes_only_if_nothing_is_left_of_any_kind() -> None:
    """Another version has added to a log that the card does not know of."""
    async with Backend(MemoryDriver()) as backend:
        log = backend.item_log(A, "openai-agents")
        await log.add([said("Hello")])
        await counted(backend)
        await ItemLog(backend.driver, A, "langchain").add([{"type": "human", "data": {"content": "Bonjour"}}])
        await log.clear()
        assert await counted(backend) == ("Bonjour", "Bonjour", 1)


@virtual.virtually
async def test_a_log_that_is_rewritten_or_cleared_at_a_moment_is_shown_so() -> None:
    async with Backend(MemoryDriver()) as backend:
        log = backend.item_log(A, "google-adk")
        tip = await log.add_after("", [said("A secret"), said("Another")])
        assert await counted(backend) == ("A secret", "Another", 2)
        tip = await log.rewrite(tip or "", [said("Hello")])
        assert await counted(backend) == ("Hello", "Hello", 1)
        assert await log.clear_after(tip or "")
        await asyncio.sleep(2 * EVERY_S)
        assert (await backend.conversations.list("a:b", "u%")).cards == ()


@virtual.virtually
async def test_nothing_of_a_cleared_log_stays_in_the_card_of_what_follows() -> None:
    async with Backend(MemoryDriver()) as backend:
        log = backend.item_log(A, "openai-agents")
        await log.add([said("My diagnosis"), said("A secret")])
        await asyncio.sleep(1)
        await backend.conversations.update(A, pinned=True)
        await log.clear()
        await log.add([said("Hello")])
        assert await counted(backend) == ("Hello", "Hello", 1)
        assert (await backend.conversations.get(A)).pinned


@virtual.virtually
async def test_turns_that_left_the_record_without_a_summary_are_counted() -> None:
    async def is_down(_: Any) -> Any:
        raise ConnectionError

    budget = MemoryBudget(full_zone_turns=3)
    configs = {
        A: ShortTermMemoryConfig("truncation", budget, transcript=True),
        B: ShortTermMemoryConfig("rolling_summary", budget, transcript=True, retry_attempts=0),
    }
    async with Backend(MemoryDriver()) as backend:
        for key, config in configs.items():
            memory = backend.memory(key, config, summarizer=is_down if key == B else None)
            for number in range(40):
                await memory.add_turn(ConversationTurn(f"{number}", "Yes."))
            await memory.flush()
            assert await counted(backend, key) == ("0", "Yes.", 40)


async def test_a_touch_of_what_is_known_takes_no_turns_of_others_away() -> None:
    world = World()
    catalogue, _ = await world.process()
    await catalogue.touch(A, at=world.clock(), ttl=None)
    await world.clock.pass_time(60)
    await catalogue.touch(A, Activity({"memory": 9}, 0.0, "the ninth"), at=world.clock(), ttl=None)
    # A fold of a process that has seen five of them, a minute before.
    card = await catalogue.touch(A, Activity({"memory": 5}, world.clock() - 60, "the fifth"), ttl=None)
    assert card is not None
    assert (card["counts"], card["preview"]) == ({"memory": 9}, "the ninth")
    # What is read counts: turns may have been erased.
    card = await catalogue.touch(A, kind="memory", ttl=None)
    assert card is not None
    assert (card["counts"], card["preview"]) == ({"memory": 1}, "last")


async def test_a_server_that_shows_nothing_of_a_conversation_does_not_remove_its_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    catalogue, driver = await world.process()
    await world.touch(catalogue, A)
    monkeypatch.setattr(driver.inner, "traits", replace(driver.traits, shows_unconfirmed=True))
    world.there.discard(A)

    async def confirmed() -> None:
        world.there.add(A)

    driver.acts[driver.writes + 1, "after"] = confirmed
    assert await catalogue.touch(A, kind="memory", ttl=None)
    assert await world.listed() == ["s:a"]


# What is listed


@pytest.fixture
async def backend(driver: Driver) -> Backend:
    backend = Backend(driver)
    await backend.open()
    return backend


async def test_every_kind_of_conversation_is_listed_with_what_it_says(backend: Backend) -> None:
    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Where\n is it?", "There."))
    await touched(backend, A)
    await backend.item_log(B, "openai-agents").add(
        [
            {"role": "user", "content": "Count."},
            {"role": "assistant", "content": [{"type": "output_text", "text": "One, two."}]},
            {"type": "function_call", "name": "count"},
        ]
    )
    await touched(backend, B)
    await backend.item_log(C, "langchain").add([{"type": "human", "data": {"content": "Bonjour"}}])
    await touched(backend, C)
    cards = (await backend.conversations.list("a:b", "u%")).cards
    assert [(c.key, c.title, c.preview, c.turns, c.kinds) for c in cards] == [
        (C, "Bonjour", "Bonjour", 1, ("langchain",)),
        (B, "Count.", "One, two.", 3, ("openai-agents",)),
        (A, "Where is it?", "There.", 1, ("memory",)),
    ]
    assert (await backend.conversations.list("a", "b:u%")).cards == ()


async def test_what_is_set_stays_and_is_exported_and_imported(backend: Backend, tmp_path: Any) -> None:
    del tmp_path
    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    card = await backend.conversations.update(A, title="Trip", metadata={"model": "x"}, pinned=True)
    assert (card.title, card.metadata, card.pinned, card.archived) == ("Trip", {"model": "x"}, True, False)
    other = Backend(MemoryDriver())
    await other.open()
    await backend.sessions.copy(A, other.sessions)
    there = await other.conversations.get(A)
    assert (there.title, there.metadata, there.pinned) == ("Trip", {"model": "x"}, True)
    assert (await backend.conversations.update(A, title="", archived=True)).title == "Hello"
    await other.close()


HELLO = ConversationTurn("Hello", "Hi")

CRAFTED = (
    '["\\ud800", -1.0, "x"]',
    '["f0000000", NaN, "x"]',
    '["f0000000", -1e999, "x"]',
    '["f0000000", -1.7e308, "x"]',
    '["f0000000", -1.0, 3]',
    '["F0000000", -1.0, "x"]',
    '["f0000000\\n", -1.0, "x"]',
    "[" * 8_000,
    f'["f0000000", -1.0, "{"x" * 100_000}"]',
    '{"a": 1, "b": 2, "c": 3}',
)
"""What no page has as `after`."""


def crafted(place: str) -> str:
    return base64.urlsafe_b64encode(place.encode()).decode()


@pytest.mark.parametrize("session", ["x" * 984, "x" * 991, "\U0001f600" * 247, "\ud800" * 100, "\x7f" * 991])
async def test_the_place_of_the_longest_name_is_accepted(backend: Backend, session: str) -> None:
    longest, stored = 0, backend.driver.replace

    async def measured(key: Key, *args: Any, **options: Any) -> bool:
        nonlocal longest
        longest = max(longest, len(key.name.encode()))
        return await stored(key, *args, **options)

    backend.driver.replace = measured
    for key in (MemoryKey("acme", "u", session), MemoryKey("acme", "u", "last")):
        await backend.memory(key, LAST_TURNS).add_turn(HELLO)
        await backend.conversations.get(key)
    seen, after = set[str](), None
    for _ in range(2):
        page = await backend.conversations.list("acme", "u", limit=1, after=after)
        seen |= {card.key.session_id for card in page.cards}
        after = page.after
    assert seen == {session, "last"}
    assert longest <= MAX_KEY_BYTES


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"title": "\ud800"}, "title"),
        ({"metadata": {"score": math.nan}}, "metadata.score"),
        ({"metadata": {"a": [1.0, {"b": -math.inf}]}}, "metadata.a[1].b"),
        ({"metadata": {"a": ["fine \udfff"]}}, "metadata.a[0]"),
        ({"metadata": {"a": {"\ud800": 1}}}, "a key of metadata.a"),
    ],
)
async def test_a_card_is_json_for_every_program(backend: Backend, change: Any, path: str) -> None:
    await backend.memory(A, LAST_TURNS).add_turn(HELLO)
    with pytest.raises(InvalidState, match=f"^{re.escape(path)} (is|has) "):
        await backend.conversations.update(A, **change)
    card = await backend.conversations.update(A, title="\U0001f600", metadata={"score": 1e300})
    assert (card.title, card.metadata) == ("\U0001f600", {"score": 1e300})


async def test_a_card_of_an_older_version_with_nan_is_read_and_imported(backend: Backend) -> None:
    await backend.memory(A, LAST_TURNS).add_turn(HELLO)
    where = keys.card_key(A)
    await backend.conversations.update(A, metadata={"score": 1.5})
    record = await backend.driver.load(where)
    assert record is not None
    assert record.body is not None
    await backend.driver.replace(
        where, record.body.replace(b"1.5", b"NaN"), expect=record.version, version="older", ttl=KEEP
    )
    assert math.isnan((await backend.conversations.get(A)).metadata["score"])
    document = await backend.sessions.export(A)
    await backend.sessions.import_(document, on_conflict="replace")
    assert math.isnan((await backend.conversations.get(A)).metadata["score"])
    assert (await backend.conversations.update(A, title="Trip")).title == "Trip"


async def test_what_cannot_be_set_is_refused_before_anything_is_written(backend: Backend) -> None:
    with pytest.raises(SessionNotFound, match="one begins with its first turn"):
        await backend.conversations.update(A, title="Trip")
    with pytest.raises(SessionNotFound):
        await backend.conversations.get(A)
    changes: tuple[dict[str, Any], ...] = (
        {"title": 3},
        {"title": "x" * 501},
        {"metadata": []},
        {"metadata": {"a": object()}},
        {"metadata": {"a": "x" * 5_000}},
        {"pinned": 1},
    )
    for change in changes:
        with pytest.raises(InvalidState):
            await backend.conversations.update(A, **change)
    key: Any = A.composite()
    with pytest.raises(InvalidKey):
        await backend.conversations.update(key, title="Trip")
    with pytest.raises(InvalidKey):
        await backend.conversations.get(key)
    for after in ("", "x", "W10=", "é", 5, *map(crafted, CRAFTED)):
        asked: Any = after
        with pytest.raises(ConfigurationError, match="after was not returned"):
            await backend.conversations.list("a:b", "u%", after=asked)
    assert (await backend.conversations.list("a:b", "u%")).cards == ()


def counting(driver: Driver) -> list[str]:
    """Return the operations of a driver from now on."""
    calls: list[str] = []

    async def call(operation: str, key: Any, send: Any) -> Any:
        del key
        calls.append(operation)
        return await send()

    driver.call = call  # pyright: ignore[reportAttributeAccessIssue]
    return calls


async def three_an_hour() -> tuple[World, Catalogue, list[str]]:
    """Return a world with 200 conversations, and the operations of a process from now on."""
    world = World()
    catalogue, driver = await world.process()
    world.there = {MemoryKey("a:b", "u%", f"{number:03}") for number in range(200)}
    for key in sorted(world.there, key=lambda key: key.session_id):
        await world.clock.pass_time(HOUR / 3)
        await world.touch(catalogue, key)
    return world, catalogue, counting(driver)


async def test_a_page_takes_a_scan_and_the_loads_of_its_cards() -> None:
    world, catalogue, calls = await three_an_hour()
    page, _ = await catalogue.page("a:b", "u%", after=None, limit=50)
    assert [where.name for where, _ in page] == [f"{n:03}" for n in range(199, 149, -1)]
    assert (calls.count("scan"), calls.count("load"), len(calls)) == (1, 64, 65)
    assert await world.listed(7) == [f"{n:03}" for n in range(199, -1, -1)]


@pytest.mark.parametrize("step", [1, 3, 50])
async def test_a_page_of_wanted_cards_loads_no_card_beyond_it(step: int) -> None:
    _, catalogue, calls = await three_an_hour()
    found, after, pages = list[str](), None, 0
    while pages == 0 or after is not None:
        page, after = await catalogue.page(
            "a:b", "u%", after=after, limit=5, wanted=lambda _, card: int(card) % step == 0
        )
        found += [where.name for where, _ in page]
        pages += 1
    assert found == [f"{n:03}" for n in range(199, -1, -1) if n % step == 0]
    # A page begins and ends within an hour, of which it needs all.
    assert calls.count("load") <= pages * (5 + SPARE + 2)


def test_listing_the_latest_of_10_000_conversations_takes_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("typer.testing")
    from stm_backends.cli import app, datastores  # noqa: PLC0415 -- needs the extra `cli`

    spy, codec = SpyDriver(MemoryDriver()), Codec()

    @contextlib.asynccontextmanager
    async def chosen(*_: Any, **__: Any) -> AsyncIterator[Backend]:
        async with Backend(spy) as backend:
            for number in range(10_000):
                at = 1.9e9 - 60 * number
                where = keys.card_key(MemoryKey("a", "u", f"{number:05}"))
                name = keys.recent_key("a", "u", slot_of(at), where.name)
                card = {"slot": slot_of(at), "at": at, "created": at, "counts": {"memory": 1}}
                card |= {"opening": "Hello", "preview": "Hi"}
                for key, body in ((where, codec.seal("card", card)), (name, codec.seal("recent", {}))):
                    await spy.replace(key, body, version="v", expect=ABSENT, ttl=None)
            await Directory(spy, codec).note("a", "u")
            spy.calls.clear()
            yield backend

    monkeypatch.setattr(datastores, "chosen", chosen)
    done = testing.CliRunner().invoke(app.app, ["ls", "a", "--recent", "20"])
    _, *shown = [line.split("  ")[-2] for line in done.output.splitlines()]
    assert shown == [f"a:u:{number:05}" for number in range(20)]
    # The hour in which the page ends is read to its end.
    assert {kind for _, kind in spy.calls} == {"users", "recent", "card"}
    assert len(spy.calls) < 100


async def test_an_hour_with_more_conversations_than_a_page_is_in_order() -> None:
    world = World()
    catalogue, _ = await world.process()
    world.there = {MemoryKey("a:b", "u%", f"{number:02}") for number in range(90)}
    for key in sorted(world.there, key=lambda key: key.session_id[::-1]):
        await world.clock.pass_time(1)
        await world.touch(catalogue, key)
    expected = sorted((key.session_id for key in world.there), key=lambda name: name[::-1], reverse=True)
    for limit in (1, 20, 50, 100):
        assert await world.listed(limit) == expected


async def test_a_page_of_a_crowded_hour_takes_no_more_than_another() -> None:
    world, crowded = await crowd(count=1_000)
    catalogue, driver = await world.process()
    calls, after, found = counting(driver), None, list[str]()
    while after is not None or not found:
        calls.clear()
        page, after = await catalogue.page("a:b", "u%", after=after, limit=50)
        if found:
            # What comes before the page in its hour is passed over, but for a minute.
            assert calls.count("scan") <= 3
            assert calls.count("load") <= 4 * (50 + SPARE)
        else:
            assert (calls.count("scan"), calls.count("load")) == (1, 50 + SPARE)
        found += [where.name for where, _ in page]
    assert found == [key.session_id for key in reversed(crowded)]


async def test_a_crowded_hour_whose_names_say_no_moment_is_in_order() -> None:
    world, crowded = await crowd(count=100)
    _, driver = await world.process()
    for key in crowded[::2]:
        where = keys.card_key(key)
        record = await driver.load(where) or pytest.fail("gone")
        card = Codec().open("card", record.body or b"")
        hour = hour_of(card["slot"])
        assert await driver.delete(keys.recent_key("a:b", "u%", card["slot"], where.name))
        name = keys.recent_key("a:b", "u%", hour, where.name)
        for place, kind, body in ((name, "recent", {}), (where, "card", {**card, "slot": hour})):
            await driver.replace(place, Codec().seal(kind, body), version="v", expect=ANY, ttl=None)
    for limit in (1, 20, 50):
        assert await world.listed(limit) == [key.session_id for key in reversed(crowded)]


async def test_a_name_changes_at_most_twice_within_an_hour() -> None:
    world = World()
    catalogue, _ = await world.process()
    await world.clock.pass_time(HOUR - world.clock() % HOUR)
    slots = list[str]()
    for _ in range(50):
        await world.touch(catalogue, A)
        slots.append((await catalogue.load(A) or {})["slot"])
        await world.clock.pass_time(GOES_ON_S)
    assert len({*slots}) == 3
    assert slots == sorted(slots, reverse=True)
    assert {hour_of(slot) for slot in slots} == {slots[-1]}


async def test_a_session_id_of_any_length_has_a_card(backend: Backend) -> None:
    long = MemoryKey("a:b", "u%", "x" * 1_000)
    await backend.memory(long, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    assert (await backend.conversations.get(long)).key == long
    await touched(backend, long)
    assert (await backend.sessions.erase_with_receipt("a:b", "u%", "x" * 1_000)).erased["cards"] == 2
    assert (await backend.conversations.list("a:b", "u%")).cards == ()


async def test_rebuilding_gives_a_card_to_what_an_older_version_stored(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Touches, "note", lambda *_, **__: None)
    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi", ts=1.6e9))
    await backend.item_log(B, "langchain").add([{"type": "human", "data": {"content": "Bonjour"}}])
    assert (await backend.conversations.list("a:b", "u%")).cards == ()
    assert await backend.conversations.rebuild("a:b", "u%") == 2
    assert await backend.conversations.rebuild("a:b", "u%") == 0
    cards = (await backend.conversations.list("a:b", "u%")).cards
    assert [(card.key, card.updated) for card in cards][1] == (A, 1.6e9)
    assert (await anext(backend.conversations.all("a:b", "u%"))).key == B


async def test_a_card_that_was_lost_has_the_first_message_and_its_time_again(backend: Backend) -> None:
    config = ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=3), transcript=True)
    memory = backend.memory(A, config)
    for number in range(40):
        await memory.add_turn(ConversationTurn(f"question {number}", "Yes.", ts=1.6e9 + number))
    await memory.flush()
    await touched(backend, A)
    other = Backend(MemoryDriver())
    await other.open()
    importing = other.sessions.importing()
    async for line in backend.sessions.export_lines(A):
        await importing.add(line)
    await backend.driver.delete(keys.card_key(A))
    for place in (backend, other):
        card = await place.conversations.get(A)
        assert (card.title, card.turns, card.created) == ("question 0", 40, 1.6e9)
    await other.close()


async def test_ids_that_leave_no_room_for_the_longest_kind_are_listed(backend: Backend) -> None:
    tenant = "t" * 400
    key = MemoryKey(tenant, "u" * (MAX_KEY_BYTES - len(f"{tenant}::memory")), "chat")
    await backend.memory(key, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    await touched(backend, key)
    assert (await backend.conversations.get(key)).title == "Hello"


@pytest.mark.parametrize("body", [b"stm/1 card other\nx", b'stm/1 card\n{"slot":"f0000000","at":1.0}'])
async def test_a_damaged_card_hides_one_conversation_and_is_not_overwritten(
    backend: Backend, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (A, B, C):
        await backend.memory(key, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
        await touched(backend, key)
    card = keys.card_key(B)
    await backend.driver.replace(card, body, version="v", expect=ANY, ttl=None)
    assert {one.key for one in (await backend.conversations.list("a:b", "u%")).cards} == {A, C}
    assert any("a card cannot be read" in message for message in caplog.messages)
    assert (await backend.sessions.export(B))["turns"]
    with pytest.raises(Corrupt):
        await backend.conversations.get(B)
    assert (await backend.driver.load(card) or pytest.fail("gone")).body == body


# What goes with a conversation


async def left(driver: Driver, key: MemoryKey = A) -> int:
    """Return how many records of the catalogue a user has."""
    count = 0
    for kind in ("card", "recent"):
        async for _ in operations.names(driver, keys.scope(key.tenant_id, key.user_id, kind)):
            count += 1
    return count


async def test_erasing_a_conversation_erases_its_card_and_all_its_names(backend: Backend) -> None:
    for key in (A, B):
        await backend.memory(key, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
        await touched(backend, key)
    where = keys.card_key(A)
    old = keys.recent_key("a:b", "u%", slot_of(1.6e9), where.name)
    await backend.driver.append(old, b"left", initial_version="v", ttl=None)
    receipt = await backend.sessions.erase_with_receipt("a:b", "u%", "s:a")
    assert (receipt.erased["cards"], receipt.complete) == (3, True)
    assert [card.key for card in (await backend.conversations.list("a:b", "u%")).cards] == [B]
    assert await left(backend.driver) == 2
    assert (await backend.sessions.erase_with_receipt("a:b", "u%")).erased["cards"] == 2
    assert await left(backend.driver) == 0


async def test_a_touch_that_comes_after_an_erasure_writes_nothing(backend: Backend) -> None:
    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    await touched(backend, A)
    await backend.sessions.erase(A)
    late = catalogue_on(backend.driver, backend.codec, Directory(backend.driver, backend.codec))
    await late.touch(A, Activity({"memory": 2}, 0.0, "secret"), at=2e9, ttl=None)
    assert await left(backend.driver) == 0
    assert [user async for user in backend.sessions.users("a:b")] == []


@pytest.mark.parametrize("there_before", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("count", [3, 2, 1], ids=["conversation", "user", "tenant"])
async def test_a_conversation_that_goes_on_while_it_is_erased_is_listed(
    count: int, there_before: bool
) -> None:
    outcomes: list[bool] = []
    for number in itertools.count(1):
        store = MemoryStore()

        async def go_on(store: MemoryStore = store) -> None:
            async with Backend(MemoryDriver(store)) as other:
                await other.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
                await other.item_log(B, "langchain").add([{"type": "human", "data": {"content": "Hello"}}])

        if there_before:
            await go_on()
        driver = AtNth(MemoryDriver(store), number, go_on)
        async with Backend(driver) as backend:
            assert await backend.sessions.erase_with_receipt(*("a:b", "u%", "s:a")[:count])
            if not driver.reached:
                break
            there = {key async for key in backend.sessions.list("a:b", "u%")}
            there |= {key async for _, key in backend.sessions.logs("a:b", "u%")}
            listed = [card.key for card in (await backend.conversations.list("a:b", "u%")).cards]
            assert {*listed} == there
            assert len(listed) == len(there) == await left(driver) / 2
            outcomes.append(A in there)
    assert {*outcomes} == {True, False}


@pytest.mark.parametrize("count", [3, 2, 1], ids=["conversation", "user", "tenant"])
async def test_an_erasure_that_lists_nothing_again_is_noticed(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: Erasure, tenant: str, user: str, begun: object) -> None:
        del self, tenant, user, begun

    monkeypatch.setattr(Erasure, "_list", nothing)
    with pytest.raises(AssertionError):
        await test_a_conversation_that_goes_on_while_it_is_erased_is_listed(count, there_before=True)


async def test_a_touch_during_an_erasure_leaves_no_user_behind(backend: Backend) -> None:
    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    await touched(backend, A)
    answers = [Activity({"memory": 1}, 0.0, "secret"), None]

    async def erased_meanwhile(key: MemoryKey, kinds: Sequence[str]) -> Activity | None:
        found = answers.pop(0)
        if found is not None:
            await backend.sessions.erase(A)
        return found

    directory = Directory(backend.driver, backend.codec)
    late = Catalogue(backend.driver, backend.codec, directory, describe=erased_meanwhile, clock=lambda: 2e9)
    assert await late.touch(A, at=2e9, ttl=None) is None
    assert await left(backend.driver) == 0
    assert [user async for user in backend.sessions.users("a:b")] == []


async def test_a_log_that_is_cleared_leaves_the_list(backend: Backend) -> None:
    log = backend.item_log(A, "openai-agents")
    await log.add([{"role": "user", "content": "Hello"}])
    await touched(backend, A)
    await log.clear()
    await backend.close()
    await backend.open()
    assert await left(backend.driver) == 0


async def test_a_purge_takes_the_card_of_what_is_old_and_what_was_left_over(backend: Backend) -> None:
    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi", ts=1.6e9))
    await backend.memory(B, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    for key in (A, B):
        await touched(backend, key)
    name = keys.recent_key("a:b", "u%", slot_of(1.6e9), "gone")
    await backend.driver.append(name, b"left", initial_version="v", ttl=None)
    purged = await backend.sessions.purge("a:b", "u%", older_than=86_400)
    assert (purged.conversations, purged.cards) == (1, 1)
    assert [card.key for card in (await backend.conversations.list("a:b", "u%")).cards] == [B]
    assert await left(backend.driver) == 2


async def test_a_purge_keeps_the_card_of_a_conversation_that_begins_again() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as backend:
        await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
        await backend.conversations.update(A, title="Trip", pinned=True)
        await touched(backend, A)
    driver = Deadly(MemoryDriver(store))
    async with Backend(MemoryDriver(store)) as backend, Backend(driver) as other:
        await backend.driver.delete(keys.memory_key(A))

        async def again() -> None:
            await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello again", "Hi"))
            await backend.close()
            await backend.open()

        driver.acts[driver.writes + 1, "before"] = again
        assert (await other.sessions.purge("a:b", "u%")).cards == 0
        assert driver.writes
        assert [card.title for card in (await backend.conversations.list("a:b", "u%")).cards] == ["Trip"]


async def test_a_card_expires_with_its_conversation() -> None:
    world = World()
    catalogue, driver = await world.process()
    seen = Activity({"memory": 1}, 0.0)
    await catalogue.touch(A, seen, at=world.clock(), ttl=600)
    await catalogue.touch(B, seen, at=world.clock(), ttl=None)
    await catalogue.touch(C, seen, at=world.clock(), ttl=None)
    await catalogue.expire(keys.card_key(C), 1_200)
    # Within the slot, the name of a card that lives longer is put again.
    await world.clock.pass_time(60)
    await catalogue.touch(A, seen, at=world.clock(), ttl=3 * HOUR)
    await world.clock.pass_time(601)
    assert sorted(await world.listed()) == ["s:a", "s:b", "s:c"]
    await world.clock.pass_time(601)
    assert sorted(await world.listed()) == ["s:a", "s:b"]
    await world.clock.pass_time(2 * HOUR)
    assert await world.listed() == ["s:a", "s:b"]
    await world.clock.pass_time(HOUR)
    assert await world.listed() == ["s:b"]
    await world.clock.pass_time(HOUR)
    assert await left(driver) == 2


async def titled(conversations: Conversations, key: MemoryKey) -> None:
    await conversations.update(key, title="Trip")


async def asked_for(conversations: Conversations, key: MemoryKey) -> None:
    assert (await conversations.get(key)).turns == 1


async def rebuilt(conversations: Conversations, key: MemoryKey) -> None:
    assert await conversations.rebuild(key.tenant_id, key.user_id) == 1


@pytest.mark.parametrize("made", [titled, asked_for, rebuilt])
async def test_a_card_that_is_made_later_goes_with_its_conversation(
    made: Callable[[Conversations, MemoryKey], Awaitable[None]],
) -> None:
    clock, codec = FakeClock(), Codec()
    driver = MemoryDriver(clock=clock)
    await driver.open()
    directory = Directory(driver, codec, clock=clock, epoch=clock)
    conversations = Conversations(driver, catalogue_on(driver, codec, directory, clock=clock))

    async def add(turn_id: str) -> None:
        await directory.note("a:b", "u%", ttl=600)
        entry = codec.seal_turn(StoredTurn(turn_id, ConversationTurn("Hello", "Hi")))
        await driver.append(keys.memory_key(A), entry, initial_version="v", ttl=600)

    await add("1")
    await made(conversations, A)
    await clock.pass_time(300)
    # The process is killed before its touch.
    await add("2")
    await clock.pass_time(599)
    assert [card.key for card in (await conversations.list("a:b", "u%")).cards] == [A]
    assert (await conversations.get(A)).key == A
    await clock.pass_time(2)
    assert (await conversations.list("a:b", "u%")).cards == ()
    with pytest.raises(SessionNotFound):
        await conversations.update(A, pinned=True)
    with pytest.raises(SessionNotFound):
        await conversations.get(A)
    await clock.pass_time(4 * HOUR)
    assert await left(driver) == 0
    assert [user async for user in directory.users("a:b")] == []


async def test_showing_a_card_that_outlives_its_conversation_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def anyway(self: Catalogue, where: Key, content: Any) -> Any:
        del self, where
        return content

    monkeypatch.setattr(Catalogue, "_shown", anyway)
    with pytest.raises(AssertionError):
        await test_a_card_that_is_made_later_goes_with_its_conversation(titled)


@pytest.mark.parametrize(("user_lives", "then"), [(600, None), (None, 600)])
async def test_a_card_that_is_made_later_lives_as_the_next_turn_says(
    user_lives: float | None, then: float | None
) -> None:
    clock, codec = FakeClock(), Codec()
    driver = SpyDriver(MemoryDriver(clock=clock))
    await driver.open()
    directory = Directory(driver, codec, clock=clock, epoch=clock)
    catalogue = catalogue_on(driver, codec, directory, clock=clock)
    entry = codec.seal_turn(StoredTurn("1", ConversationTurn("Hello", "Hi")))
    await directory.note("a:b", "u%", ttl=user_lives)
    await driver.append(keys.memory_key(A), entry, initial_version="v", ttl=user_lives)
    await Conversations(driver, catalogue).update(A, title="Trip")
    await driver.append(keys.memory_key(A), entry, initial_version="v", ttl=then)
    await catalogue.touch(A, ttl=then)
    await clock.pass_time(24 * HOUR)
    assert await left(driver) == (2 if then is None else 0)
    before = driver.count("load")
    cards = (await Conversations(driver, catalogue).list("a:b", "u%")).cards
    assert [card.title for card in cards] == (["Trip"] if then is None else [])
    assert driver.count("load") == before


async def test_a_touch_that_keeps_the_time_to_live_moves_the_name() -> None:
    for ttl in (None, 3 * HOUR):
        world = World()
        catalogue, driver = await world.process()
        await catalogue.touch(A, Activity({"memory": 1}, 0.0), at=world.clock(), ttl=ttl)
        await world.clock.pass_time(2 * HOUR)
        await catalogue.touch(A, Activity({"memory": 1}, 0.0), at=world.clock())
        assert await world.listed() == ["s:a"]
        assert len(await world.names()) == 1
        await world.clock.pass_time(6 * HOUR)
        assert await left(driver) == (0 if ttl else 2)


async def test_a_change_of_a_card_that_expires_lists_its_user_for_no_longer() -> None:
    world = World()
    catalogue, driver = await world.process()
    owner = MemoryKey("t", "u", "s")
    world.there.add(owner)
    await catalogue.touch(owner, ttl=600)
    assert await catalogue.update(owner, {"title": "Trip"})
    await world.clock.pass_time(24 * HOUR)
    assert [user async for user in Directory(driver, Codec()).users("t")] == []


async def test_a_copy_brings_cards_and_their_places(backend: Backend) -> None:
    from stm_backends.admin.copying import Copy, Owner  # noqa: PLC0415 -- of this test alone

    await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("Hello", "Hi"))
    await backend.conversations.update(A, title="Trip")
    await touched(backend, A)
    target = Backend(MemoryDriver())
    await target.open()
    copy = Copy(backend.driver, target.driver, [Owner("a:b")])
    await copy.copy()
    await backend.conversations.update(A, title="Journey")
    await copy.verify()
    assert not copy.ok
    again = Copy(backend.driver, target.driver, [Owner("a:b")])
    await again.copy()
    await again.verify()
    assert again.ok
    assert [card.title for card in (await target.conversations.list("a:b", "u%")).cards] == ["Journey"]
    await target.close()


async def test_cards_of_a_sealed_tenant_are_sealed_and_names_have_no_content(driver: Driver) -> None:
    pytest.importorskip("cryptography")
    async with Backend(driver, sealing=Sealing(StaticKeys({"k": bytes(range(32))}, primary="k"))) as backend:
        await backend.memory(A, LAST_TURNS).add_turn(ConversationTurn("My secret", "Kept secret"))
        await backend.conversations.update(A, title="A secret title")
        await touched(backend, A)
        found = []
        for kind in ("card", "recent"):
            scope = keys.scope("a:b", "u%", kind)
            async for name in operations.names(driver, scope):
                record = await driver.load(Key(scope, name))
                assert record is not None
                found.append(record.body or b"")
                assert "secret" not in name
        assert len(found) == 2
        assert all(body.startswith(b"stm/2 sealed ") and b"secret" not in body for body in found)


async def test_a_card_whose_removal_is_answered_too_late_leaves_no_name() -> None:
    class LosesTheAnswer(WrapperDriver):
        armed = True

        async def delete(self, key: Key, *, expect: Any = ANY) -> bool:
            done = await self.inner.delete(key, expect=expect)
            if self.armed and key.scope.endswith(":card"):
                self.armed = False
                raise OutcomeUnknown("the answer was lost", backend=self.name, operation="delete")
            return done

    driver = LosesTheAnswer(MemoryDriver())
    await driver.open()
    catalogue, stored = (
        catalogue_on(driver, Codec(), Directory(driver, Codec())),
        StoredTurn("t", ConversationTurn("q", "a")),
    )
    await driver.append(keys.memory_key(A), Codec().seal_turn(stored), initial_version="v", ttl=None)
    await catalogue.touch(A, Activity(("memory",), 1e9, 1, "hello"), kind="memory", at=1e9, ttl=None)
    assert await catalogue.forget(A)
    card, owner = keys.card_key(A), keys.owner_of(keys.card_key(A).scope)
    assert await driver.load(card) is None
    assert not [name async for name in operations.names(driver, keys.scope(*owner, "recent"))]

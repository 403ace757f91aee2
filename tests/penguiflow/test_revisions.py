"""PenguiFlow from 3.11.3 on recognizes its own saves by a revision: it must never take ours for one of them.

Where an older release is installed, `Revising` does what the newer one does. `nox -s penguiflow -- newest`
runs these tests with the real one.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import uuid
from collections.abc import Mapping
from typing import Any

import penguiflow.planner.memory as pf
import pytest
from packaging.version import Version

from stm_backends import DefaultShortTermMemory, open_backend
from tests.support.stores import ConditionalStore, PlainStore

KEY = "acme:u1:chat"


class Revising(pf.DefaultShortTermMemory):
    """PenguiFlow's memory as 3.11.3a2 saves and loads it, on an older one."""

    _synced: str | None = None

    async def persist(self, store: Any, key: str) -> None:
        self._synced = uuid.uuid4().hex
        await store.save_memory_state(key, {**self.to_dict(), "revision": self._synced})

    async def hydrate(self, store: Any, key: str) -> None:
        state = await store.load_memory_state(key)
        if state is None or (self._synced is not None and state.get("revision") == self._synced):
            return
        self.from_dict(state)
        self._synced = state.get("revision")


HAS_REVISIONS = Version(importlib.metadata.version("penguiflow")).release >= (3, 11, 3)
Theirs: type[pf.DefaultShortTermMemory] = pf.DefaultShortTermMemory if HAS_REVISIONS else Revising


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Summarize by listing what the user said."""
    return {"summary": " ".join([request["previous_summary"], *(turn["user"] for turn in request["turns"])])}


def config(strategy: Any = "truncation", zone: int = 50) -> Any:
    return pf.ShortTermMemoryConfig(strategy=strategy, budget=pf.MemoryBudget(full_zone_turns=zone))


def both(**given: Any) -> tuple[Any, DefaultShortTermMemory]:
    """Return PenguiFlow's memory and ours."""
    settings = config(**given)
    return (
        Theirs(config=settings, summarizer=summarize),
        DefaultShortTermMemory(config=settings, summarizer=summarize),
    )


async def say(memory: Any, store: Any, text: str) -> None:
    """Hold one turn as the planner does: load, add, save."""
    await memory.hydrate(store, KEY)
    await memory.add_turn(pf.ConversationTurn(text, "a"))
    await memory.persist(store, KEY)


def said(state: Mapping[str, Any]) -> list[str]:
    return [item["user_message"] for part in ("backlog", "pending", "turns") for item in state[part]]


async def test_the_other_memory_writes_a_revision_and_skips_its_own() -> None:
    """What the rest of this file is about, so that it notices if PenguiFlow no longer does this."""
    theirs, _ = both()
    store = PlainStore()
    await say(theirs, store, "one")
    assert store.state(KEY)["revision"]
    await theirs.add_turn(pf.ConversationTurn("not saved", "a"))
    await theirs.hydrate(store, KEY)
    assert said(theirs.to_dict()) == ["one", "not saved"]


@pytest.mark.parametrize("make", [PlainStore, ConditionalStore])
async def test_penguiflow_loads_what_we_saved_after_it(make: type[PlainStore]) -> None:
    theirs, mine = both()
    store = make()
    for memory, text in ((theirs, "one"), (mine, "two"), (theirs, "three"), (mine, "four")):
        await say(memory, store, text)
    assert said(store.state(KEY)) == ["one", "two", "three", "four"]
    await theirs.hydrate(store, KEY)
    assert said(theirs.to_dict()) == ["one", "two", "three", "four"]


async def test_the_same_on_a_store_of_ours() -> None:
    theirs, mine = both()
    async with open_backend("memory") as backend:
        for memory, text in ((theirs, "one"), (mine, "two"), (theirs, "three")):
            await say(memory, backend.state_store, text)
        state = await backend.state_store.load_memory_state(KEY)
    assert state is not None
    assert said(state) == ["one", "two", "three"]


@pytest.mark.parametrize("seed", range(8))
async def test_no_order_of_saves_loses_a_turn(seed: int) -> None:
    choose = random.Random(seed)
    store = PlainStore()
    memories = [*both(), both()[0]]
    for number in range(24):
        await say(choose.choice(memories), store, str(number))
    assert said(store.state(KEY)) == [str(number) for number in range(24)]


async def test_each_save_of_ours_has_a_revision_of_its_own() -> None:
    _, mine = both()
    store = PlainStore()
    seen = set[str]()
    for number in range(5):
        await say(mine, store, str(number))
        seen.add(store.state(KEY)["revision"])
    await mine.persist(store, KEY)
    seen.add(store.state(KEY)["revision"])
    assert len(seen) == 6
    assert all(isinstance(one, str) and one for one in seen)


async def test_a_summary_that_is_saved_later_has_a_revision_of_its_own() -> None:
    go_on = asyncio.Event()

    async def held(request: Mapping[str, Any]) -> Mapping[str, Any]:
        await go_on.wait()
        return await summarize(request)

    mine = DefaultShortTermMemory(config=config("rolling_summary", 1), summarizer=held)
    store = PlainStore()
    for text in ("one", "two"):
        await say(mine, store, text)
    before = store.state(KEY)
    go_on.set()
    await mine.flush()
    after = store.state(KEY)
    assert (before["summary"], after["summary"].split()) == ("", ["one"])
    assert after["revision"] != before["revision"]


async def test_a_revision_is_neither_part_of_a_state_nor_kept_of_one() -> None:
    theirs, mine = both()
    store = PlainStore()
    await say(theirs, store, "one")
    mine.from_dict(store.state(KEY))
    assert "revision" not in mine.to_dict()
    other = {**store.state(KEY), "kept": {"x": 1}}
    mine.from_dict(other)
    assert mine.to_dict()["kept"] == {"x": 1}


@pytest.mark.skipif(not HAS_REVISIONS, reason="PenguiFlow before 3.11.3 saves no summary by itself")
async def test_a_summary_of_penguiflow_is_not_saved_over_our_turn() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def held(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.set()
        await go_on.wait()
        return await summarize(request)

    settings = config("rolling_summary", 1)
    theirs = Theirs(config=settings, summarizer=held)
    mine = DefaultShortTermMemory(config=config(), summarizer=summarize)
    store = PlainStore()
    for text in ("one", "two"):
        await say(theirs, store, text)
    await asyncio.wait_for(asked.wait(), 30)
    await say(mine, store, "three")
    go_on.set()
    await theirs.flush()
    assert said(store.state(KEY))[-2:] == ["two", "three"]
    await say(theirs, store, "four")
    assert said(store.state(KEY))[-2:] == ["three", "four"]

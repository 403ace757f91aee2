"""The limits of a backend apply to the entries of long-term memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends import LimitReached, Limits, MemoryKey
from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.telemetry.observer import Observer, Subject
from stm_backends.tiers import BackendGraph, MemoryEntry, MemoryManager, MemoryTier, SharedShortTermMemory

OWNER = ("acme", "u1")
LONG = MemoryTier.LONG_TERM


class Heard(Observer):
    def __init__(self) -> None:
        self.reached: list[tuple[Subject, str]] = []

    def limit_reached(self, subject: Subject, limit: str) -> None:
        self.reached.append((subject, limit))


def limited(store: MemoryStore, observer: Observer | None = None, **limits: int) -> Backend:
    return Backend(MemoryDriver(store), limits=Limits(**limits), observer=observer or Observer())


async def test_an_entry_beyond_the_limit_is_refused_and_not_stored() -> None:
    heard = Heard()
    async with limited(MemoryStore(), heard, memory_characters=60) as backend:
        memory = MemoryManager(backend=backend, owner=OWNER)
        await memory.remember("k", "short", tier=LONG)
        for key, value in (("k", "x" * 60), ("other", ["x"] * 60)):
            with pytest.raises(LimitReached, match="memory_characters"):
                await memory.remember(key, value, tier=LONG)
        assert [(one.key, one.content) for one in await memory.recall("k")] == [("k", "short")]
        assert await memory.long_term.recall("x") == []
    assert heard.reached == [(Subject("acme", "u1"), "memory_characters")] * 2


async def test_an_entry_stored_before_the_limit_can_be_recalled_and_merged() -> None:
    store = MemoryStore()
    async with limited(store) as backend:
        memory = MemoryManager(backend=backend, owner=OWNER)
        await memory.remember("long", "many words " * 20, tier=LONG)
        await memory.remember("same", "words many " * 20, tier=LONG)
    async with limited(store, memory_characters=60) as backend:
        memory = MemoryManager(backend=backend, owner=OWNER)
        assert [one.access_count for one in await memory.recall("many")] == [1, 1]
        assert await memory.long_term.consolidate() == 1
        assert len(await memory.get_context_window(1_000)) == 1


async def test_a_session_of_more_operations_than_the_limit_is_folded() -> None:
    async with asyncio.timeout(20), limited(MemoryStore(), conversation_turns=20) as backend:
        memory = SharedShortTermMemory(backend, MemoryKey("acme", "u1", "chat"))
        for number in range(60):
            entry = MemoryEntry(f"k{number}", f"fact {number}", MemoryTier.SHORT_TERM)
            while True:
                try:
                    await memory.remember(entry)
                    break
                except LimitReached:
                    # A fold in the background makes room.
                    await asyncio.sleep(0.01)
        assert len(await memory.listed()) == 60


async def test_a_user_has_no_more_memories_than_the_limit() -> None:
    async with limited(MemoryStore(), user_memories=3) as backend:
        memory = MemoryManager(backend=backend, owner=OWNER)
        other = MemoryManager(backend=backend, owner=("acme", "u2"))
        results: list[Any] = await asyncio.gather(
            *(memory.remember(f"k{n}", f"fact {n}", tier=LONG) for n in range(6)), return_exceptions=True
        )
        assert sum(isinstance(one, LimitReached) for one in results) == 3
        assert len(await memory.long_term.listed()) == len(await memory.recall("fact")) == 3
        await other.remember("k", "fact", tier=LONG)
        [first, *_] = await memory.long_term.listed()
        await memory.remember(first.key, "a new fact", tier=LONG)
        await memory.forget(first.key)
        await memory.remember("room", "fact again", tier=LONG)
        with pytest.raises(LimitReached, match="user_memories"):
            await memory.remember("more", "fact", tier=LONG)
        graph = BackendGraph(backend, OWNER)
        assert await graph.reindex() == 0

"""Turns of any size on every datastore: stored, shown, folded, copied and erased."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stm_backends import (
    ConversationTurn,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key
from stm_backends.records import keys
from stm_backends.testing.workbench.drivers import names_in
from tests.support.places import EACH, Place, quick_on

KEY = MemoryKey("acme", "u1", "chat")
WHERE = keys.memory_key(KEY)
PARTS = keys.parts_of(WHERE).scope

pytestmark = pytest.mark.parametrize("datastore", quick_on("dynamo", ["sqlite", *EACH]))


def text(size: int) -> str:
    return os.urandom(size // 2).hex()


def turn(size: int) -> ConversationTurn:
    return ConversationTurn(user_message=text(size), assistant_response="seen", ts=1.0)


def config(zone: int = 12, *, ttl: float | None = None) -> ShortTermMemoryConfig:
    budget = MemoryBudget(full_zone_turns=zone, total_max_tokens=0)
    return ShortTermMemoryConfig(strategy="truncation", budget=budget, session_ttl_s=ttl)


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Backend]:
    async with open_backend(place.url, create=True) as backend:
        yield backend


async def parts(backend: Backend) -> list[str]:
    return await names_in(backend.driver, PARTS)


async def test_a_turn_of_4_mib_and_ten_of_300_kb_are_stored_and_shared(
    place_on: Callable[[str], Place], datastore: str
) -> None:
    place = place_on(datastore)
    turns = [turn(4 * 1024 * 1024), *(turn(300_000) for _ in range(10))]
    async with opened(place) as one, opened(place) as two:
        memory = one.memory(KEY, config())
        for added in turns:
            await memory.add_turn(added)
        assert await two.memory(KEY, config()).turns() == turns
        shown = (await two.memory(KEY, config()).get_llm_context())["conversation_memory"]
        assert shown["recent_turns"][0]["user"] == turns[0].user_message
        assert await parts(two)
        assert await two.sessions.erase(KEY)
        assert await parts(one) == []


async def test_turns_of_100_kb_never_get_stuck(place_on: Callable[[str], Place], datastore: str) -> None:
    async with opened(place_on(datastore)) as backend:
        memory, turns = backend.memory(KEY, config(5)), [turn(100_000) for _ in range(12)]
        for added in turns:
            await memory.add_turn(added)
        assert (await memory.turns())[-5:] == turns[-5:]


async def test_large_turns_are_copied_between_datastores_and_compared(
    place_on: Callable[[str], Place], datastore: str, tmp_path: Path
) -> None:
    turns, place = [turn(600_000), turn(300_000), turn(10)], place_on(datastore)
    async with opened(place) as backend:
        for added in turns:
            await backend.memory(KEY, config()).add_turn(added)
    # Closed, so that no card is written during the copies.
    async with opened(place) as source, open_backend(f"sqlite:///{tmp_path}/to.db") as target:
        for left, right in ((source, target), (target, source)):
            copy = Copy(left.driver, right.driver, [Owner("acme")])
            await copy.copy()
            await copy.verify()
            assert copy.ok
        assert await target.memory(KEY, config()).turns() == turns
        assert await target.driver.load(WHERE) == await source.driver.load(WHERE)
        assert await source.sessions.export(KEY) == await target.sessions.export(KEY)
        assert await source.sessions.erase_tenant("acme") == 1
        assert await parts(source) == []


async def test_a_saved_state_of_2_mib_comes_back(place_on: Callable[[str], Place], datastore: str) -> None:
    state = {"text": text(2 * 1024 * 1024)}
    async with opened(place_on(datastore)) as backend:
        await backend.state_store.save_memory_state(KEY.composite(), state)
        assert await backend.state_store.load_memory_state(KEY.composite()) == state
        assert await backend.state_store.delete_memory_state(KEY.composite())
        assert await parts(backend) == []


async def test_parts_are_written_with_the_time_to_live_of_the_conversation(
    place_on: Callable[[str], Place], datastore: str
) -> None:
    async with opened(place_on(datastore)) as backend:
        memory = backend.memory(KEY, config(ttl=3600.0))
        for size in (5_000_000, 10):
            await memory.add_turn(turn(size))
        record = await backend.driver.load(Key(PARTS, (await parts(backend))[0]))
        assert record is not None
        assert b'"ttl":3600.0' in (record.body or b"")[:96]

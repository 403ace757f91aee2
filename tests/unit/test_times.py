"""The times of turns: whatever unit they come in, a conversation becomes old."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig
from stm_backends.admin.purging import last_added
from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import InvalidState
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.records.body import Forgotten
from stm_backends.records.codec import load_turn
from stm_backends.types import as_turn, seconds_of

KEY = MemoryKey("acme", "u1", "chat")
CONFIG = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=3))
NOW = 1_764_000_000.0


@pytest.mark.parametrize("scale", [1, 1_000, 10**6, 10**9])
def test_a_time_in_a_smaller_unit_is_converted(scale: int) -> None:
    assert seconds_of(NOW * scale) == pytest.approx(NOW)
    assert as_turn(ConversationTurn("u", "a", ts=int(NOW) * scale)).ts == pytest.approx(NOW)
    assert load_turn({"ts": NOW * scale}).ts == pytest.approx(NOW)


@pytest.mark.parametrize("ts", [math.nan, -1.0, -NOW * 1000])
def test_a_time_that_is_none_is_unknown(ts: float) -> None:
    assert as_turn(ConversationTurn("u", "a", ts=ts)).ts == 0.0
    assert load_turn({"ts": ts}).ts == 0.0


@pytest.mark.parametrize("ts", [True, False, math.inf, -math.inf, 1e30, "1", None])
def test_what_is_no_time_is_refused(ts: Any) -> None:
    with pytest.raises(InvalidState, match=r"turn\.ts"):
        as_turn(ConversationTurn("u", "a", ts=ts))


def test_a_stored_time_that_is_none_can_be_read() -> None:
    assert [load_turn({"ts": ts}).ts for ts in (True, math.inf, -math.inf, 1e30, None)] == [0.0] * 5


@pytest.mark.parametrize("ts", [NOW * 1000, math.nan, -5.0, NOW * 2, 0.0])
async def test_every_conversation_becomes_old_enough_to_be_purged(ts: float) -> None:
    driver = MemoryDriver()
    await driver.open()
    memory = DistributedShortTermMemory(driver, KEY, CONFIG, clock=lambda: NOW)
    await memory.add_turn(ConversationTurn("u", "a", ts=ts))
    [stored] = await memory.turns()
    assert stored.ts == pytest.approx(NOW)
    assert last_added([stored.ts], Forgotten(), now=NOW) == pytest.approx(NOW)


async def test_a_local_state_with_milliseconds_is_read_in_seconds() -> None:
    memory = DefaultShortTermMemory(config=CONFIG)
    await memory.add_turn(ConversationTurn("u", "a", ts=NOW))
    state = memory.to_dict()
    state["turns"][0]["ts"] = NOW * 1000
    memory.from_dict(state)
    assert [one.ts for one in await memory.turns()] == [NOW]


@pytest.mark.parametrize("ts", [math.nan, -1.0, True])
async def test_an_import_of_what_is_no_time_is_refused(ts: Any) -> None:
    async with Backend(MemoryDriver()) as backend:
        await backend.memory(KEY, CONFIG).add_turn(ConversationTurn("u", "a"))
        document = await backend.sessions.export(KEY)
        document["turns"][0]["ts"] = ts
        with pytest.raises(InvalidState, match=r"turns\[0\]\.ts"):
            await backend.sessions.import_(document, on_conflict="replace")
        document["turns"][0]["ts"] = NOW * 1000
        await backend.sessions.import_(document, on_conflict="replace")
        assert [one.ts for one in await backend.memory(KEY, CONFIG).turns()] == [NOW]

"""The section "Tier 1: Fleeting Memory" of the specification."""

from __future__ import annotations

import threading
from typing import Any

from stm_backends.tiers import FleetingMemory, MemoryManager, MemoryTier


async def test_the_api_example_of_fleeting_memory() -> None:
    mem = FleetingMemory()
    await mem.remember("scratch", {"partial_result": 42})
    [found] = await mem.recall("scratch")
    assert (found.key, found.content, found.tier) == ("scratch", {"partial_result": 42}, MemoryTier.FLEETING)
    assert found.importance == 0.0
    await mem.forget("scratch")
    await mem.forget("scratch")
    assert mem.size == 0
    await mem.remember("other", 1)
    await mem.clear()
    assert mem.size == 0
    assert mem.entries == []


async def test_recall_searches_keys_and_values_for_a_substring() -> None:
    mem = FleetingMemory()
    await mem.remember("Alpha", "one")
    await mem.remember("beta", {"x": "TWO"})
    assert [one.key for one in await mem.recall("lph")] == ["Alpha"]
    assert [one.key for one in await mem.recall("two")] == ["beta"]
    assert len(await mem.recall("")) == 2
    assert await mem.recall("none") == []


async def test_fleeting_memory_keeps_any_object_by_reference(manager: Any) -> None:
    memory: MemoryManager = manager()
    scratch, lock = {"list": [1]}, threading.Lock()
    for key, value in [("scratch", scratch), ("lock", lock)]:
        entry = await memory.remember(key, value, MemoryTier.FLEETING)
        assert entry.content is value
    scratch["list"].append(2)
    [found] = await memory.recall("scratch", tiers=[MemoryTier.FLEETING])
    assert found.content is scratch
    assert [one.content for one in memory.fleeting.entries] == [scratch, lock]
    found.importance = 1.0
    assert [one.importance for one in memory.fleeting.entries] == [0.0, 0.0]

"""The section "Tier 1: Fleeting Memory" of the specification."""

from __future__ import annotations

from stm_backends.tiers import FleetingMemory, MemoryTier


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


async def test_what_the_caller_changes_in_fleeting_memory_is_not_stored() -> None:
    mem = FleetingMemory()
    value = {"list": [1]}
    await mem.remember("k", value)
    value["list"].append(2)
    [found] = await mem.recall("k")
    found.content["list"].append(3)
    assert (await mem.recall("k"))[0].content == {"list": [1]}

"""The section "Garbage Collection" of the specification."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from stm_backends.errors import ConfigurationError
from stm_backends.tiers import MemoryEntry, MemoryGarbageCollector, MemoryManager, MemoryTier

BOTH = pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM])


async def keys(memory: MemoryManager, tier: MemoryTier) -> set[str]:
    store = memory.short_term if tier is MemoryTier.SHORT_TERM else memory.long_term
    return {one.key for one in await store.listed()}


def test_the_collector_has_the_defaults_of_the_configuration_reference(manager: Any) -> None:
    parameters = inspect.signature(MemoryGarbageCollector).parameters
    assert {name: one.default for name, one in parameters.items()} == {
        "memory_manager": inspect.Parameter.empty,
        "llm_provider": None,
        "relevance_threshold": 0.15,
        "duplicate_similarity_threshold": 0.7,
    }
    with pytest.raises(ConfigurationError):
        MemoryGarbageCollector(manager(), relevance_threshold=-1)


@BOTH
async def test_auto_forget_removes_entries_below_the_threshold(
    clock: Any, tier: MemoryTier, manager: Any
) -> None:
    memory = manager(clock=clock)
    await memory.remember("weak", "one", tier=tier, importance=0.1)
    await memory.remember("strong", "two", tier=tier, importance=1.0)
    clock.pass_days(60)
    assert await memory.gc.auto_forget(tier) == 1
    assert await keys(memory, tier) == {"strong"}


@BOTH
async def test_prune_by_relevance_drops_the_bottom_share(clock: Any, tier: MemoryTier, manager: Any) -> None:
    memory = manager(clock=clock)
    for number in range(10):
        await memory.remember(f"k{number}", "text", tier=tier, importance=number / 10)
    assert await memory.gc.prune_by_relevance(tier) == 3
    assert await keys(memory, tier) == {f"k{number}" for number in range(3, 10)}
    assert await memory.gc.prune_by_relevance(tier, keep_ratio=1.0) == 0
    assert await memory.gc.prune_by_relevance(tier, keep_ratio=0.0) == 7
    with pytest.raises(ConfigurationError):
        await memory.gc.prune_by_relevance(tier, keep_ratio=1.5)


@BOTH
async def test_prune_by_staleness_drops_what_was_not_accessed(
    clock: Any, tier: MemoryTier, manager: Any
) -> None:
    memory = manager(clock=clock)
    await memory.remember("stale", "one", tier=tier)
    await memory.remember("used", "two", tier=tier)
    clock.pass_days(20)
    await memory.recall("two")
    clock.pass_days(10)
    assert await memory.gc.prune_by_staleness(tier, max_age_days=30) == 0
    clock.pass_days(0.01)
    assert await memory.gc.prune_by_staleness(tier) == 1
    assert await keys(memory, tier) == {"used"}


@BOTH
async def test_prune_duplicates_keeps_the_more_relevant_entry(
    clock: Any, tier: MemoryTier, manager: Any
) -> None:
    memory = manager(clock=clock)
    await memory.remember("weak", "one two three", tier=tier, importance=0.1, tags=["x"])
    await memory.remember("strong", "three two one", tier=tier, importance=0.9)
    await memory.remember("apart", "one two four five", tier=tier)
    assert await memory.gc.prune_duplicates(tier) == 1
    assert await keys(memory, tier) == {"strong", "apart"}
    [strong] = await memory.recall("three")
    assert strong.tags == ["x"]


async def test_the_collector_leaves_fleeting_memory_alone(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await memory.remember("k", "v", tier=MemoryTier.FLEETING)
    fleeting = MemoryTier.FLEETING
    assert await memory.gc.auto_forget(fleeting) == 0
    assert await memory.gc.prune_by_relevance(fleeting, keep_ratio=0) == 0
    assert await memory.gc.prune_by_staleness(fleeting, max_age_days=0) == 0
    assert await memory.gc.prune_duplicates(fleeting) == 0
    assert await memory.gc.improve_memory(fleeting) == 0
    assert memory.fleeting.size == 1


async def test_summarize_context_without_a_model_cuts_the_joined_text(manager: Any) -> None:
    gc = manager().gc
    entries = [MemoryEntry(f"k{n}", "word " * 1000, MemoryTier.SHORT_TERM) for n in range(3)]
    text = await gc.summarize_context(entries, max_tokens=2000)
    assert len(text) == 8000
    assert "k0" in text
    assert await gc.summarize_context([]) == ""


async def test_summarize_context_with_a_model_is_its_answer(model: Any, manager: Any) -> None:
    gc = manager(llm_provider=model).gc
    entries = [MemoryEntry("k", "the fact </entries>", MemoryTier.SHORT_TERM)]
    assert await gc.summarize_context(entries) == "a summary"
    assert "the fact \\u003c/entries>" in model.prompts[0]
    model.answer = " "
    assert "the fact" in await gc.summarize_context(entries)


@BOTH
async def test_improve_memory_replaces_content_by_the_answer(
    model: Any, tier: MemoryTier, manager: Any
) -> None:
    memory = manager(llm_provider=model)
    await memory.remember("k", "vague", tier=tier, importance=0.9, tags=["x"])
    await memory.remember("other", {"a": 1}, tier=tier)
    model.answer = "precise"
    assert await memory.gc.improve_memory(tier) == 1
    [found] = await memory.recall("precise")
    assert (found.key, found.importance, found.tags) == ("k", 0.9, ["x"])
    assert "other" in model.prompts[0]
    assert [one.content for one in await memory.recall("other")] == [{"a": 1}]
    model.answer = '{"a": 2}'
    await memory.gc.improve_memory(tier)
    assert [one.content for one in await memory.recall("other")] == [{"a": 2}]


async def test_improve_memory_without_a_model_does_nothing(manager: Any) -> None:
    memory = manager()
    await memory.remember("k", "v", tier=MemoryTier.LONG_TERM)
    assert await memory.gc.improve_memory(MemoryTier.LONG_TERM) == 0


async def test_on_turn_end_clears_fleeting_memory_only(manager: Any) -> None:
    memory = manager()
    for tier in MemoryTier:
        await memory.remember("k", "v", tier=tier)
    await memory.gc.on_turn_end()
    assert (memory.fleeting.size, len(await memory.short_term.listed()), memory.long_term.size) == (0, 1, 1)


async def test_on_session_end_promotes_what_is_important(clock: Any, manager: Any) -> None:
    memory = manager(clock=clock)
    await memory.remember("half", "one", importance=0.5, tags=["t"], source_agent="a", source_run_id="r")
    await memory.remember("minor", "two", importance=0.49)
    await memory.remember("used", "three", importance=0.1)
    await memory.remember("scratch", 1, tier=MemoryTier.FLEETING)
    for _ in range(3):
        await memory.short_term.recall("three")
    await memory.gc.on_session_end()
    assert await keys(memory, MemoryTier.LONG_TERM) == {"half", "used"}
    assert memory.fleeting.size == 0
    before = {one.key: one for one in await memory.short_term.listed()}
    for one in await memory.long_term.listed():
        assert one == before[one.key].copied(tier=MemoryTier.LONG_TERM)


async def test_on_session_end_promotes_the_summary(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model, session_id="s1")
    for number in range(12):
        await memory.remember(f"k{number}", f"v{number}", importance=0.1)
    await memory.gc.on_session_end()
    [summary] = await memory.long_term.listed()
    assert summary.key.startswith("__summary__:s1")
    assert (summary.key, summary.content) == (memory.short_term.summary_key, "a summary")
    assert summary.importance == 0.8


async def test_on_idle_maintains_long_term_memory(clock: Any, model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model, clock=clock)
    long = MemoryTier.LONG_TERM
    await memory.remember("stale", "not used for long", tier=long, importance=1.0)
    clock.pass_days(31)
    await memory.remember("a", "one two three four five six seven eight", tier=long, importance=0.9)
    await memory.remember("same", "eight seven six five four three two one", tier=long, importance=0.1)
    await memory.remember("similar", "one two three four five six nine ten", tier=long, importance=0.1)
    await memory.remember("apart", "nothing in common", tier=long)
    model.answer = ""
    await memory.gc.on_idle()
    assert await keys(memory, long) == {"a", "apart"}
    assert len(model.prompts) == 2

"""What the lifecycle must not lose, one test for each sentence of the issue."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import pytest

from stm_backends.errors import Corrupt, Denied, InvalidState, TooLarge, Unavailable
from stm_backends.tiers import (
    InProcessGraph,
    LongTermMemory,
    MemoryEntry,
    MemoryManager,
    MemoryTier,
)
from stm_backends.tiers.graph import Change
from tests.support.graphs import Counting, GraphAround

LONG = MemoryTier.LONG_TERM


async def fill(memory: MemoryManager, count: int = 12, *, start: int = 0, importance: float = 0.1) -> None:
    for number in range(start, start + count):
        await memory.remember(f"k{number}", f"fact {number}", importance=importance)


async def stored(memory: MemoryManager) -> dict[str, Any]:
    return {one.key: one.content for one in await memory.long_term.listed()}


class Outage(GraphAround):
    """A graph that can be down."""

    down = False

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        if self.down:
            raise Unavailable("down")
        return await self.inner.change_vertex(vertex_id, label, change)


@pytest.mark.parametrize("with_model", [True, False])
async def test_an_important_entry_that_is_summarized_is_promoted(
    model: Any, with_model: bool, manager: Any
) -> None:
    memory = manager(llm_provider=model if with_model else None, session_id="s")
    await memory.remember("important", "the key fact", importance=0.9)
    await fill(memory)
    await memory.gc.on_session_end()
    assert "important" not in {one.key for one in await memory.short_term.listed()}
    assert (await stored(memory)).keys() == {"important", memory.short_term.summary_key}
    assert (await stored(memory))["important"] == "the key fact"


async def test_an_entry_summarized_before_the_end_is_promoted_then(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model, session_id="s")
    await memory.remember("important", "the key fact", importance=0.9)
    await fill(memory)
    await memory.short_term.summarize(model)
    assert "important" not in {one.key for one in await memory.short_term.listed()}
    await memory.gc.on_session_end()
    assert (await stored(memory))["important"] == "the key fact"


async def test_an_entry_dropped_for_room_is_promoted_at_the_end(manager: Any) -> None:
    memory = manager()
    memory.short_term.max_entries = 5
    await memory.remember("important", "the key fact", importance=0.5)
    await fill(memory, importance=0.9)
    assert "important" not in {one.key for one in await memory.short_term.listed()}
    await memory.gc.on_session_end()
    assert (await stored(memory))["important"] == "the key fact"


@pytest.mark.parametrize("prune", ["auto_forget", "prune_by_relevance", "prune_by_staleness"])
async def test_an_entry_pruned_from_the_session_is_promoted_if_due(
    manager: Any, clock: Any, prune: str
) -> None:
    memory = manager(clock=clock)
    await memory.remember("used", "the key fact", importance=0.0)
    for _ in range(3):
        await memory.recall("key fact")
    await memory.remember("unused", "something else", importance=0.0)
    clock.pass_days(60)
    arguments = {"prune_by_relevance": {"keep_ratio": 0}}.get(prune, {})
    assert await getattr(memory.gc, prune)(MemoryTier.SHORT_TERM, **arguments) == 2
    assert await memory.recall("") == []
    await memory.gc.on_session_end()
    assert await stored(memory) == {"used": "the key fact"}


async def test_a_summary_dropped_for_room_survives_beside_the_next_one(manager: Any, model: Any) -> None:
    memory = manager(llm_provider=model, session_id="s")
    await fill(memory)
    model.answer = "of the first entries"
    await memory.short_term.summarize(model)
    memory.short_term.max_entries = 20
    await fill(memory, 20, start=100, importance=0.9)
    assert "__summary__" not in {one.key for one in await memory.short_term.listed()}
    model.answer = "of the others"
    await memory.gc.on_session_end()
    found = await stored(memory)
    summaries = {found[key] for key in found if key.startswith("__summary__:s")}
    assert summaries == {"of the first entries", "of the others"}


async def test_a_forgotten_entry_that_was_set_aside_is_not_promoted(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model, session_id="s")
    await memory.remember("important", "the key fact", importance=0.9)
    await fill(memory)
    await memory.short_term.summarize(model)
    await memory.forget("important")
    await memory.gc.on_session_end()
    assert "important" not in await stored(memory)


async def test_an_entry_updated_while_the_model_summarizes_keeps_it(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)
    model.during = lambda: memory.remember("k0", "updated", importance=0.1)
    await memory.short_term.summarize(model)
    found = {one.key: one.content for one in await memory.short_term.listed()}
    assert found["k0"] == "updated"
    assert "k1" not in found


async def test_an_entry_added_while_the_model_summarizes_is_kept(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)
    model.during = lambda: memory.remember("added", "new", importance=0.1)
    await memory.short_term.summarize(model)
    assert "added" in {one.key for one in await memory.short_term.listed()}


async def test_accesses_while_the_model_summarizes_count_for_promotion(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)

    async def use() -> None:
        for _ in range(3):
            await memory.recall("fact 0")

    model.during = use
    await memory.gc.on_session_end()
    [found] = await memory.long_term.recall("k0")
    assert (found.content, found.access_count) == ("fact 0", 4)


async def test_an_entry_forgotten_while_the_model_summarizes_is_gone(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)

    async def forget() -> None:
        model.answer = "without it"
        await memory.forget("k0")

    model.during = forget
    assert (await memory.short_term.summarize(model)).content == "without it"
    assert len(model.prompts) == 2
    assert "fact 0" not in model.prompts[1]


async def test_a_summary_forgotten_while_the_next_is_written_is_gone(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)
    model.answer = "the secret"
    await memory.short_term.summarize(model)
    await fill(memory, start=100)

    async def forget() -> None:
        model.answer = "without it"
        await memory.forget("__summary__")

    model.answer, model.during = "with the secret", forget
    assert (await memory.short_term.summarize(model)).content == "without it"
    assert "the secret" in model.prompts[1]
    assert "the secret" not in model.prompts[2]


async def test_two_summaries_at_once_lose_no_entry(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)
    model.during = lambda: asyncio.sleep(0)
    await asyncio.gather(memory.short_term.summarize(model), memory.short_term.summarize(model))
    assert len(model.prompts) == 1
    assert len(await memory.short_term.listed()) == 11


@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, LONG])
async def test_an_entry_updated_while_the_model_improves_keeps_it(
    model: Any, tier: MemoryTier, manager: Any
) -> None:
    memory = manager(llm_provider=model)
    await memory.remember("k", "old", tier=tier)
    model.answer = "old, improved"
    model.during = lambda: memory.remember("k", "new", tier=tier)
    assert await memory.gc.improve_memory(tier) == 0
    assert [one.content for one in await memory.recall("k")] == ["new"]


@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, LONG])
async def test_an_entry_forgotten_while_the_model_improves_stays_gone(
    model: Any, tier: MemoryTier, manager: Any
) -> None:
    memory = manager(llm_provider=model)
    await memory.remember("k", "old", tier=tier)
    model.answer = "old, improved"
    model.during = lambda: memory.forget("k")
    assert await memory.gc.improve_memory(tier) == 0
    assert await memory.recall("") == []


async def test_accesses_while_the_model_improves_are_counted(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await memory.remember("k", "old", tier=LONG)
    model.answer = "better"
    model.during = lambda: memory.recall("k")
    assert await memory.gc.improve_memory(LONG) == 1
    [found] = await memory.long_term.listed()
    assert (found.content, found.access_count) == ("better", 1)


@pytest.mark.parametrize("answer", ["", "  \n"])
async def test_an_empty_answer_of_the_model_changes_nothing(model: Any, answer: str, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await fill(memory)
    await memory.remember("k", "v", tier=LONG)
    model.answer = answer
    before = await memory.short_term.listed()
    assert await memory.short_term.summarize(model) is None
    assert await memory.short_term.listed() == before
    assert await memory.gc.improve_memory(LONG) == 0
    assert await stored(memory) == {"k": "v"}


async def test_a_model_that_fails_leaves_a_summary_of_cut_text(
    model: Any, manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counting()
    memory = manager(llm_provider=model, observer=counted)
    await memory.remember("important", "the key fact", importance=0.9)
    await fill(memory)
    model.answer = RuntimeError("no model: the secret of a user")
    await memory.gc.on_session_end()
    summary = next(one for one in await memory.short_term.listed() if one.key == "__summary__")
    assert "[k0] fact 0" in summary.content
    assert await memory.gc.summarize_context([summary]) == f"[__summary__] {summary.content}"
    assert (await stored(memory))["important"] == "the key fact"
    assert memory.fleeting.size == 0
    # A session in a conversation reports to the observer of its backend.
    assert counted.counts["truncated", "short_term"] in (1, 2)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


async def test_a_second_truncated_summary_keeps_some_of_the_newer_batch(manager: Any) -> None:
    memory = manager()
    for number in range(11):
        await memory.remember(f"a{number}", "first " * 1000)
    await memory.short_term.summarize()
    for number in range(11):
        await memory.remember(f"b{number}", "second " * 1000)
    text = (await memory.short_term.summarize()).content
    for number in range(11):
        await memory.remember(f"c{number}", "third " * 1000)
    again = (await memory.short_term.summarize()).content
    assert max(len(text), len(again)) <= 2000
    assert "first" in again
    assert "second" in text
    assert "second" in again


async def test_the_summaries_of_two_sessions_both_survive(model: Any, manager: Any, new_graph: Any) -> None:
    graph = new_graph()
    for answer in ("of the first session", "of the second session"):
        model.answer = answer
        memory = manager(graph_backend=graph, llm_provider=model)
        await fill(memory)
        await memory.gc.on_session_end()
    found = await LongTermMemory(graph).recall("__summary__")
    assert {one.content for one in found} == {"of the first session", "of the second session"}


async def test_the_summaries_of_two_sessions_of_one_manager_survive(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    for number, answer in enumerate(("of the first session", "of the second session")):
        model.answer = answer
        await fill(memory, start=100 * number)
        await memory.gc.on_session_end()
        await memory.gc.on_session_end()
    assert sorted((await stored(memory)).values()) == ["of the first session", "of the second session"]


async def test_an_entry_that_cannot_be_stored_keeps_no_other_from_promotion(
    model: Any, new_graph: Any
) -> None:
    memory = MemoryManager(new_graph(), llm_provider=model, session_id="s")
    await memory.remember("first", {1, 2}, importance=0.9)
    await memory.remember("important", "the key fact", importance=0.9)
    await memory.remember("scratch", 1, tier=MemoryTier.FLEETING)
    await fill(memory)
    for _ in range(2):
        with pytest.raises(InvalidState, match="content"):
            await memory.gc.on_session_end()
        assert await stored(memory) == {"important": "the key fact", "__summary__:s": "a summary"}
        assert memory.fleeting.size == 0
    await memory.forget("first")
    await memory.gc.on_session_end()


async def test_two_memories_on_a_graph_of_eight_methods_lose_no_access() -> None:
    class Slow(GraphAround):
        """A graph of eight methods that lets other tasks run before it answers."""

        change_vertex = list_vertices = None

        async def query_vertex(self, vertex_id: str) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] -- a method in place of a copied one
            found = await self.inner.query_vertex(vertex_id)
            await asyncio.sleep(0)
            return found

    graph = Slow(InProcessGraph())
    one, other = LongTermMemory(graph), LongTermMemory(graph)
    entry = MemoryEntry("k", "v", LONG)
    await one.remember(entry)
    await asyncio.gather(*(memory.touch([entry]) for memory in (one, other) for _ in range(5)))
    [found] = await other.listed()
    assert found.access_count == 10


@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, LONG])
async def test_equal_scalars_under_different_keys_are_kept(tier: MemoryTier, manager: Any) -> None:
    memory = manager()
    for key, value in [("a", 1), ("b", 1), ("c", "Alice"), ("d", "Alice"), ("e", True), ("f", None)]:
        await memory.remember(key, value, tier=tier)
    for key in ("apples", "pears"):
        await memory.remember(key, {"count": 3, "state": ["ripe"]}, tier=tier)
    assert await memory.gc.prune_duplicates(tier) == 0
    assert await memory.long_term.consolidate() == 0


@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, LONG])
async def test_a_chain_of_duplicates_keeps_what_no_survivor_says(tier: MemoryTier, manager: Any) -> None:
    memory = manager()
    memory.gc.duplicate_similarity_threshold = 0.6
    for key, text, importance in [("1", "a b c d", 0.9), ("2", "b c d e", 0.8), ("3", "c d e f", 0.7)]:
        await memory.remember(key, text, tier=tier, importance=importance)
    assert await memory.gc.prune_duplicates(tier) == 1
    assert {one.key for one in await memory.recall("")} == {"1", "3"}


@pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, LONG])
async def test_metadata_of_a_merged_entry_reaches_a_survivor(tier: MemoryTier, manager: Any) -> None:
    memory = manager()
    # "2" is merged into "1", and "3" is similar to both: its metadata must not go to "2".
    for key, importance in [("1", 0.9), ("2", 0.8), ("3", 0.7)]:
        await memory.remember(key, "a b c d", tier=tier, importance=importance, tags=[f"tag{key}"])
    assert await memory.gc.prune_duplicates(tier) == 2
    [left] = await memory.recall("")
    assert (left.key, sorted(left.tags)) == ("1", ["tag1", "tag2", "tag3"])


async def test_an_outage_of_the_graph_is_an_error_and_no_silent_copy(manager: Any, new_graph: Any) -> None:
    graph = Outage(new_graph())
    memory = manager(graph_backend=graph)
    graph.down = True
    with pytest.raises(Unavailable):
        await memory.remember("k", "v", tier=LONG)
    graph.down = False
    assert await memory.recall("k") == []
    assert memory.long_term.size == 0


async def test_a_session_end_in_an_outage_can_be_repeated(model: Any, manager: Any, new_graph: Any) -> None:
    graph = Outage(new_graph())
    memory = manager(graph_backend=graph, llm_provider=model, session_id="s")
    await memory.remember("important", "the key fact", importance=0.9)
    await fill(memory)
    before = await memory.short_term.listed()
    graph.down = True
    with pytest.raises(Unavailable):
        await memory.gc.on_session_end()
    assert await memory.short_term.listed() == before
    graph.down = False
    await memory.gc.on_session_end()
    assert (await stored(memory)).keys() == {"important", memory.short_term.summary_key}


async def test_an_outage_during_the_summary_loses_nothing(model: Any, manager: Any, new_graph: Any) -> None:
    graph = Outage(new_graph())
    memory = manager(graph_backend=graph, llm_provider=model, session_id="s")
    await fill(memory)

    async def use_and_fail() -> None:
        for _ in range(3):
            await memory.short_term.recall("fact 0")
        graph.down = True

    model.during = use_and_fail
    with pytest.raises(Unavailable):
        await memory.gc.on_session_end()
    graph.down = False
    await memory.gc.on_session_end()
    assert (await stored(memory)).keys() == {"k0", memory.short_term.summary_key}


async def test_a_fallback_that_was_asked_for_is_announced(
    caplog: pytest.LogCaptureFixture, manager: Any, new_graph: Any
) -> None:
    graph = Outage(new_graph())
    memory = manager(graph_backend=graph, hold_on_outage=True)
    graph.down = True
    with caplog.at_level(logging.WARNING, "stm_backends"):
        await memory.remember("k", "secret text", tier=LONG)
        await memory.remember("forgotten", "secret text", tier=LONG)
        assert memory.long_term.held == 2
        assert [one.content for one in await memory.recall("k")] == ["secret text"]
        with pytest.raises(Unavailable):
            await memory.forget("forgotten")
    assert "graph failed" in caplog.text
    assert "secret" not in caplog.text
    graph.down = False
    assert await stored(memory) == {"k": "secret text"}
    assert memory.long_term.held == 0
    assert await stored(manager(graph_backend=graph)) == {"k": "secret text"}


async def test_a_promotion_that_is_only_held_is_repeated_by_the_next_end(
    manager: Any, new_graph: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graph = Outage(new_graph())
    memory = manager(graph, session_id="s", hold_on_outage=True)
    await memory.remember("important", "the key fact", importance=0.9)
    graph.down = True
    await memory.gc.on_session_end()
    assert memory.long_term.held == 1
    assert "graph failed" in caplog.text
    graph.down = False
    # This process dies with what it holds, and the session is ended by another one.
    after = MemoryManager(graph, short_term=memory.short_term)
    await after.gc.on_session_end()
    assert await stored(after) == {"important": "the key fact"}


@pytest.mark.parametrize("error", [TooLarge("entry", size=2, limit=1), Denied("no"), Corrupt("damaged")])
async def test_a_refusal_is_raised_and_never_held(error: Exception, manager: Any, new_graph: Any) -> None:
    class Refusing(GraphAround):
        refuses = True

        async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
            if self.refuses:
                raise error
            return await self.inner.change_vertex(vertex_id, label, change)

    graph = Refusing(new_graph())
    memory = manager(graph, hold_on_outage=True)
    with pytest.raises(type(error)):
        await memory.remember("refused", "x", tier=LONG)
    graph.refuses = False
    await memory.remember("k", "v", tier=LONG)
    assert (await stored(memory), memory.long_term.held) == ({"k": "v"}, 0)


async def test_a_held_entry_that_is_refused_later_blocks_nothing(
    manager: Any, new_graph: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(Outage):
        async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
            if not self.down and vertex_id.endswith("large"):
                raise TooLarge("entry", size=2, limit=1)
            return await super().change_vertex(vertex_id, label, change)

    graph = Small(new_graph())
    memory = manager(graph, hold_on_outage=True)
    await memory.remember("before", "the first fact", tier=LONG)
    graph.down = True
    await memory.remember("large", "the large fact", tier=LONG)
    await memory.remember("small", "the small fact", tier=LONG)
    graph.down = False
    found = await memory.recall("fact", tiers=[LONG])
    assert {one.key for one in found} == {"before", "small"}
    await memory.remember("after", "the last fact", tier=LONG)
    assert (await stored(memory)).keys() == {"before", "small", "after"}
    assert memory.long_term.held == 1
    assert caplog.text.count("refuses") == 1
    with pytest.raises(TooLarge):
        await memory.long_term.reconcile()
    await memory.remember("large", "smaller", tier=MemoryTier.SHORT_TERM)
    with suppress(TooLarge):
        await memory.forget("large")
    assert memory.long_term.held == 0


async def test_an_entry_forgotten_while_it_is_reconciled_stays_gone(manager: Any, new_graph: Any) -> None:
    class Slow(Outage):
        async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
            if slow:
                started.set()
                slow.pop()
                await go.wait()
            return await super().change_vertex(vertex_id, label, change)

    started, go, slow = asyncio.Event(), asyncio.Event(), list[int]()
    graph = Slow(new_graph())
    memory = manager(graph, hold_on_outage=True)
    graph.down = True
    await memory.remember("k", "v", tier=LONG)
    graph.down = False
    slow.append(1)
    reconciling = asyncio.ensure_future(memory.long_term.reconcile())
    await started.wait()
    forgetting = asyncio.ensure_future(memory.forget("k"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(reconciling, forgetting)
    assert await stored(memory) == {}


async def test_a_held_entry_does_not_replace_a_newer_one(clock: Any, manager: Any, new_graph: Any) -> None:
    graph = Outage(new_graph())
    one = manager(graph_backend=graph, hold_on_outage=True, clock=clock)
    other = manager(graph_backend=graph, clock=clock)
    graph.down = True
    await one.remember("k", "old", tier=LONG, tags=["held"])
    graph.down = False
    clock.pass_days(1)
    await other.remember("k", "new", tier=LONG)
    await one.long_term.reconcile()
    [found] = await other.long_term.listed()
    assert (found.content, found.tags) == ("new", ["held"])


async def test_what_the_caller_changes_afterwards_is_not_stored(manager: Any) -> None:
    memory = manager()
    for tier in (MemoryTier.SHORT_TERM, LONG):
        value, tags = {"list": [1]}, ["a"]
        entry = await memory.remember("k", value, tier=tier, tags=tags)
        value["list"].append(2)
        tags.append("b")
        entry.content["list"].append(3)
        entry.tags.append("c")
        [found] = await memory.recall("k", tiers=[tier])
        found.content["list"].append(4)
        [again] = await memory.recall("k", tiers=[tier])
        assert again.content == {"list": [1]}
        assert again.tags == ["a"]


async def test_ending_a_session_twice_promotes_once(model: Any, manager: Any) -> None:
    memory = manager(llm_provider=model)
    await memory.remember("important", "the key fact", importance=0.9)
    await fill(memory)
    await memory.gc.on_session_end()
    before = await memory.long_term.listed()
    await memory.gc.on_session_end()
    assert await memory.long_term.listed() == before
    assert len(before) == 2


async def test_a_promotion_keeps_an_improvement_and_takes_an_update(
    model: Any, clock: Any, manager: Any
) -> None:
    memory = manager(clock=clock)
    await memory.remember("k", "old", importance=0.9)
    await memory.gc.on_session_end()
    memory.gc.llm_provider = model
    model.answer = "improved"
    await memory.gc.improve_memory(LONG)
    memory.gc.llm_provider = None
    await memory.gc.on_session_end()
    assert await stored(memory) == {"k": "improved"}
    clock.pass_days(1)
    await memory.remember("k", "updated", importance=0.9)
    await memory.gc.on_session_end()
    assert await stored(memory) == {"k": "updated"}


async def test_accesses_of_several_processes_add_up(new_graph: Any) -> None:
    graph = new_graph()
    processes = [LongTermMemory(graph) for _ in range(3)]
    await processes[0].remember(MemoryEntry("k", "v", LONG))
    await asyncio.gather(*(one.recall("k") for one in processes for _ in range(5)))
    [found] = await processes[0].listed()
    assert found.access_count == 15

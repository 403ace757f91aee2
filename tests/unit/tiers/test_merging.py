"""Merges of long-term memory that other processes interrupt or change."""

from __future__ import annotations

from typing import Any

import pytest

from stm_backends.errors import Unavailable
from stm_backends.tiers import LongTermMemory, MemoryEntry, MemoryManager, MemoryTier, SharedGraph
from stm_backends.tiers.graph import Change
from tests.support.graphs import GraphAround


class Interrupted(GraphAround):
    """A graph that does something before, or fails at, the n-th change from now on."""

    def __init__(self, inner: SharedGraph) -> None:
        super().__init__(inner)
        self.changes = 0
        self.fail_at = 0
        self.before: dict[int, Any] = {}

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        self.changes += 1
        now = self.changes
        if now == self.fail_at:
            raise Unavailable("down")
        if now in self.before:
            await self.before.pop(now)()
        return await self.inner.change_vertex(vertex_id, label, change)


def entry(key: str, content: str, **fields: Any) -> MemoryEntry:
    return MemoryEntry(key, content, MemoryTier.LONG_TERM, **fields)


@pytest.fixture
async def graph(new_graph: Any) -> Interrupted:
    graph = Interrupted(new_graph())
    ltm = LongTermMemory(graph)
    await ltm.remember(entry("strong", "a b c", importance=0.9, access_count=3))
    await ltm.remember(entry("weak", "c b a", importance=0.1, access_count=2, tags=["x"]))
    graph.changes = 0
    return graph


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_merge_that_fails_at_any_step_is_finished_once(graph: Interrupted, step: int) -> None:
    graph.fail_at = step
    with pytest.raises(Unavailable):
        await LongTermMemory(graph).consolidate()
    assert "strong" in {one.key for one in await LongTermMemory(graph).listed()}
    assert await LongTermMemory(graph).consolidate() == 1
    [left] = await LongTermMemory(graph).listed()
    assert (left.key, left.access_count, left.tags) == ("strong", 5, ["x"])
    weak = await graph.inner.query_vertex("memory:weak")
    assert (weak["properties"]["superseded_by"], weak["properties"]["content"]) == ("strong", None)


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_two_processes_that_merge_at_once_count_once(graph: Interrupted, step: int) -> None:
    async def other() -> None:
        await LongTermMemory(graph).consolidate()

    graph.before[step] = other
    await LongTermMemory(graph).consolidate()
    [left] = await LongTermMemory(graph).listed()
    assert (left.key, left.access_count) == ("strong", 5)


@pytest.mark.parametrize("step", [1, 2])
async def test_a_survivor_changed_during_the_merge_swallows_nothing(graph: Interrupted, step: int) -> None:
    async def other() -> None:
        await LongTermMemory(graph).remember(entry("strong", "x y z", importance=0.9))

    graph.before[step] = other
    assert await LongTermMemory(graph).consolidate() == 0
    found = {one.key: one.content for one in await LongTermMemory(graph).listed()}
    assert found == {"strong": "x y z", "weak": "c b a"}


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_loser_changed_during_the_merge_keeps_its_update(graph: Interrupted, step: int) -> None:
    async def other() -> None:
        await LongTermMemory(graph).remember(entry("weak", "x y z"))

    graph.before[step] = other
    await LongTermMemory(graph).consolidate()
    found = {one.key: one.content for one in await LongTermMemory(graph).listed()}
    assert found == {"strong": "a b c", "weak": "x y z"}


async def test_a_survivor_forgotten_during_the_merge_leaves_the_loser(graph: Interrupted) -> None:
    async def other() -> None:
        await LongTermMemory(graph).forget("strong")

    graph.before[2] = other
    assert await LongTermMemory(graph).consolidate() == 0
    [left] = await LongTermMemory(graph).listed()
    assert (left.key, left.superseded_by) == ("weak", None)


async def test_an_access_during_the_merge_is_not_lost(graph: Interrupted) -> None:
    async def other() -> None:
        await LongTermMemory(graph).recall("a b c")

    graph.before[1] = other
    await LongTermMemory(graph).consolidate()
    [left] = await LongTermMemory(graph).listed()
    assert left.access_count == 3 + 2 + 2


LONG = MemoryTier.LONG_TERM


async def stored(memory: MemoryManager) -> dict[str, Any]:
    return {one.key: one.content for one in await memory.long_term.listed()}


async def test_a_session_ended_again_after_a_merge_creates_nothing(manager: Any, clock: Any) -> None:
    memory = manager(clock=clock)
    await memory.remember("strong", "a b c", importance=0.9)
    await memory.remember("weak", "c b a", importance=0.6, tags=["x"])
    await memory.gc.on_session_end()
    await memory.long_term.recall("a")
    assert await memory.long_term.consolidate() == 1
    before = await memory.long_term.listed()
    await memory.gc.on_session_end()
    assert await memory.long_term.listed() == before
    assert await memory.long_term.consolidate() == 0
    [left] = await memory.long_term.listed()
    assert (left.key, left.access_count, left.tags) == ("strong", 2, ["x"])
    assert memory.long_term.size == 1


async def test_a_merged_entry_that_is_updated_later_is_promoted(manager: Any, clock: Any) -> None:
    memory = manager(clock=clock)
    await memory.remember("strong", "a b c", importance=0.9)
    await memory.remember("weak", "c b a", importance=0.6)
    await memory.gc.on_session_end()
    await memory.long_term.consolidate()
    clock.pass_days(1)
    await memory.remember("weak", "something else", importance=0.6)
    await memory.gc.on_session_end()
    assert await stored(memory) == {"strong": "a b c", "weak": "something else"}
    await memory.forget("weak")
    assert await stored(memory) == {"strong": "a b c"}


async def test_a_merged_entry_is_remembered_for_thirty_days(manager: Any, new_graph: Any, clock: Any) -> None:
    graph = new_graph()
    memory = manager(graph, clock=clock)
    for key in ("strong", "weak"):
        await memory.remember(key, "a b c", tier=LONG, importance=0.9 if key == "strong" else 0.1)
    await memory.long_term.consolidate()
    clock.pass_days(30)
    await memory.long_term.consolidate()
    assert await graph.query_vertex("memory:weak") is not None
    clock.pass_days(0.1)
    assert await memory.long_term.consolidate() == 0
    assert await graph.query_vertex("memory:weak") is None
    assert await stored(memory) == {"strong": "a b c"}

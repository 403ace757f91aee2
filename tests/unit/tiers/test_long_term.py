"""The section "Tier 3: Long-Term Memory" of the specification, on each kind of graph."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import ConfigurationError, InvalidState
from stm_backends.tiers import (
    BackendGraph,
    GraphBackend,
    InProcessGraph,
    LongTermMemory,
    MemoryEntry,
    MemoryTier,
)
from stm_backends.tiers.long_term import INDEXED


class EightMethods:
    """A graph of another library: only the methods of the protocol, and edges that are kept twice."""

    def __init__(self) -> None:
        self.vertices: dict[str, dict[str, Any]] = {}
        self.edges: list[tuple[str, str, str, dict[str, Any]]] = []

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        self.vertices[vertex_id] = {"id": vertex_id, "label": label, "properties": dict(properties)}

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        self.vertices[vertex_id]["properties"].update(properties)

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        self.edges.append((source_id, target_id, label, properties))

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        return self.vertices.get(vertex_id)

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        return [self.vertices[target] for source, target, *_ in self.edges if source == vertex_id]

    async def query_parents(self, vertex_id: str) -> list[dict[str, Any]]:
        return [self.vertices[source] for source, target, *_ in self.edges if target == vertex_id]

    async def get_full_trace(self, run_id: str) -> dict[str, Any]:
        return {"vertices": [], "edges": [], "run_id": run_id}

    async def clear(self) -> None:
        self.vertices.clear()
        self.edges.clear()


@pytest.fixture(params=[InProcessGraph, EightMethods, BackendGraph])
async def graph(request: pytest.FixtureRequest) -> AsyncIterator[GraphBackend]:
    if request.param is not BackendGraph:
        yield request.param()
        return
    async with Backend(MemoryDriver()) as backend:
        yield BackendGraph(backend, ("acme", "u1"))


def entry(key: str, content: Any, clock: Callable[[], Any], **fields: Any) -> MemoryEntry:
    return MemoryEntry(
        key, content, MemoryTier.SHORT_TERM, created_at=clock(), last_accessed=clock(), **fields
    )


async def test_the_api_example_of_long_term_memory(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph_backend=graph, relevance_threshold=0.10, clock=clock)
    await ltm.remember(
        entry("ui", "user preferences: dark", clock, source_agent="researcher", source_run_id="run-abc123")
    )
    await ltm.remember(entry("other", "something else", clock, source_agent="writer"))
    assert [one.key for one in await ltm.recall("user preferences")] == ["ui"]
    assert [one.key for one in await ltm.recall_by_agent("researcher")] == ["ui"]
    [found] = await ltm.recall_by_run("run-abc123")
    assert (found.key, found.tier, found.access_count) == ("ui", MemoryTier.LONG_TERM, 3)
    assert await ltm.consolidate() == 0
    assert await ltm.decay() == 0
    assert ltm.size == 2


def test_the_long_term_defaults_are_those_of_the_document() -> None:
    parameters = inspect.signature(LongTermMemory).parameters
    assert list(parameters)[:2] == ["graph_backend", "relevance_threshold"]
    assert parameters["graph_backend"].default is None
    assert parameters["relevance_threshold"].default == 0.10
    with pytest.raises(ConfigurationError):
        LongTermMemory(relevance_threshold=2)


async def test_entries_are_vertices_with_the_label_memory() -> None:
    graph = InProcessGraph()
    await LongTermMemory(graph).remember(MemoryEntry("k", "c", MemoryTier.LONG_TERM, source_run_id="r"))
    trace = await graph.get_full_trace("r")
    assert [(v["label"], v["properties"]["key"]) for v in trace["vertices"]] == [("memory", "k")]


async def test_two_memories_on_one_graph_see_the_same_entries(graph: GraphBackend, clock: Any) -> None:
    one, other = LongTermMemory(graph, clock=clock), LongTermMemory(graph, clock=clock)
    await one.remember(entry("k", "content", clock))
    [found] = await other.recall("content")
    assert found.key == "k"
    await other.forget("k")
    assert await one.recall("") == []
    await one.remember(entry("k", "again", clock))
    assert [found.content for found in await other.recall("")] == ["again"]


@pytest.mark.parametrize("how", ["listed", "with_vectors", "consolidate"])
async def test_a_process_no_longer_knows_of_what_others_removed(
    graph: GraphBackend, clock: Any, how: str
) -> None:
    one, other = LongTermMemory(graph, clock=clock), LongTermMemory(graph, clock=clock)
    for key in ("kept", "gone"):
        await one.remember(entry(key, f"content of {key}", clock))
    assert len(await other.recall("content")) == 2
    await one.forget("gone")
    await other.recall("kept")
    await getattr(other, how)()
    assert other.size == 1


async def test_what_changes_during_a_listing_is_known_afterwards(clock: Any) -> None:
    class Paged(InProcessGraph):
        """Lets others work after its last page."""

        async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
            async for page in super().list_vertices(label):
                yield page
            await ltm.remember(entry("new", "content", clock))
            await ltm.forget("gone")

    ltm = LongTermMemory(Paged(), clock=clock)
    for key in ("kept", "gone"):
        await ltm.remember(entry(key, "content", clock))
    await ltm.listed()
    assert ltm.size == 2
    await ltm.forget("new")
    assert ltm.size == 1


async def test_results_are_sorted_by_relevance_and_can_be_limited(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    for key, importance in [("a", 0.2), ("b", 0.9), ("c", 0.5)]:
        await ltm.remember(entry(key, "text", clock, importance=importance))
    assert [one.key for one in await ltm.recall("TEXT")] == ["b", "c", "a"]
    assert [one.key for one in await ltm.recall("text", limit=1)] == ["b"]
    assert [(one.key, one.access_count) for one in await ltm.recall("")] == [("b", 3), ("c", 2), ("a", 2)]


async def test_decay_prunes_what_falls_below_the_threshold(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    await ltm.remember(entry("faded", "one", clock, importance=0.2))
    await ltm.remember(entry("important", "two", clock, importance=1.0))
    clock.pass_days(13)
    # (1/14*0.3 + 0.2*0.4 + 0.95^13*0.1) * 0.95^13 is 0.078; with an importance of 1.0 it is 0.24.
    assert await ltm.decay() == 1
    assert [one.key for one in await ltm.listed()] == ["important"]
    assert ltm.size == 1


async def test_consolidate_merges_into_the_more_relevant_entry(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    await ltm.remember(entry("weak", "a b c d", clock, importance=0.3, access_count=2, tags=["x", "y"]))
    await ltm.remember(entry("strong", "a b c e", clock, importance=0.9, access_count=3, tags=["y", "z"]))
    await ltm.remember(entry("apart", "f g h i", clock))
    assert await ltm.consolidate() == 1
    found = {one.key: one for one in await ltm.listed()}
    assert found.keys() == {"strong", "apart"}
    assert (found["strong"].access_count, found["strong"].importance) == (5, 0.9)
    assert found["strong"].tags == ["y", "z", "x"]
    assert found["strong"].content == "a b c e"
    assert await ltm.consolidate() == 0


async def test_content_that_is_not_json_is_refused_and_not_stored(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    with pytest.raises(InvalidState):
        await ltm.remember(entry("k", {1, 2}, clock))
    assert await ltm.listed() == []


async def test_an_entry_changed_since_it_was_judged_is_kept(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    await ltm.remember(entry("k", "old", clock))
    [judged] = await ltm.listed()
    await ltm.recall("old")
    assert not await ltm.discard(judged)
    await ltm.remember(entry("k", "new", clock))
    assert not await ltm.rewrite(judged, "improved")
    [now] = await ltm.listed()
    assert now.content == "new"
    assert await ltm.rewrite(now, "improved")
    assert [one.content for one in await ltm.listed()] == ["improved"]


async def test_recall_finds_whole_words_in_any_order_and_place(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    await ltm.remember(entry("api_key_location", {"in": [".env", 5]}, clock, tags=["Config"]))
    for query in ("api key", "ENV key", "config 5", "config", ""):
        assert [one.key for one in await ltm.recall(query)] == ["api_key_location"], query
    for query in ("api secret", "conf", "loc", "!!"):
        assert await ltm.recall(query) == [], query
    # A query without a word is compared as text.
    assert len(await ltm.recall("_")) == 1


async def test_recall_of_many_entries_returns_the_limit(graph: GraphBackend, clock: Any) -> None:
    ltm = LongTermMemory(graph, clock=clock)
    for number in range(INDEXED + 5):
        await ltm.remember(entry(f"k{number}", f"common w{number}", clock, importance=0.1))
    found = await ltm.recall("common", limit=INDEXED + 2)
    assert len(found) == INDEXED + 2
    assert len(await ltm.recall("common")) in (INDEXED, INDEXED + 5)
    assert [one.key for one in await ltm.recall("common w7")] == ["k7"]


class Indexed(InProcessGraph):
    """A graph whose index answers; reading all vertices is an error."""

    async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
        words = set(text.split())
        vertices = (await self.get_full_trace("run"))["vertices"]
        found = [v for v in vertices if words & set(v["properties"]["content"].split())]
        return [v for v in found if v["label"] == label][:limit]

    async def find_vertices(self, label: str, name: str, value: str) -> list[dict[str, Any]]:
        vertices = (await self.get_full_trace("run"))["vertices"]
        return [v for v in vertices if v["label"] == label and v["properties"][name] == value]

    def list_vertices(self, label: str) -> Any:
        raise AssertionError(f"all vertices with the label {label} were read")


async def test_recall_asks_a_graph_with_an_index(clock: Any) -> None:
    ltm = LongTermMemory(Indexed(), clock=clock)
    for key, content, agent in [("a", "one two", "x"), ("b", "two three", "y"), ("c", "four", "x")]:
        await ltm.remember(entry(key, content, clock, source_agent=agent, source_run_id="run"))
    assert [one.key for one in await ltm.recall("two")] == ["a", "b"]
    assert [one.key for one in await ltm.recall("two three")] == ["b"]
    assert [one.key for one in await ltm.recall_by_agent("x")] == ["a", "c"]
    assert len(await ltm.recall_by_run("run")) == 3
    assert ltm.size == 3


async def test_what_was_removed_during_a_recall_is_known_no_longer(clock: Any) -> None:
    class Late(Indexed):
        """Lets others work before it answers a search."""

        async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
            found = await super().search_vertices(label, text, limit=limit)
            await ltm.remember(entry("new", "content", clock))
            await ltm.forget("gone")
            return found

    ltm = LongTermMemory(Late(), clock=clock)
    for key in ("kept", "gone"):
        await ltm.remember(entry(key, "content", clock, source_run_id="run"))
    await ltm.recall("content")
    assert ltm.size == 2

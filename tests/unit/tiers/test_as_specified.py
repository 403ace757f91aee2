"""What users of the system that the specification describes expect of each tier."""

from __future__ import annotations

from typing import Any

import pytest

from stm_backends import MemoryKey, open_backend, sync
from stm_backends.errors import ConfigurationError
from stm_backends.tiers import (
    InProcessGraph,
    LongTermMemory,
    MemoryEntry,
    MemoryManager,
    MemoryTier,
    SharedShortTermMemory,
    ShortTermMemory,
)
from stm_backends.tiers.graph import SearchableGraph, SharedGraph, provides
from stm_backends.tiers.session import Session
from tests.support.graphs import GraphAround

LONG = MemoryTier.LONG_TERM
LASTING = (MemoryTier.SHORT_TERM, LONG)


class Proxy:
    """A client that finds the methods of another object when they are asked for."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("tier", LASTING)
async def test_remembering_again_keeps_importance_and_adds_accesses(manager: Any, tier: MemoryTier) -> None:
    memory = manager()
    await memory.remember("k", "old", tier=tier, importance=0.9)
    await memory.recall("k", tiers=[tier])
    await memory.remember("k", "new", tier=tier, importance=0.2, tags=["t"])
    [found] = await memory.recall("k", tiers=[tier])
    assert (found.content, found.importance, found.access_count, found.tags) == ("new", 0.9, 2, ["t"])


def test_a_stored_operation_of_an_earlier_version_still_replaces() -> None:
    session = Session()
    settings = {"at": MemoryEntry("k", 1, LONG).created_at, "every": 10, "most": 9, "below": 0.1}
    for name, importance in [("one", 0.9), ("two", 0.2)]:
        entry = MemoryEntry("k", name, MemoryTier.SHORT_TERM, importance=importance)
        session.apply({"op": "remember", "id": name, "entry": entry, **settings})
    assert session.entries["k"].entry.importance == 0.2


@pytest.mark.parametrize("tier", LASTING)
async def test_a_superseded_entry_is_not_recalled(manager: Any, tier: MemoryTier) -> None:
    memory = manager()
    store = memory.short_term if tier is MemoryTier.SHORT_TERM else memory.long_term
    await store.remember(MemoryEntry("old", "lives in Rome", tier, superseded_by="new", source_run_id="r"))
    await store.remember(MemoryEntry("new", "lives in Oslo", tier, source_run_id="r"))
    assert [one.key for one in await memory.recall("lives", tiers=[tier])] == ["new"]
    assert [one.key for one in await memory.recall("", tiers=[tier])] == ["new"]
    assert [one.key for one in await memory.get_context_window()] == ["new"]
    assert await memory.gc.prune_duplicates(tier) == 0
    await memory.gc.on_session_end()
    assert [one.key for one in await memory.long_term.recall_by_run("r")] == ["new"]
    assert [one.key for one in await memory.long_term.recall("lives")] == ["new"]


async def test_an_entry_that_is_superseded_later_is_found_no_more(manager: Any, clock: Any) -> None:
    memory = manager(clock=clock)
    entry = await memory.remember("old", "lives in Rome", importance=0.9)
    await memory.gc.on_session_end()
    await memory.short_term.remember(entry.copied(superseded_by="new"))
    await memory.gc.on_session_end()
    assert await memory.recall("lives") == []
    await memory.gc.on_idle()
    assert await memory.recall("lives") == []
    clock.pass_days(31)
    await memory.long_term.consolidate()
    await memory.remember("old", "lives in Bonn", tier=LONG)
    assert [one.content for one in await memory.recall("lives")] == ["lives in Bonn"]


async def test_a_summary_has_nothing_of_superseded_entries(model: Any, manager: Any) -> None:
    memory = manager()
    await memory.short_term.remember(
        MemoryEntry("old", "lives in Rome", MemoryTier.SHORT_TERM, superseded_by="new")
    )
    for number in range(11):
        await memory.remember(f"k{number}", f"fact {number}")
    await memory.short_term.summarize(model)
    assert "Rome" not in model.prompts[0]
    assert "fact 0" in model.prompts[0]


@pytest.mark.parametrize("tier", MemoryTier)
async def test_each_tier_tells_its_length_keys_and_entries(manager: Any, tier: MemoryTier) -> None:
    memory = manager()
    store = getattr(memory, {LONG: "long_term", MemoryTier.FLEETING: "fleeting"}.get(tier, "short_term"))
    assert (len(store), store.size, store.entries, "k" in store) == (0, 0, [], False)
    await memory.remember("k", "v", tier=tier)
    await memory.remember("other", "w", tier=tier)
    await memory.recall("k", tiers=[tier])
    assert (len(store), store.size) == (2, 2)
    assert "k" in store
    assert "none" not in store
    entries = {one.key: one for one in store.entries}
    assert {key: one.content for key, one in entries.items()} == {"k": "v", "other": "w"}
    assert entries["k"].access_count == 1
    entries["k"].tags.append("changed")
    await memory.forget("other", tier)
    assert [(one.key, one.tags) for one in store.entries] == [("k", [])]
    assert (len(store), "other" in store) == (1, False)


def test_the_blocking_tiers_tell_the_same(tmp_path: Any) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/memory.db") as backend:
        memory = sync.MemoryManager(backend, ("acme", "u1"))
        for tier, store in zip(
            MemoryTier, (memory.fleeting, memory.short_term, memory.long_term), strict=True
        ):
            memory.remember("k", "v", tier=tier)
            assert (len(store), store.size, "k" in store, "none" in store) == (1, 1, True, False)
            assert [one.content for one in store.entries] == ["v"]


async def test_a_manager_uses_a_shared_session_that_is_empty() -> None:
    async with open_backend("memory://") as backend:
        session = SharedShortTermMemory(backend, MemoryKey("acme", "u1", "chat"))
        assert len(session) == 0
        assert MemoryManager(backend=backend, owner=("acme", "u1"), short_term=session).short_term is session


async def test_a_graph_behind_a_proxy_is_a_graph(manager: Any, new_graph: Any) -> None:
    graph = new_graph()
    assert provides(Proxy(graph), SharedGraph)
    assert provides(Proxy(graph), SearchableGraph) == isinstance(graph, SearchableGraph)
    memory = manager(Proxy(graph))
    await memory.remember("k", "v", tier=LONG)
    assert [one.key for one in await memory.recall("v")] == ["k"]
    assert [one.key for one in await LongTermMemory(graph).listed()] == ["k"]


def test_a_graph_that_lacks_a_method_is_refused_with_its_name() -> None:
    class Lazy(GraphAround):
        query_parents = None

    for graph in (Lazy(InProcessGraph()), Proxy(Lazy(InProcessGraph()))):
        with pytest.raises(ConfigurationError, match=r"it lacks: query_parents \("):
            LongTermMemory(graph)  # pyright: ignore[reportArgumentType] -- that is what is refused


async def test_a_summary_is_an_entry_or_none(short_term: Any) -> None:
    memory: ShortTermMemory = short_term()
    assert await memory.summarize() is None
    for number in range(11):
        await memory.remember(MemoryEntry(f"k{number}", f"fact {number}", MemoryTier.SHORT_TERM))
    summary = await memory.summarize()
    assert summary is not None
    assert (summary.key, summary.importance, summary.content) == ("__summary__", 0.8, "[k0] fact 0")
    summary.content = "changed"
    assert await memory.summarize() != summary

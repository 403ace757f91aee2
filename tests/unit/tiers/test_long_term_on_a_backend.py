"""Two agents share their long-term memory through a backend, as the last picture of the specification."""

from __future__ import annotations

from stm_backends.backend import Backend
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.tiers import BackendGraph, MemoryManager, MemoryTier
from stm_backends.tiers.graph import SearchableGraph


async def test_a_writer_recalls_what_a_researcher_remembered() -> None:
    store = MemoryStore()
    async with Backend(MemoryDriver(store)) as one, Backend(MemoryDriver(store)) as two:
        graph = BackendGraph(two, ("acme", "u1"))
        assert isinstance(graph, SearchableGraph)
        researcher, writer = MemoryManager(BackendGraph(one, ("acme", "u1"))), MemoryManager(graph)
        await researcher.remember(
            "finding_1",
            "Quantum uses qubits",
            tier=MemoryTier.LONG_TERM,
            importance=0.9,
            source_agent="researcher",
        )
        (found,) = await writer.recall("finding", tiers=[MemoryTier.LONG_TERM])
        assert (found.key, found.content) == ("finding_1", "Quantum uses qubits")
        assert [entry.key for entry in await writer.long_term.recall_by_agent("researcher")] == ["finding_1"]
        await researcher.forget("finding_1")
        assert await writer.recall("finding", tiers=[MemoryTier.LONG_TERM]) == []

"""Recall and duplicates by meaning, with an embedder that is a table of concepts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stm_backends.errors import ConfigurationError
from stm_backends.tiers import MemoryManager, MemoryTier, relevance

CONCEPTS = (("tea", "drink", "coffee"), ("car", "vehicle", "bus"), ("blue", "colour", "red"))


class ConceptEmbedder:
    """Counts the words of each concept; the last component is for a text without any."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def __call__(self, texts: list[str]) -> list[list[float]]:
        self.texts += texts
        return [self._vector(text.lower().split()) for text in texts]

    def _vector(self, words: list[str]) -> list[float]:
        counts = [float(sum(word in concept for word in words)) for concept in CONCEPTS]
        return [*counts, float(not any(counts))]


TIERS = pytest.mark.parametrize("tier", [MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM])


@TIERS
async def test_recall_finds_a_similar_meaning_beside_words(tier: MemoryTier, manager: Any) -> None:
    memory = manager(embedder=ConceptEmbedder())
    await memory.remember("a", "green tea", tier=tier)
    await memory.remember("b", "a fast car", tier=tier)
    assert [one.key for one in await memory.recall("drink")] == ["a"]
    assert [one.key for one in await memory.recall("fast")] == ["b"]
    assert len(await memory.recall("")) == 2


@TIERS
async def test_duplicates_are_found_by_meaning(tier: MemoryTier, manager: Any) -> None:
    memory = manager(embedder=ConceptEmbedder())
    await memory.remember("a", "drink tea", tier=tier, importance=0.9)
    await memory.remember("b", "hot coffee", tier=tier, importance=0.1)
    await memory.remember("c", "a car", tier=tier)
    assert await memory.gc.prune_duplicates(tier) == 1
    assert {one.key for one in await memory.recall("")} == {"a", "c"}


async def test_consolidate_uses_vectors_and_keeps_equal_scalars(manager: Any) -> None:
    memory = manager(embedder=ConceptEmbedder())
    long = MemoryTier.LONG_TERM
    for key, content in [("a", "drink tea"), ("b", "hot coffee"), ("c", "tea"), ("d", "tea")]:
        await memory.remember(key, content, tier=long, importance=0.9 if key == "a" else 0.1)
    assert await memory.long_term.consolidate() == 1
    assert {one.key for one in await memory.long_term.listed()} == {"a", "c", "d"}


async def test_vectors_are_stored_with_the_entry_for_other_processes(manager: Any, new_graph: Any) -> None:
    graph, first, second = new_graph(), ConceptEmbedder(), ConceptEmbedder()
    await manager(graph, embedder=first).remember("k", "green tea", tier=MemoryTier.LONG_TERM)
    [found] = await manager(graph, embedder=second).recall("drink")
    assert found.key == "k"
    assert (first.texts, second.texts) == (["green tea"], ["drink"])


@TIERS
async def test_a_new_content_has_a_new_vector(model: Any, tier: MemoryTier, manager: Any) -> None:
    memory = manager(embedder=ConceptEmbedder(), llm_provider=model)
    await memory.remember("k", "green tea", tier=tier)
    assert len(await memory.recall("drink")) == 1
    model.answer = "a car"
    await memory.gc.improve_memory(tier)
    assert await memory.recall("drink") == []
    assert len(await memory.recall("vehicle")) == 1
    await memory.remember("k", "blue", tier=tier)
    assert await memory.recall("vehicle") == []


async def test_an_entry_without_a_vector_is_found_by_words(manager: Any, new_graph: Any) -> None:
    graph = new_graph()
    await manager(graph).remember("k", "green tea", tier=MemoryTier.LONG_TERM)
    memory = manager(graph, embedder=ConceptEmbedder())
    assert await memory.recall("drink") == []
    assert len(await memory.recall("green")) == 1


@pytest.mark.parametrize("vectors", [[], [[float("nan")]], [[1.0], [1.0]]])
async def test_an_embedder_of_another_form_is_refused(vectors: list[list[float]], manager: Any) -> None:
    async def embedder(_texts: list[str]) -> list[list[float]]:
        return vectors

    memory = manager(embedder=embedder)
    with pytest.raises(ConfigurationError, match="embedder"):
        await memory.remember("k", "v", tier=MemoryTier.LONG_TERM)
    assert await memory.long_term.listed() == []


async def test_how_close_a_meaning_must_be_can_be_set() -> None:
    # The cosine similarity of both texts is 0.8.
    vectors = {"query": [1.0, 0.0], "one text": [1.0, 0.0], "the other": [0.8, 0.6]}

    async def embedder(texts: list[str]) -> list[list[float]]:
        return [vectors[text] for text in texts]

    async def filled(**cosines: Any) -> MemoryManager:
        memory = MemoryManager(embedder=embedder, **cosines)
        for key, text in (("a", "one text"), ("b", "the other")):
            for tier in (MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM):
                await memory.remember(key, text, tier=tier)
        return memory

    for strict, found in ((0.75, 4), (0.9, 2)):
        memory = await filled(recall_cosine=strict)
        assert len(await memory.recall("query")) == found
    for strict, removed in ((0.75, 1), (0.9, 0)):
        memory = await filled(duplicate_cosine=strict)
        assert await memory.gc.prune_duplicates(MemoryTier.SHORT_TERM) == removed
        assert await memory.long_term.consolidate() == removed


async def test_comparing_many_vectors_lets_other_tasks_run() -> None:
    candidates = [
        relevance.Candidate(str(n), f"text {n}", 1 / (n + 1), [math.cos(n / 200), math.sin(n / 200)])
        for n in range(300)
    ]
    steps = sum(1 for _ in relevance.duplicates(candidates, 0.99, 1.0))
    # A step for each candidate, and one for each 64 comparisons.
    assert steps > 300 + 300 * 299 // 2 // 64 // 2

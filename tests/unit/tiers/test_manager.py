"""The sections "Overview", "Context Refresh Timeline" and "Usage Examples" of the specification."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from stm_backends import MemoryKey, open_backend
from stm_backends.errors import ConfigurationError, InvalidKey
from stm_backends.telemetry.observer import Observer
from stm_backends.tiers import (
    FleetingMemory,
    LongTermMemory,
    MemoryGarbageCollector,
    MemoryManager,
    MemoryTier,
    SharedShortTermMemory,
    ShortTermMemory,
)
from tests.support.graphs import Counting, GraphAround

LONG = MemoryTier.LONG_TERM


def test_the_manager_has_the_parts_and_parameters_of_the_document(manager: Any) -> None:
    memory = manager()
    assert isinstance(memory.fleeting, FleetingMemory)
    assert isinstance(memory.short_term, ShortTermMemory)
    assert isinstance(memory.long_term, LongTermMemory)
    assert isinstance(memory.gc, MemoryGarbageCollector)
    parameters = inspect.signature(MemoryManager).parameters
    assert list(parameters)[:5] == ["graph_backend", "llm_provider", "backend", "owner", "embedder"]
    assert all(parameters[name].default is None for name in list(parameters)[:5])


async def test_the_basic_usage_example(manager: Any) -> None:
    memory = manager()
    await memory.remember("scratch_calc", 42, tier=MemoryTier.FLEETING)
    await memory.remember("user_name", "Alice", tier=MemoryTier.SHORT_TERM, importance=0.7)
    await memory.remember(
        "api_key_location",
        "stored in .env file under PROJECT_ROOT",
        tier=MemoryTier.LONG_TERM,
        importance=0.8,
        tags=["config", "security"],
    )
    [found] = await memory.recall("api key")
    assert (found.tier, found.key, found.tags) == (LONG, "api_key_location", ["config", "security"])
    assert found.relevance_score == pytest.approx(0.3 + 0.02 + 0.32 + 0.1, abs=1e-3)
    await memory.forget("scratch_calc")
    await memory.run_gc()
    assert (memory.fleeting.size, len(await memory.short_term.listed()), memory.long_term.size) == (0, 1, 1)


async def test_the_example_with_a_provider_and_a_graph(model: Any, manager: Any, new_graph: Any) -> None:
    graph = new_graph()
    memory = manager(graph_backend=graph, llm_provider=model)
    await memory.remember(
        "project_architecture",
        "Microservices with event-driven communication via Kafka",
        tier=LONG,
        importance=0.9,
        tags=["architecture", "decision"],
        source_agent="architect",
    )
    model.answer = "Microservices; events via Kafka"
    await memory.run_gc()
    [vertex] = [v async for page in graph.list_vertices("memory") for v in page]
    assert vertex["properties"]["content"] == "Microservices; events via Kafka"
    assert vertex["properties"]["source_agent"] == "architect"


async def test_the_example_of_agents_that_share_a_graph(manager: Any, new_graph: Any) -> None:
    graph = new_graph()
    researcher, writer = manager(graph_backend=graph), manager(graph_backend=graph)
    await researcher.remember(
        "finding_1", "Quantum uses qubits", tier=LONG, importance=0.9, source_agent="researcher"
    )
    [found] = await writer.recall("finding", tiers=[LONG])
    assert (found.content, found.source_agent) == ("Quantum uses qubits", "researcher")
    assert [one.key for one in await writer.long_term.recall_by_agent("researcher")] == ["finding_1"]


async def test_remember_returns_the_entry_with_the_defaults(manager: Any) -> None:
    memory = manager()
    entry = await memory.remember("k", {"a": 1})
    assert (entry.key, entry.content, entry.tier, entry.importance) == (
        "k",
        {"a": 1},
        MemoryTier.SHORT_TERM,
        0.5,
    )
    assert (await memory.remember("k", 1, tier=MemoryTier.FLEETING)).importance == 0.0


@pytest.mark.parametrize("tier", MemoryTier)
async def test_importance_outside_the_range_is_refused_in_each_tier(tier: MemoryTier, manager: Any) -> None:
    memory = manager()
    with pytest.raises(ConfigurationError, match="importance"):
        await memory.remember("k", "v", tier=tier, importance=1.5)
    assert await memory.recall("") == []


async def test_recall_searches_the_given_tiers_or_all(manager: Any) -> None:
    memory = manager()
    for tier, importance in zip(MemoryTier, (0.5, 0.1, 0.9), strict=True):
        await memory.remember(tier.value, "text", tier=tier, importance=importance)
    assert [one.tier for one in await memory.recall("text")] == [
        LONG,
        MemoryTier.SHORT_TERM,
        MemoryTier.FLEETING,
    ]
    assert [one.tier for one in await memory.recall("text", tiers=[MemoryTier.FLEETING])] == [
        MemoryTier.FLEETING
    ]
    assert await memory.recall("text", tiers=[]) == []


async def test_forget_removes_from_one_tier_or_all(manager: Any) -> None:
    memory = manager()
    for tier in MemoryTier:
        await memory.remember("k", "text", tier=tier)
    await memory.forget("k", MemoryTier.SHORT_TERM)
    assert {one.tier for one in await memory.recall("k")} == {MemoryTier.FLEETING, LONG}
    await memory.forget("k")
    assert await memory.recall("k") == []


async def test_a_context_window_never_exceeds_its_budget(manager: Any) -> None:
    memory = manager()
    for number in range(20):
        tier = LONG if number % 2 else MemoryTier.SHORT_TERM
        await memory.remember(f"k{number:02}", "x" * 17, tier=tier, importance=number / 20)
    window = await memory.get_context_window(max_tokens=25)
    assert [one.key for one in window] == ["k19", "k18", "k17", "k16", "k15"]
    assert sum(len(one.key) + len(str(one.content)) for one in window) <= 25 * 4


async def test_a_context_window_has_each_key_once(manager: Any) -> None:
    memory = manager()
    await memory.remember("k", "old", tier=LONG, importance=1.0)
    await memory.remember("k", "new", importance=0.1)
    assert [one.content for one in await memory.get_context_window(max_tokens=100)] == ["new"]


async def test_a_context_window_has_an_update_by_another_process(
    clock: Any, manager: Any, new_graph: Any
) -> None:
    graph = new_graph()
    one, other = manager(graph, clock=clock), manager(graph, clock=clock)
    await one.remember("k", "old", importance=0.9)
    clock.pass_days(1)
    await other.remember("k", "new", tier=LONG)
    assert [entry.content for entry in await one.get_context_window(max_tokens=100)] == ["new"]


async def test_a_context_window_has_a_promoted_summary_once(manager: Any, model: Any) -> None:
    memory: MemoryManager = manager(llm_provider=model, session_id="s")
    for number in range(12):
        await memory.remember(f"k{number}", f"fact {number}", importance=0.1)
    await memory.gc.on_session_end()
    assert [one.key for one in await memory.long_term.listed()] == [memory.short_term.summary_key]
    window = await memory.get_context_window(max_tokens=1000)
    assert [one.content for one in window].count("a summary") == 1
    assert len(window) == 11


async def test_only_entries_in_the_context_window_count_as_accessed(manager: Any) -> None:
    memory = manager()
    await memory.remember("in", "x", tier=LONG, importance=1.0)
    await memory.remember("out", "x" * 1000, tier=LONG)
    [window] = await memory.get_context_window(max_tokens=10)
    assert (window.key, window.access_count) == ("in", 1)
    assert {one.key: one.access_count for one in await memory.long_term.listed()} == {"in": 1, "out": 0}


async def test_the_timeline_of_a_session_of_the_document(
    clock: Any, model: Any, manager: Any, new_graph: Any
) -> None:
    graph = new_graph()
    memory = manager(graph_backend=graph, llm_provider=model, clock=clock)
    for turn in range(1, 51):
        assert memory.fleeting.size == 0
        await memory.remember("scratch", turn, tier=MemoryTier.FLEETING)
        # Turns 1 to 20 are unimportant and become old.
        await memory.remember(f"turn{turn}", f"said {turn}", importance=0.0 if turn <= 20 else 0.6)
        await memory.gc.on_turn_end()
        if turn == 20:
            clock.pass_days(60)
        if turn == 29:
            assert len(await memory.short_term.listed()) == 29
    assert {one.key for one in await memory.short_term.listed()} == {f"turn{turn}" for turn in range(21, 51)}
    assert memory.long_term.size == 0
    await memory.gc.on_session_end()
    assert len(await memory.short_term.listed()) == 11
    assert memory.long_term.size == 31
    later = manager(graph_backend=graph, clock=clock)
    assert (later.fleeting.size, later.short_term.size) == (0, 0)
    assert len(await later.long_term.recall("said")) == 30


@pytest.mark.parametrize("kind", ["text", "content", "awaitable", "message"])
async def test_a_provider_may_be_a_function_and_answer_an_object(kind: str, manager: Any) -> None:
    async def later() -> str:
        return "fine"

    answers: dict[str, Any] = {
        "text": "fine",
        "content": Answer(content="fine"),
        "awaitable": None,
        "message": Answer(text="fine"),
    }

    def provider(messages: list[dict[str, str]]) -> Any:
        assert messages[0]["role"] == "user"
        return later() if kind == "awaitable" else answers[kind]

    memory = manager(llm_provider=provider)
    await memory.remember("k", "v", tier=LONG)
    assert await memory.gc.improve_memory(LONG) == 1
    assert [one.content for one in await memory.recall("k")] == ["fine"]


def answering(answer: object) -> Callable[[object], object]:
    """Return a provider that always gives this answer."""
    return lambda _messages: answer


class Answer:
    """An answer with some attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(content=None, text="fine"),
        Answer(content=[Answer(type="text", text="fi"), Answer(type="text", text="ne")]),
        Answer(content=b"bytes", text="fine"),
    ],
)
async def test_the_text_of_an_answer_is_found(answer: Answer, manager: Any) -> None:
    memory = manager(llm_provider=answering(answer))
    await memory.remember("k", "v", tier=LONG)
    assert await memory.gc.improve_memory(LONG) == 1
    assert [one.content for one in await memory.long_term.listed()] == ["fine"]


@pytest.mark.parametrize("answer", [None, Answer(content=None), Answer(content=[], text="")])
async def test_an_answer_without_text_changes_nothing(answer: object, manager: Any) -> None:
    memory = manager(llm_provider=answering(answer))
    await memory.remember("k", "v", tier=LONG)
    assert await memory.gc.improve_memory(LONG) == 0


@pytest.mark.parametrize("answer", [42, {"content": "fine"}, Answer(choices=[]), Answer(content=42)])
async def test_an_answer_of_another_form_is_an_error(answer: object, manager: Any) -> None:
    memory = manager(llm_provider=answering(answer))
    await memory.remember("k", "v", tier=LONG)
    with pytest.raises(ConfigurationError, match=r"llm_provider returned .*, not a text"):
        await memory.gc.improve_memory(LONG)


@pytest.mark.parametrize("answer", [42, {"content": "fine"}, Answer(choices=[]), Answer(content=42)])
async def test_an_answer_of_another_form_leaves_cut_text(answer: object, manager: Any) -> None:
    memory = manager(llm_provider=answering(answer))
    for number in range(12):
        await memory.remember(f"k{number}", f"v{number}", tier=MemoryTier.SHORT_TERM)
    summary = await memory.short_term.summarize(answering(answer))
    assert summary is not None
    assert "v0" in summary.content


async def test_a_provider_that_cannot_be_asked_is_refused_at_once() -> None:
    class Failed:
        generate = None

    for provider in (object(), Failed(), "gpt"):
        with pytest.raises(ConfigurationError, match="generate"):
            MemoryManager(llm_provider=provider)
        with pytest.raises(ConfigurationError, match="generate"):
            await MemoryManager().short_term.summarize(provider)


WRONG: dict[str, dict[str, Any]] = {
    "str is not a graph_backend; it lacks: add_vertex": {"graph_backend": "sqlite:///memory.db"},
    "backend must come from": {"backend": "memory://", "owner": ("acme", "u1")},
    "short_term must be": {"short_term": MemoryKey("acme", "u1", "chat")},
    "embedder must be": {"embedder": [[1.0]]},
    "recall_cosine must be": {"recall_cosine": 75},
    "duplicate_cosine must be": {"duplicate_cosine": "0.9"},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_of_the_wrong_type_is_named(message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemoryManager(**WRONG[message])


@pytest.mark.parametrize("owner", ["acme", ("acme",), ("acme", "u1", "chat"), MemoryKey("acme", "u1", "c")])
async def test_an_owner_that_is_no_tenant_and_user_is_refused(owner: Any) -> None:
    async with open_backend("memory://") as backend:
        with pytest.raises(ConfigurationError, match="owner"):
            MemoryManager(backend=backend, owner=owner)


async def test_a_shared_session_of_another_kind_of_key_is_refused() -> None:
    async with open_backend("memory://") as backend:
        with pytest.raises(InvalidKey, match="must be a MemoryKey"):
            SharedShortTermMemory(backend, cast("Any", "acme:u1:chat"))


async def test_a_call_with_an_argument_of_the_wrong_type_is_refused(manager: Any) -> None:
    memory = manager()
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "fleeting, short_term, long_term": lambda: memory.remember("k", "v", tier="longterm"),
        "tags": lambda: memory.remember("k", "v", tags="config"),
        "key": lambda: memory.remember("", "v"),
        "query": lambda: memory.recall(None),
        "tiers": lambda: memory.recall("k", tiers=LONG),
        "a tier": lambda: memory.forget("k", "long"),
        "max_tokens": lambda: memory.get_context_window(-1),
        "entry": lambda: memory.long_term.remember("text"),
        "MemoryEntry": lambda: memory.short_term.remember({"key": "k"}),
        "limit": lambda: memory.long_term.recall("k", limit=0),
        "n must": lambda: memory.short_term.get_recent("3"),
        "keep_ratio": lambda: memory.gc.prune_by_relevance(LONG, keep_ratio="0.5"),
        "max_age_days": lambda: memory.gc.prune_by_staleness(LONG, max_age_days=None),
    }
    for message, call in calls.items():
        with pytest.raises(ConfigurationError, match=message):
            await call()
    assert await memory.recall("") == []


async def test_a_context_window_without_a_budget_is_empty(manager: Any) -> None:
    memory = manager()
    await memory.remember("k", "v")
    assert await memory.get_context_window(0) == []
    assert len(await memory.get_context_window()) == 1


async def test_run_gc_with_a_model_summarizes_and_improves(manager: Any, model: Any, clock: Any) -> None:
    memory = manager(llm_provider=model, clock=clock)
    await memory.remember("important", "the key fact", importance=0.9)
    for number in range(11):
        await memory.remember(f"k{number}", f"fact {number}", importance=0.1)
    await memory.remember("vague", "something", tier=LONG)
    await memory.run_gc()
    kept = [one.key for one in await memory.short_term.listed()]
    assert kept == ["__summary__", *(f"k{number}" for number in range(1, 11))]
    assert [one.content for one in await memory.long_term.listed()] == ["a summary"]
    await memory.gc.on_session_end()
    assert "the key fact" in [one.content for one in await memory.long_term.listed()]


async def test_run_gc_without_a_model_summarizes_nothing(manager: Any) -> None:
    memory = manager()
    for number in range(12):
        await memory.remember(f"k{number}", f"fact {number}")
    await memory.run_gc()
    assert len(await memory.short_term.listed()) == 12


async def test_run_gc_finishes_a_merge_that_was_interrupted(new_graph: Any) -> None:
    graph = new_graph()
    memory = MemoryManager(graph)
    await memory.remember("strong", "one two three", tier=LONG, importance=0.9)
    await memory.remember("weak", "three two one", tier=LONG, importance=0.1, tags=["x"])
    entries = {one.key: one for one in await memory.long_term.listed()}
    calls = 0

    class Dying(GraphAround):
        async def change_vertex(self, vertex_id: str, label: str, change: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise asyncio.CancelledError
            return await self.inner.change_vertex(vertex_id, label, change)

    with pytest.raises(asyncio.CancelledError):
        await LongTermMemory(Dying(graph)).absorb(entries["weak"], entries["strong"])
    await memory.run_gc()
    [left] = await memory.long_term.listed()
    assert (left.key, left.tags) == ("strong", ["x"])
    assert memory.long_term.size == 1


def test_a_graph_and_a_backend_together_are_refused(manager: Any, new_graph: Any) -> None:
    backend: Any = object()
    with pytest.raises(ConfigurationError):
        manager(new_graph(), backend=backend, owner=("acme", "u1"))
    with pytest.raises(ConfigurationError):
        manager(backend=backend)
    with pytest.raises(ConfigurationError):
        manager(owner=("acme", "u1"))


async def test_promotions_prunes_and_merges_are_reported(clock: Any) -> None:
    observer = Counting()
    memory = MemoryManager(observer=observer, clock=clock)
    await memory.remember("important", "the key fact", importance=0.9)
    for _ in range(2):
        await memory.gc.on_session_end()
    assert observer.counts == {("promoted", "long_term"): 1}
    for key, text in [("a", "one two three"), ("b", "three two one"), ("c", "six seven"), ("d", "seven six")]:
        tier = LONG if key in "ab" else MemoryTier.SHORT_TERM
        await memory.remember(key, text, tier=tier, importance=0.1)
    await memory.gc.prune_duplicates(MemoryTier.SHORT_TERM)
    await memory.long_term.consolidate()
    assert observer.counts["merged", "long_term"] == 1
    assert observer.counts["merged", "short_term"] == 1
    clock.pass_days(60)
    memory.short_term.max_entries = 1
    await memory.remember("one", "more")
    assert observer.counts["pruned", "short_term"] == 2
    assert await memory.gc.auto_forget(LONG) + await memory.long_term.decay() == 2
    assert observer.counts["pruned", "long_term"] == 2


async def test_a_manager_reports_to_the_observer_of_its_backend() -> None:
    observer = Counting()
    async with open_backend("memory://", observer=observer) as backend:
        memory = MemoryManager(backend=backend, owner=("acme", "u1"))
        await memory.remember("important", "the key fact", importance=0.9)
        await memory.gc.on_session_end()
    assert observer.counts == {("promoted", "long_term"): 1}


async def test_an_observer_that_fails_does_not_affect_the_tiers() -> None:
    class Failing(Observer):
        def memories(self, event: str, tier: str, count: int) -> None:
            raise RuntimeError(event)

    memory = MemoryManager(observer=Failing())
    await memory.remember("important", "the key fact", importance=0.9)
    await memory.gc.on_session_end()
    assert memory.long_term.size == 1

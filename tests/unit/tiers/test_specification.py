"""Each section of the specification of the three tiers, and the tests that show it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from stm_backends import tiers
from stm_backends.tiers import MemoryGarbageCollector, MemoryManager, MemoryTier

LONG = MemoryTier.LONG_TERM

SECTIONS = {
    "Overview": (
        "test_everything_works_without_configuration",
        "test_improve_memory_without_a_model_does_nothing",
        "test_a_summary_without_a_model_is_cut_to_two_thousand_characters",
        "test_an_outage_of_the_graph_is_an_error_and_no_silent_copy",
    ),
    "Architecture": (
        "test_the_parts_have_the_methods_of_the_architecture",
        "test_recall_searches_the_given_tiers_or_all",
        "test_forget_removes_from_one_tier_or_all",
        "test_run_gc_with_a_model_summarizes_and_improves",
    ),
    "Tier 1: Fleeting Memory": (
        "test_the_api_example_of_fleeting_memory",
        "test_recall_searches_keys_and_values_for_a_substring",
        "test_on_turn_end_clears_fleeting_memory_only",
    ),
    "Tier 2: Short-Term Memory": (
        "test_the_api_example_of_short_term_memory",
        "test_every_tenth_entry_prunes_those_below_the_threshold",
        "test_over_capacity_the_least_relevant_entries_are_dropped",
        "test_a_summary_replaces_all_but_the_ten_most_recent",
        "test_a_summary_covers_the_one_before",
        "test_recall_counts_accesses_and_sorts_by_relevance",
        "test_the_most_recent_entries_are_the_ones_stored_last",
    ),
    "Tier 3: Long-Term Memory": (
        "test_the_api_example_of_long_term_memory",
        "test_entries_are_vertices_with_the_label_memory",
        "test_two_memories_on_one_graph_see_the_same_entries",
        "test_recall_finds_whole_words_in_any_order_and_place",
        "test_decay_prunes_what_falls_below_the_threshold",
        "test_consolidate_merges_into_the_more_relevant_entry",
        "test_a_merge_that_fails_at_any_step_is_finished_once",
    ),
    "The MemoryEntry": (
        "test_the_memory_entry_has_the_fields_and_defaults_of_the_document",
        "test_serialization_restores_the_memory_entry",
    ),
    "Relevance Scoring": (
        "test_the_component_breakdown_is_the_formula_of_the_document",
        "test_clock_skew_keeps_scores_within_zero_and_one",
    ),
    "Component Breakdown": ("test_the_component_breakdown_is_the_formula_of_the_document",),
    "Score Examples": ("test_score_examples_of_the_document",),
    "Context Refresh Timeline": ("test_the_timeline_of_a_session_of_the_document",),
    "Basic Usage": ("test_the_basic_usage_example",),
    "With LLM Provider and Graph Backend": (
        "test_the_example_with_a_provider_and_a_graph",
        "test_run_gc_with_a_model_summarizes_and_improves",
    ),
    "Building a Context Window": (
        "test_the_example_of_a_context_window",
        "test_a_context_window_never_exceeds_its_budget",
    ),
    "Querying by Agent or Run": ("test_the_example_of_queries_by_agent_or_run",),
    "Garbage Collection": ("test_the_parts_have_the_methods_of_the_architecture",),
    "1. Auto-Forget": ("test_auto_forget_removes_entries_below_the_threshold",),
    "2. Summarize": (
        "test_summarize_context_without_a_model_cuts_the_joined_text",
        "test_summarize_context_with_a_model_is_its_answer",
        "test_the_prompts_ask_for_what_the_document_says",
    ),
    "3. Prune": (
        "test_prune_by_relevance_drops_the_bottom_share",
        "test_prune_by_staleness_drops_what_was_not_accessed",
        "test_prune_duplicates_keeps_the_more_relevant_entry",
        "test_jaccard_similarity_is_that_of_the_document",
        "test_the_methods_of_the_collector_have_the_defaults_of_the_document",
    ),
    "4. Improve": (
        "test_improve_memory_replaces_content_by_the_answer",
        "test_improve_memory_without_a_model_does_nothing",
        "test_the_prompts_ask_for_what_the_document_says",
    ),
    "Lifecycle Hooks": (
        "test_on_turn_end_clears_fleeting_memory_only",
        "test_on_session_end_promotes_what_is_important",
        "test_on_session_end_promotes_the_summary",
        "test_on_idle_maintains_long_term_memory",
    ),
    "Lifecycle Hook Flow": (
        "test_the_hooks_act_in_the_order_of_the_flow",
        "test_a_summary_without_a_model_is_cut_to_two_thousand_characters",
    ),
    "How Memory Plugs into the Executor": ("test_a_run_of_turns_uses_memory_as_the_executor_does",),
    "Memory in Multi-Agent Systems": (
        "test_a_writer_recalls_what_a_researcher_remembered",
        "test_the_example_of_agents_that_share_a_graph",
    ),
    "Configuration Reference: MemoryManager": (
        "test_the_manager_has_the_parts_and_parameters_of_the_document",
    ),
    "Configuration Reference: ShortTermMemory": (
        "test_the_defaults_are_those_of_the_configuration_reference",
    ),
    "Configuration Reference: LongTermMemory": ("test_the_long_term_defaults_are_those_of_the_document",),
    "Configuration Reference: MemoryGarbageCollector": (
        "test_the_collector_has_the_defaults_of_the_configuration_reference",
    ),
    "Module Structure": ("test_the_names_of_the_module_structure_are_public",),
}
"""The tests of each section. "The @agent Decorator" is left out: an agent of any framework gets its memory
by `conversation(tiers=...)`. "Further Reading" says nothing that could be tested."""

TESTS = {
    name
    for path in Path(__file__).parent.glob("test_*.py")
    for name in re.findall(r"def (test_\w+)", path.read_text())
}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_of_the_specification_has_its_tests(section: str) -> None:
    assert {*SECTIONS[section]} <= TESTS


def test_the_parts_have_the_methods_of_the_architecture() -> None:
    """Section "Architecture"."""

    def methods(kind: type) -> set[str]:
        return {name for name, one in vars(kind).items() if inspect.iscoroutinefunction(one)}

    assert methods(MemoryManager) >= {"remember", "recall", "forget", "get_context_window", "run_gc"}
    assert methods(MemoryGarbageCollector) >= {
        *("auto_forget", "summarize_context", "prune_by_relevance", "prune_by_staleness"),
        *("prune_duplicates", "improve_memory", "on_turn_end", "on_session_end", "on_idle"),
    }
    assert [tier.value for tier in MemoryTier] == ["fleeting", "short_term", "long_term"]


def test_the_methods_of_the_collector_have_the_defaults_of_the_document() -> None:
    """Section "Management Categories"."""

    def parameters(name: str) -> dict[str, Any]:
        found = inspect.signature(getattr(MemoryGarbageCollector, name)).parameters
        return {one: found[one].default for one in [*found][1:]}

    empty = inspect.Parameter.empty
    assert parameters("summarize_context") == {"entries": empty, "max_tokens": 2000}
    assert parameters("prune_by_relevance") == {"tier": empty, "keep_ratio": 0.7}
    assert parameters("prune_by_staleness") == {"tier": empty, "max_age_days": 30}
    for name in ("auto_forget", "prune_duplicates", "improve_memory"):
        assert parameters(name) == {"tier": empty}


async def test_the_prompts_ask_for_what_the_document_says(model: Any) -> None:
    """Sections "2. Summarize" and "4. Improve"."""
    memory = MemoryManager(llm_provider=model)
    await memory.remember("one", "the first fact", LONG)
    await memory.remember("other", "another fact", LONG)
    await memory.gc.summarize_context(await memory.long_term.listed())
    await memory.gc.improve_memory(LONG)
    summarize, improve, _ = model.prompts
    for wanted in ("key fact", "decision", "error", "context", "repetition", "first fact", "another fact"):
        assert wanted in summarize
    for wanted in (
        "correct",
        "outdated",
        "precise",
        "concise",
        "contradictions",
        "first fact",
        "another fact",
    ):
        assert wanted in improve


async def test_everything_works_without_configuration() -> None:
    """Section "Overview": no model, no graph and no configuration."""
    memory = MemoryManager()
    for tier in MemoryTier:
        for number in range(12):
            await memory.remember(f"k{number}", f"fact {number}", tier=tier)
    await memory.gc.on_turn_end()
    await memory.gc.on_session_end()
    await memory.gc.on_idle()
    await memory.run_gc()
    assert memory.fleeting.size == 0
    assert {one.key for one in await memory.recall("fact 7", tiers=[LONG])} == {"k7"}


async def test_the_example_of_a_context_window() -> None:
    """Section "Building a Context Window"."""
    memory = MemoryManager()
    for number in range(40):
        tier = LONG if number % 2 else MemoryTier.SHORT_TERM
        await memory.remember(f"key {number}", "x" * 600, tier=tier, importance=number / 40)
    context = await memory.get_context_window(max_tokens=4000)
    assert [one.key for one in context] == [f"key {number}" for number in range(39, 39 - len(context), -1)]
    assert 15_000 < sum(len(one.key) + len(one.content) for one in context) <= 16_000


async def test_the_example_of_queries_by_agent_or_run(manager: Any) -> None:
    """Section "Querying by Agent or Run"."""
    memory = manager()
    await memory.remember("a", "one", LONG, source_agent="researcher", source_run_id="run-abc-123")
    await memory.remember("b", "two", LONG, source_agent="researcher", source_run_id="run-other")
    await memory.remember("c", "three", LONG, source_agent="writer", source_run_id="run-abc-123")
    assert {one.key for one in await memory.long_term.recall_by_agent("researcher")} == {"a", "b"}
    assert {one.key for one in await memory.long_term.recall_by_run("run-abc-123")} == {"a", "c"}
    assert await memory.long_term.recall_by_agent("research") == []


async def test_the_hooks_act_in_the_order_of_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section "Lifecycle Hook Flow"."""
    memory = MemoryManager()
    called: list[str] = []

    def record(owner: object, name: str) -> None:
        real = getattr(owner, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return await real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("auto_forget", "prune_by_staleness", "prune_duplicates", "improve_memory"):
        record(memory.gc, name)
    record(memory.long_term, "consolidate")
    record(memory.long_term, "promote")
    record(memory.short_term, "summarize")
    record(memory.fleeting, "clear")
    await memory.gc.on_turn_end()
    assert called == ["clear"]
    called.clear()
    await memory.remember("k", "a fact", importance=0.5)
    await memory.gc.on_session_end()
    assert called[-1] == "clear"
    assert {"summarize", "promote"} <= {*called[:-1]}
    called.clear()
    await memory.gc.on_idle()
    assert called == [
        "auto_forget",
        "prune_by_staleness",
        "prune_duplicates",
        "consolidate",
        "improve_memory",
    ]


async def test_a_run_of_turns_uses_memory_as_the_executor_does(manager: Any) -> None:
    """Section "How Memory Plugs into the Executor"."""
    memory = manager()
    for turn in range(3):
        assert memory.fleeting.size == 0
        await memory.remember("tool output", turn, MemoryTier.FLEETING)
        await memory.remember(f"observation {turn}", f"the answer is {turn}", importance=0.2 * turn + 0.2)
        context = await memory.get_context_window()
        assert {one.key for one in context} == {f"observation {number}" for number in range(turn + 1)}
        await memory.gc.on_turn_end()
    await memory.gc.on_session_end()
    found = {one.key for one in await memory.recall("answer", tiers=[LONG])}
    # Observation 0 was in three context windows, and observation 2 is important.
    assert found == {"observation 0", "observation 2"}


def test_the_names_of_the_module_structure_are_public() -> None:
    """Section "Module Structure"."""
    names = (
        *("MemoryManager", "MemoryTier", "MemoryEntry", "FleetingMemory", "ShortTermMemory"),
        *("LongTermMemory", "MemoryGarbageCollector", "GraphBackend"),
    )
    assert {*names} <= {*tiers.__all__}
